"""How fast this kind of machine works: seconds per visit, step and image, from a table or from a measurement."""

from dataclasses import dataclass
from typing import Literal

import torch

from fedvit.core import tree
from fedvit.core.settings import Experiment
from fedvit.engine.net import Net
from fedvit.engine.probe import Footprint, Work

# Measured on one of two cores of an AMD EPYC with AVX2, in float32, with torch 2.15: `python -m benchmarks estimate`.
SECONDS_PER_MAC = 1 / 30e9
SECONDS_PER_OP = 8e-6
SECONDS_PER_BYTE = 1 / 4e9
THREADS = 0.8  # what each doubling of the threads gains, of twice as fast
GPU_SPEEDUP = 50.0  # a guess: we have had no GPU to measure
START = 6.0  # seconds: imports, settings, data, model, results and report
START_WORKERS = 4.0  # seconds until worker processes have built their models
DISK = 200e6  # bytes that a checkpoint writes per second
COPY = 1e9  # bytes of a message that cross to another process per second
MAIN_MB = 800.0  # the command itself, with PyTorch and timm
WORKER_MB = 200.0  # another process, beside what it shares with the first
SPARE_MB = 400.0  # the process that workers are forked from


@dataclass(frozen=True)
class Rates:
    """Seconds per visit of a client, step and image; MB that a process takes before it works."""

    train_visit: float
    train_step: float
    train_image: float
    train_image_epoch: float
    train_first: float
    test_visit: float
    test_image: float
    test_first: float
    start: float
    round: float
    main_mb: float = MAIN_MB
    worker_mb: float = WORKER_MB
    spare_mb: float = SPARE_MB
    how: Literal["table", "measured"] = "table"


def rates_for(experiment: Experiment, net: Net, found: Footprint, workers: int, shape: tuple[int, ...] = ()) -> Rates:
    """Return how fast this experiment's work goes."""
    return rates_by_table(experiment, net, found, workers)


def rates_by_table(experiment: Experiment, net: Net, found: Footprint, workers: int) -> Rates:
    """Return how fast the footprint's work goes on the machine of the table."""
    threads = experiment.run.threads
    faster = 2 ** (THREADS * (threads.bit_length() - 1)) if threads > 1 else 1.0
    if torch.device(experiment.run.devices[0]).type == "cuda":
        faster = GPU_SPEEDUP

    def seconds(work: Work) -> float:
        return work.ops * SECONDS_PER_OP + (work.macs * SECONDS_PER_MAC + work.fresh * SECONDS_PER_BYTE) / faster

    message = tree.nbytes(net.shared) + net.memory_nbytes
    crossing = 2 * message / COPY if workers > 1 else 0.0
    cohort = experiment.train.cohort or 1
    return Rates(
        train_visit=seconds(found.train_visit) + crossing,
        train_step=seconds(found.train_step),
        train_image=seconds(found.train_image),
        train_image_epoch=seconds(found.train_image_epoch),
        train_first=seconds(found.train_first),
        test_visit=seconds(found.test_visit) + crossing / 2,
        test_image=seconds(found.test_image),
        test_first=seconds(found.test_first),
        start=START + (START_WORKERS if workers > 1 else 0.0),
        round=0.02 + (tree.nbytes(net.shared) + cohort * net.memory_nbytes) / DISK,
    )
