"""Personal adapters (FedPerfix, Table 6): the head and one adapter that all blocks' MLPs share are personal.

Departs from the paper: the down-projection starts at random (the code starts both projections at zero, and then only
a bias ever learns); the width is 256, because the paper gives none.
"""

from fedvit.core.plan import Plan
from fedvit.core.roles import PERSONAL, SHARED, everything
from fedvit.core.settings import Count
from fedvit.models.groups import group, head
from fedvit.models.plugins.specs import Adapter


def plan(width: Count = 256, per_layer: bool = False) -> Plan:
    return Plan(
        name="adapters",
        build=(Adapter(width=width, activation="tanh", per_layer=per_layer),),
        roles=((group("adapter") | head, PERSONAL), (everything, SHARED)),
    )
