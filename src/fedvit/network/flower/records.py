"""Payloads as Flower records."""

from collections.abc import Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedvit.core.payload import Payload, from_bytes, to_bytes

ABOUT, NUMBERS, TENSORS = "about", "numbers", "tensors"  # the records of a message
RAW = "fedvit.payload"  # how the array is written: as `core.payload` writes tensors
LONGEST_TEXT = 300


def to_records(content: Payload, about: Mapping[str, Any]) -> RecordDict:
    """A payload and what it is about, as Flower sends it: all tensors in one array, since each array is a request."""
    records = RecordDict({ABOUT: ConfigRecord(dict(about)), NUMBERS: MetricRecord(dict(content.scalars))})
    if content.trees:
        blob = to_bytes(Payload(content.trees))
        records[TENSORS] = ArrayRecord({TENSORS: Array("uint8", (len(blob),), RAW, blob)})
    return records


def from_records(records: RecordDict) -> tuple[Payload, dict[str, Any]]:
    """What `to_records` was given; a ValueError where it is something else."""
    strange = set(records) - {ABOUT, NUMBERS, TENSORS}
    if strange:
        raise ValueError(f"a record {min(strange)!r} that is none of ours")
    content = Payload()
    try:
        numbers, about = dict(records.metric_records[NUMBERS]), dict(records.config_records[ABOUT])
        if TENSORS in records:
            array = records.array_records[TENSORS][TENSORS]
            if array.stype != RAW:
                raise ValueError(f"an array written as {array.stype!r}")
            content = from_bytes(array.data, copy=True)
    except (KeyError, TypeError, AttributeError, RecursionError, RuntimeError, OverflowError) as problem:
        raise ValueError(f"records that are not ours: {problem!r}") from problem
    if not all(isinstance(value, int | float) for value in numbers.values()):
        raise ValueError("a list where a number was expected")
    return Payload(content.trees, numbers), about  # type: ignore[arg-type]
