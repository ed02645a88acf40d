"""FedPerfix (Sun et al. 2023): a personal side adapter per block shifts keys and values; the head is personal too.

Departs from the paper: the prefix is added to keys and values, as in the authors' code; combine=concat concatenates
them, as eq. 3 is written. init=auto draws the up-projection at random for training from scratch (as the paper does) and
starts it at zero on pre-trained weights, whose attention a random prefix would disturb. last_block=true also keeps the
whole last block personal, which the code does on CIFAR-100 and the paper does not mention.
"""

from typing import Literal

from fedvit.core.plan import Plan
from fedvit.core.roles import PERSONAL, SHARED, everything
from fedvit.core.settings import Count, Finite
from fedvit.models.groups import group, head
from fedvit.models.groups import last_block as whole_last_block
from fedvit.models.plugins.specs import Init, Prefix


def plan(
    s: Finite = 1.5,
    bottleneck: Count = 256,
    init: Init = "auto",
    combine: Literal["add", "concat"] = "add",
    last_block: bool = False,
) -> Plan:
    own = group("prefix") | head
    if last_block:
        own = own | whole_last_block
    return Plan(
        name="fedperfix",
        build=(Prefix(bottleneck=bottleneck, s=s, init=init, combine=combine),),
        roles=((own, PERSONAL), (everything, SHARED)),
    )
