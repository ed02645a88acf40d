"""Narrower copies of a model: which part of every weight a window keeps, and how such parts are merged again.

Every axis of a weight has a code. A cut axis has `chunks` equal chunks, each with its own window, whose length is a
multiple of `step`. All heads stay but become narrower, so queries, keys and values are 3 * heads chunks; the residual
stream, which timm's attention requires to be as wide as all heads together, is one chunk in steps of `heads`. What a
window keeps of an axis depends only on its size and code, so branches that meet in a sum keep the same indices.
"""

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from timm.layers.attention import Attention
from timm.layers.mlp import Mlp
from timm.layers.patch_embed import PatchEmbed
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from fedvit.core.errors import UserError
from fedvit.core.tree import Tree
from fedvit.models.groups import state
from fedvit.models.plugins.attach import classifier_names


class Window(NamedTuple):
    """The part of every cut axis that a client holds: its fraction, and where it begins."""

    rate: float = 1.0
    shift: int = 0


FULL = Window()


@dataclass(frozen=True)
class Windows:
    """Which part each client holds: rates that are assigned in turn, or one rate for each client by name."""

    rates: tuple[float, ...]
    names: tuple[str, ...] = ()
    rolling: bool = False  # begin one position further every round

    @staticmethod
    def parse(text: str, *, rolling: bool = False) -> "Windows":
        """Parse "1,0.5" or "north=1,south=0.5"."""
        items = [item.strip().rpartition("=") for item in text.split(",")]
        names = [name.strip() for name, equals, _ in items if equals]
        try:
            rates = [float(rate) for _, _, rate in items]
        except ValueError:
            rates = []
        fits = rates and all(0 < rate <= 1 for rate in rates)
        if not fits or len(names) not in (0, len(items)) or len(set(names)) != len(names):
            raise UserError(
                f"method.rates: expected widths above 0 and up to 1, such as 1,0.5 (assigned to the clients in turn), "
                f"or one for each client, such as north=1,south=0.5; found {text!r}"
            )
        return Windows(tuple(rates), tuple(names), rolling)

    def check(self, clients: Sequence[str]) -> None:
        """Raise an error for clients that have no rate."""
        forgotten = [name for name in clients if self.names and name not in self.names]
        if forgotten:
            raise UserError(
                f"method.rates gives no width for {', '.join(forgotten[:5])}: name every client, or none of them"
            )

    def of(self, client: str, clients: Sequence[str], round_: int) -> Window:
        """Return this client's window after `round_` rounds; a client that never trains has the first rate."""
        self.check(clients)
        places = self.names or clients
        place = places.index(client) if client in places else 0
        return Window(self.rates[place % len(self.rates)], round_ if self.rolling else 0)


class Axis(NamedTuple):
    """How an axis is cut: one window in each of `chunks` equal chunks, in steps of `step`; never, without chunks."""

    chunks: int
    step: int = 1


WHOLE = Axis(0)  # image channels, kernels, tokens, positions, the ranks and bottlenecks of plugins
CLASSES = Axis(0, 0)  # also never cut; every row belongs to a class
HIDDEN = Axis(1)
Axes = Mapping[str, tuple[Axis, ...]]


def axes(model: nn.Module) -> Axes:
    """Return the code of every axis of every weight and float buffer; an error says which models can be cut."""
    from torchvision.models import ResNet

    if isinstance(model, VisionTransformer) and plain(model):
        return _vit_axes(model)
    if isinstance(model, ResNet) and all(part.groups == 1 for part in model.modules() if isinstance(part, nn.Conv2d)):
        return _resnet_axes(model)
    raise UserError(
        f"this {type(model).__name__} cannot be made narrower: choose a timm ViT or DeiT with plain blocks, "
        "such as vit_tiny_patch16_224, or resnet18, resnet50 or resnet50_gn"
    )


def check(model: nn.Module) -> None:
    """Raise an error if a model cannot be made narrower."""
    axes(model)


def plain(model: Any) -> bool:
    """Return whether the ViT consists of the parts that `_vit_axes` knows."""
    return (
        type(model.patch_embed) is PatchEmbed
        and model.attn_pool is None
        and all(type(block) is Block and type(block.mlp) is Mlp for block in model.blocks)
        and all(type(block.attn) is Attention and not getattr(block.attn, "gate", None) for block in model.blocks)
        and all(part.weight is not None for part in model.modules() if hasattr(part, "normalized_shape"))
    )


