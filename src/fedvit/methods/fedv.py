"""FedV (split learning on a pre-trained ViT): the body stays at the server, and each client has a small head and tail.

During a round, the body is fixed and clients train head and tail through it; after the round, it takes one step along
the mean gradient of their last batches. Heads and tails are averaged every `fedround` rounds.
Departs from the paper: cut=B puts tokens and positions at the client and the final norm in the tail, which the paper
leaves open; cut=A is FESTA's. init=pretrained keeps the pre-trained head (the paper draws it at random: init=random).
Heads and tails are averaged after rounds 1, 21, 41, ... (the paper counts from 0), and all clients get the average
(with receives=sampled, only those of that round). Of the body's output, only the class token's row is sent.
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
