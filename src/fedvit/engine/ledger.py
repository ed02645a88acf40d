"""The cost of a round: bytes by direction and seconds by phase."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass
class Ledger:
    """The account of one round. Bytes are those of the payloads that were actually sent."""

    down: list[int] = field(default_factory=list)  # tensor bytes to each sampled client
    up: list[int] = field(default_factory=list)  # and from each client that answered
    losses: dict[str, float] = field(default_factory=dict)  # training loss of each client that answered
    noted: dict[str, Any] = field(default_factory=dict)  # fields of rounds.jsonl that not every run has
    evaluation: int = 0  # tensor bytes of all evaluation messages, in both directions
    seconds: dict[str, float] = field(default_factory=dict)
    charged: float = 0.0  # seconds of the phases nested in the current one

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge the time spent in the block to a phase, excluding nested phases."""
        begin, outside, self.charged = time.perf_counter(), self.charged, 0.0
        try:
            yield
        finally:
            spent = time.perf_counter() - begin
            self.seconds[name] = self.seconds.get(name, 0.0) + spent - self.charged
            self.charged = outside + spent

    def awaited(self, name: str, items: Iterator[T]) -> Iterator[T]:
        """Yield the same items, charging the time spent waiting for each to a phase."""
        while True:
            with self.phase(name):
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item


def per_client(sizes: Sequence[int | float | None]) -> int | float | None:
    """Return the mean over clients: a whole number if all messages have the same size, None if there were none."""
    known = [size for size in sizes if size is not None]
    if not known:
        return None
    return known[0] if len(set(known)) == 1 else sum(known) / len(known)
