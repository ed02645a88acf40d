"""The network with which DisTrans's server makes offset images from class proportions."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedvit.core import randomness
from fedvit.core.tree import Tree
from fedvit.models.plugins.attach import classifiers

HIDDEN = 100  # units, as the authors have
IMAGE = "offset.image"


def first_maker(module: nn.Module) -> Tree:
    """Draw the network's first weights, the same for every run of this model."""
    classes = next(iter(classifiers(module, "the offset plugin").values())).out_features
    sizes = (classes, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, module.get_parameter(IMAGE).numel())
    with randomness.seeded(0, "offset maker"):
        layers = [nn.Linear(*size) for size in sizes]
    return {f"{i}.{key}": tensor for i, layer in enumerate(layers) for key, tensor in layer.state_dict().items()}


def made_offset(maker: Tree, proportions: Tensor) -> Tensor:  # (classes,) -> (3, size, size)
    """Make the offset image of a client with these class proportions."""
    hidden = proportions
    for layer in ("0", "1"):
        hidden = F.relu(F.linear(hidden, maker[f"{layer}.weight"], maker[f"{layer}.bias"]))
    numbers = F.linear(hidden, maker["2.weight"], maker["2.bias"]).tanh()
    side = round((len(numbers) // 3) ** 0.5)
    return numbers.view(3, side, side)


def equal_shares(maker: Tree) -> Tensor:
    """Return the proportions of a client with as many images of every class."""
    classes = maker["0.weight"].shape[1]
    return torch.full((classes,), 1 / classes)


def taught(maker: Tree, proportions: Tensor, offset: Tensor, lr: float) -> Tree:
    """Return the weights after one step of SGD towards this offset for these proportions, in mean squared error."""
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in maker.items()}
    slopes = torch.autograd.grad(F.mse_loss(made_offset(leaves, proportions), offset), list(leaves.values()))
    return {name: maker[name] - lr * slope for name, slope in zip(maker, slopes, strict=True)}
