"""MiniBatch-SFL (Huang et al. 2023): FedAvg for the clients' parts, mini-batch SGD over all clients for the server's.

For every batch, the server takes one step along the mean gradient of all clients' batches; labels go to the server.
Departs from the paper: written from its abstract and a summary. The client holds the first `block` blocks.
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
        name="minibatch_sfl",
        cut=Cut("after", block),
        body="step",
        server_lr=server_lr,
        server_decay=server_decay,
        client_head_lr=client_head_lr,
        server_optimizer="sgd",
        average_every=1,
        wire=wire,
    )
