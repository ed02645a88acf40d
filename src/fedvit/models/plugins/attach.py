"""Attach plugins to a model."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers.attention import Attention
from torch import Tensor, nn

from fedvit.core.errors import UserError
from fedvit.core.plan import Plugin
from fedvit.models.plugins.modules import (
    Bottleneck,
    FreePrefix,
    ImageSplitter,
    LinearPrefix,
    OffsetImage,
    PromptTokens,
    PseudoToken,
    StatisticNoise,
    zero_,
)
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


def attach(model: nn.Module, plugin: Plugin, *, from_scratch: bool = True, size: int = 0) -> None:
    """Add the plugin's modules to the model, drawing their initial values from the global generator."""
    if isinstance(plugin, SecondHead | HeadMaker | Projection | Offset):
        _attach_to_classifier(model, plugin, size)
        return
    if isinstance(plugin, FeatureNoise):
        _attach_feature_noise(model, plugin)
        return
    if isinstance(plugin, Splitter):
        model.splitter = ImageSplitter(plugin.width, plugin.latent)
        return
    blocks = vit_blocks(model, plugin.kind)
    dim: int = model.embed_dim  # type: ignore[assignment]
    if isinstance(plugin, Pseudo):
        model.pseudo_token = PseudoToken(dim)
        return
    match plugin:
        case Prefix():
            for block in blocks:
                _attach_prefix(
                    block, plugin, zero=plugin.init == "zero" or (plugin.init == "auto" and not from_scratch)
                )
        case Lora():
            for block in blocks:
                qkv = block.attn.qkv
                block.lora = Bottleneck(
                    qkv.in_features, plugin.rank, qkv.out_features, nn.Identity(),
                    plugin.alpha / plugin.rank, bias=False, zero=True,
                )  # fmt: skip
                qkv.register_forward_hook(partial(_add_to_output, block.lora))
        case Prompt():
            patch_area = model.patch_embed.proj.weight[0].numel()  # type: ignore[union-attr,index]
            bound = 0.0 if plugin.init == "zero" else (6 / (patch_area + dim)) ** 0.5
            for block in blocks:
                _need_plain_attention(block, "the prompt plugin")
                block.prompt = PromptTokens(plugin.tokens, dim, bound, plugin.dropout)
                block.register_forward_pre_hook(partial(_transform_input, block.prompt))
                block.register_forward_hook(partial(_cut_prompt, plugin.tokens), prepend=True)
        case Adapter():
            width = plugin.width or max(1, dim // 8)
            act = nn.GELU() if plugin.activation == "gelu" else nn.Tanh()
            zero = plugin.init == "zero"
            one = Bottleneck(dim, width, dim, act, 1, bias=True, zero=zero)
            if not plugin.per_layer:
                model.adapter = one
            for block in blocks:
                if plugin.per_layer:
                    one = Bottleneck(dim, width, dim, act, 1, bias=True, zero=zero)
                    block.adapter = one
                block.mlp.register_forward_hook(partial(_add_own_output, one))


def groups_of_model(model: nn.Module) -> dict[str, list[str]]:
    """Return the layer groups that the model itself names, with the paths of their modules."""
    return getattr(model, "layer_groups", {})


def classifier_names(model: nn.Module) -> list[str]:
    """Return the path of every module that timm calls the classifier; a distilled DeiT has two."""
    named = groups_of_model(model).get("head")
    if named is not None:
        return named
    classifier: Any = getattr(model, "fc", getattr(model, "classifier", None))  # torchvision's names
    if hasattr(model, "get_classifier"):
        classifier = model.get_classifier()  # type: ignore[operator]
    if classifier is None:
        raise UserError(
            f"which part of this {type(model).__name__} is its classifier? Name it: groups={{'head': ['PATH']}}; its "
            f"parts are {', '.join(name for name, _ in model.named_children())}"
        )
    members = classifier if isinstance(classifier, tuple) else (classifier,)
    return [path for path, module in model.named_modules() if any(module is m for m in members)]


def classifiers(model: nn.Module, what: str) -> dict[str, nn.Linear]:
    """Return the linear classifiers by path; an error says what needs one."""
    found = {path: model.get_submodule(path) for path in classifier_names(model)}
    linear = {path: module for path, module in found.items() if isinstance(module, nn.Linear)}
    if not linear or len(linear) < len(found):
        raise UserError(
            f"{what} needs a model whose features go into a linear classifier; found {type(model).__name__} with "
            f"{', '.join(type(m).__name__ for m in found.values()) or 'none'}: choose a ViT, DeiT or ResNet"
        )
    return linear


def _attach_to_classifier(model: nn.Module, plugin: SecondHead | HeadMaker | Projection | Offset, size: int) -> None:
    heads = classifiers(model, f"the {plugin.kind} plugin")
    match plugin:
        case SecondHead():
            seconds = [nn.Linear(head.in_features, head.out_features) for head in heads.values()]
            model.second_head = nn.ModuleList(seconds)
            for head, second in zip(heads.values(), seconds, strict=True):
                zero_(second)
                head.register_forward_hook(partial(_add_to_output, second))
        case HeadMaker():
            numbers = sum(head.weight.numel() + head.out_features for head in heads.values())
            classes = next(iter(heads.values())).out_features
            layers = nn.Linear(classes, plugin.width), nn.ReLU(), nn.Linear(plugin.width, numbers)
            model.head_maker = nn.Sequential(*layers)
        case Projection():
            model.projection = nn.ModuleList()
            for path, head in heads.items():
                dim = head.in_features
                layers = nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, plugin.width)
                model.projection.append(nn.Sequential(*layers))
                fresh = nn.Linear(plugin.width, head.out_features)
                fresh.register_forward_pre_hook(partial(_transform_input, model.projection[-1]))
                model.set_submodule(path, fresh)
        case Offset():
            model.offset = OffsetImage(size, plugin.a)
            model.register_forward_pre_hook(partial(_transform_input, model.offset))
            for path, head in heads.items():
                fresh = nn.Linear(2 * head.in_features, head.out_features)
                fresh.register_forward_pre_hook(partial(_transform_input, _pair_up))
                model.set_submodule(path, fresh)


