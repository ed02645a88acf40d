"""The server's state, and how it samples clients."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fedvit.core import randomness
from fedvit.core.tree import Tree


@dataclass(frozen=True)
class Server:
    """Everything the server knows after `round` rounds."""

    round: int
    shared: Tree
    memory: Mapping[str, Tree] = field(default_factory=dict)
    clients: tuple[str, ...] = ()  # all clients that may be sampled, in order


def sample(clients: Sequence[str], cohort: int, seed: int, round_: int) -> list[str]:
    """Sample the clients of a round uniformly and without replacement, in the order of `clients`."""
    order = torch.randperm(len(clients), generator=randomness.generator(seed, round_, "", "cohort"))
    return [clients[i] for i in sorted(order[:cohort].tolist())]
