"""FedRep (Collins et al. 2021): each client trains its personal head while the body is frozen, then the body alone.

Departs from the paper: `head_epochs` is 1 and the body trains for the run's epochs, so that a round costs about
as much as FedPer's; the authors' code uses 10 head epochs and 1 or 5 body epochs. There are two optimizers, so that no
momentum moves the frozen part.
"""

from dataclasses import replace
from functools import partial

from fedvit.core.client import Client
from fedvit.core.plan import Plan
from fedvit.core.settings import Count
from fedvit.core.training import descend
from fedvit.core.tree import Tree
from fedvit.methods import fedper


def head_then_body(client: Client, start: Tree, head_epochs: int, body_epochs: int | None) -> Tree:
    middle = descend(client, start, only=client.roles.personal, epochs=head_epochs, tag="head")
    return descend(client, middle, only=client.roles.shared, epochs=body_epochs)


def plan(head_epochs: Count = 1, body_epochs: Count | None = None) -> Plan:
    local = partial(head_then_body, head_epochs=head_epochs, body_epochs=body_epochs)
    # Training the head alone costs little more than a forward pass, which is a third of a training pass.
    return replace(
        fedper.plan(),
        name="fedrep",
        local=local,
        passes=lambda epochs: (head_epochs / 3 + (body_epochs or epochs)) / epochs,
    )
