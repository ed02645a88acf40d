"""FedPer (Arivazhagan et al. 2019): a personal head on a shared body, trained together.

FedPerfix's tables call this row FedRep.
Departs from the paper: the personal part is the classifier alone; use `custom` for deeper ones.
"""

from fedvit.core.plan import Plan
from fedvit.core.roles import PERSONAL, SHARED, everything
from fedvit.models.groups import head


def plan() -> Plan:
    return Plan(name="fedper", roles=((head, PERSONAL), (everything, SHARED)))
