"""SplitFed V2 (Thapa et al. 2022): like V1, but with one model at the server that serves the clients one by one.

Departs from the paper: as V1. Clients take turns in random order; the server's Adam keeps its state.
"""

from fedvit.core.settings import NotNegative
from fedvit.methods.fedv import Block, Decay
from fedvit.models.cuts import Cut
from fedvit.split.plan import SplitPlan, Wire


def plan(
    block: Block = 1,
    server_lr: NotNegative | None = None,
    server_decay: Decay = 1.0,
    client_head_lr: NotNegative | None = None,
    wire: Wire = "fp32",
) -> SplitPlan:
    return SplitPlan(
        name="splitfed_v2",
        cut=Cut("after", block),
        body="turns",
        server_lr=server_lr,
        server_decay=server_decay,
        client_head_lr=client_head_lr,
        server_optimizer="adam",
        average_every=1,
        wire=wire,
    )
