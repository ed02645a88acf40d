"""The split loop: the same rounds, cohorts, evaluation and files as the federated loop, with another protocol.

The loop does not know where the clients are: in this process (`LocalClients`) or behind a network (`RemoteClients` in
`network.grpc.remote_clients`).
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from fedvit.core import randomness, tree
from fedvit.core.cases import Cases
from fedvit.core.errors import DivergedError
from fedvit.core.metrics import view_scores
from fedvit.core.server import Server
from fedvit.core.settings import Experiment
from fedvit.core.training import all_finite
from fedvit.core.tree import Tree
from fedvit.engine.inprocess import DROPPED, InProcess
from fedvit.engine.ledger import Ledger, per_client
from fedvit.engine.loop import Round, is_evaluated, reasons_for_row, sample_cohort, summarize
from fedvit.engine.net import Net, local_settings
from fedvit.models.cuts import Parts
from fedvit.split.client import ClientSide, Requests
from fedvit.split.messages import Message
from fedvit.split.plan import SplitPlan
from fedvit.split.server import ServerSide

log = logging.getLogger(__name__)
Scores = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Answer:
    """The result of a client's round: its mean loss, its number of images, and the tensor bytes in both directions."""

    loss: float | None  # None if the client keeps it
    examples: int
    up: int
    down: int


@dataclass
class Trained:
    """A round's clients: those that finished, in the order of the cohort, and the bytes sent to those that failed."""

    answers: dict[str, Answer] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)  # why those failed


class SplitClients(Protocol):
    """The holders of the heads and tails, wherever they are."""

    def clients(self) -> Sequence[str]:
        """Return all clients, in the order in which sums are taken."""

    def train(self, side: ServerSide, cohort: Sequence[str], number: int, *, average: bool) -> Trained:
        """Let these clients take their steps of a round against the body."""

    def receive(self, names: Sequence[str], number: int, average: Tree) -> None:
        """Give these clients the mean of their parts, before the round is committed."""

    def commit(self, number: int) -> None:
        """Commit the memories that this round's training produced."""

    def evaluate(
        self, side: ServerSide, names: Sequence[str], number: int, cases: dict[str, Cases] | None = None
    ) -> tuple[Scores, int]:
        """Score these clients with the current body; return the scores and the tensor bytes that were sent.

        What clients on this machine tell about their test images one by one is added to `cases`.
        """

    def absences(self, number: int) -> Mapping[str, str]:
        """Return the clients that the last evaluation missed, if it was this round's, and why."""


class Loopback:
    """The channel within one process, which also counts tensor bytes."""

    def __init__(self, server: ServerSide):
        self.server = server
        self.up: dict[str, int] = {}
        self.down: dict[str, int] = {}

    def call(self, request: bytes) -> bytes:
        message = Message.from_bytes(request)
        reply = self.server.answer(message)
        for one, account in ((message, self.up), (reply, self.down)):
            account[one.client] = account.get(one.client, 0) + one.payload.nbytes
        return reply.to_bytes()


class LocalClients:
    """All clients in this process, run one after another, or step by step where they must wait for each other."""

    def __init__(self, net: Net, transport: InProcess):
        self.net, self.transport, self.split = net, transport, net.split
        self.parts = Parts(net.module, self.split.cut)

    def clients(self) -> Sequence[str]:
        return self.transport.clients()

    def train(self, side: ServerSide, cohort: Sequence[str], number: int, *, average: bool) -> Trained:
        transport, worker = self.transport, self.transport.worker
        done = Trained()
        for name in cohort:
            if transport.fails(name, number):
                log.warning("round %d: client %s dropped out (train.dropout)", number, name)
                done.failed[name], done.reasons[name] = 0, DROPPED
                side.drop(name)
        present = [name for name in cohort if name not in done.failed]
        channel = Loopback(side)
        sides = {
            name: ClientSide(self.split, self.parts, worker.client(name, number, transport.store.get(name)))
            for name in present
        }
        requests = {name: sides[name].requests(average=average) for name in present}
        if self.split.lockstep:
            while requests:
                requests = {name: r for name, r in requests.items() if one_step(r, channel)}
                side.end_of_step()
        else:
            for name in order(self.split, present, worker.experiment.run.seed, number):
                while one_step(requests[name], channel):
                    pass
                side.finish(name)
        for name, client_side in sides.items():
            client = client_side.client
            transport.pending[name] = client.memory
            loss, examples = client.scalars["loss"], len(client.data.train)
            done.answers[name] = Answer(loss, examples, channel.up[name], channel.down[name])
        return done

    def receive(self, names: Sequence[str], number: int, average: Tree) -> None:
        for name in names:
            own = self.transport.pending[name]["personal"]
            assert isinstance(own, dict)
            self.transport.pending[name]["personal"] = tree.overlay(own, average)

    def commit(self, number: int) -> None:
        self.transport.commit(number)

    def evaluate(
        self, side: ServerSide, names: Sequence[str], number: int, cases: dict[str, Cases] | None = None
    ) -> tuple[Scores, int]:
        worker, channel, scores = self.transport.worker, Loopback(side), {}
        for name in names:
            client = worker.client(name, number, dict(self.transport.store.get(name)))
            with torch.no_grad():
                predict = ClientSide(self.split, self.parts, client).predictor(channel)
            inputs, device = self.net.inputs, worker.device
            scores[name] = view_scores("personal", predict, client.data, inputs, device, auroc=worker.auroc)
            clinical, one_by_one = worker.measure(client, predict)
            scores[name] |= clinical
            if cases is not None and one_by_one is not None:
                cases[name] = one_by_one
        return scores, sum(channel.up.values()) + sum(channel.down.values())

    def absences(self, number: int) -> Mapping[str, str]:
        return {}  # clients in this process are always there


