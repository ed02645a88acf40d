"""The inner training loop that all methods share. Tensors are modified in place only here."""

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import SGD, Adam, AdamW, Optimizer

from fedvit.core import randomness
from fedvit.core.batches import Batch
from fedvit.core.client import Client, LocalSettings, Loss, Predictor
from fedvit.core.errors import DivergedError
from fedvit.core.tree import Tree

Named = Mapping[str, nn.Parameter]
RateGroup = dict[str, Any]  # parameters with their learning rate, as PyTorch's optimizers take them


def descend(
    client: Client,
    start: Tree,
    *,
    only: Collection[str] | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    tag: str = "train",
    loss: Loss | None = None,
    adjust: Callable[[Named], None] | None = None,
    optimizer: Callable[[Named], Optimizer] | None = None,
) -> Tree:
    """Train on the client's batches from `start` and return the trained weights; `start` is not modified.

    `only` names the weights to train (default: all trainable ones), `steps` stops after this many batches, `loss`
    replaces the client's (`train.loss`), `adjust` may change the gradients before each step and before they are
    clipped, and `optimizer` replaces the one of the settings.
    `start` may also hold weights that the plan freezes; the module gets its frozen values back.
    """
    settings, module, live = client.settings, client.module, client.live
    plain = loss is None  # other losses may look inside the module, which a compiled module does not allow
    model = client.compiled if client.compiled is not None and plain else module
    loss = loss or client.loss
    learn = set(client.roles.trainable if only is None else only)
    load_(live, start)
    losses: list[tuple[int, Tensor]] = []
    parameters = {name: parameter for name, parameter in module.named_parameters() if name in learn}
    if parameters:
        stepper = (
            make_optimizer(settings, rate_groups(client, parameters)) if optimizer is None else optimizer(parameters)
        )
        with training(client, learn, epochs, tag) as batches:
            for x, y in itertools.islice(batches, steps):
                if client.private is None:
                    with settings.autocast():
                        value = loss(model, x, y)
                    stepper.zero_grad(set_to_none=True)
                    value.backward()  # type: ignore[no-untyped-call]
                else:
                    value, slopes = client.private.gradient(client, parameters, list(parameters), x, y, loss)
                    for name, parameter in parameters.items():
                        parameter.grad = slopes[name]
                if adjust is not None:
                    adjust(parameters)
                clip_([p.grad for p in parameters.values() if p.grad is not None], settings.clip_grad)
                stepper.step()
                losses.append((len(y), value.detach()))
    end = {name: live[name].detach().to("cpu", copy=True) for name in start}
    note_loss(client, losses, end)
    _restore_frozen_(client, start)
    return end


@contextmanager
def training(
    client: Client, learn: Collection[str], epochs: int | None = None, tag: str = "train", size: int | None = None
) -> Iterator[Iterator[Batch]]:
    """Yield the client's batches, with the module in training mode for these weights; all randomness is keyed."""
    settings = client.settings
    for name, parameter in client.module.named_parameters():
        parameter.requires_grad_(name in learn)
    _train_mode_(client.module)
    batch_norm = learns_statistics(client.module)
    batches = client.batches(settings.epochs if epochs is None else epochs, tag, size)
    with randomness.seeded(settings.seed, client.round, client.id, tag, "dropout"):
        yield (batch for batch in batches if len(batch[1]) > 1 or not batch_norm)  # a single image has no variance


class Learner:
    """Weights with their own optimizer, run through the worker's only module.

    Use it inside `training`, for methods that train two models side by side; for one model `descend` is faster.
    """

    def __init__(self, client: Client, start: Tree, lr: float | None = None):  # lr replaces the run's
        self.client = client
        self.weights = {name: tensor.to(client.settings.device, copy=True) for name, tensor in start.items()}
        parameters = {name for name, _ in client.module.named_parameters()}
        self.leaves = {name: nn.Parameter(self.weights[name]) for name in start if name in parameters}
        self.weights.update(self.leaves)
        self.optimizer = make_optimizer(client.settings, rate_groups(client, self.leaves, lr))
        self.losses: list[tuple[int, Tensor]] = []

    def step(self, gradients: Tree) -> None:
        """Take one step of the optimizer along these gradients, which are clipped first."""
        gradients = clipped(gradients, self.client.settings.clip_grad)
        for name, leaf in self.leaves.items():
            leaf.grad = gradients[name]
        self.optimizer.step()

    def learn(self, x: Tensor, y: Tensor) -> Tree:
        """Take one step on a batch and return its gradients."""
        value, gradients = gradient(self.client, self.weights, x, y)
        self.losses.append((len(y), value))
        self.step(gradients)
        return gradients

    def end(self) -> Tree:
        """Return the current weights."""
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.weights.items()}


def clip_(gradients: list[Tensor], largest: float) -> None:
    """Scale gradients in place so that their joint L2 norm is at most `largest`; 0 leaves them alone.

    A gradient that is short enough is multiplied by exactly 1. It does not wait for a GPU.
    """
    if largest and gradients:
        norm = torch.nn.utils.get_total_norm(gradients)
        torch._foreach_mul_(gradients, (largest / (norm + 1e-6)).clamp(max=1.0))


