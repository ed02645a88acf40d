"""The split loop: the same rounds, cohorts, evaluation and files as the federated one, another protocol inside."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fedvit import randomness, tree
from fedvit.client import Memory
from fedvit.errors import UserError
from fedvit.evaluation import view_scores
from fedvit.ledger import Ledger, per_client
from fedvit.models.cuts import Parts
from fedvit.rounds import Round, choose, is_evaluated, reached, summarize
from fedvit.server import Server
from fedvit.settings import Experiment
from fedvit.split import ClientSide, Message, Requests, ServerSide, SplitPlan
from fedvit.training import all_finite
from fedvit.transport.inprocess import InProcess
from fedvit.worker import Net, rate_factor

log = logging.getLogger(__name__)


class Loopback:
    """The channel inside one process, and its account of tensor bytes."""

    def __init__(self, server: ServerSide):
        self.server = server
        self.up: dict[str, int] = {}
        self.down: dict[str, int] = {}

    def call(self, request: bytes) -> bytes:
        reply = self.server.call(request)
        for blob, account in ((request, self.up), (reply, self.down)):
            message = Message.from_bytes(blob)
            account[message.client] = account.get(message.client, 0) + message.payload.nbytes
        return reply


def split_of(net: Net) -> SplitPlan:
    assert net.plan.split is not None
    return net.plan.split


def federate_split(
    net: Net, server: Server, transport: InProcess, experiment: Experiment, test_samples: Mapping[str, int]
) -> Iterator[Round]:
    """Run the rounds after `server.round`, one at a time."""
    run, parts = experiment.run, Parts(net.module, split_of(net).cut)
    clients = list(transport.clients())
    for parameter in net.module.parameters():
        parameter.requires_grad_(False)  # learning weights are given at every call
    for number in range(server.round + 1, experiment.train.rounds + 1):
        ledger = Ledger()
        cohort = choose(net.plan, clients, experiment, number)
        with ledger.phase("train"):
            server, loss, failed = split_round(net, parts, server, transport, experiment, cohort, number, ledger)
        with ledger.phase("store"):
            transport.commit(number)
        scores, views = None, None
        if is_evaluated(number, experiment):
            with ledger.phase("evaluate"):
                scores, ledger.evaluation = evaluate_split(net, server, transport, clients, number)
                views = summarize(scores, test_samples)
        row: dict[str, Any] = {
            "round": number,
            "cohort": cohort,
            "failed": failed,
            "loss": loss,
            "nbytes_down": per_client(ledger.down),
            "nbytes_up": per_client(ledger.up),
            "nbytes_evaluation": ledger.evaluation,
            "views": views,
        }
        yield Round(server, row, scores, ledger)
        if views is not None and reached(views["personal"]["mean"], run.until_accuracy):
            return


def server_side(net: Net, parts: Parts, server: Server, transport: InProcess, number: int) -> ServerSide:
    settings, train, split = transport.worker.settings(number), transport.worker.experiment.train, split_of(net)
    lr = settings.lr if split.server_lr is None else split.server_lr * rate_factor(train, number)
    return ServerSide(
        split, parts, server.shared, dict(server.memory), number, settings.seed, lr, settings.device,
        autocast=settings.autocast,
    )  # fmt: skip


def split_round(
    net: Net,
    parts: Parts,
    server: Server,
    transport: InProcess,
    experiment: Experiment,
    cohort: Sequence[str],
    number: int,
    ledger: Ledger,
) -> tuple[Server, float | None, list[str]]:
    """Every sampled client's steps, one client after another or all in step, and the body's learning."""
    split, worker = split_of(net), transport.worker
    failed = [name for name in cohort if transport.fails(name, number)]
    for name in failed:
        log.warning("round %d: client %s dropped out (train.dropout)", number, name)
    ledger.down += [0] * len(failed)
    present = [name for name in cohort if name not in failed]
    if not present:
        return replace(server, round=number), None, failed
    side = server_side(net, parts, server, transport, number)
    channel = Loopback(side)
    average = bool(split.average_every) and (number - 1) % split.average_every == 0  # rounds count from 0 in the papers
    net.module.train()
    sides = {name: ClientSide(split, parts, worker.client(name, number, transport.store.get(name))) for name in present}
    requests = {name: sides[name].requests(average=average) for name in present}
    if split.lockstep:
        while requests:
            requests = {name: r for name, r in requests.items() if one_step(r, channel)}
            side.end_of_step()
    else:
        for name in order(split, present, experiment.run.seed, number):
            while one_step(requests[name], channel):
                pass
    losses = []
    for name, client_side in sides.items():
        client = client_side.client
        transport.pending[name] = client.memory
        losses.append((len(client.data.train), client.scalars["loss"]))
        ledger.down.append(channel.down[name])
        ledger.up.append(channel.up[name])
    body, memory = side.end_of_round()
    if side.ends and split.receives == "sampled":
        for number_of, name in enumerate(present):
            own = transport.pending[name]["personal"]
            assert isinstance(own, dict)
            transport.pending[name]["personal"] = tree.overlay(own, memory["average"])
            ledger.down[len(failed) + number_of] += tree.nbytes(memory["average"])
    if not all_finite(body):
        raise UserError(
            f"the body's weights became infinite or not a number in round {number}; try a smaller method.server_lr "
            f"(now {side.lr:g}). The last checkpoint is still good."
        )
    loss = sum(count * value for count, value in losses) / sum(count for count, _ in losses)
    return replace(server, round=number, shared=body, memory=memory), loss, failed


def one_step(requests: Requests, channel: Loopback) -> bool:
    """Carry a client's messages until the end of its step; False when its round is over."""
    try:
        message = next(requests)
        while message is not None:
            message = requests.send(Message.from_bytes(channel.call(message.to_bytes())))
    except StopIteration:
        return False
    return True


def order(split: SplitPlan, present: Sequence[str], seed: int, number: int) -> list[str]:
    """Turns are taken in random order; elsewhere the order does not matter."""
    if split.body != "turns":
        return list(present)
    chosen = torch.randperm(len(present), generator=randomness.generator(seed, number, "", "turns"))
    return [present[i] for i in chosen.tolist()]


def evaluate_split(
    net: Net, server: Server, transport: InProcess, names: Sequence[str], number: int
) -> tuple[dict[str, dict[str, float]], int]:
    """Every client's own head and tail around the newest body, through the same messages; and their bytes."""
    split, worker = split_of(net), transport.worker
    parts = Parts(net.module, split.cut)
    channel = Loopback(server_side(net, parts, server, transport, number))
    net.module.eval()
    scores = {}
    for name in names:
        memory: Memory = dict(transport.store.get(name))
        client = worker.client(name, number, memory)
        with torch.no_grad():
            predict = ClientSide(split, parts, client).predictor(channel)
        scores[name] = view_scores("personal", predict, client.data, net.inputs, worker.device, auroc=worker.auroc)
    return scores, sum(channel.up.values()) + sum(channel.down.values())
