"""The share of attention that goes to concatenated prefixes, lambda(x) of FedPerfix's equation 6, block by block."""

from functools import partial
from typing import Any

import torch
from torch import nn

from fedvit.core.batches import image_batches
from fedvit.engine.net import make_net
from fedvit.engine.worker import Worker, load_data
from fedvit.models.plugins.attach import prefix_share
from fedvit.runs.folder import Run
from fedvit.runs.models import client_model, open_run

BATCH = 128


@torch.no_grad()
def shares_by_block(run: Run) -> list[float]:
    """Average over heads, tokens and all test images, each of which goes through its owner's own model."""
    experiment, cpu = run.experiment, torch.device("cpu")
    torch.set_num_threads(experiment.run.threads)
    dataset, split = load_data(experiment)
    net = make_net(experiment, dataset.classes, cpu)
    worker = Worker(experiment, net, dataset, split, cpu)
    opened, sums, images = open_run(run, last=True), dict[int, float](), 0
    for name in worker.partition.seen:
        mine = torch.from_numpy(worker.partition.clients[name].test)
        model, data = client_model(opened, name).eval(), worker.client(name, 0, {}).data
        blocks: Any = model.blocks
        hooks = [
            block.attn.register_forward_pre_hook(partial(_add_share, sums, number, block.prefix))
            for number, block in enumerate(blocks)
            if hasattr(block, "prefix")
        ]
        for x, _ in image_batches(data, mine, BATCH, net.inputs, cpu):
            model(x)
        for hook in hooks:
            hook.remove()
        images += len(mine)
    return [total / images for _, total in sorted(sums.items())]


def _add_share(
    sums: dict[int, float], number: int, prefix: nn.Module, attn: nn.Module, inputs: tuple[Any, ...]
) -> None:
    """Add the shares of a batch's images in one block."""
    share = prefix_share(attn, prefix, inputs[0])
    sums[number] = sums.get(number, 0.0) + float(share.mean(dim=(1, 2)).double().sum())
