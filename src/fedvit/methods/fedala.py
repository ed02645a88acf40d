"""FedALA (Zhang et al. 2023): each client learns, number by number, how much of the new global weights to adopt.

Below the last `p` tensors, the client adopts everything. In those tensors, a weight W in [0, 1] interpolates from the
client's last model to the global one; it is learned on local images before training and kept between rounds. Clients
are tested with the merged model.
Departs from the paper: `p` counts tensors, as in its code (the paper counts layers); the first learning of W
stops after `most_epochs` if its losses never settle. A client without a last model adopts everything. W is learned in
evaluation mode. For a test, all clients learn it, but only those that train keep it: a client that is not sampled does
not change.
"""

from collections.abc import Mapping
from functools import partial
from typing import Annotated

import torch
from pydantic import Field
from torch import nn

from fedvit.core import tree
from fedvit.core.batches import image_batches
from fedvit.core.client import Client
from fedvit.core.payload import Payload
from fedvit.core.plan import Plan
from fedvit.core.roles import is_statistic
from fedvit.core.settings import Count, NotNegative
from fedvit.core.training import descend, eval_mode, gradient
from fedvit.core.tree import Tree
from fedvit.models.groups import head

SETTLED, WATCHED = 0.1, 10  # the first learning of W ends at this deviation of the last epochs' losses


def _last_tensors(module: nn.Module, weights: Tree, p: int) -> list[str]:
    """List the last p tensors of a model; the classifier's come after those of any plugin."""
    heads = head.match(module)
    names = [name for name in weights if not is_statistic(name)]
    return sorted(names, key=lambda name: name in heads)[-p:]


def _step(mix: Tree, slopes: Tree, way: Tree, eta: float) -> Tree:
    """Return W after one step; by the chain rule, its gradient is slope * (global - last)."""
    return {name: (mix[name] - eta * slopes[name] * way[name]).clamp(0, 1) for name in mix}


def _merge(client: Client, down: Payload, eta: float, share: float, p: int, most_epochs: int) -> Tree:
    received, last, known = down.trees["shared"], client.memory.get("last"), client.memory.get("mix")
    if not isinstance(last, dict):
        return received
    names, device = _last_tensors(client.module, client.initial, p), client.settings.device  # in model order
    placed = {name: tensor.to(device) for name, tensor in received.items()}
    old = {name: last[name].to(device) for name in names}
    way = {name: placed[name] - old[name] for name in names}
    mix = {n: t.to(device) for n, t in known.items()} if isinstance(known, dict) else _ones(old)
    count = max(1, round(len(client.data.train) * share / 100))
    begin = int(torch.randint(len(client.data.train) - count + 1, (), generator=client.rng("ala")))
    images, losses = client.data.train[begin : begin + count], []
    with eval_mode(client.module):
        for _ in range(1 if isinstance(known, dict) else most_epochs):
            total = 0.0
            for x, y in image_batches(client.data, images, client.settings.batch, client.inputs, device):
                merged = {**placed, **{name: torch.lerp(old[name], placed[name], mix[name]) for name in names}}
                value, slopes = gradient(client, merged, x, y, only=names)
                mix = _step(mix, slopes, way, eta)
                total += value.item() * len(y)
            losses.append(total / count)
            if len(losses) > WATCHED and torch.tensor(losses[-WATCHED:]).std(correction=0) < SETTLED:
                break
    client.memory["mix"] = {name: tensor.cpu() for name, tensor in mix.items()}
    merged = {name: torch.lerp(old[name], placed[name], mix[name]).cpu() for name in names}
    return tree.overlay(received, merged)


def _ones(like: Tree) -> Tree:
    return {name: torch.ones_like(tensor) for name, tensor in like.items()}


def train_and_remember(client: Client, start: Tree) -> Tree:
    end = descend(client, start)
    client.memory["last"] = end
    return end


def plan(
    eta: NotNegative = 1.0,
    share: Annotated[float, Field(gt=0, le=100)] = 80.0,
    p: Count = 2,
    most_epochs: Count = 50,
) -> Plan:
    adapt = partial(_merge, eta=eta, share=share, p=p, most_epochs=most_epochs)

    def merged_model(client: Client, down: Payload) -> Mapping[str, Tree]:
        return {"personal": adapt(client, down)}

    return Plan(
        name="fedala",
        merge=adapt,
        local=train_and_remember,
        views=merged_model,
        not_private="learns its mixing weights from losses, for as many epochs as they say, without noise",
        passes=lambda epochs: (
            1 + share / 100 / 3 / epochs
        ),  # W costs a forward pass, and a backward pass through a few tensors
        remembers=lambda module, trainable: {
            "last": trainable,
            "mix": tree.pick(trainable, _last_tensors(module, trainable, p)),
        },
    )
