"""One round of fedavg over a bare PyTorch loop on the same batches: what federation itself costs.

    python benchmarks/federation.py [--repeats 5] [--clients 8] [--images 128]

Both contestants alternate in one process, with the same threads and the same optimiser built per client. Counted
for fedavg: dispatch, batching, copying in and out, training, aggregation, ledger, and the memories' commit. Counted
for the bare loop: the same batches (prepared by the same pipeline), one model, no copies, no aggregation. Not counted:
evaluation, checkpoint, start-up.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from fedvit import config
from fedvit.data.datasets import Dataset
from fedvit.data.partition import ClientSplit, Split
from fedvit.ledger import Ledger
from fedvit.models.classifier import build
from fedvit.rounds import train_round
from fedvit.server import Server
from fedvit.settings import Experiment
from fedvit.store import Store
from fedvit.training import make_optimizer
from fedvit.transport.inprocess import InProcess
from fedvit.worker import Worker, make_net


def generated(clients: int, images: int, size: int = 32, classes: int = 10) -> tuple[Dataset, Split]:
    """Noise images: arithmetic does not care what is on them."""
    rng = np.random.default_rng(0)
    total = clients * (images + 1)
    pixels = rng.integers(0, 256, (total, size, size, 3), dtype=np.uint8)
    dataset = Dataset("generated", pixels, rng.integers(0, classes, total), tuple(map(str, range(classes))))
    parts = np.arange(total).reshape(clients, images + 1)
    none = np.empty(0, dtype=np.int64)
    split = {str(i): ClientSplit(part[:-1], part[-1:], none) for i, part in enumerate(parts)}
    return dataset, Split(split, parts[:, -1])


def bare_round(model: torch.nn.Module, worker: Worker, clients: list[str], round_: int) -> None:
    """What anybody would write without a framework."""
    model.train()
    for name in clients:
        client = worker.client(name, round_, {})
        optimizer = make_optimizer(client.settings, list(model.parameters()))
        for x, y in client.batches(client.settings.epochs, "train"):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()


def measure(experiment: Experiment, images: int, repeats: int) -> float:
    """The median over repeats of our round's time over the bare loop's."""
    device = torch.device("cpu")
    torch.set_num_threads(experiment.run.threads)
    dataset, split = generated(experiment.partition.clients, images)
    net = make_net(experiment, dataset.classes, device)
    worker = Worker(experiment, net, dataset, split, device)
    clients = list(split.clients)
    bare = build(experiment.model, dataset.classes, net.plan.build, 0)
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        transport = InProcess(worker, Store(Path(folder), in_ram=True))
        server = Server(0, net.shared)
        for repeat in range(repeats + 1):
            begin = time.perf_counter()
            server, _, _ = train_round(net.plan, server, transport, experiment, clients, repeat + 1, Ledger(), {})
            transport.commit(repeat + 1)
            middle = time.perf_counter()
            bare_round(bare, worker, clients, repeat + 1)
            end = time.perf_counter()
            if repeat:  # the first warms up
                ratios.append((middle - begin) / (end - middle))
                print(f"  repeat {repeat}: fedvit {middle - begin:.2f} s, bare {end - middle:.2f} s: {ratios[-1]:.3f}")
    return statistics.median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    work = f"{arguments.clients} clients x {arguments.images} images"
    print(f"torch {torch.__version__}, {arguments.threads} threads, {work}")
    flags = {
        "model": "vit_tiny_patch16_224", "image_size": 32, "patch_size": 4, "batch": 32, "epochs": 1,
        "clients": arguments.clients, "cohort": arguments.clients, "threads": arguments.threads,
    }  # fmt: skip
    experiment = config.load(None, {"optimizer": "sgd"}, {**flags, "method": "fedavg"})
    ratio = measure(experiment, arguments.images, arguments.repeats)
    print(f"fedavg round / bare loop: {ratio:.3f} (bar: 1.15)")


if __name__ == "__main__":
    main()
