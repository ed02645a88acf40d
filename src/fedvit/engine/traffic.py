"""The bytes that a run will send, from the messages of its first round where all rounds are alike."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fedvit.core.payload import Payload
from fedvit.core.plan import Plan
from fedvit.core.settings import Experiment
from fedvit.data.partition.records import Partition
from fedvit.engine.cost import split_costs
from fedvit.engine.footprint import Footprint, SplitBytes
from fedvit.engine.net import Net, window_of

MOST = 200  # rounds, or clients, that are asked one by one for the size of their messages


@dataclass(frozen=True)
class Traffic:
    """Tensor bytes to clients, from clients and for evaluation, over all clients and rounds."""

    down: int
    up: int
    evaluation: int

    @property
    def total(self) -> int:
        return self.down + self.up + self.evaluation


def traffic_of(
    experiment: Experiment,
    net: Net,
    found: Footprint,
    cohorts: Sequence[Sequence[str]],
    evaluations: int,
    partition: Partition,
) -> Traffic:
    """Return the bytes of a run: exact where the size of messages depends on the client and round alone."""
    plan = net.plan
    if not isinstance(plan, Plan):
        assert found.split is not None
        step = split_costs(net, experiment.train.batch)["step_nbytes"]
        return _split_traffic(experiment, found.split, step, cohorts, evaluations, partition)
    if plan.pooled:
        return Traffic(0, 0, 0)
    rounds = experiment.train.rounds
    visits: Counter[str] = Counter(name for cohort in cohorts for name in cohort)
    scale = rounds / max(1, len(cohorts))
    shares = {number: _sizes(net, plan, partition.seen, number) for number in _distinct_rounds(net, plan, rounds)}
    down, up, test = (sum(sizes[way] for sizes in shares.values()) / len(shares) for way in range(3))
    count = sum(visits.values()) * scale
    once = plan.costs(net.bare_client()).get("nbytes_once_per_image", 0)
    images = sum(len(partition.clients[name].train) for name in visits if name in partition.clients)
    residuals_down = once * images * max(0, len(visits) - 1)
    return Traffic(
        round(count * down + residuals_down),
        round(count * (1 - experiment.train.dropout) * up + once * images),
        round(evaluations * len(partition.seen) * test),
    )


def _distinct_rounds(net: Net, plan: Plan, rounds: int) -> list[int]:
    """Return the rounds whose messages stand for all: the first alone, if the last is of the same size."""
    server = net.server([])
    same = plan.dispatch(server, "0").nbytes == plan.dispatch(replace(server, round=rounds - 1), "0").nbytes
    if same or rounds == 1:
        return [1]
    return list(range(1, rounds + 1, math.ceil(rounds / MOST)))


def _sizes(net: Net, plan: Plan, clients: Sequence[str], number: int) -> tuple[float, float, float]:
    """Return the bytes to a client, from it, and to it for evaluation, as means over the clients."""
    server = replace(net.server([]), round=number - 1)
    some = clients[:: math.ceil(len(clients) / MOST)]
    server = replace(server, clients=tuple(clients))
    down, up = 0, 0
    known: dict[float, int] = {}
    for name in some:
        message = plan.dispatch(server, name)
        down += message.nbytes
        rate = message.scalars.get("rate", 1.0)
        if rate not in known:
            known[rate] = _report_nbytes(net, plan, message, number)
        up += known[rate]
    after = replace(server, round=number)
    test = sum(plan.dispatch(after, name).nbytes for name in some)
    return down / len(some), up / len(some), test / len(some)


def _report_nbytes(net: Net, plan: Plan, message: Payload, number: int) -> int:
    """Return the size of the report that a client would send after training nothing."""
    part = net.at(window_of(message))
    return plan.report(replace(part.bare_client(), round=number), part.initial, part.initial).nbytes


def _split_traffic(
    experiment: Experiment,
    sent: SplitBytes,
    step: Mapping[str, int],
    cohorts: Sequence[Sequence[str]],
    evaluations: int,
    partition: Partition,
) -> Traffic:
    """Return the bytes of split learning, which grow with the images."""
    train = experiment.train
    visits = [len(partition.clients[name].train) for cohort in cohorts for name in cohort]
    scale = train.rounds / max(1, len(cohorts))
    tests = [len(partition.clients[n].test) + len(partition.clients[n].val) for n in partition.seen]

    def over(line: tuple[float, float], clients: int, images: int) -> float:
        return clients * line[0] + images * line[1]

    images = train.epochs * sum(visits)
    down, up = (
        scale * max(over(line, len(visits), images), images * step[way] / train.batch)  # FedV's do not grow evenly
        for way, line in (("down", sent.down), ("up", sent.up))
    )
    return Traffic(round(down), round(up), round(evaluations * over(sent.evaluation, len(tests), sum(tests))))
