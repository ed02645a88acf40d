"""Compare one round with a bare PyTorch loop on the same batches, to measure the overhead of federation itself.

    python -m benchmarks.federation [--repeats 4] [--clients 8] [--images 128] [--threads 2]

Both contestants take turns in one process, and each goes first in turn, with the same threads and the same optimizer,
built per client. The time of a round includes dispatch, batching, copying in and out, training, aggregation, the
ledger, and committing the clients' memories. The time of the bare loop includes training one model on the same batches,
which are ready, without copies or aggregation. Evaluation, checkpoint and start-up are not included; their seconds are
reported separately.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.common import Result, make_worker, seconds_of, settings, show
from fedvit.core.client import LocalSettings
from fedvit.core.training import make_optimizer
from fedvit.engine.checkpoint import save_checkpoint
from fedvit.engine.client_store import ClientStore
from fedvit.engine.inprocess import InProcess
from fedvit.engine.ledger import Ledger
from fedvit.engine.loop import evaluate, train_round
from fedvit.engine.net import join_plugins
from fedvit.engine.worker import Worker
from fedvit.models.build import build

LABELS = ("fedavg", "fedperfix", "fedavg+bias")


Batches = list[tuple[torch.Tensor, torch.Tensor]]


def ready(worker: Worker, round_: int) -> list[tuple[LocalSettings, Batches]]:
    """Prepare every client's batches of a round."""
    clients = [worker.client(name, round_, {}) for name in worker.partition.clients]
    return [(c.settings, list(c.batches(c.settings.epochs, "train"))) for c in clients]


def bare_round(model: torch.nn.Module, work: list[tuple[LocalSettings, Batches]]) -> None:
    """Train as you would without a framework."""
    model.train()
    for local, batches in work:
        optimizer = make_optimizer(local, [p for p in model.parameters() if p.requires_grad])
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()


def measure(label: str, clients: int, images: int, threads: int, repeats: int) -> Result:
    experiment = settings(label, clients=clients, cohort=clients, threads=threads)
    begin = time.perf_counter()
    worker = make_worker(experiment, images)
    start_up = time.perf_counter() - begin
    net, names = worker.net, list(worker.partition.clients)
    bare = build(experiment.model, net.classes, join_plugins(net.plan.build, net.tune.build), 0)
    for name, parameter in bare.named_parameters():
        parameter.requires_grad_(name in net.roles.trainable)
    ratios, rounds, ledger = [], [], Ledger()
    with tempfile.TemporaryDirectory() as folder:
        transport = InProcess(worker, ClientStore(Path(folder), in_ram=True))
        server = net.server(names)
        for repeat in range(repeats + 1):
            work = ready(worker, repeat + 1)
            if repeat % 2:
                bare_seconds = seconds_of(bare_round, bare, work)
            begin = time.perf_counter()
            server, _, _ = train_round(net.plan, server, transport, experiment, names, repeat + 1, Ledger(), {})
            transport.commit(repeat + 1)
            seconds = time.perf_counter() - begin
            if not repeat % 2:
                bare_seconds = seconds_of(bare_round, bare, work)
            if repeat:  # the first warms up
                rounds.append(seconds)
                ratios.append(seconds / bare_seconds)
        with ledger.phase("evaluate"):
            evaluate(net.plan, dict.fromkeys(names, server), transport, repeats + 1, ledger)
        with ledger.phase("checkpoint"):
            save_checkpoint(Path(folder), server, transport.store)
    round_ = sum(rounds) / len(rounds)
    shares = ", ".join(f"{name} {seconds / round_:.1%}" for name, seconds in ledger.seconds.items())
    beside = f"round {round_:.2f} s; beside it {shares}, start-up {start_up / round_:.1%} once"
    return Result(f"{label}: a round / a bare loop", ratios, 1.05, beside=beside, threads=threads)


def results(clients: int = 8, images: int = 128, threads: int = 2, repeats: int = 4) -> list[Result]:
    return [measure(label, clients, images, threads, repeats) for label in LABELS]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    show(results(**vars(parser.parse_args())))
