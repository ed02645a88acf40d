"""The one inner loop that everyone shares. Only here are tensors changed in place."""

import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from fedvit import randomness
from fedvit.client import Client, LocalSettings, Predictor
from fedvit.errors import UserError
from fedvit.tree import Tree


def descend(
    client: Client,
    start: Tree,
    *,
    only: Collection[str] | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    tag: str = "train",
) -> Tree:
    """Train on the client's batches from `start` and return the end, `start` untouched.

    `only` names the weights that learn (default: all trainable ones), `steps` stops after so many batches.
    `start` may also hold weights that are frozen in the plan; the module gets its frozen values back.
    """
    settings, module = client.settings, client.module
    learn = set(client.roles.trainable if only is None else only)
    live = client.live
    load_(live, start)
    parameters = []
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in learn)
        if name in learn:
            parameters.append(parameter)
    batch_norm = train_mode_(module)
    loss_sum, seen = torch.zeros((), device=settings.device), 0
    if parameters:
        optimizer = make_optimizer(settings, parameters)
        batches = client.batches(settings.epochs if epochs is None else epochs, tag)
        with randomness.addressed(settings.seed, client.round, client.id, tag, "dropout"):
            for x, y in itertools.islice(batches, steps):
                if len(y) == 1 and batch_norm:
                    continue  # one image has no variance
                with settings.autocast():
                    loss = F.cross_entropy(module(x).float(), y)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                loss_sum += loss.detach() * len(y)
                seen += len(y)
    end = {name: live[name].detach().to("cpu", copy=True) for name in start}
    if seen:
        client.scalars["loss"] = loss_sum.item() / seen
        check_finite(client, end)
    restore_frozen_(client, start)
    return end


@contextmanager
def holding(client: Client, tree: Tree) -> Iterator[Predictor]:
    """The worker's one module with these weights, in evaluation mode: quicker than `client.net`, one at a time."""
    load_(client.live, tree)
    client.module.eval()

    def predict(x: Tensor) -> Tensor:
        with client.settings.autocast():
            logits: Tensor = client.module(x)
        return logits.float()

    try:
        yield predict
    finally:
        restore_frozen_(client, tree)


def restore_frozen_(client: Client, tree: Tree) -> None:
    """Give the module back the frozen values that a tree has covered."""
    load_(client.live, {name: client.frozen[name] for name in tree if name in client.frozen})


def make_optimizer(settings: LocalSettings, parameters: list[nn.Parameter]) -> Optimizer:
    """A fresh optimiser: no state lives longer than one call of `descend`."""
    lr, decay = settings.lr, settings.weight_decay
    fused = settings.device.type in (
        "cpu",
        "cuda",
    )  # one kernel for all tensors: a small model is mostly overhead
    match settings.optimizer:
        case "sgd":
            return SGD(parameters, lr, momentum=settings.momentum, weight_decay=decay, fused=fused)
        case "adam":
            return Adam(parameters, lr, weight_decay=decay, fused=fused)
        case "adamw":
            return AdamW(parameters, lr, weight_decay=decay, fused=fused)


def load_(live: Mapping[str, Tensor], tree: Tree) -> None:
    """Copy a tree into the module's own tensors."""
    with torch.no_grad():
        for name, tensor in tree.items():
            live[name].copy_(tensor, non_blocking=True)


def train_mode_(module: nn.Module) -> bool:
    """Training mode, but batch normalisation whose weights are frozen keeps its statistics too.

    Returns whether any batch normalisation is being trained.
    """
    module.train()
    training = False
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.train(any(p.requires_grad for p in part.parameters()))
            training |= part.training
    return training


def check_finite(client: Client, end: Tree) -> None:
    """A loss or weight that is no longer a number ends the run before it spreads or is written down."""
    loss, settings = client.scalars["loss"], client.settings
    norms = torch.stack(torch._foreach_norm([t for t in end.values() if t.is_floating_point()]))
    if math.isfinite(loss) and bool(norms.isfinite().all()):
        return
    what = f"training loss of client {client.id} became {loss}"
    if math.isfinite(loss):
        what = f"weights of client {client.id} became infinite or not a number"
    raise UserError(
        f"the {what} in round {client.round}; try a smaller --lr (now {settings.lr:g})"
        f"{', or --precision fp32' if settings.precision != 'fp32' else ''}. The last checkpoint is still good."
    )
