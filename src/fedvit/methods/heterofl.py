"""HeteroFL (Diao et al. 2021): every client trains the top-left part of each weight, as wide as its device allows.

Each number of the model is the unweighted mean over the clients that hold it. `rates` are the widths: either a list,
whose values are given to the clients in turn, or name=rate for each client; a client that never trains has the first
rate. `scaler` divides hidden outputs by the rate in training. `masking` zeroes the logits of classes that a client
lacks, and averages a class's row of the classifier over the clients that have the class, which they tell the server.
Departs from the paper: half of the clients have rate 1/2 by default (our choice). Running statistics of batch
normalization are averaged like weights, not gathered by extra passes (static batch normalization). In a ViT, the number
of heads stays and each gets narrower, and the residual stream is as wide as all heads together; tokens and positions
are not scaled.
"""

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from fedvit.core.client import Client, Predictor
from fedvit.core.payload import Payload
from fedvit.core.plan import Plan, Report, report_shared
from fedvit.core.server import Server
from fedvit.core.settings import Numbers
from fedvit.core.training import descend
from fedvit.core.tree import Tree
from fedvit.models import width
from fedvit.models.width import Cutter, Part, Windows


def _send_part(server: Server, client: str, windows: Windows, cut: Cutter) -> Payload:
    window = windows.of(client, server.clients, server.round)
    return Payload({"shared": cut(server.shared, width.unpacked(server.memory["axes"]), window)}, window._asdict())


def _train_part(client: Client, start: Tree, masking: bool, scaler: bool, clip: float | None) -> Tree:
    absent = (client.data.class_counts == 0).to(client.settings.device)

    def masked(model: Predictor, x: Tensor, y: Tensor) -> Tensor:
        return client.criterion(model(x).float().masked_fill(absent, 0), y)

    def clipped(parameters: Mapping[str, nn.Parameter]) -> None:
        nn.utils.clip_grad_norm_(parameters.values(), clip or 0)

    with width.scaled(client.module, client.rate) if scaler else nullcontext():
        return descend(client, start, loss=masked if masking else None, adjust=clipped if clip else None)


def _report_with_classes(client: Client, start: Tree, end: Tree) -> Payload:
    labels = {"owned": (client.data.class_counts > 0).to(torch.uint8)}
    return Payload({**report_shared(client, start, end).trees, "labels": labels})


def _overlap(server: Server, reports: Iterable[Report], windows: Windows) -> Server:
    def part(report: Report) -> Part:
        trees, window = report.payload.trees, windows.of(report.client, server.clients, server.round)
        classes = trees["labels"]["owned"].nonzero().flatten() if "labels" in trees else None
        return Part(report.weight, window, trees["shared"], classes)

    codes = width.unpacked(server.memory["axes"])
    return replace(server, shared=width.overlap_mean(server.shared, codes, map(part, reports)))


def narrow_clients(name: str, windows: Windows, *, masking: bool, scaler: bool, clip: float | None = None) -> Plan:
    return Plan(
        name=name,
        start=lambda module, shared: {"axes": width.packed(width.axes(module), shared)},
        dispatch=partial(_send_part, windows=windows, cut=Cutter()),
        local=partial(_train_part, masking=masking, scaler=scaler, clip=clip),
        report=_report_with_classes if masking else report_shared,
        aggregate=partial(_overlap, windows=windows),
        weighting="equal",
        unprotected=("which classes a client has, by which its loss and its report are masked",) if masking else (),
        check=lambda module, roles: width.check(module),
    )


def plan(rates: Numbers = "1,0.5", masking: bool = True, scaler: bool = True) -> Plan:
    return narrow_clients("heterofl", Windows.parse(rates), masking=masking, scaler=scaler)
