"""What a round cost: bytes by direction, seconds by phase."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


@dataclass
class Ledger:
    """One round's account. Bytes are those of the payloads that really crossed."""

    down: list[int] = field(default_factory=list)  # tensor bytes to each sampled client
    up: list[int] = field(default_factory=list)  # and from each that answered
    evaluation: int = 0  # tensor bytes of all evaluation messages, both ways
    seconds: dict[str, float] = field(default_factory=dict)
    charged: float = 0.0  # seconds of the phases inside the present one

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge the time inside the block to a phase, without that of phases inside it."""
        begin, outside, self.charged = time.perf_counter(), self.charged, 0.0
        try:
            yield
        finally:
            spent = time.perf_counter() - begin
            self.seconds[name] = self.seconds.get(name, 0.0) + spent - self.charged
            self.charged = outside + spent

    def awaited(self, name: str, items: Iterator[T]) -> Iterator[T]:
        """The same items; the time until each comes is charged to a phase."""
        while True:
            with self.phase(name):
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item


def per_client(sizes: Sequence[int | float | None]) -> int | float | None:
    """The mean over clients: a whole number where all messages are of one size, None where there was none."""
    known = [size for size in sizes if size is not None]
    if not known:
        return None
    return known[0] if len(set(known)) == 1 else sum(known) / len(known)
