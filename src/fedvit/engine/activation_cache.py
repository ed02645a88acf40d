"""A cache for frozen layers: every image passes them once, up to the first weight that is trained."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from fedvit.core.batches import InputSettings, prepare
from fedvit.core.client import LocalSettings
from fedvit.core.training import eval_mode
from fedvit.models.cuts import TAIL, needed_rows
from fedvit.models.plugins.attach import classifier_names
from fedvit.models.plugins.specs import HeadMaker, Projection, SecondHead
from fedvit.models.token_skipping import draws

BESIDE_CLASSIFIER = (SecondHead.kind, HeadMaker.kind, Projection.kind)


@dataclass(frozen=True)
class Start:
    """The point where a forward pass may start: at the only classifier, or after the first `block` blocks of a ViT."""

    classifier: str | None = None
    block: int = 0

    def __str__(self) -> str:
        return "the classifier" if self.classifier else f"block {self.block}"


def first_learned(module: nn.Module, trainable: Collection[str]) -> Start | None:
    """Return the last point before all trainable weights; None if one comes first or the architecture is unknown."""
    heads = classifier_names(module)
    if all(lies_under(name, (*heads, *BESIDE_CLASSIFIER)) for name in trainable) and len(heads) == 1:
        return Start(classifier=heads[0])
    if not isinstance(module, VisionTransformer):
        return None
    block = min(_first_block(name, len(module.blocks)) for name in trainable)
    return Start(block=block) if block else None


def lies_under(name: str, paths: Collection[str]) -> bool:
    return any(name == path or name.startswith(path + ".") for path in paths)


def _first_block(name: str, depth: int) -> int:
    """Return the number of blocks that come before a weight of a ViT."""
    if name.startswith("blocks."):
        return int(name.split(".")[1])
    return depth if lies_under(name, (*TAIL, *BESIDE_CLASSIFIER)) else 0


def is_random_before(module: nn.Module, start: Start) -> bool:
    """Return whether dropout, drop-path or noise acts before `start`."""
    behind = set(module.get_submodule(start.classifier).modules()) if start.classifier else set()
    if isinstance(module, VisionTransformer) and not start.classifier:
        tail = [module.blocks[start.block :], *(getattr(module, name, None) for name in (*TAIL, "head_drop"))]
        behind = {part for owner in tail if isinstance(owner, nn.Module) for part in owner.modules()}
    return any(draws(part) for part in module.modules() if part not in behind)


def accept_activations_(module: nn.Module, start: Start) -> None:
    """Let the module also accept activations at `start` in place of images; they have fewer axes."""
    module.forward = partial(_forward, module, start)  # a partial, so that a copy of the module refers to itself


def _forward(module: nn.Module, start: Start, x: Tensor) -> Tensor:
    if x.ndim == 4:
        return type(module).forward(module, x)  # type: ignore[no-any-return]
    if start.classifier:
        return module.get_submodule(start.classifier)(x)  # type: ignore[no-any-return]
    assert isinstance(module, VisionTransformer)
    for block in module.blocks[start.block :]:
        x = block(x)
    return module.forward_head(module.norm(x))


@torch.no_grad()
def activations(module: nn.Module, start: Start, x: Tensor) -> Tensor:
    """Return what images (batch, 3, size, size) become at `start`: (batch, features) or (batch, tokens, width)."""
    if start.classifier:
        seen: list[Tensor] = []
        classifier = module.get_submodule(start.classifier)
        hook = classifier.register_forward_pre_hook(lambda _, args: seen.append(args[0]), prepend=True)
        try:
            type(module).forward(module, x)
        finally:
            hook.remove()
        return seen[0]
    assert isinstance(module, VisionTransformer)
    x = module.norm_pre(module.patch_drop(module._pos_embed(module.patch_embed(x))))
    for block in module.blocks[: start.block]:
        x = block(x)
    return x[:, : needed_rows(module)] if start.block == len(module.blocks) else x


@torch.no_grad()
def same_result(module: nn.Module, start: Start, images: Tensor, inputs: InputSettings, device: torch.device) -> bool:
    """Return whether a pass from `start` gives exactly the result of the full pass."""
    x = prepare(images.to(device), inputs)
    with eval_mode(module):
        return torch.equal(module(x), module(activations(module, start, x)))


class Activations:
    """A cache of activations by image index, computed on first use and kept while there is room.

    Activations depend on the image alone, not on its batch, so no result depends on what is kept.
    """

    def __init__(
        self,
        module: nn.Module,
        start: Start,
        images: Tensor,
        inputs: InputSettings,
        settings: LocalSettings,
        limit: int,
    ):
        self.module, self.start, self.images, self.inputs, self.settings = module, start, images, inputs, settings
        example = self.compute(images[:1])[0]
        size = example.numel() * example.element_size()
        self.room = min(len(images), limit // size)
        self.megabytes = self.room * size / 1e6
        self.kept = torch.empty((self.room, *example.shape), dtype=example.dtype, device=example.device)
        self.slot = torch.full((len(images),), -1)  # the row of `kept` that holds an image's activations, or -1
        self.used = 0

    def compute(self, images: Tensor) -> Tensor:
        """Compute the activations of these images.

        A single image is computed twice in one batch: 1 is the only batch size whose sums round differently (measured).
        """
        pair = images.expand(2, -1, -1, -1) if len(images) == 1 else images
        with self.settings.autocast():
            out = activations(self.module, self.start, prepare(pair.to(self.settings.device), self.inputs))
        return out[: len(images)]

    def __call__(self, chosen: Tensor) -> Tensor:
        """Return the activations of the images with these indices."""
        slots = self.slot[chosen]
        new = slots < 0
        if not new.any():
            return self.kept[slots.to(self.kept.device)]
        fresh = self.compute(self.images[chosen[new]])
        keep = chosen[new][: self.room - self.used]
        self.kept[self.used : self.used + len(keep)] = fresh[: len(keep)]
        self.slot[keep] = torch.arange(self.used, self.used + len(keep))
        self.used += len(keep)
        if new.all():
            return fresh
        place = new.to(fresh.device)
        out = fresh.new_empty((len(chosen), *fresh.shape[1:]))
        out[place] = fresh
        out[~place] = self.kept[slots[~new].to(fresh.device)]
        return out
