"""Which weights are trained: every tune by name, with the learning rate that FedPEFT publishes for it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from fedvit.core.plan import Plugin
from fedvit.core.roles import Selector, biases, everything, state_names
from fedvit.core.settings import CLIP_BIAS, CLIP_GRAD, Count, Finite, Positive, Share
from fedvit.models.groups import group, groups, head
from fedvit.models.plugins.specs import Adapter, Init, Lora, Prefix, Prompt


@dataclass(frozen=True)
class Tune:
    """The trainable weights of the backbone, and the plugins that the tune adds; the head is always trained."""

    name: str
    trainable: Selector
    lr: float  # for SGD on pre-trained weights
    build: tuple[Plugin, ...] = ()
    clip: float = CLIP_GRAD  # the longest gradient, on pre-trained weights


def full() -> Tune:
    """Train everything.

    Departs from the paper: nothing.
    """
    return Tune("full", everything, 1e-3)


def _head_only() -> Tune:
    """Train only the classifier.

    Departs from the paper: nothing.
    """
    return Tune("head", head, 5e-3)


def bias() -> Tune:
    """Train every bias of the backbone, including those of LayerNorm (FedPEFT-Bias).

    Departs from the paper: nothing. Its text does not say whether LayerNorm counts; its 0.18M weights only add up so.
    """
    return Tune("bias", biases, 1e-2, clip=CLIP_BIAS)


def adapter(
    width: Count | None = None,
    per_layer: bool = False,
    activation: Literal["gelu", "tanh"] = "gelu",
    init: Literal["zero", "random"] = "zero",
) -> Tune:
    """Train one adapter for all blocks, or one per block (FedPEFT-Adapter).

    Departs from the paper: the up-projection starts at zero, so that training starts from the pre-trained model; in
    the paper's Algorithm 3 it is a plain linear layer, which init=random restores. All blocks share one adapter, as in
    that algorithm and in the paper's 0.23M weights, although its text puts one into each layer: per_layer=true.
    """
    return Tune("adapter", group("adapter"), 5e-3, (Adapter(width, activation, per_layer, init),))


def prompt(tokens: Count = 10, dropout: Share = 0.0, init: Literal["uniform", "zero"] = "uniform") -> Tune:
    """Train extra tokens before every block (FedPEFT-Prompt).

    Departs from the paper: tokens start at random as in VPT, on which it builds; in the paper's pseudo-code they start
    at zero, which init=zero restores, but tokens that start equal get equal gradients and stay equal.
    """
    return Tune("prompt", group("prompt"), 1e-2, (Prompt(tokens, dropout, init),))


def prefix(
    s: Finite = 1.5,
    bottleneck: Count = 256,
    init: Init = "auto",
    combine: Literal["add", "concat"] = "add",
) -> Tune:
    """Train FedPerfix's side adapters on frozen attention.

    Departs from the paper: FedPerfix trains the whole model and keeps these adapters personal; here they are all that
    is trained. On pre-trained weights they start at zero; init=random is the paper's start.
    """
    return Tune("prefix", group("prefix"), 1e-2, (Prefix(bottleneck, s, init, combine),))


def lora(rank: Count = 8, alpha: Positive = 16.0) -> Tune:
    """Train a low-rank change of the query, key and value projections (LoRA).

    Departs from the paper: one change of rank 8 for the joint projection of a ViT; LoRA changes queries and values.
    """
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
