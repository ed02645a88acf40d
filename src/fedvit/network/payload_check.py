"""Compare a message with what the plan itself would send: the same groups, names, shapes and data types.

Nothing that arrives over a network is used before such a check.
"""

from collections.abc import Sequence
from dataclasses import replace

from fedvit.core.payload import Payload
from fedvit.core.training import all_finite
from fedvit.core.tree import Tree
from fedvit.engine.net import Net, window_of


def down_of(net: Net, clients: Sequence[str], client: str, after: int) -> Payload:
    """Return the message that a server sends to a client after `after` rounds, with the initial values."""
    return net.federated.dispatch(replace(net.server(clients), round=after), client)


def up_of(net: Net, down: Payload, round_: int) -> Payload:
    """Return the report of a client that received `down` and trained nothing."""
    own = net.at(window_of(down))
    return own.federated.report(replace(own.bare_client(), round=round_), own.initial, own.initial)


def difference(found: Payload, expected: Payload) -> str | None:
    """Describe what is wrong with a message without quoting any value; return None if nothing is wrong."""
    if found.trees.keys() != expected.trees.keys():
        return f"expected the groups {sorted(expected.trees)}, found {sorted(found.trees)}"
    for group, wanted in expected.trees.items():
        wrong = _tree_difference(found.trees[group], wanted)
        if wrong is not None:
            return f"group {group}: {wrong}"
        if not all_finite(found.trees[group]):
            return f"group {group} has values that are infinite or NaN"
    return None


def _tree_difference(found: Tree, expected: Tree) -> str | None:
    """Describe the first tensor that is missing, unexpected, or of another shape or data type."""
    for name in {**expected, **found}:
        if name not in found:
            return f"{name} is missing"
        if name not in expected:
            return f"{name} is unexpected"
        a, b = found[name], expected[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{name} is {a.dtype} {tuple(a.shape)}, expected {b.dtype} {tuple(b.shape)}"
    return None
