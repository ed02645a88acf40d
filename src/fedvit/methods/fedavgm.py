"""FedAvgM (Hsu et al. 2019): the server adds momentum to FedAvg's mean change.

Departs from the paper: nothing. Running statistics of batch normalization are averaged and get no momentum.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch

from fedvit.core.plan import Plan, Report, average
from fedvit.core.roles import is_statistic
from fedvit.core.server import Server
from fedvit.core.settings import Positive, Share
from fedvit.core.tree import Tree


def zeros(shared: Tree) -> Tree:
    """Return the server's moments before round 1, for every tensor that takes steps."""
    return {name: torch.zeros_like(tensor) for name, tensor in shared.items() if not is_statistic(name)}


def _push(server: Server, reports: Iterable[Report], beta: float, server_lr: float) -> Server:
    shared = dict(average(server, reports).shared)
    momentum = {}
    for name, old in server.memory["momentum"].items():
        momentum[name] = beta * old + (shared[name] - server.shared[name])
        shared[name] = server.shared[name] + server_lr * momentum[name]
    return replace(server, shared=shared, memory={"momentum": momentum})


def plan(beta: Share = 0.9, server_lr: Positive = 1.0) -> Plan:
    return Plan(
        name="fedavgm",
        start=lambda module, shared: {"momentum": zeros(shared)},
        aggregate=partial(_push, beta=beta, server_lr=server_lr),
    )
