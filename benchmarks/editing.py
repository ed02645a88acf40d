"""One step of PFedEdit's editing over as many whole forward passes as there are layers.

    python benchmarks/editing.py [--repeats 7] [--images 8] [--size 96]

Both contestants alternate in one process on the same random weights and images of a ViT-Tiny with 12 blocks. The step
counts all it does: the plain pass it records, exchanging weights, every edited pass. The passes it is held against
count the model alone. The bar is 0.6.
"""

import argparse
import statistics
import time

import torch

from fedvit import config
from fedvit.client import Client
from fedvit.data import pipeline
from fedvit.editing import Layer, edited_logits, layers_of, probe_batches
from fedvit.training import holding
from fedvit.tree import Tree
from fedvit.worker import make_net


def seconds_of_step(client: Client, base: Tree, other: Tree, layers: list[Layer]) -> float:
    begin = time.perf_counter()
    edited_logits(client, base, other, layers)
    return time.perf_counter() - begin


@torch.no_grad()
def seconds_of_passes(client: Client, base: Tree, count: int) -> float:
    with holding(client, base) as predict:
        batches = list(probe_batches(client))
        begin = time.perf_counter()
        for _ in range(count):
            for x, _ in batches:
                predict(x)
        return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    flags = {"method": "pfededit", "model": "vit_tiny_patch16_224", "image_size": options.size}
    net = make_net(config.load(None, {}, flags), 100, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    shape = (options.images, options.size, options.size, 3)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    everything, nothing = torch.arange(options.images), torch.zeros(0, dtype=torch.int64)
    client = net.bare_client()
    client.data = pipeline.ClientData(images, everything % 100, nothing, nothing, nothing, everything, 100)
    other = {name: t + 0.01 * torch.randn(t.shape, generator=generator) for name, t in net.initial.items()}
    layers = layers_of(net.module, net.roles.trainable)
    ratios = []
    for _ in range(options.repeats + 1):
        step = seconds_of_step(client, net.initial, other, layers)
        ratios.append(step / seconds_of_passes(client, net.initial, len(layers)))
    ratios = ratios[1:]  # the first warms up
    print(f"torch {torch.__version__}, {options.threads} threads, {options.images} images of {options.size} px")
    print(f"editing {len(layers)} layers / {len(layers)} whole passes: median {statistics.median(ratios):.3f}", end=" ")
    print(f"(of {', '.join(f'{ratio:.3f}' for ratio in ratios)}; bar 0.6)")


if __name__ == "__main__":
    main()
