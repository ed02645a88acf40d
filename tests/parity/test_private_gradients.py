"""Gradients image by image, without clipping and noise, against the ordinary gradients of batches."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedvit.core.client import Client
from fedvit.core.plan import Plan, client_round
from fedvit.engine.loop import for_round
from fedvit.methods import METHODS
from fedvit.methods.tunes import TUNES
from fedvit.privacy.gradients import PrivateGradients
from tests.conftest import Bench, assert_close_trees, tiny

FEDERATED = {name: plan() for name, plan in METHODS.items() if isinstance(plan(), Plan)}
TAGS = {"fedrep": ("head", "train")}
SETTINGS = {"cd2_pfed": {"method.ramp": 1}}  # so that it has channels of both kinds from the first round
HALVED = {"per_fedavg"}  # its batches are others where training is private
POSSIBLE = [name for name, plan in FEDERATED.items() if plan.not_private is None and name not in HALVED]


@dataclass
class Transparent(PrivateGradients):
    """Ordinary batches, and gradients image by image that are neither clipped nor noised."""

    client: Client | None = None
    tags: tuple[str, ...] = ("train",)

    def orders(self, images: int, size: int, epochs: int) -> Iterator[Tensor]:
        assert self.client is not None
        generator = self.client.rng(self.tags[self.passes % len(self.tags)])
        self.passes += 1
        for _ in range(epochs):
            for chosen in torch.randperm(images, generator=generator).split(size):
                self.share = len(chosen) / images
                yield chosen


def trained(bench: Bench, name: str, *, by_image: bool) -> tuple[Client, dict[str, Tensor]]:
    down = for_round(bench.net.federated.dispatch(bench.server, name), 1)
    client = bench.worker.client(name, 1, {})
    if by_image:
        client.private = Transparent(1e9, 0.0, b"key", client=client, tags=TAGS.get(bench.net.plan.name, ("train",)))
    up = client_round(bench.net.federated, client, down)
    return client, {f"{group} {key}": t for group, tree in up.trees.items() for key, t in tree.items()}


@pytest.mark.parametrize("label", [*POSSIBLE, *(f"fedavg+{tune}" for tune in TUNES), "fedavg+norm,blocks.1"])
def test_a_gradient_of_single_images_adds_up_to_that_of_their_batch(label: str, tmp_path: Path) -> None:
    sets = {"train.optimizer": "sgd", "train.lr": 0.01, "train.clip_grad": 0.0, "data.samples": 300}
    bench = Bench(tiny(label, {**sets, **SETTINGS.get(label, {})}, epochs=1, clients=6), tmp_path)
    name = "/pooled" if bench.net.federated.pooled else bench.split.seen[0]
    plain, sent = trained(bench, name, by_image=False)
    private, sent_by_image = trained(bench, name, by_image=True)
    assert_close_trees(sent_by_image, sent)
    assert private.scalars["loss"] == pytest.approx(plain.scalars["loss"], rel=1e-4)
    trees = [key for key, value in plain.memory.items() if isinstance(value, dict)]
    for key in trees:
        assert_close_trees(private.memory[key], plain.memory[key])  # type: ignore[arg-type]
    assert any(not torch.equal(t, bench.net.initial[n]) for n, t in plain.recall(trees[0]).items()) if trees else sent
