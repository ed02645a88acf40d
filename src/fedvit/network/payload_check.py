"""Compare a message with what the plan itself would send: the same groups, names, shapes and data types.

Nothing that arrives over a network is used before such a check.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedvit.core.errors import one_line
from fedvit.core.payload import Payload
from fedvit.core.tree import Tree
from fedvit.engine.net import Net

# No weight, statistic, activation or gradient that a useful run sends is larger, and a model still computes finite
# numbers with weights of this size.
LARGEST = 1e6
# No group of tensors grows by this factor in training either. The bound is the same in every round and in both
# directions, so the mean of reports that the server accepted is within the bound of the sites.
GROWTH = 1000


def down_of(net: Net, clients: Sequence[str], client: str, after: int) -> Payload:
    """Return the message that a server sends to a client after `after` rounds, with the initial values."""
    return net.federated.dispatch(replace(net.server(clients), round=after), client)


def up_of(net: Net, down: Payload, round_: int) -> Payload:
    """Return the report of a client that received `down` and trained nothing."""
    return net.bare_report(down, round_)


def difference(found: Payload, expected: Payload) -> str | None:
    """Describe what is wrong with a message without quoting any value; return None if nothing is wrong."""
    if found.trees.keys() != expected.trees.keys():
        return one_line(f"expected the groups {sorted(expected.trees)}, found {sorted(found.trees)}")
    for group, wanted in expected.trees.items():
        wrong = _tree_difference(found.trees[group], wanted)
        if wrong is not None:
            return f"group {group}: {wrong}"
        most = largest(found.trees[group].values())
        if not most <= LARGEST:
            return f"group {group} has values that are {beyond(most)}"
        if norm(found.trees[group]) > GROWTH * (1 + norm(wanted)):
            return f"group {group} has a norm of more than {GROWTH} times that before round 1"
    return None


def largest(tensors: Iterable[Tensor]) -> float:
    """Return the largest absolute value in these tensors, which is NaN if any value is."""
    floats = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    if not floats:
        return 0.0
    return float(torch.stack([norm.double().cpu() for norm in torch._foreach_norm(floats, ord=math.inf)]).max())


def norm(tensors: Tree) -> float:
    """Return the joint L2 norm of the floating-point tensors in a tree."""
    floats = [tensor for tensor in tensors.values() if tensor.is_floating_point() and tensor.numel()]
    return float(torch.stack([part.double().cpu() for part in torch._foreach_norm(floats)]).norm()) if floats else 0.0


def beyond(most: float) -> str:
    """Say in which way values are not below LARGEST."""
    return f"larger than {LARGEST:,.0f}" if math.isfinite(most) else "infinite or NaN"


def _tree_difference(found: Tree, expected: Tree) -> str | None:
    """Describe the first tensor that is missing, unexpected, or of another shape or data type."""
    for name in {**expected, **found}:
        if name not in found:
            return f"{name} is missing"
        if name not in expected:
            return f"{one_line(name)} is unexpected"
        a, b = found[name], expected[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{name} is {a.dtype} {tuple(a.shape)}, expected {b.dtype} {tuple(b.shape)}"
    return None
