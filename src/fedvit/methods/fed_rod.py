"""Fed-RoD (Chen and Chao 2022): a shared head trained with a balanced loss, and a personal one that corrects it.

The view `personal` is the sum of both heads, and `generic` is the shared one alone.
Departs from the paper: the personal head learns on detached features, as PFLlib reads the paper, and starts at zero, so
that a client that never trained predicts like the shared model. With hyper=true, a shared network makes the personal
head each round from the client's class frequencies and then takes a step towards what the client trained (`hyper_lr`).
Its sizes and learning rate are those of re-implementations, and a client that has trained is tested with the head it
kept, not with a new one.
"""

from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fedvit.core import tree
from fedvit.core.client import Client, Predictor
from fedvit.core.losses import balanced_softmax
from fedvit.core.payload import Payload
from fedvit.core.plan import Plan, overwrite
from fedvit.core.roles import PERSONAL, SHARED, everything
from fedvit.core.settings import Positive
from fedvit.core.training import clipped, descend
from fedvit.core.tree import Tree
from fedvit.models.groups import group
from fedvit.models.plugins.attach import tapped
from fedvit.models.plugins.specs import HeadMaker, SecondHead

second_head = group(SecondHead.kind)


def _two_heads(client: Client, start: Tree, hyper: bool, hyper_lr: float) -> Tree:
    counts = client.data.answer_counts
    seconds = list(client.module.second_head.children())  # type: ignore[union-attr]

    def loss(model: Predictor, x: Tensor, y: Tensor) -> Tensor:
        with tapped(client.module) as tap:
            model(x)
        generic = torch.stack(tap.logits).mean(0).float()
        own = torch.stack([head(h.detach()) for head, h in zip(seconds, tap.features, strict=True)]).mean(0)
        return balanced_softmax(generic, y, counts) + client.criterion(generic.detach() + own.float(), y)

    maker = {name for name in start if name.split(".")[0] == HeadMaker.kind}
    end = descend(client, start, only=set(start) - maker, loss=loss)
    return teach_maker(client, end, hyper_lr) if hyper else end


def made(client: Client, weights: Tree) -> Tensor:
    """Compute all numbers of a personal head from the client's class frequencies."""
    counts = client.data.class_counts.float()
    hidden = F.linear(counts / counts.sum().clamp(min=1), weights["head_maker.0.weight"], weights["head_maker.0.bias"])
    return F.linear(F.relu(hidden), weights["head_maker.2.weight"], weights["head_maker.2.bias"])


def teach_maker(client: Client, end: Tree, lr: float) -> Tree:
    """Move the shared network one step towards the head that the client trained."""
    maker = {name: t.clone().requires_grad_() for name, t in end.items() if name.split(".")[0] == HeadMaker.kind}
    trained = torch.cat([end[name].flatten() for name in client.roles.personal])
    loss = (made(client, maker) - trained).square().sum() / 2
    slopes = torch.autograd.grad(loss, list(maker.values()))
    named = clipped(dict(zip(maker, slopes, strict=True)), client.settings.clip_grad)
    stepped = {name: end[name] - lr * slope for name, slope in named.items()}
    return tree.overlay(end, stepped)


def _make_head(client: Client, down: Payload) -> Tree:
    """Merge as the hypernetwork version does, which makes a new personal head."""
    start = overwrite(client, down)
    names = client.roles.personal
    pieces = torch.split(made(client, start), [start[name].numel() for name in names])
    return tree.overlay(start, {n: p.view_as(start[n]).clone() for n, p in zip(names, pieces, strict=True)})


def _both_and_generic(client: Client, down: Payload, hyper: bool) -> Mapping[str, Tree]:
    own = overwrite(client, down)
    if hyper and "personal" not in client.memory:
        own = _make_head(client, down)
    silent = {name: torch.zeros_like(own[name]) for name in client.roles.personal}
    return {"personal": own, "generic": tree.overlay(own, silent)}


def plan(hyper: bool = False, hyper_lr: Positive = 0.1) -> Plan:
    return Plan(
        name="fed_rod",
        build=(SecondHead(), HeadMaker()) if hyper else (SecondHead(),),
        roles=((second_head, PERSONAL), (everything, SHARED)),
        merge=_make_head if hyper else overwrite,
        local=partial(_two_heads, hyper=hyper, hyper_lr=hyper_lr),
        views=partial(_both_and_generic, hyper=hyper),
        unprotected=("the frequencies of a client's classes, which the balanced loss uses",),
        loss_terms=2,
    )
