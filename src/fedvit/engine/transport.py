"""The protocol by which messages reach clients. The loop knows nothing else about a transport."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, Protocol

from fedvit.core.payload import Failure, Payload

Task = Literal["train", "evaluate"]


class Transport(Protocol):
    """The same three calls for clients in one process, in several processes or over a network."""

    def clients(self) -> Sequence[str]:
        """Return all clients, in the order in which sums are taken."""

    def exchange(self, task: Task, messages: Mapping[str, Payload]) -> Iterator[tuple[str, Payload | Failure]]:
        """Send the messages and yield the answers in the same order."""

    def commit(self, round_: int) -> None:
        """Commit the memories that this round's training produced; until then they are pending."""
