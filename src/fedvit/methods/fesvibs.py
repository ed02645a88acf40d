"""FeSViBS (Almalik et al. 2023): features leave the body after a random block, through a common block of convolutions.

For each round and client, a number of blocks from 1 to `blocks` is drawn; patch tokens pass through them, and a
convolution turns them into one token, which the client's tail classifies. Each client has its own copy of the body, and
the copies are averaged after the round; heads and tails are averaged every `fedround` rounds.
Departs from the paper: the head is the ViT's patch embedding, not a ResNet. `blocks` defaults to half of them, 6 of 12.
A client is tested with the block it drew last in training, as in the authors' code; a client that never trained, with
the last block. No noise is added to the features.
"""

from fedvit.core.settings import Count, NotNegative, Whole
from fedvit.methods.fedv import Decay, Receives
from fedvit.models.cuts import Cut
from fedvit.models.plugins.specs import Pseudo
from fedvit.split.plan import Average, SplitPlan, Wire


def plan(
    blocks: Count | None = None,
    server_lr: NotNegative | None = None,
    server_decay: Decay = 1.0,
    client_head_lr: NotNegative | None = None,
    fedround: Whole = 2,
    average: Average = "both",
    receives: Receives = "all",
    wire: Wire = "fp32",
) -> SplitPlan:
    return SplitPlan(
        name="fesvibs",
        build=(Pseudo(),),
        cut=Cut("vibs", blocks or 0),
        body="copies",
        server_lr=server_lr,
        server_decay=server_decay,
        client_head_lr=client_head_lr,
        server_optimizer="adam",
        average_every=fedround,
        average=average,
        receives=receives,
        wire=wire,
    )
