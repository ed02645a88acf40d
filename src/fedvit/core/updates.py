"""The update in a report: by how much it changes what the server sent, how long that is, and how it is shortened."""

import math
from collections.abc import Collection

import torch
from torch import Tensor

from fedvit.core.payload import Payload
from fedvit.core.tree import Tree

HARDLY = 1e-12  # a shorter update has no direction


def update_in(up: Payload, down: Payload, changes: Collection[str] = ()) -> Tree:
    """Return the changes that a report makes to the numbers that the server sent, by group and name.

    The groups in `changes` hold changes already (`Plan.changes`). Other numbers in a report, such as the statistics of
    FedFA, are no update.
    """
    names = [
        (group, name)
        for group, tree in up.trees.items()
        for name, tensor in tree.items()
        if tensor.is_floating_point() and (group in changes or name in down.trees.get(group, {}))
    ]
    after = [up.trees[group][name] for group, name in names]
    before = [_start(up, down, changes, group, name) for group, name in names]
    found = torch._foreach_sub(after, before) if names else ()
    return {f"{group}/{name}": tensor for (group, name), tensor in zip(names, found, strict=True)}


def _start(up: Payload, down: Payload, changes: Collection[str], group: str, name: str) -> Tensor:
    return torch.zeros_like(up.trees[group][name]) if group in changes else down.trees[group][name]


def length(update: Tree) -> float:
    """Return the joint L2 norm of an update."""
    parts = [tensor for tensor in update.values() if tensor.numel()]
    return float(torch.stack([norm.double() for norm in torch._foreach_norm(parts)]).norm()) if parts else 0.0


def clip_update(
    up: Payload, down: Payload, bound: float, changes: Collection[str] = (), update: Tree | None = None
) -> Payload:
    """Return the report with its update shortened to the norm `bound`; one that is short enough stays as it is."""
    update = update_in(up, down, changes) if update is None else update
    norm = length(update)
    if norm <= bound:
        return up
    factor = bound / norm if math.isfinite(norm) else 0.0
    trees = {group: dict(tree) for group, tree in up.trees.items()}
    for path, change in update.items():
        group, name = path.split("/", 1)
        trees[group][name] = torch.add(_start(up, down, changes, group, name), change, alpha=factor)
    return Payload(trees, up.scalars)
