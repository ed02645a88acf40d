"""Payloads as Flower records."""

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from fedvit.core.payload import Payload
from fedvit.core.tree import Tree

ABOUT, NUMBERS, LAYOUT, TENSORS = "about", "numbers", "layout", "tensors"  # the records of a message
RAW = "fedvit.raw"  # how the array is written: the tensors' bytes in memory, one after the other
TYPES = {
    str(kind).removeprefix("torch."): kind
    for kind in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.uint8, torch.int8, torch.int16,
                 torch.int32, torch.int64, torch.bool)
}  # fmt: skip
LONGEST_TEXT = 300


# Payloads as records.


def to_records(content: Payload, about: Mapping[str, Any]) -> RecordDict:
    """A payload and what it is about, as Flower sends it: all tensors in one array, since each array is a request."""
    records = RecordDict({ABOUT: ConfigRecord(dict(about)), NUMBERS: MetricRecord(dict(content.scalars))})
    if content.trees:
        layout = {
            group: [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tree.items()]
            for group, tree in content.trees.items()
        }
        blob = b"".join(raw(tensor) for tree in content.trees.values() for tensor in tree.values())
        records[LAYOUT] = ConfigRecord({LAYOUT: json.dumps(layout)})
        records[TENSORS] = ArrayRecord({TENSORS: Array("uint8", (len(blob),), RAW, blob)})
    return records


def from_records(records: RecordDict) -> tuple[Payload, dict[str, Any]]:
    """What `to_records` was given; a ValueError where it is something else."""
    strange = set(records) - {ABOUT, NUMBERS, LAYOUT, TENSORS}
    if strange:
        raise ValueError(f"a record {min(strange)!r} that is none of ours")
    trees: dict[str, Tree] = {}
    try:
        numbers, about = dict(records.metric_records[NUMBERS]), dict(records.config_records[ABOUT])
        if LAYOUT in records:
            layout, array = records.config_records[LAYOUT][LAYOUT], records.array_records[TENSORS][TENSORS]
            if array.stype != RAW:
                raise ValueError(f"an array written as {array.stype!r}")
            trees = read_tensors(json.loads(str(layout)), array.data)
    except (KeyError, TypeError, AttributeError, RecursionError, RuntimeError, OverflowError) as problem:
        raise ValueError(f"records that are not ours: {problem!r}") from problem
    if not all(isinstance(value, int | float) for value in numbers.values()):
        raise ValueError("a list where a number was expected")
    return Payload(trees, numbers), about  # type: ignore[arg-type]


def raw(tensor: Tensor) -> bytes:
    """A tensor's bytes in memory, little-endian."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def read_tensors(layout: Mapping[str, Any], blob: bytes) -> dict[str, Tree]:
    """The tensors that lie one after the other in the bytes, each in memory of its own."""
    trees: dict[str, Tree] = {}
    view, at = memoryview(blob), 0
    for group, entries in layout.items():
        trees[group] = {}
        for name, kind, shape in entries:
            if kind not in TYPES or not all(type(n) is int and n >= 0 for n in shape):
                raise ValueError(f"a tensor of kind {kind!r} and shape {shape!r}")
            end = at + math.prod(shape) * TYPES[kind].itemsize
            if end > len(view):
                raise ValueError(f"{len(view)} bytes are too few for what is said to be in them")
            flat = torch.frombuffer(bytearray(view[at:end]), dtype=TYPES[kind]) if end > at else torch.empty(0)
            trees[group][name], at = flat.to(TYPES[kind]).reshape(shape), end
    if at != len(view):
        raise ValueError(f"{len(view)} bytes where {at} were expected")
    return trees
