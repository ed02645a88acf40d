"""SplitFed V1 (Thapa et al. 2022): clients hold the lower blocks, the server a copy of the rest for each of them.

Labels go to the server. Copies and clients' parts are averaged after every round, without regard to sizes.
Departs from the paper: the server's Adam is made anew every round, a client's goes on from round to round (the released
code makes both anew every batch); clients are tested after averaging. `block` blocks are the client's.
"""

from fedvit.core.settings import NotNegative
from fedvit.methods.fedv import Block
from fedvit.models.cuts import Cut
from fedvit.split.plan import SplitPlan, Wire


def plan(block: Block = 1, server_lr: NotNegative | None = None, wire: Wire = "fp32") -> SplitPlan:
    return SplitPlan(
        name="splitfed_v1",
        cut=Cut("after", block),
        body="copies",
        server_lr=server_lr,
        server_optimizer="adam",
        average_every=1,
        wire=wire,
    )
