"""How fast this kind of machine works: seconds per visit, step and image, from a table or from a measurement."""

import json
import platform
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch

from fedvit.core import tree
from fedvit.core.batches import EVALUATION_BATCH
from fedvit.core.settings import Experiment
from fedvit.engine.footprint import Footprint, Work
from fedvit.engine.net import Net
from fedvit.engine.system import cores

# Measured on one of two cores of an AMD EPYC with AVX2, in float32, with torch 2.15: `python -m benchmarks estimate`.
SECONDS_PER_MAC = 1 / 68e9
SECONDS_PER_OP = 4.8e-6
SECONDS_PER_BYTE = 1 / 5.2e9
THREADS = 0.8  # what each doubling of the threads gains, of twice as fast
GPU_SPEEDUP = 50.0  # a guess: we have had no GPU to measure
COMMAND = 3.0  # seconds of a command, whatever it runs: imports and the report
START = 0.5  # seconds of a run before its first round: data and model
START_WORKERS = 0.5  # seconds until worker processes have built their models
DISK = 200e6  # bytes that a checkpoint writes per second
COPY = 1e9  # bytes of a message that cross to another process per second
MAIN_MB = 800.0  # the command itself, with PyTorch and timm
WORKER_MB = 150.0  # another process, beside what it shares with the first
SPARE_MB = 450.0  # the process that workers are forked from


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
    command: float  # once, however many runs follow
    start: float  # of every run
    round: float
    main_mb: float = MAIN_MB
    worker_mb: float = WORKER_MB
    spare_mb: float = SPARE_MB
    how: Literal["table", "measured"] = "table"


def rates_for(experiment: Experiment, net: Net, found: Footprint, workers: int) -> Rates:
    """Return how fast this experiment's work goes: as `fedvit cost --calibrate` measured it, or by the table."""
    kept = known_calibrations(calibration_file(experiment)).get(calibration_key(experiment, net.classes, workers))
    if kept is not None and kept.keys() == {field.name for field in fields(Rates)}:
        return Rates(**kept)
    return rates_by_table(experiment, net, found, workers)


def calibration_file(experiment: Experiment) -> Path:
    """Return where measurements are kept."""
    return experiment.data.cache_folder / "calibration.json"


def calibration_key(experiment: Experiment, classes: int, workers: int) -> str:
    """Return what a measurement depends on."""
    train, run = experiment.train, experiment.run
    parts = {
        "model": experiment.model.model_dump(mode="json", exclude={"weights", "pretrained", "fingerprint"}),
        "method": experiment.method,
        "tune": experiment.tune,
        "train": [train.batch, train.optimizer, train.augment, train.compile],
        "run": [run.threads, run.device, run.precision, workers],
        "classes": classes,
        "machine": [platform.node(), platform.machine(), cores(), torch.__version__],
    }
    return json.dumps(parts, sort_keys=True)


def known_calibrations(file: Path) -> dict[str, dict[str, Any]]:
    """Return everything that was measured before; an unreadable file counts as none."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def memory_mb(
    experiment: Experiment,
    net: Net,
    found: Footprint,
    rates: Rates,
    workers: int,
    clients: int,
    images_nbytes: int,
    cached_images: int,
    tests: int = EVALUATION_BATCH,
) -> float:
    """Return the peak memory of all processes together: programs, models, images, what clients keep, and training."""
    model = 2 * tree.nbytes(net.live)  # the module itself, and its initial weights
    kept = clients * net.memory_nbytes + cached_images * found.cached_nbytes
    working = found.working_nbytes(experiment.train.batch, tests)
    if workers == 1:
        return rates.main_mb + (model + working + images_nbytes + kept) / 1e6
    messages = 4 * tree.nbytes(net.initial)
    each = rates.worker_mb + (model + messages + working) / 1e6
    return rates.main_mb + rates.spare_mb + workers * each + (model + messages + images_nbytes + kept) / 1e6


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
        command=COMMAND,
        start=START + (START_WORKERS if workers > 1 else 0.0),
        round=0.01 + (tree.nbytes(net.shared) + cohort * net.memory_nbytes) / DISK,
    )
