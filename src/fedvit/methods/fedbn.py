"""FedBN (Li et al. 2021): normalization layers stay personal, which in ViTs are the LayerNorms.

Departs from the paper: nothing. Layers are found by module type, so none is missed; their running statistics are
personal too.
"""

from fedvit.core.plan import Plan
from fedvit.core.roles import PERSONAL, SHARED, everything
from fedvit.models.groups import norm


def plan() -> Plan:
    return Plan(name="fedbn", roles=((norm, PERSONAL), (everything, SHARED)))
