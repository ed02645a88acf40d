"""What it costs the server to measure, bound and combine the updates of a round, beside the round itself.

    python -m benchmarks updates

A round has 8 clients with 128 images each and one epoch of ViT-Tiny, so more training makes every share smaller. The
first line is what every run pays, train.clip_update=auto included; the others are the seconds of each aggregate, beside
those of the mean.
"""

import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common import Result, make_worker, settings
from fedvit.core.robust import combine_by
from fedvit.engine.client_store import ClientStore
from fedvit.engine.inprocess import InProcess
from fedvit.engine.ledger import Ledger
from fedvit.engine.loop import train_round

CLIENTS, IMAGES, ROUNDS = 8, 128, 3
AGGREGATES = ("mean", "median", "trimmed_mean", "krum", "multi_krum")


def shares(label: str, sets: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Return the shares of rounds that go into updates and into combining reports."""
    experiment = settings(label, sets, clients=CLIENTS, cohort=CLIENTS, threads=1)
    worker = make_worker(experiment, IMAGES)
    names = list(worker.partition.clients)
    train = experiment.train
    measured, combined = [], []
    with tempfile.TemporaryDirectory() as folder:
        transport = InProcess(worker, ClientStore(Path(folder), in_ram=True))
        server = replace(worker.net.server(names), combine=combine_by(train.aggregate, train.byzantine))
        for number in range(1, ROUNDS + 1):
            ledger = Ledger()
            with ledger.phase("aggregate"):
                server, _, _ = train_round(
                    worker.net.federated, server, transport, experiment, names, number, ledger, {}
                )
            whole = sum(ledger.seconds.values())
            measured.append(ledger.seconds["updates"] / whole)
            combined.append(ledger.seconds["aggregate"] / whole)
    return measured[1:], combined[1:]  # the first round warms up


def results() -> list[Result]:
    rows = []
    for label in ("fedavg", "fedavg+bias"):
        measured, _ = shares(label, {"clip_update": "auto"})
        rows.append(Result(f"{label}: updates / a round", measured, 0.02))
    mean = 0.0
    for aggregate in AGGREGATES:
        _, combined = shares("fedavg", {"aggregate": aggregate})
        mean = mean or statistics.median(combined)
        rows.append(Result(f"fedavg: {aggregate} / a round", combined, None, beside=f"mean {mean:.2%}"))
    return rows
