"""Custom: you choose which layer groups are personal, to study where to personalize (FedPerfix, Table 1).

Departs from the paper: nothing. `personal` is a list of groups separated by commas, such as attn,head; all other groups
are shared.
"""

from fedvit.core.plan import Plan
from fedvit.core.roles import PERSONAL, SHARED, everything
from fedvit.models.groups import groups


def plan(personal: str = "head") -> Plan:
    return Plan(name="custom", roles=((groups(personal), PERSONAL), (everything, SHARED)))
