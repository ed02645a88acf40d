"""FESTA (Park et al. 2021): U-shaped split learning; the body learns at every step from the mean over the clients.

Departs from the paper: its head is a DenseNet; here it is the ViT's patch embedding (cut=A), as in FedV's comparison.
The body starts from the pre-trained weights if there are any; in FedV's comparison it starts from scratch. A pre-
trained head is not trained by default, as in FedV. Clients with more batches continue when others are done. perturb is
noise on what is sent for averaging; the paper's own is not given.
"""

from typing import Literal

from fedvit.core.settings import NotNegative, Whole
from fedvit.methods.fedv import Decay, Init, Receives
from fedvit.models.cuts import Cut
from fedvit.split.plan import Average, SplitPlan, Wire


def plan(
    server_lr: NotNegative | None = None,
    server_decay: Decay = 1.0,
    client_head_lr: NotNegative | None = None,
    cut: Literal["A", "B"] = "A",
    fedround: Whole = 50,
    average: Average = "both",
    receives: Receives = "sampled",
    perturb: NotNegative = 0.0,
    init: Init = "pretrained",
    wire: Wire = "fp32",
) -> SplitPlan:
    return SplitPlan(
        name="festa",
        cut=Cut(cut),
        body="step",
        server_lr=server_lr,
        server_decay=server_decay,
        client_head_lr=client_head_lr,
        server_optimizer="adam",
        average_every=fedround,
        average=average,
        receives=receives,
        perturb=perturb,
        init=init,
        wire=wire,
    )
