"""Vanilla Attention (FedPerfix, Sun et al. 2023, Table 2): all self-attention layers and the head are personal.

Departs from the paper: nothing.
"""

from fedvit.core.plan import Plan
from fedvit.core.roles import PERSONAL, SHARED, everything
from fedvit.models.groups import attn, head


def plan() -> Plan:
    return Plan(name="vanilla_attention", roles=((attn | head, PERSONAL), (everything, SHARED)))
