"""Time the checks of all messages of a round beside the round itself: python -m benchmarks.checks [--repeats 5]

A round and its checks are timed in turns. A round is what `benchmarks.federation` measures: messages, training and
averaging of 8 clients with 128 images each on a ViT-Tiny. Its checks are those of both sides of a network: every client
compares the message it gets with the one that the plan would send, and the server every report, tensor by tensor. Of
split learning, one client's round of FedV is timed, with the checks of every request and answer apart.
"""

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Result, make_worker, seconds_of, settings, show
from fedvit.core.payload import Failure, Payload
from fedvit.engine.client_store import ClientStore
from fedvit.engine.inprocess import InProcess
from fedvit.engine.ledger import Ledger
from fedvit.engine.loop import train_round
from fedvit.engine.split_loop import Loopback, one_step, server_side
from fedvit.models.cuts import Parts
from fedvit.network.boundary import read_order, read_report
from fedvit.network.grpc.checks import Checks, Progress
from fedvit.network.payload_check import difference, down_of, up_of
from fedvit.runs.write import Holding
from fedvit.split.client import ClientSide
from fedvit.split.messages import Message
from fedvit.split.server import ServerSide

CLIENTS, IMAGES = 8, 128
LABELS = ("fedavg", "fedperfix", "scaffold", "fedavg+bias")


class Heard:
    """A transport that keeps the messages of a round."""

    def __init__(self, inner: InProcess):
        self.inner = inner
        self.messages: list[tuple[str, Payload, Payload]] = []

    def clients(self) -> Any:
        return self.inner.clients()

    def exchange(self, task: Any, messages: Mapping[str, Payload]) -> Iterator[tuple[str, Payload | Failure]]:
        for name, answer in self.inner.exchange(task, messages):
            if isinstance(answer, Payload):
                self.messages.append((name, messages[name], answer))
            yield name, answer

    def commit(self, round_: int) -> None:
        self.inner.commit(round_)


def federated(label: str, repeats: int, images: int = IMAGES) -> Result:
    experiment = settings(label, clients=CLIENTS, cohort=CLIENTS, threads=1)
    worker = make_worker(experiment, images)
    net, names = worker.net, list(worker.partition.clients)
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        heard = Heard(InProcess(worker, ClientStore(Path(folder), in_ram=True)))
        server = net.server(names)

        def round_(number: int) -> None:
            nonlocal server
            server, _, _ = train_round(net.federated, server, heard, experiment, names, number, Ledger(), {})
            heard.commit(number)

        def checks(number: int) -> None:
            for name, down, up in heard.messages:
                read_order(down, {"run": "r", "continues": number - 1})
                difference(down, down_of(net, names, name, number - 1))
                read_report(up, up_of(net, down, number), Holding(images, 1, 1))

        for number in range(1, repeats + 2):
            heard.messages.clear()
            whole = seconds_of(round_, number)
            share = seconds_of(checks, number) / whole
            if number > 1:  # the first round warms up
                ratios.append(share)
    return Result(f"{label}: checks of a round / the round", ratios, 0.02)


class Timed(Loopback):
    """A channel within one process that checks what passes, as both sides of a network do, and times the checks."""

    def __init__(self, side: ServerSide, checks: Checks, steps: int):
        super().__init__(side)
        self.checks, self.progress, self.images, self.seconds = checks, Progress("train", steps, average=True), 0, 0.0

    def call(self, request: bytes) -> bytes:
        sent = Message.from_bytes(request)
        self.seconds += seconds_of(self.checks.check, sent, self.progress, self.server)
        reply = super().call(request)
        self.images = len(sent.payload.trees["h"]["x"]) if "h" in sent.payload.trees else self.images
        self.seconds += seconds_of(self.checks.check_answer, sent, Message.from_bytes(reply), self.images)
        return reply


def split(repeats: int, images: int = IMAGES) -> Result:
    experiment = settings("fedv", clients=1, cohort=1, threads=1)
    worker = make_worker(experiment, images)
    net, (name,) = worker.net, worker.partition.clients
    checks, parts = Checks(net, experiment.train.batch), Parts(net.module, net.split.cut)
    steps = experiment.train.epochs * -(-images // experiment.train.batch)

    def seconds(number: int) -> tuple[float, float]:
        """Return the seconds of a client's round, and those of its checks."""
        channel = Timed(server_side(net, parts, net.server([name]), experiment, number, [name]), checks, steps)
        requests = ClientSide(net.split, parts, worker.client(name, number, {})).requests(average=True)

        def train() -> None:
            while one_step(requests, channel):
                pass

        whole = seconds_of(train)
        return whole - channel.seconds, channel.seconds

    pairs = [seconds(1) for _ in range(repeats + 1)][1:]  # the first warms up
    return Result("fedv: checks of a round / the round", [checking / rest for rest, checking in pairs], 0.02)


def results(repeats: int = 5, images: int = IMAGES) -> list[Result]:
    torch.set_num_threads(1)
    return [*(federated(label, repeats, images) for label in LABELS), split(repeats, images)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    show(results(given.repeats))
