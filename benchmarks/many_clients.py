"""Compare rounds with 10,000 and 100 clients, and time the start with 100,000: python -m benchmarks.many_clients

The work is fedperfix on a ViT-Tiny at 32 px with patches of 4; every client has 12 images, and 8 clients train per
round, with one worker and one thread. Images are in a memory map, as FedViT keeps image folders. The time of a round
includes training, the store and the checkpoint. Both populations take turns, round by round; peak memory is measured
before the smaller one joins. The last line is the time from data in memory to the first round's messages with 100,000
clients, including split.json, in seconds.
"""

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.common import CPU, Result, generated, settings, show
from fedvit.core.server import Server
from fedvit.data.dataset import Dataset
from fedvit.data.partition.split import partition_dataset
from fedvit.engine.checkpoint import save_checkpoint
from fedvit.engine.client_store import ClientStore
from fedvit.engine.inprocess import InProcess
from fedvit.engine.ledger import Ledger
from fedvit.engine.loop import choose, train_round
from fedvit.engine.net import make_net
from fedvit.engine.system import peak_rss_mb, reset_peak_rss
from fedvit.engine.worker import Worker
from fedvit.runs.write import class_counts, open_folder, roster_of

ALONE = 3  # rounds of the larger population alone, for its peak memory


class Population:
    """A number of clients, the server that they share, and a folder for what they remember."""

    def __init__(self, clients: int, folder: Path):
        self.experiment = settings("fedperfix", clients=clients, cohort=8, threads=1)
        in_memory, split = generated(clients, 12)
        dataset = mapped(in_memory, folder)
        net = make_net(self.experiment, dataset.classes, CPU)
        self.transport = InProcess(Worker(self.experiment, net, dataset, split, CPU), ClientStore(folder, in_ram=False))
        self.plan, self.folder, self.names = net.plan, folder, list(split.clients)
        self.server: Server = net.server(self.names)

    def round(self, number: int) -> float:
        begin = time.perf_counter()
        cohort = choose(self.plan, self.names, self.experiment, number)
        self.server, _, _ = train_round(
            self.plan, self.server, self.transport, self.experiment, cohort, number, Ledger(), {}
        )
        self.transport.commit(number)
        save_checkpoint(self.folder, self.server, self.transport.store)
        return time.perf_counter() - begin

    @property
    def files(self) -> int:
        return len(list(self.folder.glob("clients/*")))


def mapped(dataset: Dataset, folder: Path) -> Dataset:
    """Move the images into a file."""
    folder.mkdir(parents=True)
    np.save(folder / "images.npy", dataset.images)
    return replace(dataset, images=np.load(folder / "images.npy", mmap_mode="r"))


def start(clients: int) -> float:
    """Measure the seconds from images in memory to the first round's messages, including the partition."""
    dataset, _ = generated(clients, 12, test=0)
    experiment = settings("fedperfix", {"partition.min_samples": 2}, clients=clients, cohort=8, partition="iid")
    begin = time.perf_counter()
    split = partition_dataset(dataset, experiment.partition, experiment.data, batch=32, seed=0)
    net = make_net(experiment, dataset.classes, CPU)
    worker = Worker(experiment, net, dataset, split, CPU)
    server = net.server(list(split.clients))
    with tempfile.TemporaryDirectory() as folder:
        counts = {"image": list(dataset.images.shape[1:]), "class_counts": class_counts(dataset, split)}
        open_folder(Path(folder) / "run", experiment, {**split.to_json(), **counts}, resume=False)
    roster_of(worker.labels.numpy(), split)
    for name in choose(net.plan, list(split.clients), experiment, 1):
        worker.client(name, 1, {})
        net.plan.dispatch(server, name)
    return time.perf_counter() - begin


def results(repeats: int = 5, many: int = 10_000, most: int = 100_000) -> list[Result]:
    torch.set_num_threads(1)
    reset_peak_rss()
    with tempfile.TemporaryDirectory() as folder:
        lot, ratios = Population(many, Path(folder) / "many"), list[float]()
        for number in range(1, ALONE + 1):
            lot.round(number)
        peak, few = peak_rss_mb(), Population(100, Path(folder) / "few")
        for number in range(ALONE + 1, ALONE + repeats + 2):
            pair = lot.round(number), few.round(number)
            if number > ALONE + 1:
                ratios.append(pair[0] / pair[1])
        beside = f"{lot.files} files of clients that took part"
    begun = start(most)
    return [
        Result(f"a round of {many:,} clients / of 100", ratios, 1.1, beside=beside),
        Result(f"{many:,} clients: peak memory, MB", [peak], 1500),
        Result(f"{most:,} clients: seconds to the first round", [begun], 30),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--many", type=int, default=10_000)
    parser.add_argument("--most", type=int, default=100_000)
    show(results(**vars(parser.parse_args())))
