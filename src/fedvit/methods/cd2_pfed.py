"""CD2-pFed (Shen et al. 2022): a growing share of every tensor's channels is private, and both parts learn to agree.

In round 1 everything is shared; by round `ramp` a `share` of each tensor's output channels (the last ones) is private
and no longer sent, so `fedvit cost` shows the first round, the most expensive. The loss is the cross-entropy of the
whole network, plus `weight` times the symmetric KL divergence of two sub-networks: that of shared channels and that of
private ones, each with the other's weights at zero. The classifier is split by its inputs, so that no class is
private, and its bias is shared. share=0 is FedAvg; share=1 with ramp=1 is Local but for that bias.

Departs from the paper: we had only its abstract and a summary. Assumed are linear growth over `ramp` rounds (a client
does not know the run's length), share, weight and temperature, gradients through both sub-networks, and that the last
channels are private first. Queries, keys and values are split alike. `beta`, the share of new weights in the average
over local epochs, is constant; 1 turns averaging off, below 1 each epoch has a fresh optimizer. Private channels start
from a client's last or the initial ones. The server keeps the last values of channels that nobody shares.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from fedvit.core.client import Client, Loss, Predictor
from fedvit.core.payload import Payload
from fedvit.core.plan import Plan, Report
from fedvit.core.server import Server
from fedvit.core.settings import Count, Fraction, NotNegative, Positive
from fedvit.core.training import descend
from fedvit.core.tree import Tree
from fedvit.models.channels import cut, paste, places

Ramp = partial[float]  # from a round's number to its private share


def _private_share(round_: int, share: float, ramp: int) -> float:
    return share * (1.0 if ramp == 1 else min(1.0, (round_ - 1) / (ramp - 1)))


def _send_channels(server: Server, client: str, ramp: Ramp) -> Payload:
    private = ramp(server.round + 1)
    return Payload({"channels": cut(server.shared, server.memory["places"], private)}, {"private": private})


def _own_channels_kept(client: Client, down: Payload) -> Tree:
    place = places(client.module, client.initial)
    return paste(client.recall("own"), down.trees["channels"], place, down.scalars["private"])


def _symmetric_kl(a: Tensor, b: Tensor, temperature: float, *, several_labels: bool) -> Tensor:
    """Return the mean divergence of two answers; with several labels, of yes and no for each label."""
    if several_labels:
        a, b = (logits.float() / temperature for logits in (a, b))
        return 0.5 * ((a.sigmoid() - b.sigmoid()) * (a - b)).mean()
    a, b = (F.log_softmax(logits.float() / temperature, dim=1) for logits in (a, b))
    return 0.5 * ((a.exp() - b.exp()) * (a - b)).sum(1).mean()


def two_way_loss(client: Client, private: float, weight: float, temperature: float) -> Loss:
    """Make the loss: cross-entropy, plus the disagreement of both kinds of channels as long as both exist."""
    place = {n: t.to(client.settings.device) for n, t in places(client.module, client.initial).items()}
    divergence = partial(_symmetric_kl, temperature=temperature, several_labels=client.data.several_labels)
    names = [name for name, _ in client.module.named_parameters() if name in place]
    both = private < 1 and any(bool((place[name] >= 1 - private).any()) for name in names)

    def loss(model: Predictor, x: Tensor, y: Tensor) -> Tensor:
        value = client.loss(model, x, y)
        if not both:
            return value
        now, outputs = dict(client.module.named_parameters()), []  # a private gradient has put its own there
        for keep_shared in (True, False):
            masked = {name: now[name] * ((place[name] < 1 - private) == keep_shared) for name in names}
            scratch = {name: buffer.clone() for name, buffer in client.module.named_buffers()}
            outputs.append(functional_call(client.module, {**scratch, **masked}, (x,)))
        return value + weight * divergence(*outputs)

    return loss


def _train_both(client: Client, start: Tree, ramp: Ramp, weight: float, temperature: float, beta: float) -> Tree:
    loss = two_way_loss(client, ramp(client.round), weight, temperature)
    end = descend(client, start, loss=loss) if beta == 1 else start
    for epoch in range(client.settings.epochs if beta < 1 else 0):
        trained = descend(client, end, epochs=1, tag=f"train {epoch}", loss=loss)
        end = {name: end[name].lerp(tensor, beta) for name, tensor in trained.items()}
    client.memory["own"] = end
    return end


def _report_channels(client: Client, start: Tree, end: Tree, ramp: Ramp) -> Payload:
    return Payload({"channels": cut(end, places(client.module, end), ramp(client.round))})


def _average_channels(server: Server, reports: Iterable[Report], ramp: Ramp) -> Server:
    mean = server.combine((r.weight, r.payload.trees["channels"]) for r in reports)
    return replace(server, shared=paste(server.shared, mean, server.memory["places"], ramp(server.round + 1)))


def plan(
    share: Fraction = 0.5,
    ramp: Count = 10,
    weight: NotNegative = 1.0,
    temperature: Positive = 1.0,
    beta: Fraction = 1.0,
) -> Plan:
    grows = partial(_private_share, share=share, ramp=ramp)
    return Plan(
        name="cd2_pfed",
        start=lambda module, shared: {"places": places(module, shared)},
        dispatch=partial(_send_channels, ramp=grows),
        merge=_own_channels_kept,
        local=partial(_train_both, ramp=grows, weight=weight, temperature=temperature, beta=beta),
        report=partial(_report_channels, ramp=grows),
        aggregate=partial(_average_channels, ramp=grows),
        views=lambda client, down: {"personal": _own_channels_kept(client, down)},
        remembers=lambda module, trainable: {"own": trainable},
        loss_terms=2,
        passes=lambda epochs: 1.0 if share == 0 or (share == 1 and ramp == 1) else 3.0,
    )
