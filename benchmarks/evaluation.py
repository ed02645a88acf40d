"""Compare evaluating every client with one bare forward pass over the same images: python -m benchmarks.evaluation

There are 8 clients with 64 test images each, a ViT-Tiny at 32 px with patches of 4, and one thread. The bare pass is
timm's own, on images that are ready as floats, in batches of a client's size like ours. Our time includes everything
from uint8 to the summary of all views.
"""

import argparse
import tempfile
from pathlib import Path

import torch

from benchmarks.common import CPU, Result, alternate, make_worker, settings, show
from fedvit.core.batches import image_batches
from fedvit.engine.client_store import ClientStore
from fedvit.engine.inprocess import InProcess
from fedvit.engine.ledger import Ledger
from fedvit.engine.loop import evaluate, summarize
from fedvit.engine.net import join_plugins
from fedvit.engine.worker import client_data
from fedvit.models.build import build


def measure(label: str, clients: int, test: int, repeats: int) -> Result:
    worker = make_worker(settings(label, clients=clients, cohort=clients, threads=1), 1, test)
    net, split = worker.net, worker.partition
    server = net.server(list(split.clients))
    sizes = {name: len(part.test) for name, part in split.clients.items()}
    everything = client_data(worker.images, worker.labels, net.classes, split.clients["0"])
    images = torch.from_numpy(split.global_test)
    model = build(worker.experiment.model, net.classes, join_plugins(net.plan.build, net.tune.build), 0).eval()
    batches = [x for x, _ in image_batches(everything, images, test, net.inputs, CPU)]
    with tempfile.TemporaryDirectory() as folder:
        transport = InProcess(worker, ClientStore(Path(folder), in_ram=True))

        def ours(repeat: int) -> None:
            scores = evaluate(net.plan, dict.fromkeys(sizes, server), transport, 1, Ledger())
            summarize(scores, sizes)
            if net.one_global_model:
                worker.evaluate_server(server.shared, 1, scores)

        @torch.no_grad()
        def bare(repeat: int) -> None:
            for x in batches:
                model(x)

        return Result(f"{label}: evaluating all / a bare pass", alternate(ours, bare, repeats), 1.1)


def results(clients: int = 8, test: int = 64, repeats: int = 5) -> list[Result]:
    return [measure(label, clients, test, repeats) for label in ("fedavg", "fedper", "scaffold")]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--test", type=int, default=64)
    show(results(**vars(parser.parse_args())))
