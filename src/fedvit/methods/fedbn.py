"""FedBN (Li et al. 2021): normalisation layers stay personal, for ViTs the LayerNorms.

Departs from the paper: nothing. Layers are found by module type, so none is missed; running statistics go along.
"""

from fedvit.models.classifier import norm
from fedvit.plan import Plan
from fedvit.roles import PERSONAL, SHARED, everything


def plan() -> Plan:
    return Plan(name="fedbn", roles=((norm, PERSONAL), (everything, SHARED)))
