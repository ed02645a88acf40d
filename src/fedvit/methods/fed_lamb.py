"""Fed-LAMB (Karimi et al. 2023): local AMSGrad steps scaled layer by layer, with second moments shared by the server.

The step is theta <- theta - lr * |theta| * u / |u| per tensor, where u = m / (sqrt(v_hat) + eps) + decay * theta.
Departs from the paper: written from its abstract and common knowledge, because no code is public. In each round, first
moments start at zero and second moments at the server's running maximum v_hat, which is fixed during a round and zero
before round 1. A tensor of only zeros takes a step of length lr. The run's weight decay is used, its optimizer is not.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from fedvit.core import tree
from fedvit.core.client import Client
from fedvit.core.payload import Payload
from fedvit.core.plan import Plan, Report, means, overwrite
from fedvit.core.server import Server
from fedvit.core.settings import Positive, Share
from fedvit.core.training import Named, descend
from fedvit.core.tree import Tree
from fedvit.methods.fedavgm import zeros


class Lamb(Optimizer):
    """LAMB with a fixed maximum of second moments; `second` holds the running moments."""

    def __init__(
        self, parameters: Named, rates: Mapping[str, float], betas: tuple[float, float], eps: float, decay: float,
        peak: Tree,
    ):  # fmt: skip
        super().__init__(list(parameters.values()), {})
        self.rates = rates
        self.named, self.betas, self.eps, self.decay, self.peak = parameters, betas, eps, decay, peak
        self.first = {name: torch.zeros_like(p) for name, p in parameters.items()}
        self.second = {name: peak[name].clone() for name in parameters}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        beta1, beta2 = self.betas
        for name, theta in self.named.items():
            if theta.grad is None:
                continue
            self.first[name].lerp_(theta.grad, 1 - beta1)
            self.second[name].lerp_(theta.grad.square(), 1 - beta2)
            update = self.first[name] / (self.peak[name].sqrt() + self.eps) + self.decay * theta
            length, scale = update.norm().clamp(min=1e-30), theta.norm()
            theta.sub_(self.rates[name] * torch.where(scale > 0, scale, 1.0) * (update / length))


def _keep_peak(client: Client, down: Payload) -> Tree:
    client.scratch["peak"] = down.trees["second"]
    return overwrite(client, down)


def _local_lamb(client: Client, start: Tree, betas: tuple[float, float], eps: float) -> Tree:
    settings = client.settings
    peak = {name: tensor.to(settings.device) for name, tensor in client.scratch["peak"].items()}
    second: Tree = {}

    def optimizer(parameters: Named) -> Optimizer:
        rates = {name: client.lr_of(name) for name in parameters}
        lamb = Lamb(parameters, rates, betas, eps, settings.weight_decay, peak)
        second.update(lamb.second)
        return lamb

    end = descend(client, start, optimizer=optimizer)
    client.scratch["second"] = {name: tensor.cpu() for name, tensor in second.items()}
    return end


def _report_both(client: Client, start: Tree, end: Tree) -> Payload:
    second = client.scratch.get("second") or zeros(end)
    return Payload({"shared": tree.pick(end, client.roles.shared), "second": second})


def _raise_peak(server: Server, reports: Iterable[Report]) -> Server:
    mean = means(server, reports)
    peak = {name: torch.maximum(old, mean["second"][name]) for name, old in server.memory["second"].items()}
    return replace(server, shared=mean["shared"], memory={"second": peak})


def plan(beta1: Share = 0.9, beta2: Share = 0.999, eps: Positive = 1e-8) -> Plan:
    return Plan(
        name="fed_lamb",
        start=lambda module, shared: {"second": zeros(shared)},
        dispatch=lambda server, client: Payload({"shared": server.shared, "second": server.memory["second"]}),
        merge=_keep_peak,
        local=partial(_local_lamb, betas=(beta1, beta2), eps=eps),
        report=_report_both,
        aggregate=_raise_peak,
    )
