"""APFL (Deng et al. 2020): every client mixes a model of its own with the shared one and learns the proportion.

Departs from the paper: mode=paper trains the client's own model through the mixture of weights, alpha * own +
(1 - alpha) * shared, updates alpha once per round along its exact derivative, and tests the mixture with the newest
shared weights. That the paper mixes weights is an assumption; the authors' code mixes logits, tests before aggregation
and averages the shared models regardless of dataset sizes, which train.weighting=equal does here. mode=fork follows
FedPerfix's code: the own model trains alone, alpha is updated at every batch, and the mixture is written into the own
model after each round. Both modes include the authors' pull of alpha towards zero, 0.02 * alpha. adaptive=false leaves
alpha unchanged.
"""

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedvit.core.client import Client
from fedvit.core.payload import Payload
from fedvit.core.plan import Plan
from fedvit.core.settings import Number
from fedvit.core.training import Learner, gradient, note_loss, training
from fedvit.core.tree import Tree

Mode = Literal["paper", "fork"]
PULL = 0.02


def _mixture(client: Client, shared: Tree, own: Tree, alpha: float) -> Tree:
    """Mix the parameters; batch statistics are those of the client's own model."""
    parameters = {name for name, _ in client.module.named_parameters()}
    return {
        name: torch.lerp(shared[name].detach(), own[name].detach(), alpha) if name in parameters else own[name]
        for name in own
    }


def stepped(alpha: float, lr: float, own: Tree, shared: Tree, slopes: Tree) -> float:
    """Return alpha after one step along <own - shared, slope>, clipped to [0, 1]."""
    inner: Tensor = sum((own[name].detach() - shared[name].detach()).mul(g).sum() for name, g in slopes.items())  # type: ignore[assignment]
    return min(1.0, max(0.0, alpha - lr * (float(inner) + PULL * alpha)))


def _train_both(client: Client, start: Tree, mode: Mode, alpha: float, adaptive: bool) -> Tree:
    alpha = _recalled(client, alpha)
    shared, own = Learner(client, start), Learner(client, client.recall("own"))
    with training(client, client.roles.trainable) as batches:
        for number, (x, y) in enumerate(batches):
            slope = shared.learn(x, y)
            if mode == "fork":
                own_slope = own.learn(x, y)
                if adaptive:
                    mixed = {name: torch.lerp(slope[name], own_slope[name], alpha) for name in slope}
                    alpha = stepped(alpha, client.settings.lr, own.weights, shared.weights, mixed)
                continue
            _, slope = gradient(client, _mixture(client, shared.weights, own.weights, alpha), x, y)
            along = {name: alpha * g for name, g in slope.items()}
            if adaptive and number == 0:
                alpha = stepped(alpha, client.settings.lr, own.weights, shared.weights, slope)
            own.step(along)
    end, mine = shared.end(), own.end()
    client.memory["alpha"] = alpha
    client.memory["own"] = _mixture(client, end, mine, alpha) if mode == "fork" else mine
    note_loss(client, shared.losses, {**end, **{f"own {name}": tensor for name, tensor in mine.items()}})
    return end


def _recalled(client: Client, alpha: float) -> float:
    known = client.memory.get("alpha", alpha)
    assert isinstance(known, float)
    return known


def _mixed_model(client: Client, down: Payload, mode: Mode, alpha: float) -> Mapping[str, Tree]:
    own = client.recall("own")
    if mode == "paper":
        own = _mixture(client, down.trees["shared"], own, _recalled(client, alpha))
    return {"personal": own}


def plan(
    mode: Mode = "paper",
    alpha: Annotated[float, Number, Field(ge=0, le=1)] | None = None,
    adaptive: bool = True,
) -> Plan:
    first = alpha if alpha is not None else {"paper": 0.5, "fork": 0.25}[mode]
    return Plan(
        name="apfl",
        local=partial(_train_both, mode=mode, alpha=float(first), adaptive=adaptive),
        views=partial(_mixed_model, mode=mode, alpha=float(first)),
        remembers=lambda module, trainable: {"own": trainable},
        passes=lambda epochs: 2.0,
    )
