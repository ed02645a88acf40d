"""What crosses between server and client, and nothing else does."""

import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from fedvit.core import tree
from fedvit.core.tree import Tree

SEPARATOR = "/"  # group/name; parameter names have no slash
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
WORDS = {dtype: word for word, dtype in DTYPES.items()}
EMPTY = "empty"  # in the metadata: the groups without tensors
LONGEST_HEADER = 16_000_000
ALIGNED = 16  # bytes; where the first tensor begins

with (
    warnings.catch_warnings()
):  # torch says once in a process that tensors over bytes cannot be written into; ours are not
    warnings.simplefilter("ignore")
    torch.frombuffer(b"0", dtype=torch.uint8)


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
    return frame(payload.trees, {"numbers": json.dumps(dict(payload.scalars))})


def from_bytes(blob: bytes, *, copy: bool = False) -> Payload:
    """The payload that `to_bytes` wrote, its tensors in place, or each in memory of its own.

    Where a tensor begins in a blob may decide how sums over it are rounded, so what is computed with is copied.
    """
    trees, metadata = unframe(blob)
    if copy:
        trees = {group: {name: tensor.clone() for name, tensor in members.items()} for group, members in trees.items()}
    return Payload(trees, json.loads(metadata.get("numbers", "{}")))


def frame(groups: Mapping[str, Tree], metadata: Mapping[str, str]) -> bytes:
    """A safetensors blob of tensors on the CPU, each of which is copied once, to its place; the widest come first."""
    flat = flatten(groups)
    names = sorted(flat, key=lambda name: -flat[name].element_size())
    empty = [group for group, members in groups.items() if not members]
    header: dict[str, object] = {"__metadata__": {**metadata, **({EMPTY: json.dumps(empty)} if empty else {})}}
    at = 0
    for name in names:
        end = at + tree.nbytes({name: flat[name]})
        header[name] = {"dtype": WORDS[flat[name].dtype], "shape": list(flat[name].shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNED)
    pieces = (flat[name].detach().reshape(-1).view(torch.uint8).numpy().data for name in names)
    return b"".join((len(text).to_bytes(8, "little"), text, *pieces))


def unframe(blob: bytes) -> tuple[dict[str, Tree], dict[str, str]]:
    """What `frame` joined. The tensors lie in the blob itself: nothing is copied, and they are not to be written into.

    Raises ValueError for anything else; nothing in the blob is run.
    """
    start = 8 + int.from_bytes(blob[:8], "little")
    if not 8 < start <= min(len(blob), LONGEST_HEADER):
        raise ValueError("not safetensors: the header is longer than the message")
    try:
        header = json.loads(blob[8:start])
        metadata = header.pop("__metadata__", {})
        flat = {name: _lying_in(blob, start, **entry) for name, entry in header.items()}
        if not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError("metadata that is not text")
        if (expected := sum(tensor.nbytes for tensor in flat.values())) != len(blob) - start:
            raise ValueError(f"{len(blob) - start} bytes of tensors where {expected} were expected")
        groups: dict[str, Tree] = {str(group): {} for group in json.loads(metadata.pop(EMPTY, "[]"))}
        return groups | unflatten(flat), metadata
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as problem:
        raise ValueError(f"not safetensors: {str(problem)[:200]}") from problem


def _lying_in(blob: bytes, start: int, *, dtype: str, shape: list[int], data_offsets: list[int]) -> torch.Tensor:
    """One tensor of a blob."""
    begin, end = data_offsets
    kind = DTYPES[dtype]
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        raise ValueError("sizes and places are whole numbers")
    count = math.prod(shape)
    if end - begin != count * kind.itemsize or start + end > len(blob):
        raise ValueError("a tensor that does not fit its place")
    if count == 0:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(blob, dtype=kind, count=count, offset=start + begin).view(shape)


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
