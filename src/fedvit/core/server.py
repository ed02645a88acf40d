"""The server's state, and how it samples clients."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fedvit.core import randomness, tree
from fedvit.core.robust import Combine
from fedvit.core.tree import Tree


@dataclass(frozen=True)
class Server:
    """Everything the server knows after `round` rounds. It is frozen: use `dataclasses.replace` to change it.

    Attributes:
        round: How many rounds have finished.
        shared: The shared weights by name.
        memory: The method's own trees, by name, from `Plan.start` or the last `Plan.aggregate`.
        clients: All clients that may be sampled, in order.
        combine: How reports become one tree: their weighted mean, or what `train.aggregate` asks for.
        norms: The lengths of past updates, newest last, if `train.clip_update` needs them.
    """

    round: int
    shared: Tree
    memory: Mapping[str, Tree] = field(default_factory=dict)
    clients: tuple[str, ...] = ()
    combine: Combine = field(default=tree.mean, compare=False)
    norms: tuple[float, ...] = ()


def sample(clients: Sequence[str], cohort: int, seed: int, round_: int) -> list[str]:
    """Sample the clients of a round uniformly and without replacement, in the order of `clients`."""
    order = torch.randperm(len(clients), generator=randomness.generator(seed, round_, "", "cohort"))
    return [clients[i] for i in sorted(order[:cohort].tolist())]
