"""The works that all contestants do, in files that contestants can read without FedViT."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from fedvit.config.load import load_experiment
from fedvit.core import randomness
from fedvit.core.settings import Experiment
from fedvit.engine.loop import choose
from fedvit.engine.net import make_net
from fedvit.engine.worker import load_data
from fedvit.models.build import MICRO, sizes_of

TINY = {"model": "vit_tiny_patch16_224", "image_size": 32, "patch_size": 4, "batch": 32}
ONE_A_CLIENT = {"partition": "iid", "eval_every": 0}


@dataclass(frozen=True)
class Recipe:
    """A work: the flags and settings for FedViT, from which everything else is made, and its images."""

    about: str
    flags: dict[str, Any]
    sets: dict[str, Any] = field(default_factory=dict)
    images: int | None = None  # generated images per client; None: the dataset of the flags
    threads_alone: int = 2  # of a framework that supports only one process; `--threads-alone` tries another number
    # How far from the bare loop's result the same work may end, relative to how far the bare loop's weights moved.
    # AdamW divides by the size of a gradient, so that last bits that differ by the order of sums grow. A test checks
    # that different batches end farther away.
    agrees: float = 1e-2


RECIPES = {
    "full": Recipe(
        "full fine-tuning of ViT-Tiny, 8 clients of 128 images, all sampled, 3 rounds of one epoch, SGD",
        {**TINY, **ONE_A_CLIENT, "clients": 8, "cohort": 8, "rounds": 3, "epochs": 1},
        {"train.optimizer": "sgd"},
        images=128,
    ),
    "digits": Recipe(
        "the default run: ViT-Micro on digits, 24 clients, 8 sampled, 16 rounds of 2 epochs, AdamW, all evaluated",
        {},
        threads_alone=1,
        agrees=0.1,
    ),
    "head": Recipe(
        "head tuning of ViT-Tiny, 8 clients of 128 images, all sampled, 5 rounds of 10 epochs, SGD",
        {**TINY, **ONE_A_CLIENT, "clients": 8, "cohort": 8, "rounds": 5, "epochs": 10, "tune": "head"},
        {"train.optimizer": "sgd"},
        images=128,
    ),
}
SMALL = {  # the same works in a few steps, to check that everything works
    "full": {"clients": 2, "cohort": 2, "rounds": 3, "batch": 4},
    "digits": {"clients": 6, "cohort": 4, "rounds": 3, "epochs": 2, "samples": 400},
    "head": {"clients": 2, "cohort": 2, "rounds": 3, "epochs": 2, "batch": 4},
}
SMALL_IMAGES = 8


def generated(clients: int, images: int, classes: int = 10) -> dict[str, np.ndarray]:
    """Generate images of noise, with one test image per client; the arithmetic does not depend on what they show."""
    rng = np.random.default_rng(0)
    arrays = {}
    for part, count in (("train", clients * images), ("test", clients)):
        arrays[f"{part}_images"] = rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        arrays[f"{part}_labels"] = np.arange(count, dtype=np.int64) % classes
    return arrays


def write(
    name: str,
    folder: Path,
    *,
    small: bool = False,
    processes: int = 2,
    threads: int = 1,
    threads_alone: int | None = None,
) -> Path:
    """Write the folder of a work; everything random in it is drawn by FedViT's own rules."""
    recipe = RECIPES[name]
    flags = {**recipe.flags, **(SMALL[name] if small else {}), "threads": threads, "device": "cpu"}
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if recipe.images is not None:
        np.savez(folder / "images.npz", **generated(flags["clients"], SMALL_IMAGES if small else recipe.images))
        flags["data"] = str(folder / "images.npz")
    experiment = load_experiment(None, recipe.sets, flags)
    dataset, split = load_data(experiment)
    net = make_net(experiment, dataset.classes, torch.device("cpu"))
    clients = list(split.clients)
    rounds = range(1, experiment.train.rounds + 1)
    cohorts = [choose(net.plan, clients, experiment, round_) for round_ in rounds]
    arrays = {"images": dataset.images, "labels": dataset.labels}
    for client, part in split.clients.items():
        arrays |= {f"train {client}": part.train, f"test {client}": part.test}
    for round_, cohort in zip(rounds, cohorts, strict=True):
        for client in cohort:
            arrays[f"order {round_} {client}"] = order(experiment, round_, client, split.clients[client].train)
    np.savez(folder / "data.npz", **arrays)
    save_file(
        {key: tensor.contiguous() for key, tensor in net.module.state_dict().items()}, folder / "start.safetensors"
    )
    train = experiment.train
    (folder / "work.json").write_text(
        json.dumps(
            {
                "about": recipe.about,
                "model": model(experiment),
                "classes": dataset.classes,
                "mean": net.inputs.mean,
                "std": net.inputs.std,
                "learned": "" if experiment.tune["name"] == "full" else "head",
                "optimizer": train.optimizer,
                "options": {"lr": train.lr, "weight_decay": train.weight_decay},
                "batch": train.batch,
                "clients": clients,
                "cohorts": cohorts,
                "evaluates": experiment.run.eval_every == 1,
                "processes": processes,
                "threads": threads,
                "threads_alone": threads_alone or min(recipe.threads_alone * threads, os.cpu_count() or 1),
                "flags": flags,
                "sets": recipe.sets,
            },
            indent=1,
        )
    )
    return folder


def order(experiment: Experiment, round_: int, client: str, train: np.ndarray) -> np.ndarray:
    """Return a client's images in a round, one row per epoch, as FedViT shuffles them."""
    generator = randomness.generator(experiment.run.seed, round_, client, "train")
    rows = [train[torch.randperm(len(train), generator=generator).numpy()] for _ in range(experiment.train.epochs)]
    return np.stack(rows)


def model(experiment: Experiment) -> dict[str, Any]:
    """Return the name and sizes with which to create the model in timm."""
    sizes = sizes_of(experiment.model)
    if experiment.model.name == "vit_micro":
        return {"name": "VisionTransformer", "sizes": MICRO | sizes}
    return {"name": experiment.model.name, "sizes": sizes}
