"""Small modules that sit on timm's attention and blocks: prefix, prompt, adapter, LoRA, feature noise.

A plugin is a frozen record; `attach` turns it into modules. They are hung on as forward hooks, so the names
of the backbone's own weights do not change and timm's fused attention stays in use.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from timm.layers.attention import Attention
from torch import Tensor, nn

from fedvit.errors import UserError

EPS = 1e-6
Init = Literal["zero", "random", "auto"]  # auto: random from scratch, zero on pre-trained weights


@dataclass(frozen=True)
class Prefix:
    """Keys and values of every block get s * P(z), z being the block's normed input (FedPerfix).

    With a bottleneck P is down, tanh, up; without one it is a single linear map (the vanilla prefix).
    `combine="concat"` puts the prefix beside the keys and values instead of adding it to them; without a
    bottleneck it is then a free matrix of `tokens` rows.
    """

    kind: ClassVar[str] = "prefix"
    bottleneck: int | None = 256
    s: float = 1.5
    init: Init = "auto"
    combine: Literal["add", "concat"] = "add"
    tokens: int = 10


@dataclass(frozen=True)
class Prompt:
    """Free tokens appended before every block and cut off after it (VPT-deep)."""

    kind: ClassVar[str] = "prompt"
    tokens: int = 10
    dropout: float = 0.0
    init: Literal["uniform", "zero"] = "uniform"


@dataclass(frozen=True)
class Adapter:
    """m + up(act(down(m))) on the output m of every MLP; one for all blocks, or one per block."""

    kind: ClassVar[str] = "adapter"
    width: int | None = None  # None: an eighth of the model's width
    activation: Literal["gelu", "tanh"] = "gelu"
    per_layer: bool = False


@dataclass(frozen=True)
class Lora:
    """A low-rank change of the joint query, key and value projection."""

    kind: ClassVar[str] = "lora"
    rank: int = 8
    alpha: float = 16.0


@dataclass(frozen=True)
class SecondHead:
    """A linear head beside the classifier, zero at the start; the model's output is the sum of both (Fed-RoD)."""

    kind: ClassVar[str] = "second_head"


@dataclass(frozen=True)
class HeadMaker:
    """A small network from class frequencies to all weights of the second head; it takes no part in predictions."""

    kind: ClassVar[str] = "head_maker"
    width: int = 32


@dataclass(frozen=True)
class Projection:
    """Two layers between the features and a fresh classifier (MOON)."""

    kind: ClassVar[str] = "projection"
    width: int = 256


@dataclass(frozen=True)
class Offset:
    """Two mixtures of every image with one learned image; a fresh classifier sees the features of both (DisTrans)."""

    kind: ClassVar[str] = "offset"
    a: float = 0.2


@dataclass(frozen=True)
class FeatureNoise:
    """While training, channel statistics after each of four stages are redrawn around their values (FedFA)."""

    kind: ClassVar[str] = "feature_noise"
    prob: float = 0.5
    momentum: float = 0.99


@dataclass(frozen=True)
class Splitter:
    """A small variational autoencoder beside the classifier, which does not use it (FedFed)."""

    kind: ClassVar[str] = "splitter"
    width: int = 32
    latent: int = 8


@dataclass(frozen=True)
class Pseudo:
    """A class token made from patch tokens by convolutions, for a body that has none (FeSViBS)."""

    kind: ClassVar[str] = "pseudo_token"


HeadPlugin = SecondHead | HeadMaker | Projection | Offset
Plugin = Prefix | Prompt | Adapter | Lora | HeadPlugin | FeatureNoise | Splitter | Pseudo
PLUGINS: dict[str, Any] = {
    plugin.kind: plugin
    for plugin in (
        Prefix,
        Prompt,
        Adapter,
        Lora,
        SecondHead,
        HeadMaker,
        Projection,
        Offset,
        FeatureNoise,
        Splitter,
        Pseudo,
    )
}
KINDS = tuple(PLUGINS)


