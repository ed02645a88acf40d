"""Compare two single-threaded worker processes with one: python -m benchmarks.workers [--repeats 3]

Both run the same rounds of fedavg. The processes start before the measurement, and their start-up time is reported
separately. Every repeat checks that the weights of both are equal to the bit.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.common import CPU, Result, generated, settings, show
from fedvit.engine.client_store import ClientStore
from fedvit.engine.inprocess import InProcess
from fedvit.engine.ledger import Ledger
from fedvit.engine.loop import train_round
from fedvit.engine.net import make_net
from fedvit.engine.pool import WorkerPool
from fedvit.engine.worker import Worker


def results(clients: int = 8, images: int = 128, repeats: int = 3) -> list[Result]:
    torch.set_num_threads(1)
    experiment = settings("fedavg", clients=clients, cohort=clients, threads=1)
    dataset, split = generated(clients, images)
    worker = Worker(experiment, make_net(experiment, dataset.classes, CPU), dataset, split, CPU)
    names, ratios = list(split.clients), []
    with tempfile.TemporaryDirectory() as folder:
        alone = InProcess(worker, ClientStore(Path(folder) / "one", in_ram=True))
        begin = time.perf_counter()
        with WorkerPool(InProcess(worker, ClientStore(Path(folder) / "two", in_ram=True)), dataset, 2) as pair:
            one = two = worker.net.server(names)
            for repeat in range(repeats + 1):
                start = time.perf_counter()
                two, _, _ = train_round(worker.net.plan, two, pair, experiment, names, repeat + 1, Ledger(), {})
                middle = time.perf_counter()
                one, _, _ = train_round(worker.net.plan, one, alone, experiment, names, repeat + 1, Ledger(), {})
                end = time.perf_counter()
                if not all(torch.equal(one.shared[name], two.shared[name]) for name in one.shared):
                    raise SystemExit("two workers gave different weights than one")
                if repeat:
                    ratios.append((end - middle) / (middle - start))
                else:
                    start_up = (middle - begin) - (end - middle) / 2
    return [
        Result("1 worker / 2 workers", ratios, 1.8, at_least=True, beside="equal to the bit"),
        Result("2 workers: seconds to start, once per run", [max(0.0, start_up)], 10),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--images", type=int, default=128)
    show(results(**vars(parser.parse_args())))
