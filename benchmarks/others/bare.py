"""The work in plain PyTorch, as all contestants except FedViT do it, with torch, timm, numpy and safetensors only.

A work is a folder made by `works.write`: work.json, data.npz (images, and the order in which every client sees its own
in every round) and start.safetensors. All contestants begin with the same weights and see the same batches in the same
order, so they should end with the same weights.

Every contestant gets the best conditions: images are normalized once, before the first round; frozen layers run without
gradients; the optimizer is fused and gets only what learns; and a process builds its model once.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

OPTIMIZERS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


class Work:
    """A description of the work to do."""

    def __init__(self, folder: Path):
        self.folder = folder
        said: dict[str, Any] = json.loads((folder / "work.json").read_text())
        self.model: dict[str, Any] = said["model"]  # timm's name and sizes
        self.classes: int = said["classes"]
        self.mean, self.std = said["mean"], said["std"]
        self.learned: str = said["learned"]  # prefix of the weights that learn; empty: everything
        self.optimizer: str = said["optimizer"]
        self.options: dict[str, float] = said["options"]  # of the optimizer
        self.batch: int = said["batch"]
        self.clients: list[str] = said["clients"]
        self.cohorts: list[list[str]] = said["cohorts"]  # of every round
        self.evaluates: bool = said["evaluates"]  # every client, after every round
        self.processes: int = said["processes"]
        self.threads: int = said["threads"]  # of one process
        self.threads_alone: int = said["threads_alone"]  # if a framework supports only one process
        self.data = dict(np.load(folder / "data.npz"))

    @property
    def rounds(self) -> range:
        return range(1, len(self.cohorts) + 1)

    def cohort(self, round_: int) -> list[str]:
        return self.cohorts[round_ - 1]

    def examples(self, client: str) -> int:
        return len(self.data[f"train {client}"])

    def order(self, round_: int, client: str) -> Tensor:
        """Return the client's images in this round, one row per epoch."""
        return torch.from_numpy(self.data[f"order {round_} {client}"])

    @cached_property
    def labels(self) -> Tensor:
        return torch.from_numpy(self.data["labels"])

    @cached_property
    def pixels(self) -> Tensor:
        """All images as normalized floats; the colors of a pixel are adjacent in memory, as in FedViT."""
        mean, std = (255 * torch.tensor(three) for three in (self.mean, self.std))
        x = torch.from_numpy(self.data["images"]).float()  # (images, height, width, 1 or 3)
        if x.shape[3] == 3:
            return x.sub_(mean).div_(std).permute(0, 3, 1, 2)
        grey = x.permute(0, 3, 1, 2).expand(-1, 3, -1, -1).contiguous()
        return grey.sub_(mean.view(3, 1, 1)).div_(std.view(3, 1, 1))

    def take(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return these images and their labels, in the memory layout of `pixels`."""
        x = self.pixels.permute(0, 2, 3, 1)[chosen].permute(0, 3, 1, 2) if self.in_colour else self.pixels[chosen]
        return x, self.labels[chosen]

    @property
    def in_colour(self) -> bool:
        return self.data["images"].shape[3] == 3

    def batches(self, round_: int, client: str) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterate over all batches of a client's round; the last of an epoch may be smaller."""
        for epoch in self.order(round_, client):
            for chosen in epoch.split(self.batch):
                yield self.take(chosen)

    def test(self, client: str) -> tuple[Tensor, Tensor]:
        return self.take(torch.from_numpy(self.data[f"test {client}"]))


@lru_cache(maxsize=1)
def load(folder: str | Path) -> Work:
    return Work(Path(folder))


def build(work: Work) -> nn.Module:
    """Build the model with the initial weights that all contestants share."""
    name, sizes = work.model["name"], work.model["sizes"]
    if name == "VisionTransformer":
        model: nn.Module = timm.models.vision_transformer.VisionTransformer(**sizes, num_classes=work.classes)
    else:
        model = timm.create_model(name, pretrained=False, num_classes=work.classes, **sizes)
    model.load_state_dict(load_file(work.folder / "start.safetensors"))
    for path, parameter in model.named_parameters():
        parameter.requires_grad_(path.startswith(work.learned))
    if work.learned == "head":
        model.forward = partial(frozen_body, model)  # a partial, so that a copy of the model refers to itself
    return model


def frozen_body(model: nn.Module, x: Tensor) -> Tensor:
    """Run the forward pass of head tuning, which keeps nothing for a backward pass through the body."""
    with torch.no_grad():
        x = model.forward_head(model.forward_features(x), pre_logits=True)
    return model.head(x)


def learned(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Copy the weights that learn."""
    return {name: parameter.detach().clone() for name, parameter in learned(model).items()}


def load_(model: nn.Module, tree: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in learned(model).items():
            parameter.copy_(tree[name])


def make_optimizer(work: Work, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return OPTIMIZERS[work.optimizer]((p for p in parameters if p.requires_grad), fused=True, **work.options)


def train(model: nn.Module, work: Work, round_: int, client: str) -> float:
    """Train a client's round in place, and return its mean loss."""
    model.train()
    optimizer = make_optimizer(work, model.parameters())
    total, count = torch.zeros(()), 0
    for x, y in work.batches(round_, client):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        total += loss.detach() * len(y)
        count += len(y)
    return total.item() / count


@torch.no_grad()
def correct(model: nn.Module, work: Work, client: str) -> int:
    """Count the client's test images that the model classifies correctly."""
    model.eval()
    x, y = work.test(client)
    return int((model(x).argmax(1) == y).sum())


def mean(weighted: Iterable[tuple[float, Mapping[str, Tensor]]]) -> dict[str, Tensor]:
    """Compute FedAvg's mean in double precision."""
    total, sums = 0.0, {}
    for weight, tree in weighted:
        total += weight
        for name, tensor in tree.items():
            sums[name] = sums.get(name, 0) + tensor.double() * weight
    return {name: (tensor / total).float() for name, tensor in sums.items()}


def one_process(work: Work) -> dict[str, Tensor]:
    """Do the whole work in this process, as the reference that all others should agree with."""
    model = build(work)
    shared = weights(model)
    for round_ in work.rounds:
        ends = []
        for client in work.cohort(round_):
            load_(model, shared)
            train(model, work, round_, client)
            ends.append((work.examples(client), weights(model)))
        shared = mean(ends)
    return shared


def report(out: str | Path, marks: list[float], end: Mapping[str, Tensor], *packages: str) -> None:
    """End a contestant: write its weights to a file and print one line of JSON.

    `marks` are the times at which rounds ended, by the machine-wide clock.
    """
    os.makedirs(out, exist_ok=True)
    save_file({name: tensor.detach().contiguous() for name, tensor in end.items()}, Path(out) / "end.safetensors")
    print(json.dumps({"marks": marks, "versions": {name: version(name) for name in packages}}), flush=True)


def now() -> float:
    """Return the seconds of the machine-wide clock, which are comparable between processes."""
    return time.monotonic()
