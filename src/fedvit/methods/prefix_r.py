"""Prefix-R (FedPerfix, Table 6): Prefix-Z with a random initialization.

Departs from the paper: as Prefix-Z.
"""

from typing import Literal

from fedvit.core.plan import Plan
from fedvit.core.settings import Count, Finite
from fedvit.methods.prefix_z import vanilla_prefix


def plan(s: Finite = 1.5, combine: Literal["add", "concat"] = "add", tokens: Count = 10) -> Plan:
    return vanilla_prefix("prefix_r", "random", s, combine, tokens)
