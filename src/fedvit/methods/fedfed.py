"""FedFed (Yang et al. 2023): clients share noisy versions of the image parts that decide the class, then run FedAvg.

In the `distill_rounds` rounds of stage 1, the cohort trains a small autoencoder, the splitter, with an auxiliary copy
of the classifier by federated averaging. In stage 2, every client uploads its residuals (residuals.py) once, at two
levels of Gaussian noise and with labels, and the server sends each client those that it lacks. A client trains as in
FedAvg, with as many residuals of all owners, drawn evenly over the classes, in each batch.

Privacy: residuals of training images, and their labels, leave the client by design, and every client gets and stores
them, in float16 at the model's input size. The noise is fixed, no bound on what they reveal is computed, and a residual
may show its image. Do not use this method where images or labels must not leave their owner.

Departs from the paper: stage 1 takes 4 rounds, not 15, and its weight on reconstruction falls with the epochs trained
before the round; the divergence of the code is per pixel and color; the splitter has two convolutions; residuals are
of normalized images, without augmentation, from the mean code. The classifier of stage 2 starts from the initial
weights and is shown untrained until then, so a run must be longer than stage 1, which always uses AdamW at 1e-3.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch.optim import AdamW

from fedvit.core import tree
from fedvit.core.client import Client
from fedvit.core.payload import Payload
from fedvit.core.plan import Plan, Report
from fedvit.core.server import Server
from fedvit.core.settings import Count, NotNegative
from fedvit.core.training import descend
from fedvit.core.tree import Tree
from fedvit.methods.residuals import CONTENTS, nbytes_per_image, residuals, splitting_loss, with_residuals
from fedvit.models.plugins.specs import Splitter


def parts(weights: Tree) -> tuple[Tree, Tree]:
    """Separate the splitter's weights from the classifier's."""
    splitter = {name: tensor for name, tensor in weights.items() if name.split(".")[0] == Splitter.kind}
    return splitter, {name: tensor for name, tensor in weights.items() if name not in splitter}


def _send(server: Server, client: str, distill_rounds: int) -> Payload:
    """Send splitter and auxiliary classifier in stage 1; in stage 2, send the classifier and what the client lacks."""
    splitter, classifier = parts(server.shared)
    if server.round < distill_rounds:
        return Payload({"shared": splitter, "auxiliary": server.memory["auxiliary"]})
    added = server.memory.get("added", {})
    since = server.memory.get("received", {}).get(client, torch.tensor(0))
    new = {owner for owner, round_ in added.items() if owner != client and round_ > since}
    features = {n: t for n, t in server.memory.get("features", {}).items() if n.rpartition(":")[0] in new}
    return Payload({"shared": classifier if client in added else server.shared, "features": features})


def _receive(client: Client, down: Payload) -> Tree:
    if "auxiliary" in down.trees:
        return tree.overlay(down.trees["shared"], down.trees["auxiliary"])
    client.memory["features"] = tree.overlay(client.recall("features", {}), down.trees.get("features", {}))
    return down.trees["shared"]


def train(client: Client, start: Tree, distill_rounds: int, mild: float, strong: float) -> Tree:
    if client.round <= distill_rounds:
        loss = splitting_loss(client, mild, strong)
        return descend(client, start, loss=loss, optimizer=lambda named: AdamW(list(named.values()), lr=1e-3))
    splitter, classifier = parts(start)
    if splitter:  # the server sends it to clients that have not uploaded yet
        own = {f"{client.id}:{kind}": t for kind, t in residuals(client, splitter, mild, strong).items()}
        client.memory["features"] = tree.overlay(client.recall("features", {}), own)
    return descend(client, classifier, loss=with_residuals(client, client.recall("features", {})), only=classifier)


def report(client: Client, start: Tree, end: Tree, distill_rounds: int) -> Payload:
    splitter, classifier = parts(end)
    if client.round <= distill_rounds:
        return Payload({"shared": splitter, "auxiliary": classifier})
    stored = client.recall("features", {}) if parts(start)[0] else {}
    own = {"features": {kind: stored[f"{client.id}:{kind}"] for kind in CONTENTS}} if stored else {}
    return Payload({"shared": classifier, **own})


def _aggregate(server: Server, reports: Iterable[Report], distill_rounds: int) -> Server:
    """Take FedAvg's mean of what this stage trains, and note who has sent and received which residuals."""
    memory = {kind: dict(server.memory.get(kind, {})) for kind in ("features", "added", "received")}

    def noted() -> Iterator[tuple[float, Tree]]:
        for client, weight, payload in reports:
            trees = payload.trees
            if "features" in trees:  # copied, because a view would keep the whole answer
                memory["features"] |= {f"{client}:{kind}": tensor.clone() for kind, tensor in trees["features"].items()}
                memory["added"][client] = torch.tensor(server.round + 1)
            memory["received"][client] = torch.tensor(server.round)
            yield weight, tree.overlay(trees["shared"], trees.get("auxiliary", {}))

    mean = server.combine(noted())
    if server.round >= distill_rounds:
        return replace(server, shared=tree.overlay(server.shared, mean), memory=memory)
    splitter, auxiliary = parts(mean)
    return replace(server, shared=tree.overlay(server.shared, splitter), memory={"auxiliary": auxiliary})


def plan(distill_rounds: Count = 4, mild: NotNegative = 0.15, strong: NotNegative = 0.25) -> Plan:
    return Plan(
        name="fedfed",
        build=(Splitter(),),
        start=lambda module, shared: {"auxiliary": parts(shared)[1]},
        dispatch=partial(_send, distill_rounds=distill_rounds),
        merge=_receive,
        local=partial(train, distill_rounds=distill_rounds, mild=mild, strong=strong),
        report=partial(report, distill_rounds=distill_rounds),
        aggregate=partial(_aggregate, distill_rounds=distill_rounds),
        views=lambda client, down: {"personal": tree.overlay(client.initial, parts(down.trees["shared"])[1])},
        not_private="sends residuals of single images, which no noise in gradients protects",
        not_between_sites="sends residuals of training images, and their labels, to all sites: run it on one machine",
        one_label_only="draws the residuals that it shares evenly over exclusive classes",
        loss_terms=2,
        passes=lambda epochs: 3.0,
        costs=lambda client: {"nbytes_once_per_image": nbytes_per_image(client, parts(client.initial)[0])},
    )