def _pair_up(features: Tensor) -> Tensor:  # (2 batch, dim) -> (batch, 2 dim)
    return features.reshape(2, -1, features.shape[1]).transpose(0, 1).flatten(1)


def _transform_input(by: Callable[[Tensor], Tensor], _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (by(inputs[0]), *inputs[1:])


@dataclass
class _Tap:
    """The inputs of the classifiers in the last forward pass, and their outputs before any plugin was added."""

    features: list[Tensor]
    logits: list[Tensor]


@contextmanager
def tapped(model: nn.Module) -> Iterator[_Tap]:
    """Record what goes into and comes out of the classifiers; a distilled DeiT has two, and predicts their mean."""
    tap, handles = _Tap([], []), []

    def watch(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        tap.features.append(inputs[0])
        tap.logits.append(output)

    for path in classifier_names(model):
        handles.append(model.get_submodule(path).register_forward_hook(watch, prepend=True))
    try:
        yield tap
    finally:
        for handle in handles:
            handle.remove()


def _attach_feature_noise(model: nn.Module, plugin: FeatureNoise) -> None:
    """Add noise after layer1 to layer4 of a ResNet, or after each quarter of a ViT's blocks."""
    stages: list[Any] = [getattr(model, f"layer{i}") for i in range(1, 5) if hasattr(model, f"layer{i}")]
    over: tuple[int, ...] = (2, 3)
    channels = [getattr(stage[-1], "conv3", stage[-1].conv2).out_channels for stage in stages]
    if not stages:
        blocks = vit_blocks(model, plugin.kind)
        stages = [blocks[i] for i in sorted({len(blocks) * quarter // 4 - 1 for quarter in range(1, 5)} - {-1})]
        over, channels = (1,), [model.embed_dim] * len(stages)
    layers = [StatisticNoise(count, over, plugin.prob, plugin.momentum) for count in channels]
    model.feature_noise = nn.ModuleList(layers)
    for stage, layer in zip(stages, layers, strict=True):
        stage.register_forward_hook(partial(_replace_output, layer))


def vit_blocks(model: nn.Module, kind: str) -> list[Any]:
    """Return the model's transformer blocks; an error says what a plugin needs."""
    blocks: list[Any] = list(getattr(model, "blocks", []))
    fits = blocks and all(
        isinstance(getattr(getattr(b, "attn", None), "qkv", None), nn.Linear) and hasattr(b, "mlp") for b in blocks
    )
    if not fits:
        raise UserError(
            f"the {kind} plugin needs a timm ViT or DeiT, whose blocks have attn.qkv and mlp; "
            f"found {type(model).__name__}: choose such a model, or a method and tune without plugins"
        )
    return blocks


def _need_plain_attention(block: Any, what: str) -> None:
    """Raise an error unless attention is plain: nothing else allows more tokens than the model has positions for."""
    if type(block.attn) is not Attention or getattr(block.attn, "gate", None) is not None:
        raise UserError(
            f"{what} needs timm's plain attention; found {type(block.attn).__name__}, which may be rotary or gated: "
            "use an additive prefix, adapters or LoRA, or another model"
        )


def _attach_prefix(block: Any, plugin: Prefix, *, zero: bool) -> None:
    qkv: nn.Linear = block.attn.qkv
    dim, out = qkv.in_features, qkv.out_features // 3 * 2
    if plugin.bottleneck is not None:
        block.prefix = Bottleneck(dim, plugin.bottleneck, out, nn.Tanh(), plugin.s, bias=True, zero=zero)
    elif plugin.combine == "add":
        block.prefix = LinearPrefix(dim, out, plugin.s, zero=zero)
    else:
        block.prefix = FreePrefix(plugin.tokens, out, plugin.s, zero=zero)
    if plugin.combine == "add":
        qkv.register_forward_hook(partial(_add_to_keys_and_values, block.prefix))
    else:
        _need_plain_attention(block, "combine=concat")
        block.attn.forward = partial(_attend_with_prefix, block.attn, block.prefix)


def _add_to_keys_and_values(prefix: nn.Module, qkv: nn.Linear, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    """Add the prefix to keys and values only; queries are the first third of the projection's output."""
    return output + F.pad(prefix(inputs[0]), (qkv.out_features // 3, 0))


def _add_to_output(plugin: nn.Module, _: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    return output + plugin(inputs[0])  # type: ignore[no-any-return]


def _add_own_output(plugin: nn.Module, _: nn.Module, __: tuple[Tensor], output: Tensor) -> Tensor:
    return output + plugin(output)  # type: ignore[no-any-return]


def _replace_output(plugin: nn.Module, _: nn.Module, __: tuple[Tensor], output: Tensor) -> Tensor:
    return plugin(output)  # type: ignore[no-any-return]


def _cut_prompt(tokens: int, _: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output[:, : output.shape[1] - tokens]


def _attend_with_prefix(
    attn: Any, prefix: nn.Module, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """Run self-attention over the tokens and, in addition, the prefix's keys and values (eq. 3 of FedPerfix)."""
    if attn_mask is not None or is_causal:
        raise ValueError("a concatenated prefix does not work with an attention mask")
    q, k, v, prefix_k, prefix_v = _heads_of(attn, prefix, x)
    out = F.scaled_dot_product_attention(
        q,
        torch.cat([prefix_k, k], dim=2),
        torch.cat([prefix_v, v], dim=2),
        dropout_p=attn.attn_drop.p if attn.training else 0.0,
    )
    out = attn.norm(out.transpose(1, 2).reshape(*x.shape[:2], -1))
    return attn.proj_drop(attn.proj(out))  # type: ignore[no-any-return]


def _heads_of(attn: Any, prefix: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """Return queries, keys and values of the tokens, and the prefix's keys and values: (batch, heads, rows, width)."""
    shape = (x.shape[0], -1, 3, attn.num_heads, attn.head_dim)
    q, k, v = attn.qkv(x).reshape(shape).permute(2, 0, 3, 1, 4).unbind(0)
    q, k = attn.q_norm(q), attn.k_norm(k)
    shape = (x.shape[0], -1, 2, attn.num_heads, attn.head_dim)
    prefix_k, prefix_v = prefix(x).reshape(shape).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v, prefix_k, prefix_v


def prefix_share(attn: Any, prefix: nn.Module, x: Tensor) -> Tensor:  # (batch, heads, tokens)
    """Return the share of a token's attention that goes to a concatenated prefix: lambda(x) in eq. 6 of FedPerfix."""
    q, k, _, prefix_k, _ = _heads_of(attn, prefix, x)
    weights: Tensor = (q @ torch.cat([prefix_k, k], dim=2).transpose(2, 3) / attn.head_dim**0.5).softmax(dim=-1)
    return weights[..., : prefix_k.shape[2]].sum(dim=-1)
