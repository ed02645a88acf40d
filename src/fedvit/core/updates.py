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
    found = {f"{group}/{name}": up.trees[group][name] for group, name in names}
    values = [(group, name) for group, name in names if group not in changes]
    if values:
        pairs = [[trees[group][name] for group, name in values] for trees in (up.trees, down.trees)]
        differences = torch._foreach_sub(*pairs)
        found |= {f"{group}/{name}": change for (group, name), change in zip(values, differences, strict=True)}
    return found


def flat(update: Tree) -> Tensor:
    """Return all numbers of an update as one vector, in memory of its own, so that sums over it always round alike."""
    return torch.cat([tensor.reshape(-1) for tensor in update.values()]) if update else torch.zeros(0)


def length(vector: Tensor) -> float:
    """Return the L2 norm of an update that `flat` made."""
    return float(torch.linalg.vector_norm(vector))


def clip_update(
    up: Payload, down: Payload, bound: float, changes: Collection[str] = (), update: Tree | None = None
) -> Payload:
    """Return the report with its update shortened to the norm `bound`; one that is short enough stays as it is."""
    update = update_in(up, down, changes) if update is None else update
    norm = length(flat(update))
    if norm <= bound:
        return up
    factor = bound / norm if math.isfinite(norm) else 0.0
    trees = {group: dict(tree) for group, tree in up.trees.items()}
    for path, change in update.items():
        group, name = path.split("/", 1)
        trees[group][name] = change * factor if group in changes else down.trees[group][name] + change * factor
    return Payload(trees, up.scalars)
