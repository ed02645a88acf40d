"""Fold plugins that are linear into the plain model's own weights; for all others, explain why that is impossible."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedvit.core.plan import Plugin
from fedvit.models.plugins.attach import classifier_names, vit_blocks
from fedvit.models.plugins.specs import (
    Adapter,
    FeatureNoise,
    HeadMaker,
    Lora,
    Offset,
    Prefix,
    Projection,
    Prompt,
    Pseudo,
    SecondHead,
    Splitter,
)

Weights = dict[str, Tensor]
WHY_NOT: dict[type, str] = {
    Prompt: "prompts are additional tokens in every block, which the plain model does not have",
    Adapter: "adapters have an activation between two maps, which no weight of the plain model can hold",
    Projection: "MOON's projection adds two layers before the classifier (method.projection=0 trains without it)",
    Offset: "every image goes through the network twice, mixed with the client's own image",
    Pseudo: "the features leave the body early, through convolutions that the plain model does not have",
}


class CannotFoldError(Exception):
    """No plain model computes the same; the message says why."""


def fold(model: nn.Module, plugins: Sequence[Plugin]) -> Weights:
    """Return the weights of the plain model that computes the same as this one with its plugins."""
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for plugin in plugins:
        match plugin:
            case Lora():
                for path, low_rank in _blocks_of(model, "lora"):
                    change = low_rank.up.weight.double() @ low_rank.down.weight.double() * low_rank.scale
                    _add(weights, f"{path}.attn.qkv.weight", change)
            case Prefix():
                _fold_prefix(model, plugin, weights)
            case SecondHead():
                seconds: Iterable[Any] = model.get_submodule("second_head").children()
                for path, second in zip(classifier_names(model), seconds, strict=True):
                    _add(weights, f"{path}.weight", second.weight)
                    _add(weights, f"{path}.bias", second.bias)
            case HeadMaker() | Splitter() | FeatureNoise():
                pass  # they are not used in predictions
            case _:
                raise CannotFoldError(WHY_NOT[type(plugin)])
    kinds = {plugin.kind for plugin in plugins}
    return {name: tensor for name, tensor in weights.items() if not kinds & set(name.split("."))}


def _fold_prefix(model: nn.Module, plugin: Prefix, weights: Weights) -> None:
    """Fold a prefix that is one linear map of the block's input into the rows of keys and values."""
    if plugin.combine == "concat":
        raise CannotFoldError(
            "prefixes are additional keys and values in every block, which the plain model does not have"
        )
    if plugin.bottleneck is not None:
        raise CannotFoldError("prefixes have a tanh between two maps, which no weight of the plain model can hold")
    for path, prefix in _blocks_of(model, "prefix"):
        rows = weights[f"{path}.attn.qkv.weight"].shape[0] // 3
        _add(weights, f"{path}.attn.qkv.weight", prefix.proj.weight * prefix.scale, rows)
        _add(weights, f"{path}.attn.qkv.bias", prefix.proj.bias * prefix.scale, rows)


def _blocks_of(model: nn.Module, kind: str) -> list[tuple[str, Any]]:
    """Return the path of every block, and its plugin of this kind."""
    return [(f"blocks.{i}", getattr(block, kind)) for i, block in enumerate(vit_blocks(model, kind))]


def _add(weights: Weights, name: str, change: Tensor, first_row: int = 0) -> None:
    """Add to the rows of a weight, starting at `first_row`, in double precision."""
    if name not in weights:
        raise CannotFoldError(f"the plain model has no {name} that could absorb the plugin's")
    sum_ = weights[name].double()
    sum_[first_row:] += change.detach().double()
    weights[name] = sum_.to(torch.float32)
