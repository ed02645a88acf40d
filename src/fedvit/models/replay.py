"""A forward pass recorded as a list of calls, so that a part of a model can change and only what follows runs again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

Position = tuple[int, int]  # number of an outer call, and of an inner call inside it


class Replay:
    """A recorded forward pass that can restart at any of its calls.

    Outer calls are those of units (blocks) and of the layers outside them; their outputs are kept. Inner calls are
    those of the layers inside a unit; their outputs are kept only for the unit that is being edited.
    """

    def __init__(self, module: nn.Module, forward: Callable[[], Tensor]):
        self.module, self.forward = module, forward
        self.units = set(_units_of(module))
        self.outer: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]] = []
        self.inner: list[Any] = []  # outputs inside unit `reached`
        self.first: dict[nn.Module, Position] = {}  # first call of each layer
        self.depth, self.count, self.inner_count = 0, 0, 0
        self.reached = -1
        self.mode: Literal["record", "record unit", "replay"] = "record"
        self.resume: Position = (0, 0)
        self.originals: dict[nn.Module, Callable[..., Any]] = {}

    @contextmanager
    def watching(self) -> Iterator["Replay"]:
        """Watch every layer and unit, and record the plain pass."""
        layers = {m for p, m in self.module.named_modules() if p and (_owns(m) or not any(m.children()))}
        overridden = {m: m.__dict__.get("forward") for m in layers | self.units}
        try:
            for part in overridden:
                self.originals[part] = part.forward
                part.forward = lambda *args, part=part, **kwargs: self.call(part, args, kwargs)
            self.output = self.forward()
            yield self
        finally:
            for part, forward in overridden.items():
                del part.forward
                if forward is not None:
                    part.forward = forward

    def start_of(self, name: str) -> Position | None:
        """Find the first call of a layer, or of the first layer inside a container; None if it is never called.

        A layer inside a module that is watched as a whole counts as called where that module is.
        """
        members = [self.first[m] for m in self.module.get_submodule(name).modules() if m in self.first]
        while not members and "." in name:
            name = name.rpartition(".")[0]
            owner = self.module.get_submodule(name)
            members = [self.first[owner]] if owner in self.first else []
        return min(members, default=None)

    def reach(self, outer: int) -> None:
        """Record the outputs inside this unit, unless they are already recorded."""
        part, args, kwargs, _ = self.outer[outer]
        if outer != self.reached:
            self.reached, self.inner, self.mode = outer, [], "record unit"
            if part in self.units:
                self.depth, self.inner_count = 1, 0
                self.originals[part](*args, **kwargs)
                self.depth = 0

    def run_from(self, start: Position) -> Tensor:
        """Run the pass with everything before `start` taken from the record."""
        self.mode, self.resume, self.count = "replay", start, 0
        return self.forward()

    def call(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.call_outer(part, args, kwargs) if self.depth == 0 else self.call_inner(part, args, kwargs)

    def call_outer(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number = self.count
        self.count += 1
        if self.mode == "replay" and number < self.resume[0]:
            return _copied(self.outer[number][3])  # a copy, because the network may write into it
        self.first.setdefault(part, (number, 0))
        self.depth, self.inner_count = (1, 0) if part in self.units else (2, 0)
        output = self.originals[part](*args, **kwargs)
        self.depth = 0
        if self.mode == "record":
            self.outer.append((part, args, kwargs, _copied(output)))
        return output

    def call_inner(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.depth == 2:  # inside a layer that is watched as a whole
            return self.originals[part](*args, **kwargs)
        number = self.inner_count
        self.inner_count += 1
        editing = self.mode == "replay" and self.count - 1 == self.resume[0]
        if editing and number < self.resume[1]:
            return _copied(self.inner[number])
        self.first.setdefault(part, (self.count - 1, number))
        self.depth = 2
        output = self.originals[part](*args, **kwargs)
        self.depth = 1
        if self.mode == "record unit":
            self.inner.append(_copied(output))
        return output


def _copied(output: Any) -> Any:
    """Clone the tensors in a layer's output, whatever its structure."""
    return tree_map_only(Tensor, torch.clone, output)


def _owns(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def _units_of(module: nn.Module) -> list[nn.Module]:
    """List the blocks that form the model's chain, or none if we do not know them."""
    if hasattr(module, "blocks"):
        return list(module.blocks.children())  # type: ignore[union-attr]
    from timm.models import resnet as timm_resnet
    from torchvision.models import resnet

    kinds = (resnet.BasicBlock, resnet.Bottleneck, timm_resnet.BasicBlock, timm_resnet.Bottleneck)
    return [part for part in module.modules() if isinstance(part, kinds)]
