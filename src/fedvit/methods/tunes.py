"""Which weights are trained: every tune by name, with the learning rate that FedPEFT publishes for it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from fedvit.core.plan import Plugin
from fedvit.core.roles import Selector, biases, everything, state_names
from fedvit.core.settings import Count, Finite, Positive, Share
from fedvit.models.groups import group, groups, head
from fedvit.models.plugins.specs import Adapter, Init, Lora, Prefix, Prompt


@dataclass(frozen=True)
class Tune:
    """The trainable weights of the backbone, and the plugins that the tune adds; the head is always trained."""

    name: str
    trainable: Selector
    lr: float  # for SGD on pre-trained weights
    build: tuple[Plugin, ...] = ()


def full() -> Tune:
    """Train everything."""
    return Tune("full", everything, 1e-3)


def _head_only() -> Tune:
    """Train only the classifier."""
    return Tune("head", head, 5e-3)


def bias() -> Tune:
    """Train every bias of the backbone, including those of LayerNorm (FedPEFT-Bias)."""
    return Tune("bias", biases, 1e-2)


def adapter(width: Count | None = None, per_layer: bool = False, activation: Literal["gelu", "tanh"] = "gelu") -> Tune:
    """Train one adapter for all blocks, or one per block (FedPEFT-Adapter)."""
    return Tune("adapter", group("adapter"), 5e-3, (Adapter(width, activation, per_layer),))


def prompt(tokens: Count = 10, dropout: Share = 0.0, init: Literal["uniform", "zero"] = "uniform") -> Tune:
    """Train extra tokens before every block (FedPEFT-Prompt)."""
    return Tune("prompt", group("prompt"), 1e-2, (Prompt(tokens, dropout, init),))


def prefix(
    s: Finite = 1.5,
    bottleneck: Count = 256,
    init: Init = "auto",
    combine: Literal["add", "concat"] = "add",
) -> Tune:
    """Train FedPerfix's side adapters on frozen attention."""
    return Tune("prefix", group("prefix"), 1e-2, (Prefix(bottleneck, s, init, combine),))


def lora(rank: Count = 8, alpha: Positive = 16.0) -> Tune:
    """Train a low-rank change of the query, key and value projections (LoRA)."""
    return Tune("lora", group("lora"), 1e-2, (Lora(rank, alpha),))


def _layer_groups(names: str) -> Tune:
    """Train the layer groups of these names, such as norm,attn."""
    return Tune(names, groups(names), 1e-3)


TUNES: dict[str, Callable[..., Tune]] = {
    "full": full,
    "head": _head_only,
    "bias": bias,
    "adapter": adapter,
    "prompt": prompt,
    "prefix": prefix,
    "lora": lora,
}
SCRATCH_LR = 1e-2  # for training everything from random weights (FedPEFT's "Scratch", FedPerfix)


def make_tune(table: Mapping[str, Any]) -> Tune:
    """Make the tune of a [tune] table, which names a tune or layer groups."""
    name = table["name"]
    options = {key: value for key, value in table.items() if key != "name"}
    return TUNES[name](**options) if name in TUNES else _layer_groups(name)


def trainable_names(model: nn.Module, tune: Tune, method_plugins: tuple[Plugin, ...]) -> set[str]:
    """List what is trained in this model: what the tune trains, the head, and all plugins of the method.

    A float buffer follows the module that owns it: it changes if any weight of that module is trained.
    """
    chosen = tune.trainable.names(model) | head.names(model)
    for plugin in method_plugins:
        chosen |= group(plugin.kind).match(model)
    parameters = {name for name, _ in model.named_parameters()}
    owners = {name.rpartition(".")[0] for name in chosen & parameters}
    buffers = {name for name in state_names(model) if name not in parameters and name.rpartition(".")[0] in owners}
    return (chosen & parameters) | buffers