class Bottleneck(nn.Module):
    """up(act(down(x))), scaled."""

    def __init__(self, dim: int, width: int, out: int, act: nn.Module, scale: float, *, bias: bool, zero: bool):
        super().__init__()
        self.down = nn.Linear(dim, width, bias=bias)
        self.act = act
        self.up = nn.Linear(width, out, bias=bias)
        self.scale = scale
        if zero:
            # Only the up-projection: with both at zero nothing but its bias would ever get a gradient.
            zero_(self.up)

    def forward(self, x: Tensor) -> Tensor:  # (batch, tokens, dim) -> (batch, tokens, out)
        out: Tensor = self.up(self.act(self.down(x)))
        return out if self.scale == 1 else out * self.scale


class LinearPrefix(nn.Module):
    """The vanilla prefix in its additive form: one linear map of the block's input."""

    def __init__(self, dim: int, out: int, scale: float, *, zero: bool):
        super().__init__()
        self.proj = nn.Linear(dim, out)
        self.scale = scale
        if zero:
            zero_(self.proj)

    def forward(self, x: Tensor) -> Tensor:  # (batch, tokens, dim) -> (batch, tokens, out)
        return self.scale * self.proj(x)  # type: ignore[no-any-return]


class FreePrefix(nn.Module):
    """The vanilla prefix in its concatenated form: learned rows that do not look at the input."""

    def __init__(self, tokens: int, out: int, scale: float, *, zero: bool):
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(tokens, out) if zero else torch.randn(tokens, out) * 0.02)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:  # (batch, _, _) -> (batch, rows, out)
        return (self.scale * self.rows).expand(x.shape[0], -1, -1)  # len() would fix the batch of an ONNX graph


class PromptTokens(nn.Module):
    """The prompt of one block."""

    def __init__(self, tokens: int, dim: int, bound: float, dropout: float):
        super().__init__()
        self.tokens = nn.Parameter(torch.empty(tokens, dim).uniform_(-bound, bound))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:  # (batch, n, dim) -> (batch, n + tokens, dim)
        return torch.cat([x, self.drop(self.tokens).expand(x.shape[0], -1, -1)], dim=1)


class OffsetImage(nn.Module):
    """A learned image in normalised pixels, and the two mixtures of it with every image of a batch."""

    def __init__(self, size: int, a: float):
        super().__init__()
        self.image = nn.Parameter(torch.empty(3, size, size).uniform_(-1, 1))
        self.a = a

    def forward(self, x: Tensor) -> Tensor:  # (batch, 3, h, w) -> (2 batch, 3, h, w)
        return torch.cat([(1 - self.a) * x + self.a * self.image, (1 + self.a) * x - self.a * self.image])


class StatisticNoise(nn.Module):
    """FedFA's layer after one stage. It has no weights, and passes features on unless `spread` is set.

    `seen` (2, channels) is the moving average of channel means and deviations, `spread` its variance across clients.
    """

    def __init__(self, channels: int, over: tuple[int, ...], prob: float, momentum: float):
        super().__init__()
        self.channels, self.over, self.prob, self.momentum = channels, over, prob, momentum
        self.seen: Tensor | None = None
        self.spread: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:  # (batch, tokens, channels) or (batch, channels, height, width)
        if self.spread is None or not self.training:
            return x
        values = x.float()
        mean = values.mean(self.over, keepdim=True)
        std = (values.var(self.over, correction=0, keepdim=True) + EPS).sqrt()
        now = torch.stack([mean, std]).detach().flatten(2).mean(1)
        self.seen = now if self.seen is None else self.momentum * self.seen + (1 - self.momentum) * now
        if torch.rand(()) >= self.prob:
            return x
        shape = mean.shape[1:]
        new = []
        for statistic, spread in zip((mean, std), self.spread, strict=True):
            variance = (1 + sharing_factor(spread).view(shape)) * statistic.var(0, correction=0)
            noise = torch.randn(statistic.shape).to(x.device)
            new.append(statistic + noise * (variance + EPS).sqrt())
        return (new[1] * (values - mean) / std + new[0]).to(x.dtype)


