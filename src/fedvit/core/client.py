"""The client as a method sees it: everything that a method may touch on the client's side."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedvit.core import randomness
from fedvit.core.batches import Augment, Batch, ClientData, InputSettings, image_batches
from fedvit.core.losses import Criterion, make_criterion
from fedvit.core.roles import Roles
from fedvit.core.settings import FOCAL_GAMMA, LossName
from fedvit.core.tree import Tree

CPU = torch.device("cpu")
Memory = dict[str, Tree | float]  # named trees and numbers that never leave the client
Predictor = Callable[[Tensor], Tensor]  # from images to logits
Loss = Callable[[Predictor, Tensor, Tensor], Tensor]  # from model, images and labels to the value to minimize
Part = Literal["classifier", "plugins"]  # of the weights, with a learning rate of its own


class PrivateTraining(Protocol):
    """What replaces a client's batches and gradients where training is differentially private."""

    def orders(self, images: int, size: int, epochs: int) -> Iterator[Tensor]:
        """Yield which of the images each batch holds; a batch may be empty."""

    def gradient(
        self, client: "Client", weights: Mapping[str, Tensor], names: Sequence[str], x: Tensor, y: Tensor, loss: Loss
    ) -> tuple[Tensor, Tree]:
        """Return the mean loss of a batch under these weights, and a private gradient for those named."""


@dataclass(frozen=True)
class LocalSettings:
    """How a client trains in this round."""

    lr: float
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_grad: float = 0.0  # the largest norm of a gradient; 0: unlimited
    lr_classifier: float | None = None  # None: lr
    lr_plugins: float | None = None
    epochs: int = 1
    batch: int = 32
    augment: Augment = "none"
    loss: LossName = "cross_entropy"
    focal_gamma: float = FOCAL_GAMMA
    precision: Literal["fp32", "bf16"] = "fp32"
    device: torch.device = CPU
    seed: int = 0
    schedule: float = 1.0  # the factor that the schedule applies to every learning rate in this round; `lr` has it

    def autocast(self) -> AbstractContextManager[object]:
        """Return a context with mixed precision for a forward pass; it has no effect in fp32."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")


@dataclass
class Client:
    """One client in one round. Trees hold only trainable weights; the frozen ones stay in the module.

    Attributes:
        id: The client's name.
        round: The current round; the first is 1.
        roles: The names of the shared, personal and frozen weights.
        initial: The trainable weights before round 1, the same for every client.
        frozen: The frozen weights.
        data: The client's images and labels, for training, validation and testing.
        memory: Named trees and numbers that never leave the client; the next round finds them again.
        settings: The learning rate, the epochs and the other settings of local training in this round.
        module: The process's only model. Use `net` for a model with given weights.
        inputs: How images become the module's input.
        live: The module's own tensors by name, for `descend` to write into.
        compiled: The module compiled with torch.compile, or None.
        rate: The fraction of the full model's width that this client trains.
        parts: The names of the classifier's weights and of added modules' weights, with the part each belongs to.
        private: Makes the batches and gradients, if training is differentially private.
        scalars: Numbers that are reported alongside the weights, such as the loss.
        scratch: Trees passed from merge to local to report, then discarded.
    """

    id: str
    round: int
    roles: Roles
    initial: Tree
    frozen: Tree
    data: ClientData
    memory: Memory
    settings: LocalSettings
    module: nn.Module
    inputs: InputSettings
    live: Tree
    compiled: Callable[[Tensor], Tensor] | None = None
    rate: float = 1.0
    parts: Mapping[str, Part] = field(default_factory=dict)
    private: PrivateTraining | None = None
    scalars: dict[str, float] = field(default_factory=dict)
    scratch: dict[str, Tree] = field(default_factory=dict)

    def net(self, tree: Tree) -> Predictor:
        """Return the model with these weights, in the module's current mode; several may be in use at once."""
        placed = {name: tensor.to(self.settings.device, non_blocking=True) for name, tensor in tree.items()}

        def predict(x: Tensor) -> Tensor:
            with self.settings.autocast():
                logits: Tensor = functional_call(self.module, placed, (x,))
            return logits.float()

        return predict

    @cached_property
    def criterion(self) -> Criterion:
        """The loss of the run's settings, from logits and labels, with this client's own class counts."""
        settings = self.settings
        return make_criterion(settings.loss, settings.focal_gamma, self.data.answer_counts, settings.device)

    def loss(self, model: Predictor, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of the run's settings on a batch."""
        return self.criterion(model(x).float(), y)

    def batches(self, epochs: int, tag: str, size: int | None = None) -> Iterator[Batch]:
        """Yield shuffled batches for this many passes over the client's training images."""
        generator, s, images = self.rng(tag), self.settings, len(self.data.train)
        size = size or s.batch
        for chosen in self._orders(images, size, epochs, generator):
            order = self.data.train[chosen]
            size = len(order) if self.private is not None else size
            if len(order):
                yield from image_batches(self.data, order, size, self.inputs, s.device, s.augment, generator)
            else:
                yield torch.empty(0, device=s.device), torch.empty(0, dtype=torch.int64, device=s.device)

    def _orders(self, images: int, size: int, epochs: int, generator: torch.Generator) -> Iterator[Tensor]:
        """Yield the order of the images in each pass, or, if training is private, the images of each batch."""
        if self.private is not None:
            yield from self.private.orders(images, size, epochs)
            return
        for _ in range(epochs):
            yield torch.randperm(images, generator=generator)

    def rng(self, tag: str) -> torch.Generator:
        """Return a generator keyed by (seed, round, client, tag)."""
        return randomness.generator(self.settings.seed, self.round, self.id, tag)

    def lr_of(self, name: str, lr: float | None = None) -> float:
        """Return the learning rate of a weight: its part's own if there is one, otherwise `lr`, or the run's."""
        settings = self.settings
        own = {"classifier": settings.lr_classifier, "plugins": settings.lr_plugins}
        rate = own[self.parts[name]] if name in self.parts else None
        return rate if rate is not None else settings.lr if lr is None else lr

    def personal(self) -> Tree:
        """Return the client's own weights from memory, or the initial ones if it has never trained."""
        kept = self.memory.get("personal")
        return kept if isinstance(kept, dict) else {name: self.initial[name] for name in self.roles.personal}

    def recall(self, key: str, otherwise: Tree | None = None) -> Tree:
        """Return a tree from the client's memory, or `otherwise`, by default the initial weights, if there is none."""
        kept = self.memory.get(key)
        return kept if isinstance(kept, dict) else self.initial if otherwise is None else otherwise