def _vit_axes(model: Any) -> Axes:
    heads = model.blocks[0].attn.num_heads
    stream, joined, qkv, kv = Axis(1, heads), Axis(heads), Axis(3 * heads), Axis(2 * heads)
    ends = {  # output and input of the module whose path ends so; all others lie along the residual stream
        "patch_embed.proj": (stream, WHOLE),
        "attn.qkv": (qkv, stream),
        "attn.q_norm": (HIDDEN,),
        "attn.k_norm": (HIDDEN,),
        "attn.norm": (joined,),
        "attn.proj": (stream, joined),
        "mlp.fc1": (HIDDEN, stream),
        "mlp.norm": (HIDDEN,),
        "mlp.fc2": (stream, HIDDEN),
        "adapter.down": (WHOLE, stream),
        "adapter.up": (stream, WHOLE),
        "lora.down": (WHOLE, stream),
        "lora.up": (qkv, WHOLE),
        "prefix.down": (WHOLE, stream),
        "prefix.up": (kv, WHOLE),
        "prefix.proj": (kv, stream),
        **{_end_of(path): (CLASSES, stream) for path in classifier_names(model)},
    }
    codes = {}
    for name, tensor in state(model).items():
        end = ends.get(_end_of(name.rpartition(".")[0]))
        last = kv if _end_of(name) == "prefix.rows" else stream
        codes[name] = _fitted(end, tensor) if end else (*[WHOLE] * (tensor.ndim - 1), last)
        if not end and last is stream and tensor.shape[-1] != model.embed_dim:
            raise UserError(f"this {type(model).__name__} cannot be made narrower: {name} does not lie along its width")
    return codes


