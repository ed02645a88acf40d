"""Gradients from losses alone (SPSA): the slope along a random direction, times that direction.

A direction is drawn again from its key whenever it is needed, so that no memory holds a second set of weights.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from fedvit.core import randomness
from fedvit.core.tree import Tree

Key = tuple[int, int, str, str]  # seed, round, client, purpose


def direction(key: Key, name: str, like: Tensor) -> Tensor:
    """Return the direction's normal numbers for one tensor."""
    seed, round_, client, purpose = key
    generator = randomness.generator(seed, round_, client, f"{purpose} {name}")
    return torch.randn(like.shape, generator=generator).to(like.device)


def moved(weights: Tree, names: Iterable[str], key: Key, step: float) -> Tree:
    """Return these weights, moved by `step` along the direction."""
    return {name: weights[name] + step * direction(key, name, weights[name]) for name in names}
