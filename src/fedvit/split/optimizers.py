"""Optimizers whose state is stored in trees, so that it can be kept between rounds."""

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from fedvit.core.client import Memory
from fedvit.core.tree import Tree


def make_split_optimizer(
    name: str,
    lr: float,
    leaves: Mapping[str, Tensor],
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    own: Mapping[float, Collection[str]] | None = None,
) -> Optimizer | None:
    """Make an optimizer of these leaves; `own` names those that have a rate of their own."""
    if not leaves:
        return None
    apart = {rate: set(names) & leaves.keys() for rate, names in (own or {}).items() if rate != lr}
    rest = leaves.keys() - set().union(*apart.values())
    groups = [(lr, rest), *apart.items()]
    parameters = [{"params": [leaves[n] for n in leaves if n in names], "lr": rate} for rate, names in groups if names]
    if name == "sgd":
        return SGD(parameters, lr, momentum=momentum, weight_decay=weight_decay)
    return (AdamW if name == "adamw" else Adam)(parameters, lr, weight_decay=weight_decay)


def step_along(optimizer: Optimizer | None, leaves: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Take one optimizer step along these gradients; without an optimizer, do nothing."""
    if optimizer is not None:
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def optimizer_state(optimizer: Optimizer, leaves: Mapping[str, Tensor]) -> Memory:
    """Return copies of the optimizer's tensors on the CPU, one tree per kind of state."""
    found: dict[str, Tree] = {}
    for name, leaf in leaves.items():
        for kind, value in optimizer.state.get(leaf, {}).items():
            if isinstance(value, Tensor):
                found.setdefault(f"optimizer {kind}", {})[name] = value.detach().to("cpu", copy=True)
    return dict(found)


def restore_optimizer(optimizer: Optimizer, leaves: Mapping[str, Tensor], memory: Memory) -> None:
    """Restore the state that `optimizer_state` returned."""
    for key, kept in memory.items():
        if key.startswith("optimizer ") and isinstance(kept, dict):
            for name, value in kept.items():
                kind = key.removeprefix("optimizer ")
                placed = value.clone() if kind == "step" else value.to(leaves[name].device, copy=True)
                optimizer.state[leaves[name]][kind] = placed
