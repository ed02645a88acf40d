"""SCAFFOLD (Karimireddy et al. 2020): control variates remove the drift of each client from its gradients.

Departs from the paper: a client's new control is the mean of the gradients it saw in the round, each after clipping
(train.clip_grad). With plain SGD and no clipping, that is exactly the paper's option II; with momentum and Adam, where
option II's formula no longer gives a gradient, it still is one. Weights are averaged regardless of dataset sizes, as
printed. Running statistics of batch normalization are averaged, whatever server_lr is. A client that could not take a
step keeps its control.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch

from fedvit.core import tree
from fedvit.core.client import Client
from fedvit.core.payload import Payload
from fedvit.core.plan import Plan, Report, means, overwrite
from fedvit.core.server import Server
from fedvit.core.settings import Positive
from fedvit.core.training import Named, clip_, descend
from fedvit.core.tree import Tree
from fedvit.methods.fedavgm import zeros


def _send_control(server: Server, client: str) -> Payload:
    return Payload({"shared": server.shared, "control": server.memory["control"]})


def _keep_control(client: Client, down: Payload) -> Tree:
    client.scratch["control"] = down.trees["control"]
    return overwrite(client, down)


def _corrected(client: Client, start: Tree) -> Tree:
    own = client.memory.get("control") or zeros(start)
    assert isinstance(own, dict)
    device = client.settings.device
    correction = {name: (c - own[name]).to(device) for name, c in client.scratch["control"].items()}
    sums = {name: torch.zeros_like(c) for name, c in correction.items()}
    steps = 0

    def correct(parameters: Named) -> None:
        nonlocal steps
        steps += 1
        clip_([p.grad for p in parameters.values() if p.grad is not None], client.settings.clip_grad)
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                sums[name] += parameter.grad
                parameter.grad.add_(correction[name])

    end = descend(client, start, adjust=correct)
    new = {name: (total / steps).cpu() for name, total in sums.items()} if steps else own
    client.memory["control"] = new
    client.scratch["change"] = {name: new[name] - own[name] for name in new}
    return end


def _report_change(client: Client, start: Tree, end: Tree) -> Payload:
    change = client.scratch.get("change") or zeros(end)
    return Payload({"shared": tree.pick(end, client.roles.shared), "control": change})


def _step_both(server: Server, reports: Iterable[Report], server_lr: float) -> Server:
    answered: list[str] = []

    def counted() -> Iterator[Report]:
        for report in reports:
            answered.append(report.client)
            yield report

    mean = means(server, counted())
    part = len(answered) / len(server.clients)
    shared, old = mean["shared"], server.memory["control"]
    if server_lr != 1:
        shared = {**shared, **{name: torch.lerp(server.shared[name], shared[name], server_lr) for name in old}}
    control = {name: c + part * mean["control"][name] for name, c in old.items()}
    return replace(server, shared=shared, memory={"control": control})


def plan(server_lr: Positive = 1.0) -> Plan:
    return Plan(
        name="scaffold",
        start=lambda module, shared: {"control": zeros(shared)},
        dispatch=_send_control,
        merge=_keep_control,
        local=_corrected,
        report=_report_change,
        aggregate=partial(_step_both, server_lr=server_lr),
        weighting="equal",
        changes=("control",),
        remembers=lambda module, trainable: {"control": zeros(trainable)},
    )
