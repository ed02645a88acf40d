"""Prefix-Z (FedPerfix, Table 6): a personal prefix without bottleneck that starts at zero; the head is personal too.

Departs from the paper: the prefix is one linear map of the block's input, added to keys and values (as in the code);
combine=concat concatenates `tokens` free rows with them (as in the text). s is that of FedPerfix; the paper gives none.
"""

from typing import Literal

from fedvit.core.plan import Plan
from fedvit.core.roles import PERSONAL, SHARED, everything
from fedvit.core.settings import Count, Finite
from fedvit.models.groups import group, head
from fedvit.models.plugins.specs import Init, Prefix


def vanilla_prefix(name: str, init: Init, s: float, combine: Literal["add", "concat"], tokens: int) -> Plan:
    return Plan(
        name=name,
        build=(Prefix(bottleneck=None, s=s, init=init, combine=combine, tokens=tokens),),
        roles=((group("prefix") | head, PERSONAL), (everything, SHARED)),
    )


def plan(s: Finite = 1.5, combine: Literal["add", "concat"] = "add", tokens: Count = 10) -> Plan:
    return vanilla_prefix("prefix_z", "zero", s, combine, tokens)
