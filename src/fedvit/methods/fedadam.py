"""FedAdam (Reddi et al. 2021): the server takes an Adam step along FedAvg's mean change.

Departs from the paper: nothing. There is no bias correction, as printed, and the second moment starts at tau squared.
The mean change is weighted by samples, like FedAvg's. Running statistics of batch normalization are averaged and take
no Adam step.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch

from fedvit.core.plan import Plan, Report, average
from fedvit.core.server import Server
from fedvit.core.settings import Positive, Share
from fedvit.methods.fedavgm import zeros


def _adam(server: Server, reports: Iterable[Report], beta1: float, beta2: float, tau: float, lr: float) -> Server:
    shared = dict(average(server, reports).shared)
    first, second = {}, {}
    for name, old in server.memory["first"].items():
        change = shared[name] - server.shared[name]
        first[name] = beta1 * old + (1 - beta1) * change
        second[name] = beta2 * server.memory["second"][name] + (1 - beta2) * change**2
        shared[name] = server.shared[name] + lr * first[name] / (second[name].sqrt() + tau)
    return replace(server, shared=shared, memory={"first": first, "second": second})


def plan(beta1: Share = 0.9, beta2: Share = 0.99, tau: Positive = 1e-3, server_lr: Positive = 1e-2) -> Plan:
    return Plan(
        name="fedadam",
        start=lambda module, shared: {
            "first": zeros(shared),
            "second": {name: torch.full_like(tensor, tau**2) for name, tensor in zeros(shared).items()},
        },
        aggregate=partial(_adam, beta1=beta1, beta2=beta2, tau=tau, lr=server_lr),
    )
