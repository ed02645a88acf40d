"""Code that all benchmarks share: generated images, contestants that take turns, and one table of ratios."""

import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from fedvit.config.load import load_experiment
from fedvit.core.settings import Experiment
from fedvit.data.dataset import Dataset
from fedvit.data.partition.records import ClientPartition, Partition
from fedvit.engine.net import make_net
from fedvit.engine.worker import Worker

CPU = torch.device("cpu")
TINY = {"model": "vit_tiny_patch16_224", "image_size": 32, "patch_size": 4, "batch": 32, "epochs": 1}


@dataclass(frozen=True)
class Result:
    """One line of the table: a ratio of times measured side by side, and the bar that it must meet."""

    what: str
    ratios: list[float]
    bar: float | None  # None: reported only
    at_least: bool = False  # the bar is a floor, not a ceiling
    beside: str = ""
    threads: int = 1  # of each process

    @property
    def median(self) -> float:
        return statistics.median(self.ratios)

    @property
    def verdict(self) -> str:
        if self.bar is None:
            return "-"
        return "holds" if (self.median >= self.bar if self.at_least else self.median <= self.bar) else "MISSED"


def alternate(ours: Callable[[int], object], theirs: Callable[[int], object], repeats: int) -> list[float]:
    """Return our time over theirs; each goes first in turn, and both are called once before, to warm up."""
    ours(0)
    theirs(0)
    ratios = []
    for repeat in range(1, repeats + 1):
        pair = (ours, theirs) if repeat % 2 else (theirs, ours)
        seconds = [seconds_of(contestant, repeat) for contestant in pair]
        ratios.append(seconds[0] / seconds[1] if repeat % 2 else seconds[1] / seconds[0])
    return ratios


def seconds_of(contestant: Callable[..., object], *work: Any) -> float:
    begin = time.perf_counter()
    contestant(*work)
    return time.perf_counter() - begin


def generated(clients: int, images: int, test: int = 1, size: int = 32, classes: int = 10) -> tuple[Dataset, Partition]:
    """Generate images of noise, because the arithmetic does not depend on what they show."""
    rng = np.random.default_rng(0)
    total = clients * (images + test)
    pixels = rng.integers(0, 256, (total, size, size, 3), dtype=np.uint8)
    dataset = Dataset("generated", pixels, rng.integers(0, classes, total), tuple(map(str, range(classes))))
    parts = np.arange(total).reshape(clients, images + test)
    none = np.empty(0, dtype=np.int64)
    split = {str(i): ClientPartition(part[:images], part[images:], none) for i, part in enumerate(parts)}
    return dataset, Partition(split, parts[:, images:].flatten())


def settings(label: str, sets: dict[str, Any] | None = None, **flags: Any) -> Experiment:
    """Load an experiment on the ViT-Tiny that all benchmarks use."""
    method, _, tune = label.partition("+")
    sets = {"optimizer": "sgd", **(sets or {})}
    return load_experiment(None, sets, {**TINY, "method": method, "tune": tune or None, **flags})


def make_worker(experiment: Experiment, images: int, test: int = 1) -> Worker:
    torch.set_num_threads(experiment.run.threads)
    assert experiment.partition.clients is not None
    dataset, split = generated(experiment.partition.clients, images, test)
    return Worker(experiment, make_net(experiment, dataset.classes, CPU), dataset, split, CPU)


def machine() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = ", ".join(f"{name} {version(name)}" for name in ("fedvit", "torch", "timm"))
    return f"{cores} cores, {versions}, Python {platform.python_version()}, {platform.machine()}"


def show(results: list[Result]) -> None:
    table = Table(title=machine(), title_justify="left", box=None)
    for column in ("what", "threads", "median", "bar", "", "of", "beside"):
        table.add_column(column, justify="right" if column == "median" else "left")
    for result in results:
        bar = "" if result.bar is None else f"{'>=' if result.at_least else '<='} {result.bar:g}"
        of = " ".join(f"{ratio:.3g}" for ratio in result.ratios)
        table.add_row(result.what, str(result.threads), f"{result.median:.3f}", bar, result.verdict, of, result.beside)
    Console(width=170, highlight=False).print(table)
