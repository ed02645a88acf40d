"""What is left of a run in which one client sends its update turned round and five times as long: docs/robust.md.

    python -m benchmarks bad_site

The bits are those of sites over Flower, which tests/unit/network/test_bad_sites.py attacks in the same way. Accuracy
after the last round is in percent, and the ratio is that with the bad client to that without.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.common import CPU, Result
from fedvit.config.load import load_experiment
from fedvit.core.payload import Failure, Payload
from fedvit.engine.client_store import ClientStore
from fedvit.engine.inprocess import InProcess
from fedvit.engine.loop import federate
from fedvit.engine.net import make_net
from fedvit.engine.transport import Task
from fedvit.engine.worker import Worker, load_data

BAD, FACTOR = "2", -5.0
FLAGS = {
    "method": "fedavg", "model": "mlp", "samples": 300, "partition": "iid", "rounds": 4, "epochs": 3, "batch": 16,
    "lr": 0.005, "threads": 1,
}  # fmt: skip
CASES: list[tuple[int, dict[str, Any]]] = [
    (3, {}), (3, {"clip_update": "auto"}), (3, {"aggregate": "median"}), (3, {"aggregate": "trimmed_mean"}),
    (5, {}), (5, {"clip_update": "auto"}), (5, {"aggregate": "median"}), (5, {"aggregate": "trimmed_mean"}),
    (5, {"aggregate": "krum"}), (5, {"aggregate": "multi_krum"}),
    (8, {}), (8, {"clip_update": "auto"}), (8, {"aggregate": "median"}),
]  # fmt: skip


class OneBad(InProcess):
    """Clients in this process, one of which turns its update round."""

    def exchange(self, task: Task, messages: Mapping[str, Payload]) -> Iterator[tuple[str, Payload | Failure]]:
        for name, answer in super().exchange(task, messages):
            if name == BAD and isinstance(answer, Payload) and answer.trees:
                sent = messages[name].trees["shared"]
                turned = {n: sent[n] + FACTOR * (t - sent[n]) for n, t in answer.trees["shared"].items()}
                answer = replace(answer, trees={"shared": turned})
            yield name, answer


def accuracy(clients: int, sets: dict[str, Any], transport: type[InProcess]) -> float:
    experiment = load_experiment(None, {"optimizer": "adamw", **sets}, {**FLAGS, "clients": clients, "cohort": clients})
    torch.set_num_threads(experiment.run.threads)
    dataset, split = load_data(experiment)
    net = make_net(experiment, dataset.classes, CPU)
    worker = Worker(experiment, net, dataset, split, CPU)
    tests = {name: len(part.test) for name, part in split.clients.items()}
    with TemporaryDirectory() as folder:
        here = transport(worker, ClientStore(Path(folder), in_ram=True))
        *_, last = federate(net.federated, net.server(split.seen), here, experiment, None, tests)
    return float(last.row["views"]["personal"]["mean"])


def results() -> list[Result]:
    rows = []
    for clients, sets in CASES:
        honest, attacked = (accuracy(clients, sets, kind) for kind in (InProcess, OneBad))
        words = " ".join(f"{key}={value}" for key, value in sets.items()) or "mean"
        told = f"{honest:.0f} % honest, {attacked:.0f} % attacked"
        rows.append(Result(f"{clients} sites, {words}", [attacked / honest], None, beside=told))
    return rows
