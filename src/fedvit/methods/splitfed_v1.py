"""SplitFed V1 (Thapa et al. 2022): clients hold the lower blocks, and the server a copy of the rest for each client.

Labels go to the server. The copies and the clients' parts are averaged after every round, regardless of dataset sizes.
Departs from the paper: the server's Adam starts afresh every round, and a client's continues from round to round (in
the released code, both start afresh every batch); clients are tested after averaging. The client holds `block` blocks.
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
        name="splitfed_v1",
        cut=Cut("after", block),
        body="copies",
        server_lr=server_lr,
        server_decay=server_decay,
        client_head_lr=client_head_lr,
        server_optimizer="adam",
        average_every=1,
        wire=wire,
    )
