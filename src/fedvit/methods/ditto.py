"""Ditto (Li et al. 2021): FedAvg, plus a complete personal model that is kept close to the received one.

Departs from the paper: the personal model trains for `epochs` passes, by default as many as the shared one; lam is
FedV's choice. The personal model trains first, anchored at the received weights.
"""

from collections.abc import Mapping
from functools import partial

from fedvit.core.client import Client
from fedvit.core.payload import Payload
from fedvit.core.plan import Plan
from fedvit.core.settings import Count, NotNegative
from fedvit.core.training import descend, toward
from fedvit.core.tree import Tree


def _train_both(client: Client, start: Tree, lam: float, epochs: int | None) -> Tree:
    own = descend(client, client.recall("own"), epochs=epochs, adjust=toward(client, start, lam))
    client.memory["own"] = own
    return descend(client, start)


def _own_copy(client: Client, down: Payload) -> Mapping[str, Tree]:
    return {"personal": client.recall("own")}


def plan(lam: NotNegative = 0.75, epochs: Count | None = None) -> Plan:
    return Plan(
        name="ditto",
        local=partial(_train_both, lam=lam, epochs=epochs),
        views=_own_copy,
        remembers=lambda module, trainable: {"own": trainable},
        passes=lambda own: 1 + (epochs or own) / own,
    )
