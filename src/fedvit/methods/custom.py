"""Custom: any layer groups personal, the rest shared; for asking where to personalize (FedPerfix, Table 1).

Departs from the paper: nothing; `personal` is a list of groups joined by commas, such as attn,head.
"""

from fedvit.models.classifier import groups
from fedvit.plan import Plan
from fedvit.roles import PERSONAL, SHARED, everything


def plan(personal: str = "head") -> Plan:
    return Plan(name="custom", roles=((groups(personal), PERSONAL), (everything, SHARED)))