def _resnet_axes(model: nn.Module) -> Axes:
    """Return the codes of a ResNet; groups of channels that are normalized together stay together."""
    groups = next((part.num_groups for part in model.modules() if isinstance(part, nn.GroupNorm)), None)
    heads = classifier_names(model)
    codes = {}
    for name, tensor in state(model).items():
        channels = [Axis(1, size // groups if groups else 1) for size in tensor.shape[:2]]
        if name.rpartition(".")[0] in heads:
            channels[0] = CLASSES
        if name == "conv1.weight":
            channels[1] = WHOLE
        codes[name] = _fitted(tuple(channels), tensor)
    return codes


def _end_of(path: str) -> str:
    return ".".join(path.split(".")[-2:])


def _fitted(codes: tuple[Axis, ...], tensor: Tensor) -> tuple[Axis, ...]:
    """Return as many codes as the tensor has axes: a bias has only the output, and a kernel's own axes stay whole."""
    return (*codes, WHOLE, WHOLE)[: tensor.ndim]


def packed(codes: Axes, names: Iterable[str]) -> Tree:
    """Convert codes to small tensors, for the server to keep."""
    return {name: torch.tensor(codes[name], dtype=torch.int32) for name in names}


def unpacked(tree: Mapping[str, Tensor]) -> Axes:
    """Restore the codes that `packed` converted."""
    return {name: tuple(Axis(*row) for row in tensor.tolist()) for name, tensor in tree.items()}


def indices(size: int, axis: Axis, window: Window) -> Tensor | None:
    """Return the indices that a window keeps of an axis, or None for all of them."""
    if window.rate == 1 or not axis.chunks:
        return None
    width = size // axis.chunks
    units = math.ceil(round(window.rate * width / axis.step, 9))  # 0.1 of 30 must be 3, despite rounding errors
    length = min(width, axis.step * max(1, units))
    inside = (window.shift + torch.arange(length)) % width
    return (torch.arange(axis.chunks)[:, None] * width + inside).flatten()


def cut(tree: Mapping[str, Tensor], codes: Axes, window: Window) -> Tree:
    """Return the part of a tree that lies in the window."""
    return {name: _cut_tensor(tensor, codes[name], window) for name, tensor in tree.items()}


def _cut_tensor(tensor: Tensor, codes: tuple[Axis, ...], window: Window) -> Tensor:
    for dim, axis in enumerate(codes):
        index = indices(tensor.shape[dim], axis, window)
        if index is not None:
            tensor = tensor.index_select(dim, index.to(tensor.device))
    return tensor


class Cutter:
    """`cut`, once per window of the latest tree: clients with the same window share its tensors."""

    def __init__(self) -> None:
        self.whole: Mapping[str, Tensor] = {}
        self.parts: dict[Window, Tree] = {}

    def __call__(self, tree: Mapping[str, Tensor], codes: Axes, window: Window) -> Tree:
        if tree is not self.whole:
            self.whole, self.parts = tree, {}
        if window not in self.parts:
            self.parts[window] = cut(tree, codes, window)
        return self.parts[window]


class Part(NamedTuple):
    """A narrow tree that is to be merged into the whole one."""

    weight: float
    window: Window
    tree: Tree
    classes: Tensor | None = None  # the classes whose rows count; None: all


def overlap_mean(whole: Tree, codes: Axes, parts: Iterable[Part]) -> Tree:
    """Average every number over the parts that hold it, as a running sum; a number that no part holds is kept."""
    # Adding to -0.0 changes nothing, so if all parts are whole, the result equals `tree.mean` bit for bit.
    sums = {name: torch.full_like(tensor, -0.0, dtype=torch.float64) for name, tensor in whole.items()}
    weights = {name: torch.zeros_like(tensor, dtype=torch.float32) for name, tensor in whole.items()}
    for part in parts:
        for name, tensor in part.tree.items():
            place, values = _placed(whole[name].shape, codes[name], part, tensor)
            sums[name][place] += values.to(torch.float64) * part.weight
            weights[name][place] += part.weight
    return {
        name: torch.where(weights[name] > 0, sums[name].div_(weights[name]), tensor.to(torch.float64)).to(tensor.dtype)
        for name, tensor in whole.items()
    }


def _placed(shape: torch.Size, codes: tuple[Axis, ...], part: Part, values: Tensor) -> tuple[Any, Tensor]:
    """Return where in the whole tensor a part's values belong, and the values that count."""
    found = [indices(size, axis, part.window) for size, axis in zip(shape, codes, strict=True)]
    if codes[0] == CLASSES and part.classes is not None:
        found[0], values = part.classes, values[part.classes]
    if all(index is None for index in found):
        return ..., values
    every = (torch.arange(size) if index is None else index for size, index in zip(shape, found, strict=True))
    return tuple(index.view(-1, *[1] * (len(shape) - 1 - dim)) for dim, index in enumerate(every)), values


def narrow(model: nn.Module, rate: float) -> nn.Module:
    """Return a copy of the model at this rate, including plugins, with the weights of the first window."""
    codes = axes(model)
    small = copy.deepcopy(model)  # hooks are partials over modules, so in the copy they refer to the copy's modules
    for name, tensor in state(model).items():
        path, _, leaf = name.rpartition(".")
        owner = small.get_submodule(path)
        values = _cut_tensor(tensor.detach(), codes[name], Window(rate)).clone()
        setattr(owner, leaf, nn.Parameter(values) if isinstance(tensor, nn.Parameter) else values)
    for part in small.modules():
        _resize_(part)
    return small


def _resize_(part: Any) -> None:
    """Update a module's own record of its size to match its weights."""
    match part:
        case nn.Linear():
            part.out_features, part.in_features = part.weight.shape
        case nn.Conv2d():
            part.out_channels, part.in_channels = part.weight.shape[:2]
        case nn.GroupNorm():
            part.num_groups = part.num_groups * len(part.weight) // part.num_channels
            part.num_channels = len(part.weight)
        case nn.modules.batchnorm._BatchNorm():
            part.num_features = len(part.weight)
        case Attention():
            part.attn_dim = part.qkv.weight.shape[0] // 3
            part.head_dim = part.attn_dim // part.num_heads
            part.scale = part.head_dim**-0.5
        case VisionTransformer():
            part.embed_dim = part.num_features = part.head_hidden_size = part.patch_embed.proj.weight.shape[0]
        case _ if hasattr(part, "normalized_shape"):
            part.normalized_shape = tuple(part.weight.shape)


@contextmanager
def scaled(model: nn.Module, rate: float) -> Iterator[None]:
    """Make the hidden layers of a narrow model divide their output by the rate, as dropout would."""
    codes = axes(model) if rate < 1 else {}
    layers = {path: part for path, part in model.named_modules() if isinstance(part, (nn.Linear, nn.Conv2d))}
    hidden = [part for path, part in layers.items() if codes.get(f"{path}.weight", (WHOLE,))[0].chunks]
    # Before the plugins' hooks: what these add to a layer's output comes from layers that are scaled themselves.
    handles = [part.register_forward_hook(partial(_divide, rate), prepend=True) for part in hidden]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _divide(rate: float, _: nn.Module, __: tuple[Tensor], output: Tensor) -> Tensor:
    return output / rate
