"""Parts of a model's tensors: the first share of the channels of each, of its own width."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedvit.core.tree import Tree
from fedvit.models.plugins.attach import classifier_names


def places(module: nn.Module, weights: Mapping[str, Tensor]) -> Tree:
    """Locate each channel within its layer's width, from 0 to below 1, in a shape that multiplies the tensor.

    What is not divided is at -1. A tensor whose width is a multiple of the model's (queries, keys, values) counts as
    several layers side by side.
    """
    heads, found = classifier_names(module), {}
    for name, tensor in weights.items():
        owner = name.rpartition(".")[0]
        first = isinstance(module.get_submodule(owner), nn.Linear | nn.modules.conv._ConvNd)
        axis = 0 if first and owner not in heads else tensor.ndim - 1
        shape = [size if i == axis else 1 for i, size in enumerate(tensor.shape)]
        if tensor.ndim == 0 or (owner in heads and tensor.ndim == 1):
            found[name] = torch.full(shape, -1.0)
            continue
        size = tensor.shape[axis]
        model_width = int(getattr(module, "embed_dim", size))
        width = model_width if size % model_width == 0 else size
        found[name] = (torch.arange(size) % width / width).view(shape)
    return found


def _channels(place: Tensor, last: float) -> tuple[int, Tensor]:
    """Return the axis of a tensor's channels and the indices of all but the last share."""
    axis = next((i for i, size in enumerate(place.shape) if size > 1), 0)
    return axis, (place.flatten() < 1 - last).nonzero().flatten()


def cut(weights: Tree, place: Tree, last: float) -> Tree:
    """Keep all but the last share of the channels."""
    return {name: tensor.index_select(*_channels(place[name], last)) for name, tensor in weights.items()}


def paste(whole: Tree, cuts: Tree, place: Tree, last: float) -> Tree:
    """Replace all but the last share of the channels of `whole`."""
    return {**whole, **{n: whole[n].index_copy(*_channels(place[n], last), part) for n, part in cuts.items()}}
