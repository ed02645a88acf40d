"""FedV (split learning on a pre-trained ViT): the body stays at the server, and each client has a small head and tail.

During a round, the body is fixed and clients train head and tail through it; after the round, it takes one step along
the mean gradient of their last batches. Heads and tails are averaged every `fedround` rounds.
Departs from the paper: cut=B puts tokens and positions at the client and the final norm in the tail, which the paper
leaves open; cut=A is FESTA's. init=pretrained keeps the pre-trained head, and then client_head_lr is 0 by default: one
rate for a pre-trained embedding and a fresh classifier suits neither. init=random is the paper's; it draws head and
tail once (Algorithm 1), not in every round (section 3.2). Heads and tails are averaged after rounds 1, 21, 41, ... (the
paper counts from 0; its appendix has 50 for the text's 20), and only the clients of that round get the average, because
it would replace all others' tails by one of other classes (receives=all). Only the class token's row of the output is
sent.
"""

from typing import Annotated, Literal

from pydantic import Field

from fedvit.core.settings import NotNegative, Whole
from fedvit.models.cuts import Cut
from fedvit.split.plan import Average, SplitPlan, Wire

Receives = Literal["all", "sampled"]
Init = Literal["pretrained", "random"]
Decay = Annotated[float, Field(gt=0, le=1)]
Block = Annotated[int, Field(ge=0)]


def plan(
    server_lr: NotNegative = 0.01,
    server_decay: Decay = 1.0,
    client_head_lr: NotNegative | None = None,
    cut: Literal["A", "B"] = "B",
    fedround: Whole = 20,
    average: Average = "both",
    receives: Receives = "sampled",
    init: Init = "pretrained",
    wire: Wire = "fp32",
) -> SplitPlan:
    return SplitPlan(
        name="fedv",
        cut=Cut(cut),
        server_lr=server_lr,
        server_decay=server_decay,
        client_head_lr=client_head_lr,
        average_every=fedround,
        average=average,
        receives=receives,
        init=init,
        wire=wire,
    )
