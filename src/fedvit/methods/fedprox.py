"""FedProx (Li et al. 2020): FedAvg whose local loss also keeps the weights close to the received ones.

Departs from the paper: nothing. The paper tunes mu over 0.001, 0.01, 0.1, 0.5 and 1; no value suits all settings.
"""

from functools import partial

from fedvit.core.client import Client
from fedvit.core.plan import Plan
from fedvit.core.settings import NotNegative
from fedvit.core.training import descend, toward
from fedvit.core.tree import Tree


def _stay_near(client: Client, start: Tree, mu: float) -> Tree:
    return descend(client, start, adjust=toward(client, start, mu))


def plan(mu: NotNegative = 0.1) -> Plan:
    return Plan(name="fedprox", local=partial(_stay_near, mu=mu))
