"""Vanilla Attention (FedPerfix, Sun et al. 2023, Table 2): all self-attention layers and the head are personal.

Departs from the paper: nothing.
"""

from fedvit.models.classifier import attn, head
from fedvit.plan import Plan
from fedvit.roles import PERSONAL, SHARED, everything


def plan() -> Plan:
    return Plan(name="vanilla_attention", roles=((attn | head, PERSONAL), (everything, SHARED)))
