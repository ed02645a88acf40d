"""MiniBatch-SFL (Huang et al. 2023): clients' parts as in FedAvg, the server's by mini-batch SGD over all clients.

At every step the server takes one step along the mean gradient of all clients' batches; labels go to the server.
Departs from the paper: read from its abstract and a summary. `block` blocks are the client's.
"""

from fedvit.core.settings import NotNegative
from fedvit.methods.fedv import Block
from fedvit.models.cuts import Cut
from fedvit.split.plan import SplitPlan, Wire


def plan(block: Block = 1, server_lr: NotNegative | None = None, wire: Wire = "fp32") -> SplitPlan:
    return SplitPlan(
        name="minibatch_sfl",
        cut=Cut("after", block),
        body="step",
        server_lr=server_lr,
        server_optimizer="sgd",
        average_every=1,
        wire=wire,
    )
