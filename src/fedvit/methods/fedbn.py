"""FedBN (Li et al. 2021): normalisation layers stay personal, for ViTs the LayerNorms.

Departs from the paper: nothing. Layers are found by module type, so none is missed; running statistics go along.
"""

from fedvit.core.plan import Plan
from fedvit.core.roles import PERSONAL, SHARED, everything
from fedvit.models.groups import norm


def plan() -> Plan:
    return Plan(name="fedbn", roles=((norm, PERSONAL), (everything, SHARED)))
