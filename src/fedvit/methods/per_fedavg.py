"""Per-FedAvg (Fallah et al. 2020), first order: the shared model learns to perform well after one local step.

Each batch has twice the run's batch size: the client takes a gradient step on the first half, and the gradient of the
second half at that point moves the weights from before the step. Clients are tested after `eval_steps` gradient
steps on training batches, whose result is then discarded.
Departs from the paper: first order. The inner step is plain SGD at the run's learning rate (FedPerfix's code: beta =
rate = 0.001); the outer one is the run's optimizer at beta. A last batch without a second half changes nothing, and a
client with fewer images than two batches halves all it has. So a step costs twice as much as FedAvg's and an epoch as
much as FedAvg's, with half the steps. If you set beta or eval_lr, it follows neither train.schedule nor train.warmup.
"""

import itertools
from collections.abc import Iterator, Mapping
from functools import partial

from fedvit.core.batches import Batch
from fedvit.core.client import Client
from fedvit.core.payload import Payload
from fedvit.core.plan import Plan, overwrite
from fedvit.core.settings import Count, Positive
from fedvit.core.training import Learner, clipped, gradient, learns_statistics, note_loss, training
from fedvit.core.tree import Tree


def _step(client: Client, weights: Tree, slope: Tree, lr: float | None = None) -> Tree:
    """Take one step of plain SGD along the clipped gradient; `lr` replaces the run's."""
    slope = clipped(slope, client.settings.clip_grad)
    return {**weights, **{name: weights[name].detach() - client.lr_of(name, lr) * g for name, g in slope.items()}}


def _halves(client: Client) -> Iterator[tuple[Batch, Batch]]:
    """Yield both halves of each batch; where training is private, they are batches of their own."""
    size = min(2 * client.settings.batch, len(client.data.train))
    half = max(1, size // 2)
    private = client.private is not None
    with training(client, client.roles.trainable, size=half if private else size) as batches:
        if private:
            yield from zip(batches, batches, strict=False)
            return
        least = 2 if learns_statistics(client.module) else 1  # batch normalization needs more than one image
        for x, y in batches:
            if len(y) >= half + least and half >= least:
                yield (x[:half], y[:half]), (x[half:], y[half:])


def _meta_train(client: Client, start: Tree, beta: float | None) -> Tree:
    learner = Learner(client, start, lr=beta)
    for (x, y), (other_x, other_y) in _halves(client):
        _, slope = gradient(client, learner.weights, x, y)
        ahead = _step(client, learner.weights, slope)
        value, slope = gradient(client, ahead, other_x, other_y)
        learner.losses.append((len(other_y), value))
        learner.step(slope)
    end = learner.end()
    note_loss(client, learner.losses, end)
    return end


def _after_steps(client: Client, down: Payload, lr: float | None, steps: int) -> Mapping[str, Tree]:
    device = client.settings.device
    weights = {name: tensor.to(device, copy=True) for name, tensor in overwrite(client, down).items()}
    epochs = -(-steps * client.settings.batch // len(client.data.train))  # enough epochs for this many batches
    with training(client, client.roles.trainable, epochs=epochs, tag="finetune") as batches:
        for x, y in itertools.islice(batches, steps):
            _, slope = gradient(client, weights, x, y)
            weights = _step(client, weights, slope, lr)
    return {"personal": {name: tensor.detach().cpu() for name, tensor in weights.items()}}


def plan(beta: Positive | None = None, eval_lr: Positive | None = None, eval_steps: Count = 1) -> Plan:
    return Plan(
        name="per_fedavg",
        local=partial(_meta_train, beta=beta),
        views=partial(_after_steps, lr=eval_lr, steps=eval_steps),
    )