def clipped(gradients: Tree, largest: float) -> Tree:
    """Return gradients of a joint L2 norm of at most `largest`."""
    if not largest:
        return gradients
    copies = {name: gradient.clone() for name, gradient in gradients.items()}
    clip_(list(copies.values()), largest)
    return copies


def toward(client: Client, anchor: Tree, strength: float) -> Callable[[Named], None]:
    """Return an `adjust` for `descend`: the gradient of strength / 2 * |weights - anchor|^2 (FedProx, Ditto)."""
    placed = {name: tensor.to(client.settings.device) for name, tensor in anchor.items()}

    def pull(parameters: Named) -> None:
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach() - placed[name], alpha=strength)

    return pull


def gradient(
    client: Client,
    weights: Tree,
    x: Tensor,
    y: Tensor,
    *,
    only: Collection[str] | None = None,
) -> tuple[Tensor, Tree]:
    """Return the client's loss on a batch under any weights, and its gradient by name (default: every parameter).

    The module keeps its mode and its own weights; batch statistics are written to the buffers in `weights`.
    """
    names = [name for name, _ in client.module.named_parameters() if name in weights and (only is None or name in only)]
    if client.private is not None:
        return client.private.gradient(client, weights, names, x, y, client.loss)
    leaves = {name: weights[name].detach().requires_grad_() for name in names}

    def model(x: Tensor) -> Tensor:
        logits: Tensor = functional_call(client.module, {**weights, **leaves}, (x,))
        return logits

    with client.settings.autocast():
        value = client.loss(model, x, y)
    found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    zero = ((name, torch.zeros_like(leaves[name]) if g is None else g) for name, g in zip(names, found, strict=True))
    return value.detach(), dict(zero)


def note_loss(client: Client, losses: Sequence[tuple[int, Tensor]], end: Tree) -> None:
    """Report the mean loss per image, and raise an error if the loss or a weight is not finite."""
    if losses:
        total = torch.stack([count * value for count, value in losses]).sum()
        client.scalars["loss"] = total.item() / max(1, sum(count for count, _ in losses))
        _check_finite(client, end)


@contextmanager
def holding(client: Client, tree: Tree) -> Iterator[Predictor]:
    """Yield the worker's module with these weights in evaluation mode: faster than `client.net`, but one at a time."""
    load_(client.live, tree)
    if client.module.training:  # eval() visits every submodule, which is noticeable with a small model and many clients
        client.module.eval()

    def predict(x: Tensor) -> Tensor:
        with client.settings.autocast():
            logits: Tensor = client.module(x)
        return logits.float()

    try:
        yield predict
    finally:
        _restore_frozen_(client, tree)


def _restore_frozen_(client: Client, tree: Tree) -> None:
    """Restore the module's frozen values that a tree has overwritten."""
    load_(client.live, {name: client.frozen[name] for name in tree if name in client.frozen})


def rate_groups(client: Client, named: Named, lr: float | None = None) -> list[RateGroup]:
    """Group parameters by their learning rate, for `make_optimizer`; `lr` replaces the run's."""
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in named.items():
        groups.setdefault(client.lr_of(name, lr), []).append(parameter)
    return [{"params": parameters, "lr": rate} for rate, parameters in groups.items()]


def make_optimizer(settings: LocalSettings, parameters: list[RateGroup] | list[nn.Parameter]) -> Optimizer:
    """Create a fresh optimizer: no state outlives one call of `descend`."""
    lr, decay = settings.lr, settings.weight_decay
    fused = settings.device.type in ("cpu", "cuda")  # one kernel for all tensors: overhead dominates in small models
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


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode temporarily, in the middle of training."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def _train_mode_(module: nn.Module) -> None:
    """Switch to training mode, except that batch normalization with frozen weights keeps its statistics too."""
    module.train()
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.train(any(p.requires_grad for p in part.parameters()))


def learns_statistics(module: nn.Module) -> bool:
    """Return whether any batch normalization is in training mode, which cannot normalize a single image."""
    return any(isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training for part in module.modules())


def all_finite(weights: Tree) -> bool:
    floats = [t for t in weights.values() if t.is_floating_point()]
    norms = torch._foreach_norm(floats) if floats else ()
    return not norms or bool(torch.stack(norms).isfinite().all())


def _check_finite(client: Client, end: Tree) -> None:
    """End the run if the loss or a weight is not finite, before the bad value spreads or is saved."""
    loss, settings = client.scalars["loss"], client.settings
    if math.isfinite(loss) and all_finite(end):
        return
    what = f"training loss of client {client.id} became {loss}"
    if math.isfinite(loss):
        what = f"weights of client {client.id} became infinite or not a number"
    raise DivergedError(
        f"the {what} in round {client.round}; try a smaller --lr (now {settings.lr:g}), or search for one with --lr "
        f"auto{', or --set train.clip_grad=1' if not settings.clip_grad else ''}"
        f"{', or --precision fp32' if settings.precision != 'fp32' else ''}. The last checkpoint is still good."
    )