def federate_split(
    net: Net, server: Server, clients: SplitClients, experiment: Experiment, test_samples: Mapping[str, int]
) -> Iterator[Round]:
    """Run the rounds after `server.round`, one at a time."""
    parts, names = Parts(net.module, net.split.cut), list(clients.clients())
    for parameter in net.module.parameters():
        parameter.requires_grad_(False)  # the weights being trained are passed to every call
    for number in range(server.round + 1, experiment.train.rounds + 1):
        ledger = Ledger()
        cohort = sample_cohort(names, experiment, number)
        with ledger.phase("train"):
            server, loss, failures = _split_round(net, parts, server, clients, experiment, cohort, number, ledger)
        with ledger.phase("store"):
            clients.commit(number)
        scores, views, cases = None, None, dict[str, Cases]()
        if is_evaluated(number, experiment):
            with ledger.phase("evaluate"):
                scores, ledger.evaluation = evaluate_split(net, server, clients, experiment, names, number, cases)
                views = summarize(scores, test_samples) if scores else None
        row: dict[str, Any] = {
            "round": number,
            "cohort": cohort,
            "failed": list(failures),
            "loss": loss,
            "losses": ledger.losses,
            "nbytes_down": per_client(ledger.down),
            "nbytes_up": per_client(ledger.up),
            "nbytes_evaluation": ledger.evaluation,
            "views": views,
        }
        row |= reasons_for_row({name: text for name, text in failures.items() if text}, clients.absences(number))
        yield Round(server, row, scores or None, ledger, cases)


def server_side(
    net: Net, parts: Parts, server: Server, experiment: Experiment, number: int, cohort: Sequence[str] = ()
) -> ServerSide:
    device, split = next(net.module.parameters()).device, net.split
    settings = local_settings(experiment, number, device)
    lr = settings.lr if split.server_lr is None else split.server_lr * settings.schedule
    lr *= split.server_decay ** ((number - 1) // split.decay_every)
    return ServerSide(
        split, parts, server.shared, dict(server.memory), number, settings.seed, lr, device,
        autocast=settings.autocast, cohort=cohort, clip_grad=settings.clip_grad,
    )  # fmt: skip


def _split_round(
    net: Net,
    parts: Parts,
    server: Server,
    clients: SplitClients,
    experiment: Experiment,
    cohort: Sequence[str],
    number: int,
    ledger: Ledger,
) -> tuple[Server, float | None, dict[str, str]]:
    """Take every sampled client's steps and train the body. If no client finishes, the server stays as it was."""
    split = net.split
    side = server_side(net, parts, server, experiment, number, cohort)
    average = bool(split.average_every) and (number - 1) % split.average_every == 0  # rounds count from 0 in the papers
    net.module.train()
    done = clients.train(side, cohort, number, average=average)
    answers, failed = done.answers, {name: done.reasons.get(name, "") for name in cohort if name in done.failed}
    ledger.down += [done.failed[name] for name in failed] + [answer.down for answer in answers.values()]
    ledger.up += [answer.up for answer in answers.values()]
    losses = {name: answer.loss for name, answer in answers.items() if answer.loss is not None}
    ledger.losses = dict(losses)
    if not answers:
        return replace(server, round=number), None, failed
    body, memory = side.end_of_round()
    if side.ends and split.receives == "sampled":
        clients.receive(list(answers), number, memory["average"])
        for position in range(len(failed), len(ledger.down)):
            ledger.down[position] += tree.nbytes(memory["average"])
    if not all_finite(body):
        raise DivergedError(
            f"the body's weights became infinite or not a number in round {number}; try a smaller method.server_lr "
            f"(now {side.lr:g}). The last checkpoint is still good."
        )
    examples = sum(answers[name].examples for name in losses)
    loss = sum(answers[name].examples * value for name, value in losses.items()) / examples if losses else None
    return replace(server, round=number, shared=body, memory=memory), loss, failed


def one_step(requests: Requests, channel: Loopback) -> bool:
    """Deliver a client's messages until the end of its step; return False when its round is over."""
    try:
        message = next(requests)
        while message is not None:
            message = requests.send(Message.from_bytes(channel.call(message.to_bytes())))
    except StopIteration:
        return False
    return True


def order(split: SplitPlan, present: Sequence[str], seed: int, number: int) -> list[str]:
    """Return the clients in the order in which they train: random for turns; otherwise the order does not matter."""
    if split.body != "turns":
        return list(present)
    chosen = torch.randperm(len(present), generator=randomness.generator(seed, number, "", "turns"))
    return [present[i] for i in chosen.tolist()]


def evaluate_split(
    net: Net,
    server: Server,
    clients: SplitClients,
    experiment: Experiment,
    names: Sequence[str],
    number: int,
    cases: dict[str, Cases] | None = None,
) -> tuple[Scores, int]:
    """Score each client's own head and tail with the newest body, using the same messages; also return their bytes."""
    side = server_side(net, Parts(net.module, net.split.cut), server, experiment, number)
    net.module.eval()
    return clients.evaluate(side, names, number, cases)
