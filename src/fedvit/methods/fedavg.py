"""FedAvg (McMahan et al. 2017): all clients train the same model, and the server takes the weighted mean.

Departs from the paper: nothing. Weights are normalized over the sampled clients.
"""

from fedvit.core.plan import Plan


def plan() -> Plan:
    return Plan(name="fedavg")
