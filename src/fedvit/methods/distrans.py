"""DisTrans (Yuan et al. 2022): each client learns an offset image; the network sees every image mixed with it, twice.

x1 = (1 - a) x + a offset and x2 = (1 + a) x - a offset go through one backbone, and the classifier sees both features.
By default offsets stay personal, as in its script for non-i.i.d. data. With offsets=server, as in its i.i.d. script,
clients train offsets that a network at the server makes from their class proportions. They return them, and the network
takes a step (SGD) per client towards what it got (mean squared error).

Privacy: with offsets=server, a client's class proportions and its trained offset leave the client.

Departs from the paper: both halves of a batch go through as one, which only affects batch normalization. The server's
network has two hidden layers and a linear one that gives the image through tanh, instead of transposed convolutions for
64 pixels with spectral and batch normalization; until a client reports, it counts as having every class equally.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Literal

from torch.optim import Optimizer

from fedvit.core import tree
from fedvit.core.client import Client
from fedvit.core.payload import Payload
from fedvit.core.plan import Plan, Report, average, overwrite, report_shared
from fedvit.core.roles import PERSONAL, SHARED, everything
from fedvit.core.server import Server
from fedvit.core.settings import Positive, Share
from fedvit.core.training import Named, descend, make_optimizer, rate_groups
from fedvit.core.tree import Tree
from fedvit.models.groups import group
from fedvit.models.offset_maker import IMAGE, equal_shares, first_maker, made_offset, taught
from fedvit.models.plugins.specs import Offset


def _train_with_offset(client: Client, start: Tree, offset_lr: float | None) -> Tree:
    settings = client.settings
    rate = offset_lr or settings.lr_plugins or settings.lr / 5  # the authors use 1e-3 with 5e-3

    def optimizer(parameters: Named) -> Optimizer:
        network = {name: p for name, p in parameters.items() if name not in client.roles.personal}
        own = [p for name, p in parameters.items() if name in client.roles.personal]
        return make_optimizer(settings, [*rate_groups(client, network), {"params": own, "lr": rate}])

    return descend(client, start, optimizer=optimizer)


def _send_offset(server: Server, client: str) -> Payload:
    maker = server.memory["maker"]
    proportions = server.memory.get("proportions", {}).get(client, equal_shares(maker))
    return Payload({"shared": server.shared, "offset": {IMAGE: made_offset(maker, proportions)}})


def _with_sent_offset(client: Client, down: Payload) -> Tree:
    return tree.overlay(overwrite(client, down), down.trees["offset"])


def _report_offset(client: Client, start: Tree, end: Tree) -> Payload:
    counts = client.data.class_counts.float()
    own = {"proportions": counts / counts.sum().clamp(min=1)}
    return Payload({**report_shared(client, start, end).trees, "offset": tree.pick(end, [IMAGE]), "classes": own})


def _teach_maker(server: Server, reports: Iterable[Report], lr: float) -> Server:
    """Average the network, and take one step of the offset maker per client, in the clients' order."""
    maker, proportions = server.memory["maker"], dict(server.memory.get("proportions", {}))

    def noted() -> Iterator[Report]:
        nonlocal maker
        for report in reports:
            trees = report.payload.trees
            proportions[report.client] = trees["classes"]["proportions"].clone()  # not a view of the whole answer
            maker = taught(maker, proportions[report.client], trees["offset"][IMAGE], lr)
            yield report

    server = average(server, noted())
    return replace(server, memory={"maker": maker, "proportions": proportions})


def plan(
    a: Share = 0.2,
    offset_lr: Positive | None = None,
    offsets: Literal["own", "server"] = "own",
    maker_lr: Positive = 0.01,
) -> Plan:
    own = Plan(
        name="distrans",
        build=(Offset(a),),
        roles=((group(Offset.kind), PERSONAL), (everything, SHARED)),
        local=partial(_train_with_offset, offset_lr=offset_lr),
        weighting="equal",
    )
    if offsets == "own":
        return own
    return replace(
        own,
        start=lambda module, shared: {"maker": first_maker(module)},
        dispatch=_send_offset,
        merge=_with_sent_offset,
        report=_report_offset,
        unprotected=("the proportions of a client's classes, which it sends",),
        aggregate=partial(_teach_maker, lr=maker_lr),
        views=lambda client, down: {"personal": _with_sent_offset(client, down)},
    )