def sharing_factor(spread: Tensor) -> Tensor:
    """FedFA's gamma: more noise in the channels whose statistics differ more between clients; its mean is 1."""
    weight = 1 / (1 + 1 / (spread + EPS))
    return len(spread) * weight / weight.sum()


class ImageSplitter(nn.Module):
    """Images to what a small latent code can say of them, and the code's mean and log-variance.

    The code is a map of a quarter of the image's side; it is drawn in training and is its mean otherwise.
    """

    def __init__(self, width: int, latent: int):
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv2d(3, width, 4, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 4, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(2 * width, 2 * latent, 1),
        )  # fmt: skip
        self.decode = nn.Sequential(
            nn.Conv2d(latent, 2 * width, 3, padding=1), nn.ReLU(), nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * width, width, 3, padding=1), nn.ReLU(), nn.Upsample(scale_factor=2),
            nn.Conv2d(width, 3, 3, padding=1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # (batch, 3, size, size) -> same, code, code
        mean, log_variance = self.encode(x).chunk(2, dim=1)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp() if self.training else mean
        out = self.decode(code)
        return F.interpolate(out, x.shape[-2:]) if out.shape != x.shape else out, mean, log_variance


class PseudoToken(nn.Module):
    """FeSViBS's block: patch tokens as a map, two convolutions with a residual, and their mean as a class token."""

    def __init__(self, dim: int, dropout: float = 0.5):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(dim, dim, 3, padding=1), nn.BatchNorm2d(dim)
        self.conv2, self.norm2 = nn.Conv2d(dim, dim, 3, padding=1), nn.BatchNorm2d(dim)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:  # (batch, patches, dim) -> (batch, 1, dim)
        side = int(x.shape[1] ** 0.5)
        grid = x.transpose(1, 2).reshape(x.shape[0], -1, side, side)
        out = torch.relu(self.norm1(self.conv1(grid)))
        out = torch.relu(self.norm2(self.conv2(self.drop(out))) + grid)
        return out.mean((2, 3)).unsqueeze(1)


def zero_(linear: nn.Linear) -> None:
    nn.init.zeros_(linear.weight)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


def attach(model: nn.Module, plugin: Plugin, *, from_scratch: bool = True, size: int = 0) -> None:
    """Add the plugin's modules to the model, drawing their initial values from the global generator."""
    if isinstance(plugin, SecondHead | HeadMaker | Projection | Offset):
        attach_to_classifier(model, plugin, size)
        return
    if isinstance(plugin, FeatureNoise):
        attach_feature_noise(model, plugin)
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
                attach_prefix(block, plugin, zero=plugin.init == "zero" or (plugin.init == "auto" and not from_scratch))
        case Lora():
            for block in blocks:
                qkv = block.attn.qkv
                block.lora = Bottleneck(
                    qkv.in_features, plugin.rank, qkv.out_features, nn.Identity(),
                    plugin.alpha / plugin.rank, bias=False, zero=True,
                )  # fmt: skip
                qkv.register_forward_hook(partial(add_to_output, block.lora))
        case Prompt():
            patch_area = model.patch_embed.proj.weight[0].numel()  # type: ignore[union-attr,index]
            bound = 0.0 if plugin.init == "zero" else (6 / (patch_area + dim)) ** 0.5
            for block in blocks:
                need_plain_attention(block, "the prompt plugin")
                block.prompt = PromptTokens(plugin.tokens, dim, bound, plugin.dropout)
                block.register_forward_pre_hook(partial(transform_input, block.prompt))
                block.register_forward_hook(partial(cut_prompt, plugin.tokens), prepend=True)
        case Adapter():
            width = plugin.width or max(1, dim // 8)
            act = nn.GELU() if plugin.activation == "gelu" else nn.Tanh()
            one = Bottleneck(dim, width, dim, act, 1, bias=True, zero=True)
            if not plugin.per_layer:
                model.adapter = one
            for block in blocks:
                if plugin.per_layer:
                    one = Bottleneck(dim, width, dim, act, 1, bias=True, zero=True)
                    block.adapter = one
                block.mlp.register_forward_hook(partial(add_own_output, one))


def groups_of_model(model: nn.Module) -> dict[str, list[str]]:
    """The layer groups that the model itself names, by the paths of their modules."""
    return getattr(model, "layer_groups", {})


def head_names(model: nn.Module) -> list[str]:
    """The paths of every module that timm calls the classifier; a distilled DeiT has two."""
    named = groups_of_model(model).get("head")
    if named is not None:
        return named
    if not hasattr(model, "get_classifier") and not hasattr(model, "fc"):
        raise UserError(
            f"which part of this {type(model).__name__} is its classifier? Name it: groups={{'head': ['PATH']}}; its "
            f"parts are {', '.join(name for name, _ in model.named_children())}"
        )
    classifier = model.get_classifier() if hasattr(model, "get_classifier") else model.fc  # type: ignore[operator]
    members = classifier if isinstance(classifier, tuple) else (classifier,)
    return [path for path, module in model.named_modules() if any(module is m for m in members)]


def classifiers(model: nn.Module, what: str) -> dict[str, nn.Linear]:
    """The linear classifiers by path, or an error that says what needs one."""
    found = {path: model.get_submodule(path) for path in head_names(model)}
    linear = {path: module for path, module in found.items() if isinstance(module, nn.Linear)}
    if not linear or len(linear) < len(found):
        raise UserError(
            f"{what} needs a model whose features go into a linear classifier; found {type(model).__name__} with "
            f"{', '.join(type(m).__name__ for m in found.values()) or 'none'}: choose a ViT, DeiT or ResNet"
        )
    return linear


def attach_to_classifier(model: nn.Module, plugin: SecondHead | HeadMaker | Projection | Offset, size: int) -> None:
    heads = classifiers(model, f"the {plugin.kind} plugin")
    match plugin:
        case SecondHead():
            seconds = [nn.Linear(head.in_features, head.out_features) for head in heads.values()]
            model.second_head = nn.ModuleList(seconds)
            for head, second in zip(heads.values(), seconds, strict=True):
                zero_(second)
                head.register_forward_hook(partial(add_to_output, second))
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
                fresh.register_forward_pre_hook(partial(transform_input, model.projection[-1]))
                model.set_submodule(path, fresh)
        case Offset():
            model.offset = OffsetImage(size, plugin.a)
            model.register_forward_pre_hook(partial(transform_input, model.offset))
            for path, head in heads.items():
                fresh = nn.Linear(2 * head.in_features, head.out_features)
                fresh.register_forward_pre_hook(partial(transform_input, pair_up))
                model.set_submodule(path, fresh)


def pair_up(features: Tensor) -> Tensor:  # (2 batch, dim) -> (batch, 2 dim)
    return features.reshape(2, -1, features.shape[1]).transpose(0, 1).flatten(1)


def transform_input(by: Callable[[Tensor], Tensor], _: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (by(inputs[0]), *inputs[1:])


@dataclass
class Tap:
    """What went into the classifiers in the last forward pass, and what came out before any plugin was added."""

    features: list[Tensor]
    logits: list[Tensor]


@contextmanager
def tapped(model: nn.Module) -> Iterator[Tap]:
    """Watch the classifiers. A distilled DeiT has two, and predicts their mean."""
    tap, handles = Tap([], []), []

    def watch(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        tap.features.append(inputs[0])
        tap.logits.append(output)

    for path in head_names(model):
        handles.append(model.get_submodule(path).register_forward_hook(watch, prepend=True))
    try:
        yield tap
    finally:
        for handle in handles:
            handle.remove()


def attach_feature_noise(model: nn.Module, plugin: FeatureNoise) -> None:
    """After layer1 to layer4 of a ResNet, or after each quarter of a ViT's blocks."""
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
        stage.register_forward_hook(partial(replace_output, layer))


def vit_blocks(model: nn.Module, kind: str) -> list[Any]:
    """The model's transformer blocks, or an error that says what a plugin needs."""
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


def need_plain_attention(block: Any, what: str) -> None:
    """More tokens than the model knows places for go with plain attention only."""
    if type(block.attn) is not Attention or getattr(block.attn, "gate", None) is not None:
        raise UserError(
            f"{what} needs timm's plain attention; found {type(block.attn).__name__}, which may be rotary or gated: "
            "use an additive prefix, adapters or LoRA, or another model"
        )


def attach_prefix(block: Any, plugin: Prefix, *, zero: bool) -> None:
    qkv: nn.Linear = block.attn.qkv
    dim, out = qkv.in_features, qkv.out_features // 3 * 2
    if plugin.bottleneck is not None:
        block.prefix = Bottleneck(dim, plugin.bottleneck, out, nn.Tanh(), plugin.s, bias=True, zero=zero)
    elif plugin.combine == "add":
        block.prefix = LinearPrefix(dim, out, plugin.s, zero=zero)
    else:
        block.prefix = FreePrefix(plugin.tokens, out, plugin.s, zero=zero)
    if plugin.combine == "add":
        qkv.register_forward_hook(partial(add_to_keys_and_values, block.prefix))
    else:
        need_plain_attention(block, "combine=concat")
        block.attn.forward = partial(attend_with_prefix, block.attn, block.prefix)


def add_to_keys_and_values(prefix: nn.Module, qkv: nn.Linear, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    """Queries are left alone: they are the first third of the projection's output."""
    return output + F.pad(prefix(inputs[0]), (qkv.out_features // 3, 0))


def add_to_output(plugin: nn.Module, _: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    return output + plugin(inputs[0])  # type: ignore[no-any-return]


def add_own_output(plugin: nn.Module, _: nn.Module, __: tuple[Tensor], output: Tensor) -> Tensor:
    return output + plugin(output)  # type: ignore[no-any-return]


def replace_output(plugin: nn.Module, _: nn.Module, __: tuple[Tensor], output: Tensor) -> Tensor:
    return plugin(output)  # type: ignore[no-any-return]


def cut_prompt(tokens: int, _: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output[:, : output.shape[1] - tokens]


def attend_with_prefix(
    attn: Any, prefix: nn.Module, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """Self-attention over the tokens and, beside them, the prefix's keys and values (eq. 3 of FedPerfix)."""
    if attn_mask is not None or is_causal:
        raise ValueError("a concatenated prefix does not go with an attention mask")
    batch, tokens, _dim = x.shape
    shape = (batch, -1, 3, attn.num_heads, attn.head_dim)
    q, k, v = attn.qkv(x).reshape(shape).permute(2, 0, 3, 1, 4).unbind(0)
    q, k = attn.q_norm(q), attn.k_norm(k)
    shape = (batch, -1, 2, attn.num_heads, attn.head_dim)
    prefix_k, prefix_v = prefix(x).reshape(shape).permute(2, 0, 3, 1, 4).unbind(0)
    out = F.scaled_dot_product_attention(
        q,
        torch.cat([prefix_k, k], dim=2),
        torch.cat([prefix_v, v], dim=2),
        dropout_p=attn.attn_drop.p if attn.training else 0.0,
    )
    out = attn.norm(out.transpose(1, 2).reshape(batch, tokens, -1))
    return attn.proj_drop(attn.proj(out))  # type: ignore[no-any-return]
