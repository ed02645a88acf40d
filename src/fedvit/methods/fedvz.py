"""FedVZ: FedV with a body that learns without gradients, from two losses on either side of its weights (SPSA).

The server moves the body forward and backward along a random direction, each client reports the loss of its last batch
on both sides, and the difference gives the slope along that direction. `draws` directions are averaged.
Departs from the paper: as FedV. Directions are drawn per client. A head that learns does so through the body's gradient
at its input, as the paper's algorithm says; under black_box=true it learns from two losses per step instead, and the
body gives no gradient at all. The decay of server_lr (0.5 in the paper, at steps that it does not give) acts after
every decay_every rounds. perturb, the weight perturbation of the paper's appendix, is noise on what is sent for
averaging.
"""

from typing import Literal

from fedvit.core.settings import Count, NotNegative, Positive, Whole
from fedvit.methods.fedv import Decay, Init, Receives
from fedvit.models.cuts import Cut
from fedvit.split.plan import Average, SplitPlan, Wire


def plan(
    server_lr: NotNegative = 1e-6,
    server_decay: Decay = 1.0,
    decay_every: Count = 100,
    client_head_lr: NotNegative | None = None,
    epsilon: Positive = 1e-4,
    draws: Count = 1,
    black_box: bool = False,
    cut: Literal["A", "B"] = "B",
    fedround: Whole = 20,
    average: Average = "both",
    receives: Receives = "sampled",
    perturb: NotNegative = 0.0,
    init: Init = "pretrained",
    wire: Wire = "fp32",
) -> SplitPlan:
    return SplitPlan(
        name="fedvz",
        cut=Cut(cut),
        gradient="spsa",
        epsilon=epsilon,
        draws=draws,
        black_box=black_box,
        server_lr=server_lr,
        server_decay=server_decay,
        decay_every=decay_every,
        client_head_lr=client_head_lr,
        average_every=fedround,
        average=average,
        receives=receives,
        perturb=perturb,
        init=init,
        wire=wire,
    )
