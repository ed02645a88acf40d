"""What crosses between server and client, and nothing else does."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from safetensors.torch import load, save

from fedvit import tree
from fedvit.tree import Tree

SEPARATOR = "/"  # group/name; parameter names have no slash


@dataclass(frozen=True)
class Payload:
    """Named groups of tensors, and named numbers."""

    trees: Mapping[str, Tree] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Tensor bytes; framing and scalars are not counted."""
        return sum(tree.nbytes(group) for group in self.trees.values())


@dataclass(frozen=True)
class Failure:
    """A client that did not answer, and why, in words that may leave the client."""

    reason: str


def to_bytes(payload: Payload) -> bytes:
    """A payload as safetensors, with its numbers in the header."""
    return save(flatten(payload.trees), {"numbers": json.dumps(dict(payload.scalars))})


def from_bytes(blob: bytes) -> Payload:
    """The payload that `to_bytes` wrote."""
    return Payload(unflatten(load(blob)), numbers_of(blob))


def numbers_of(blob: bytes) -> dict[str, float]:
    """The numbers in the header of a safetensors blob of ours."""
    header = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])
    numbers: dict[str, float] = json.loads(header.get("__metadata__", {}).get("numbers", "{}"))
    return numbers


def flatten(groups: Mapping[str, Tree]) -> Tree:
    """Groups of trees as one tree with names `group/name`."""
    return {
        f"{group}{SEPARATOR}{name}": tensor.contiguous()
        for group, members in groups.items()
        for name, tensor in members.items()
    }


def unflatten(flat: Mapping[str, object]) -> dict[str, Tree]:
    """The groups that `flatten` joined."""
    groups: dict[str, Tree] = {}
    for path, tensor in flat.items():
        group, name = path.split(SEPARATOR, 1)
        groups.setdefault(group, {})[name] = tensor  # type: ignore[assignment]
    return groups
