"""FedFed's residuals: the loss that trains its splitter, what a client uploads, and how it trains on what it got.

The splitter's output is the robust part of an image. The rest, the residual, is trained to suffice for the label.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from fedvit.core import tree
from fedvit.core.batches import image_batches
from fedvit.core.client import Client, Loss, Predictor
from fedvit.core.tree import Tree
from fedvit.models.plugins.modules import ImageSplitter

LEVELS = ("mild", "strong")  # of the noise
CONTENTS = (*LEVELS, "labels")  # of an upload


def _splitter_of(client: Client) -> ImageSplitter:
    return client.module.splitter  # type: ignore[return-value]


def splitting_loss(client: Client, mild: float, strong: float) -> Loss:
    """Make the loss of stage 1: reconstruct, let the noisy residual suffice for the label, and keep the code small."""
    epochs = (client.round - 1) * client.settings.epochs
    emphasis = 10.0 if epochs < 10 else 5.0 if epochs < 20 else 1.0

    def loss(model: Predictor, x: Tensor, y: Tensor) -> Tensor:
        robust, mean, log_variance = _splitter_of(client)(x)
        noisy = [x - robust + level * torch.randn_like(x) for level in (mild, strong)]
        divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum() / x.numel()
        guess = client.loss(model, torch.cat(noisy), torch.cat([y, y]))
        whole = client.loss(model, x, y)
        value: Tensor = emphasis * 5.0 * F.mse_loss(robust, x) + 2.0 * guess + 0.4 * whole + 0.005 * divergence
        return value

    return loss


@torch.no_grad()
def residuals(client: Client, weights: Tree, mild: float, strong: float) -> Tree:
    """Compute what this client uploads: its training images minus their robust part, with noise, and the labels."""
    data, device = client.data, client.settings.device
    splitter = _splitter_of(client).eval()
    placed = {name.partition(".")[2]: tensor.to(device) for name, tensor in weights.items()}
    rest = [
        (x - functional_call(splitter, placed, (x,))[0]).cpu()
        for x, _ in image_batches(data, data.train, client.settings.batch, client.inputs, device)
    ]
    whole, generator = torch.cat(rest), client.rng("features")
    noise = [level * torch.randn(whole.shape, generator=generator) for level in (mild, strong)]
    labels = data.labels[data.train].to(torch.int16)
    return {**{name: (whole + n).half() for name, n in zip(LEVELS, noise, strict=True)}, "labels": labels}


def balanced(labels: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Draw indices so that all classes that are present are equally likely."""
    weights = 1 / torch.bincount(labels)[labels]
    return torch.multinomial(weights, count, replacement=True, generator=generator)


def with_residuals(client: Client, features: Tree) -> Loss:
    """Make the cross-entropy of a batch together with as many residuals, at both levels."""
    owners = sorted({name.rpartition(":")[0] for name in features})  # arrival order would not survive a resume
    joined = {kind: torch.cat([features[f"{owner}:{kind}"] for owner in owners]) for kind in CONTENTS}
    labels, generator = joined["labels"].long(), client.rng("balanced")

    def loss(model: Predictor, x: Tensor, y: Tensor) -> Tensor:
        chosen = balanced(labels, len(y), generator)
        more = [joined[level][chosen].to(x) for level in LEVELS]
        classes = labels[chosen].to(y)
        return client.loss(model, torch.cat([x, *more]), torch.cat([y, classes, classes]))

    return loss


def nbytes_per_image(client: Client, splitter: Tree) -> int:
    """Count the bytes made of one training image, which go up once, and down once to every other client."""
    size = client.inputs.size
    image, label = torch.zeros(1, size, size, 3, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    client.data = replace(client.data, images=image, labels=label, train=label)
    return tree.nbytes(residuals(client, splitter, mild=0.0, strong=0.0))
