"""Compare head tuning without and with the cache of frozen layers' activations: python -m benchmarks.frozen

The work is fedper+head with 8 clients of 8 images, all sampled, 10 local epochs, 5 rounds, no augmentation or
evaluation, and one thread. The measured time includes filling the caches. Both contestants must end with the same bits.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.common import Result, make_worker, settings, show
from fedvit.core.tree import Tree
from fedvit.engine.client_store import ClientStore
from fedvit.engine.inprocess import InProcess
from fedvit.engine.ledger import Ledger
from fedvit.engine.loop import train_round


def seconds(label: str, megabytes: int, clients: int, images: int, rounds: int) -> tuple[float, dict[str, Tree]]:
    """Measure the time of all rounds, and return the clients' weights after them."""
    sets = {"run.cache_mb": megabytes}
    experiment = settings(label, sets, clients=clients, cohort=clients, threads=1, epochs=10)
    worker = make_worker(experiment, images)
    names = list(worker.partition.clients)
    with tempfile.TemporaryDirectory() as folder:
        transport = InProcess(worker, ClientStore(Path(folder), in_ram=True))
        server = worker.net.server(names)
        begin = time.perf_counter()
        for round_ in range(1, rounds + 1):
            server, _, _ = train_round(worker.net.plan, server, transport, experiment, names, round_, Ledger(), {})
            transport.commit(round_)
        end = time.perf_counter()
        own = {name: transport.store.get(name)["personal"] for name in names}
        return end - begin, {**own, "server": server.shared}  # type: ignore[dict-item]


def results(repeats: int = 3, clients: int = 8, images: int = 8, rounds: int = 5) -> list[Result]:
    found = []
    for label, bar in (("fedper+head", 20.0), ("fedper+blocks.10,blocks.11,head", None)):
        ratios = []
        for _ in range(repeats):
            slow, a = seconds(label, 0, clients, images, rounds)
            quick, b = seconds(label, 1000, clients, images, rounds)
            if not all(torch.equal(a[who][name], b[who][name]) for who in a for name in a[who]):
                raise SystemExit(f"{label}: the cache changed the result")
            ratios.append(slow / quick)
        beside = f"{quick:.1f} s with it, {slow:.1f} s without; equal to the bit"
        found.append(Result(f"{label}: without / with the cache", ratios, bar, at_least=True, beside=beside))
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    show(results(**vars(parser.parse_args())))
