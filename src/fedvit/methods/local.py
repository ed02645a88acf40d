"""Local: every client trains alone and nothing is sent; the baseline that every gain is measured against.

Departs from the paper: nothing. As in FedPerfix, a client trains only when it is sampled; with schedule=every_round,
all clients train in every round.
"""

from typing import Literal

from fedvit.core.plan import Plan
from fedvit.core.roles import PERSONAL, everything


def plan(schedule: Literal["sampled", "every_round"] = "sampled") -> Plan:
    trains: Literal["sampled", "everyone"] = "everyone" if schedule == "every_round" else "sampled"
    return Plan(name="local", roles=((everything, PERSONAL),), trains=trains)
