"""MOON (Li et al. 2021): a contrastive loss pulls features to the global model's, away from the client's last model's.

Departs from the paper: nothing. projection=0 leaves out its projection head. The last model is that of the client's
last participation, and the initial one before its first.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedvit.core.client import Client, Predictor
from fedvit.core.plan import Plan
from fedvit.core.roles import Roles
from fedvit.core.settings import NotNegative, Positive, Whole
from fedvit.core.training import descend, eval_mode
from fedvit.core.tree import Tree
from fedvit.models.plugins.attach import classifiers, tapped
from fedvit.models.plugins.specs import Projection


def contrast(z: Tensor, near: Tensor, far: Tensor, tau: float) -> Tensor:
    """Return -log of the softmax weight of `near` against `far`, by cosine similarity."""
    similar = torch.stack([F.cosine_similarity(z, near), F.cosine_similarity(z, far)], dim=1) / tau
    return F.cross_entropy(similar.float(), torch.zeros(len(z), dtype=torch.int64, device=z.device))


def features(client: Client, model: Predictor, x: Tensor) -> Tensor:
    with tapped(client.module) as tap, eval_mode(client.module), torch.no_grad():
        model(x)
    return torch.cat(tap.features, dim=1)


def _contrasted(client: Client, start: Tree, mu: float, tau: float) -> Tree:
    received, last = client.net(start), client.net(client.recall("last"))

    def loss(model: Predictor, x: Tensor, y: Tensor) -> Tensor:
        near, far = features(client, received, x), features(client, last, x)
        with tapped(client.module) as tap:
            supervised = client.loss(model, x, y)
        return supervised + mu * contrast(torch.cat(tap.features, dim=1), near, far, tau)

    end = descend(client, start, loss=loss)
    client.memory["last"] = end
    return end


def _need_features(module: nn.Module, roles: Roles) -> None:
    classifiers(module, "moon")


def plan(mu: NotNegative = 1.0, tau: Positive = 0.5, projection: Whole = 256) -> Plan:
    return Plan(
        name="moon",
        build=(Projection(projection),) if projection else (),
        local=partial(_contrasted, mu=mu, tau=tau),
        check=_need_features,
        remembers=lambda module, trainable: {"last": trainable},
        loss_terms=2,
        passes=lambda epochs: (
            5 / 3
        ),  # a forward and backward pass counts as three forward passes; the two other models add one each
    )
