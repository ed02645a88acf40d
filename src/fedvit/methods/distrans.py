"""DisTrans (Yuan et al. 2022): each client learns an offset image; the network sees every image mixed with it, twice.

x1 = (1 - a) x + a offset and x2 = (1 + a) x - a offset go through one backbone, and the classifier sees both features.
Departs from the paper: offsets stay personal, as in its non-i.i.d. script; the server network of the i.i.d. script,
which makes offsets, is not implemented. Both halves go through as one batch, which only affects batch normalization.
"""

from functools import partial

from torch.optim import Optimizer

from fedvit.core.client import Client
from fedvit.core.plan import Plan
from fedvit.core.roles import PERSONAL, SHARED, everything
from fedvit.core.settings import Positive, Share
from fedvit.core.training import Named, descend, make_optimizer, rate_groups
from fedvit.core.tree import Tree
from fedvit.models.groups import group
from fedvit.models.plugins.specs import Offset


def _train_with_offset(client: Client, start: Tree, offset_lr: float | None) -> Tree:
    settings = client.settings
    rate = offset_lr or settings.lr_plugins or settings.lr / 5  # the authors use 1e-3 with 5e-3

    def optimizer(parameters: Named) -> Optimizer:
        network = {name: p for name, p in parameters.items() if name not in client.roles.personal}
        own = [p for name, p in parameters.items() if name in client.roles.personal]
        return make_optimizer(settings, [*rate_groups(client, network), {"params": own, "lr": rate}])

    return descend(client, start, optimizer=optimizer)


def plan(a: Share = 0.2, offset_lr: Positive | None = None) -> Plan:
    return Plan(
        name="distrans",
        build=(Offset(a),),
        roles=((group(Offset.kind), PERSONAL), (everything, SHARED)),
        local=partial(_train_with_offset, offset_lr=offset_lr),
        weighting="equal",
    )
