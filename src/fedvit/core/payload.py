"""The payloads that cross between server and client; nothing else does."""

import json
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from fedvit.core import tree
from fedvit.core.tree import Tree

SEPARATOR = "/"  # group/name; parameter names contain no slash
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
WORDS = {dtype: word for word, dtype in DTYPES.items()}
EMPTY = "empty"  # metadata key that lists the trees without tensors
LONGEST_HEADER = 16_000_000
LONGEST_NAME = 300  # of a group and a tensor together
MOST_AXES, LONGEST_AXIS = 16, 2**40
LARGEST_WHOLE = 2**53  # an integer beyond it is no number of ours, and may be too large for a float
CLAIMED = "claimed"  # a number of a report: the training images that a site reported, where it counts for fewer
ALIGNED = 16  # the first tensor starts at a multiple of this many bytes

# torch warns once per process that tensors over bytes are not writable; we never write to ours.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.frombuffer(b"0", dtype=torch.uint8)


@dataclass(frozen=True)
class Payload:
    """A message: named trees of tensors, and named numbers.

    Attributes:
        trees: Each tree maps names of weights to tensors; FedAvg sends one tree, "shared".
        scalars: Numbers by name, such as "loss".
    """

    trees: Mapping[str, Tree] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """The size of the tensors; framing and scalars are not counted."""
        return sum(tree.nbytes(group) for group in self.trees.values())


@dataclass(frozen=True)
class Failure:
    """A client that did not answer, and why; the reason is worded so that it may leave the client."""

    reason: str


def to_bytes(payload: Payload) -> bytes:
    """Serialize a payload as safetensors, with its numbers in the header."""
    return frame(payload.trees, {"numbers": json.dumps(dict(payload.scalars))})


def from_bytes(blob: bytes, *, copy: bool = False) -> Payload:
    """Read the payload that `to_bytes` wrote, with its tensors in place or, with `copy`, each in its own memory.

    Where a tensor starts in a blob can affect how sums over it are rounded, so copy any tensor you compute with.
    """
    trees, metadata = unframe(blob)
    if copy:
        trees = {group: {name: tensor.clone() for name, tensor in members.items()} for group, members in trees.items()}
    return Payload(trees, read_numbers(metadata.get("numbers", "{}")))


def read_numbers(text: str) -> dict[str, float]:
    """Read named numbers from JSON; raise ValueError for anything else."""
    try:
        numbers = json.loads(text)
    except RecursionError as problem:
        raise ValueError("the numbers are nested too deeply") from problem
    if not isinstance(numbers, dict) or not all(type(value) in (int, float) for value in numbers.values()):
        raise ValueError("expected numbers by name")
    if not all(type(value) is float or abs(value) <= LARGEST_WHOLE for value in numbers.values()):
        raise ValueError("a number is too large")
    return numbers


def frame(trees: Mapping[str, Tree], metadata: Mapping[str, str]) -> bytes:
    """Build a safetensors blob from CPU tensors, copying each one once, into its place; the widest types come first."""
    flat = flatten(trees)
    names = sorted(flat, key=lambda name: -flat[name].element_size())
    empty = [group for group, members in trees.items() if not members]
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
    """Read what `frame` wrote; the tensors are views of the blob, so nothing is copied and you must not modify them.

    Raises ValueError for anything else; nothing in the blob is executed.
    """
    start = 8 + int.from_bytes(blob[:8], "little")
    if not 8 < start <= min(len(blob), LONGEST_HEADER):
        raise ValueError("not safetensors: the header is longer than the message")
    try:
        header = json.loads(blob[8:start])
        metadata = header.pop("__metadata__", {})
        if any(not 0 < len(name) <= LONGEST_NAME or not name.isprintable() for name in header):
            raise ValueError(f"a name is empty, longer than {LONGEST_NAME} characters or not printable")
        flat = {name: _lying_in(blob, start, **entry) for name, entry in header.items()}
        if not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError("the metadata is not text")
        if (expected := sum(tensor.nbytes for tensor in flat.values())) != len(blob) - start:
            raise ValueError(f"{len(blob) - start} bytes of tensors where {expected} were expected")
        trees: dict[str, Tree] = {group: {} for group in _empty_groups(metadata.pop(EMPTY, "[]"))}
        return trees | unflatten(flat), metadata
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError, RuntimeError) as problem:
        raise ValueError(f"not safetensors: {str(problem)[:200]}") from problem


def _empty_groups(text: str) -> list[str]:
    groups = json.loads(text)
    if not isinstance(groups, list) or not all(
        type(g) is str and len(g) <= LONGEST_NAME and g.isprintable() for g in groups
    ):
        raise ValueError("expected a list of names")
    return groups


def _lying_in(blob: bytes, start: int, *, dtype: str, shape: list[int], data_offsets: list[int]) -> torch.Tensor:
    """Return one tensor as a view of the blob."""
    begin, end = data_offsets
    kind = DTYPES[dtype]
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        raise ValueError("sizes and offsets must be whole numbers")
    if len(shape) > MOST_AXES or any(n > LONGEST_AXIS for n in shape):
        raise ValueError("a tensor has too many axes or too long a one")
    count = math.prod(shape)
    if end - begin != count * kind.itemsize or start + end > len(blob):
        raise ValueError("a tensor does not fit its offsets")
    if count == 0:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(blob, dtype=kind, count=count, offset=start + begin).view(shape)


def flatten(trees: Mapping[str, Tree]) -> Tree:
    """Merge named trees into one tree with names `tree/name`."""
    return {
        f"{group}{SEPARATOR}{name}": tensor.contiguous()
        for group, members in trees.items()
        for name, tensor in members.items()
    }


def unflatten(flat: Mapping[str, object]) -> dict[str, Tree]:
    """Restore the trees that `flatten` merged."""
    trees: dict[str, Tree] = {}
    for path, tensor in flat.items():
        group, name = path.split(SEPARATOR, 1)
        trees.setdefault(group, {})[name] = tensor  # type: ignore[assignment]
    return trees
