"""PFedEdit (Yuan et al. 2024): each client uses model editing to choose which layers of its last model to restore.

Each layer of the received model is replaced, one at a time, with the client's own and tried on held-out probe images;
the best k replacements stay. Everything is trained, sent and averaged; the choice is sent as a mask. Clients are tested
with the edited model.
Departs from the paper: nothing, but its released code does something else (nested layers are never exchanged, and the
probe images are shuffled between the two predictions that are compared). Ties go to the larger mean effect, then to
the earlier layer. flexible=false keeps the first choice: probe images are tried only at a client's first editing.
layers=resnet54 counts layers as its code does; layers=norms edits only normalization layers (its Figure 2).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from fedvit.core import tree
from fedvit.core.client import Client
from fedvit.core.errors import UserError
from fedvit.core.payload import Payload
from fedvit.core.plan import LayerChoice, Plan, overwrite
from fedvit.core.roles import Roles
from fedvit.core.settings import Whole
from fedvit.core.training import holding
from fedvit.core.tree import Tree
from fedvit.methods.fedala import train_and_remember
from fedvit.methods.layer_editing import Rule, edited_logits, layers_of, probe_batches

Metric = Literal["prediction_list", "te", "loss", "accuracy", "random"]


@dataclass(frozen=True)
class Size:
    """How many layers to restore: k of them, or a share of all, rounded up."""

    k: int | None
    ratio: float

    def of(self, layers: int) -> int:
        return self.k if self.k is not None else math.ceil(self.ratio * layers - 1e-9)


def ranking(logits: Tensor, own: Tensor, y: Tensor, metric: Metric) -> list[int]:
    """Rank layers, best first, by logits (layers, images, classes) of edits and (images, classes) of the own model."""
    edited, alone = (F.log_softmax(v.double(), dim=-1) for v in (logits, own))
    chance = edited.exp().gather(-1, y.expand(len(edited), -1).unsqueeze(-1)).squeeze(-1)
    before = alone.exp().gather(-1, y.unsqueeze(-1)).squeeze(-1)
    effect = chance / before.clamp(min=1e-12) - 1
    right = logits.argmax(-1) == y
    better, worse = effect > 0, effect < 0
    cases = (right & better, right & worse, ~right & better, ~right & worse)
    te = effect.mean(1)
    keys: dict[Metric, tuple[Tensor, ...]] = {
        "prediction_list": (*(case.sum(1) for case in cases), te),
        "te": (te,),
        "loss": (chance.clamp(min=1e-300).log().mean(1),),
        "accuracy": (right.sum(1),),
    }
    columns = [key.tolist() for key in keys[metric]]
    return sorted(range(len(logits)), key=lambda layer: tuple(-column[layer] for column in columns))


def choose(client: Client, received: Tree, last: Tree, k: int, metric: Metric, rule: Rule) -> list[int]:
    """Choose the k layers to restore, in model order."""
    layers = layers_of(client.module, client.roles.trainable, rule)
    if metric == "random":
        return sorted(torch.randperm(len(layers), generator=client.rng("edit"))[:k].tolist())
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
        mask[choose(client, received, last, k, metric, rule)] = 1
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
) -> Plan:
    put_back = partial(edit, size=Size(k, ratio), metric=metric, flexible=flexible, rule=layers)

    def check(module: nn.Module, roles: Roles) -> None:
        known = len(layers_of(module, roles.trainable, layers))
        if k is not None and k > known:
            raise UserError(f"method.k={k} is more than the {known} layers there are: choose 0 to {known}")

    def edited(client: Client, down: Payload) -> Mapping[str, Tree]:
        return {"personal": put_back(client, down)}

    def remembers(module: nn.Module, trainable: Tree) -> Mapping[str, Tree]:
        mask = torch.zeros(len(layers_of(module, trainable, layers)), dtype=torch.uint8)
        return {"last": trainable} if flexible else {"last": trainable, "choice": {"layers": mask}}

    def names(module: nn.Module, roles: Roles) -> list[str]:
        return [layer.name for layer in layers_of(module, roles.trainable, layers)]

    def probe_passes(client: Client) -> int:
        """Count the passes: one of the client's last model, and one of every edit that changes something."""
        if k == 0 or metric == "random":
            return 0
        return 1 + sum(bool(layer.tensors) for layer in layers_of(client.module, client.roles.trainable, layers))

    return Plan(
        name="pfededit",
        merge=put_back,
        local=train_and_remember,
        report=partial(_report_choice, rule=layers),
        views=edited,
        weighting="equal",
        check=check,
        remembers=remembers,
        choice=LayerChoice(names, probe),
        costs=lambda client: {"probe_passes": probe_passes(client)},
    )
