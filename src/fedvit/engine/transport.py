"""How messages reach clients. The loop knows only this protocol."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, Protocol

from fedvit.core.payload import Failure, Payload

Task = Literal["train", "evaluate"]


class Transport(Protocol):
    """One process, several processes or a network: the same three calls."""

    def clients(self) -> Sequence[str]:
        """All clients, in the order in which sums are taken."""

    def exchange(self, task: Task, messages: Mapping[str, Payload]) -> Iterator[tuple[str, Payload | Failure]]:
        """Send, and yield the answers in the order of the messages."""

    def commit(self, round_: int) -> None:
        """Make the memories of this round's training the clients' own; until then they are pending."""
