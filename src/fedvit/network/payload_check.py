"""What a message must look like: the groups, names, shapes and kinds of numbers that the plan itself would send.

Whatever comes over a network is compared with this before it is used.
"""

from collections.abc import Sequence
from dataclasses import replace

from fedvit.core.payload import Payload
from fedvit.core.training import all_finite
from fedvit.core.tree import Tree
from fedvit.engine.net import Net, window_of


def down_of(net: Net, clients: Sequence[str], client: str, after: int) -> Payload:
    """What a server after so many rounds sends; the values are the initial ones."""
    return net.federated.dispatch(replace(net.server(clients), round=after), client)


def up_of(net: Net, down: Payload, round_: int) -> Payload:
    """What a client that got this and trained nothing reports."""
    own = net.at(window_of(down))
    return own.federated.report(replace(own.bare_client(), round=round_), own.initial, own.initial)


def difference(found: Payload, expected: Payload) -> str | None:
    """What is wrong with a message, in words without any of its values; None where nothing is."""
    if found.trees.keys() != expected.trees.keys():
        return f"groups {sorted(expected.trees)} were expected, {sorted(found.trees)} came"
    for group, wanted in expected.trees.items():
        wrong = _tree_difference(found.trees[group], wanted)
        if wrong is not None:
            return f"group {group}: {wrong}"
        if not all_finite(found.trees[group]):
            return f"group {group} has values that are infinite or not numbers"
    return None


def _tree_difference(found: Tree, expected: Tree) -> str | None:
    """The first tensor that is missing, too many, or of another shape or type."""
    for name in {**expected, **found}:
        if name not in found:
            return f"{name} is missing"
        if name not in expected:
            return f"{name} was not expected"
        a, b = found[name], expected[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{name} is {a.dtype} {tuple(a.shape)}, expected {b.dtype} {tuple(b.shape)}"
    return None
