"""Convert payloads to Flower records and back."""

from collections.abc import Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedvit.core.errors import one_line
from fedvit.core.payload import LARGEST_WHOLE, Payload, from_bytes, to_bytes

ABOUT, NUMBERS, TENSORS = "about", "numbers", "tensors"  # the records of a message
RAW = "fedvit.payload"  # the format of the array: tensors as `core.payload` writes them


def to_records(content: Payload, about: Mapping[str, Any]) -> RecordDict:
    """Convert a payload and its metadata to records, with all tensors in one array, because each array is a request."""
    records = RecordDict({ABOUT: ConfigRecord(dict(about)), NUMBERS: MetricRecord(dict(content.scalars))})
    if content.trees:
        blob = to_bytes(Payload(content.trees))
        records[TENSORS] = ArrayRecord({TENSORS: Array("uint8", (len(blob),), RAW, blob)})
    return records


def from_records(records: RecordDict) -> tuple[Payload, dict[str, Any]]:
    """Return the payload and the metadata that `to_records` was given; raise ValueError for anything else."""
    strange = set(records) - {ABOUT, NUMBERS, TENSORS}
    if strange:
        raise ValueError(f"unexpected record {one_line(min(strange), 60)!r}")
    content = Payload()
    try:
        numbers, about = dict(records.metric_records[NUMBERS]), dict(records.config_records[ABOUT])
        if TENSORS in records:
            array = records.array_records[TENSORS][TENSORS]
            if array.stype != RAW:
                raise ValueError(f"unexpected array format {one_line(array.stype, 60)!r}")
            content = from_bytes(array.data, copy=True)
    except (KeyError, TypeError, AttributeError, RecursionError, RuntimeError, OverflowError) as problem:
        raise ValueError(f"unexpected records: {problem!r}") from problem
    if not all(
        type(value) is float or (type(value) is int and abs(value) <= LARGEST_WHOLE) for value in numbers.values()
    ):
        raise ValueError("expected numbers, found a list or a number that is too large")
    return Payload(content.trees, numbers), about  # type: ignore[arg-type]
