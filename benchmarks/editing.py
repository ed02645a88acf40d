"""Compare one step of PFedEdit's editing with as many whole forward passes as there are layers.

    python -m benchmarks.editing [--repeats 7] [--images 8] [--size 96]

Both contestants alternate in one process on the same random weights and images with a ViT-Tiny of 12 blocks. The time
of the step includes everything it does: the pass of the client's own model, the plain pass that it records, exchanging
weights, every edited pass and the ranking. The time of the whole passes includes only the model. The bar is 0.6.
"""

import argparse

import torch

from benchmarks.common import CPU, Result, alternate, show
from fedvit.config.load import load_experiment
from fedvit.core.batches import ClientData
from fedvit.core.client import Client
from fedvit.core.training import holding
from fedvit.core.tree import Tree
from fedvit.engine.net import make_net
from fedvit.methods.layer_editing import layers_of, probe_batches
from fedvit.methods.pfededit import choose


@torch.no_grad()
def whole_passes(client: Client, base: Tree, count: int) -> None:
    with holding(client, base) as predict:
        batches = list(probe_batches(client))
        for _ in range(count):
            for x, _ in batches:
                predict(x)


def results(repeats: int = 7, images: int = 8, size: int = 96, threads: int = 1) -> list[Result]:
    torch.set_num_threads(threads)
    flags = {"method": "pfededit", "model": "vit_tiny_patch16_224", "image_size": size}
    net = make_net(load_experiment(None, {}, flags), 100, CPU)
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (images, size, size, 3), dtype=torch.uint8, generator=generator)
    everything, nothing = torch.arange(images), torch.zeros(0, dtype=torch.int64)
    client = net.bare_client()
    client.data = ClientData(pixels, everything % 100, nothing, nothing, nothing, everything, 100)
    other = {name: t + 0.01 * torch.randn(t.shape, generator=generator) for name, t in net.initial.items()}
    count = len(layers_of(net.module, net.roles.trainable))
    ratios = alternate(
        lambda _: choose(client, net.initial, other, count, "prediction_list", "leaves"),
        lambda _: whole_passes(client, net.initial, count),
        repeats,
    )
    beside = f"{images} images of {size} px"
    return [Result(f"editing {count} layers / {count} whole passes", ratios, 0.6, beside=beside)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--images", type=int, default=8)
    parser.add_argument("--size", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1)
    show(results(**vars(parser.parse_args())))
