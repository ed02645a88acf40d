"""PFedEdit (Yuan et al. 2024): each client uses model editing to choose which layers of its last model to restore.

Each layer of the received model is replaced, one at a time, with the client's own and tried on held-out probe images;
the best k replacements stay, k being a share of the layers, rounded up. Everything is trained, sent and averaged; the
choice is sent as a mask. Clients are tested with the edited model.

Departs from the paper: the layers are by default all modules with weights (41 in ResNet18) instead of the paper's
count (54, layers=paper), which has some that hold no weights: an edit of these changes nothing and can take a place.
Probe images are never trained on, as in its parameter study and code, where its algorithm trains on all images;
`held_out` holds more out than are tried. Equal prediction lists go to the larger mean effect, then to the earlier
layer; its code has the effect before the last count, which is the same unless an effect is exactly zero. Every client
is tested after every round, and the last round counts, not the best. A client that is not sampled edits with its last
model. flexible=false keeps the layers of a client's first editing, because the paper does not say when it chooses; a
random choice is then the same for all clients, as in Figure 2. Its released code does something else: layers inside
others are never exchanged, and the probe images are shuffled between the two predictions that are compared.
"""

from collections.abc import Mapping
from functools import partial
from typing import Annotated

import torch
from pydantic import Field
from torch import nn

from fedvit.core import randomness, tree
from fedvit.core.client import Client
from fedvit.core.errors import UserError
from fedvit.core.payload import Payload
from fedvit.core.plan import LayerChoice, Plan, overwrite
from fedvit.core.roles import Roles
from fedvit.core.settings import Whole
from fedvit.core.training import holding
from fedvit.core.tree import Tree
from fedvit.methods.fedala import train_and_remember
from fedvit.methods.layer_editing import Metric, Rule, Size, edited_logits, layers_of, probe_batches, ranking


def choose(
    client: Client, received: Tree, last: Tree, k: int, metric: Metric, rule: Rule, *, flexible: bool = True
) -> list[int]:
    """Choose the k layers to restore, in model order."""
    layers = layers_of(client.module, client.roles.trainable, rule)
    if metric == "random":
        generator = client.rng("edit") if flexible else randomness.generator(client.settings.seed, "edit")
        return sorted(torch.randperm(len(layers), generator=generator)[:k].tolist())
    with holding(client, last) as predict, torch.no_grad():
        own = torch.cat([predict(x).cpu() for x, _ in probe_batches(client)])
    y = client.data.labels[client.data.probe]
    return sorted(ranking(edited_logits(client, received, last, layers), own, y, metric)[:k])


def edit(client: Client, down: Payload, size: Size, metric: Metric, flexible: bool, rule: Rule) -> Tree:
    received, last = overwrite(client, down), client.memory.get("last")
    layers = layers_of(client.module, client.roles.trainable, rule)
    k = size.of(len(layers))
    mask = torch.zeros(len(layers), dtype=torch.uint8)
    client.scratch["choice"] = {"layers": mask}
    if not isinstance(last, dict) or k == 0:
        return received
    kept = client.memory.get("choice")
    if flexible or not isinstance(kept, dict):
        mask[choose(client, received, last, k, metric, rule, flexible=flexible)] = 1
    else:
        mask.copy_(kept["layers"])
    if not flexible:
        client.memory["choice"] = {"layers": mask}
    names = [name for layer, chosen in zip(layers, mask.tolist(), strict=True) if chosen for name in layer.tensors]
    return tree.overlay(received, tree.pick(last, names))


def _report_choice(client: Client, start: Tree, end: Tree, rule: Rule) -> Payload:
    layers = len(layers_of(client.module, client.roles.trainable, rule))
    choice = client.scratch.get("choice") or {"layers": torch.zeros(layers, dtype=torch.uint8)}
    return Payload({"shared": tree.pick(end, client.roles.shared), "choice": choice})


def plan(
    k: Whole | None = None,
    ratio: Annotated[float, Field(gt=0, le=1)] = 0.07,
    probe: Annotated[float, Field(gt=0, lt=1)] = 0.1,
    metric: Metric = "prediction_list",
    flexible: bool = True,
    layers: Rule = "leaves",
    held_out: Annotated[float, Field(gt=0, lt=1)] | None = None,
) -> Plan:
    if held_out is not None and held_out < probe:
        raise UserError(f"method.held_out={held_out:g} is less than method.probe={probe:g}, which is taken from it")
    find = partial(layers_of, rule=layers)
    put_back = partial(edit, size=Size(k, ratio), metric=metric, flexible=flexible, rule=layers)

    def check(module: nn.Module, roles: Roles) -> None:
        known = len(find(module, roles.trainable))
        if k is not None and k > known:
            raise UserError(f"method.k={k} is more than the {known} layers there are: choose 0 to {known}")

    def remembers(module: nn.Module, trainable: Tree) -> Mapping[str, Tree]:
        mask = torch.zeros(len(find(module, trainable)), dtype=torch.uint8)
        return {"last": trainable} if flexible else {"last": trainable, "choice": {"layers": mask}}

    def probe_passes(client: Client) -> int:
        """Count the passes: one of the client's last model, and one of every edit that changes something."""
        if k == 0 or metric == "random":
            return 0
        return 1 + sum(bool(layer.tensors) for layer in find(client.module, client.roles.trainable))

    return Plan(
        name="pfededit",
        merge=put_back,
        local=train_and_remember,
        report=partial(_report_choice, rule=layers),
        views=lambda client, down: {"personal": put_back(client, down)},
        weighting="equal",
        check=check,
        remembers=remembers,
        unprotected=("the layers that a client chooses",),
        choice=LayerChoice(lambda module, roles: [x.name for x in find(module, roles.trainable)], probe, held_out),
        costs=lambda client: {"probe_passes": probe_passes(client)},
    )
