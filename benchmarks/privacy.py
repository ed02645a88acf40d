"""Compare private gradients with ordinary ones: python -m benchmarks.privacy

The work is one gradient of a ViT-Tiny at 96 pixels on 16 images with one thread: per image, clipped, summed, noised,
against one backward pass of the batch.
"""

import argparse
from dataclasses import replace

import torch

from benchmarks.common import CPU, Result, alternate, show
from fedvit.config.load import load_experiment
from fedvit.core.training import load_
from fedvit.engine.net import make_net
from fedvit.privacy.gradients import PrivateGradients

BARS = {"fedavg+full": 2.3, "fedavg+bias": 1.3, "fedavg+head": 1.3, "fedperfix+full": 2.3}
STEPS = 3


def ratios_of(label: str, repeats: int) -> list[float]:
    """Return the time of private gradients over that of ordinary ones."""
    method, tune = label.split("+")
    flags = {"method": method, "tune": tune, "model": "vit_tiny_patch16_224", "image_size": 96}
    net = make_net(load_experiment(None, {}, flags), 100, CPU)
    client = net.bare_client()
    load_(net.live, net.initial)
    net.module.train()
    learned = {name: p for name, p in net.module.named_parameters() if name in net.roles.trainable}
    for name, parameter in net.module.named_parameters():
        parameter.requires_grad_(name in learned)
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(16, 3, 96, 96, generator=draw), torch.randint(100, (16,), generator=draw)
    private = PrivateGradients(clip=1.0, noise=1.0, key=b"benchmark")
    private.share = 1.0
    client.data = replace(client.data, labels=y, train=torch.arange(16))

    def with_privacy(_: int) -> None:
        for _ in range(STEPS):
            private.gradient(client, learned, list(learned), x, y, client.loss)

    def plain(_: int) -> None:
        for _ in range(STEPS):
            net.module.zero_grad(set_to_none=True)
            client.loss(net.module, x, y).backward()

    return alternate(with_privacy, plain, repeats)


def results(repeats: int = 5) -> list[Result]:
    """Measure the rows of BARS."""
    torch.set_num_threads(1)
    return [Result(f"private / plain gradient, {label}", ratios_of(label, repeats), bar) for label, bar in BARS.items()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    show(results(parser.parse_args().repeats))
