"""What a round cost: bytes by direction, seconds by phase."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Ledger:
    """One round's account. Bytes are those of the payloads that really crossed."""

    down: list[int] = field(default_factory=list)  # tensor bytes to each sampled client
    up: list[int] = field(default_factory=list)  # and from each that answered
    evaluation: int = 0  # tensor bytes of all evaluation messages, both ways
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge the time inside the block to a phase."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin


def per_client(sizes: Sequence[int | float | None]) -> int | float | None:
    """The mean over clients: a whole number where all messages are of one size, None where there was none."""
    known = [size for size in sizes if size is not None]
    if not known:
        return None
    return known[0] if len(set(known)) == 1 else sum(known) / len(known)
