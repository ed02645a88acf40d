"""The number of worker processes that fit on this machine."""

import logging
import math
from collections.abc import Sequence

import numpy as np
import torch

from fedvit.core import tree
from fedvit.core.errors import UserError
from fedvit.core.settings import Experiment
from fedvit.data.dataset import Dataset
from fedvit.data.partition.records import Partition
from fedvit.engine.net import Net
from fedvit.engine.probe import footprint_of
from fedvit.engine.system import cores, free_ram, free_shared_memory
from fedvit.split.plan import SplitPlan

log = logging.getLogger(__name__)


def number_of_workers(
    wanted: int | None, experiment: Experiment, net: Net, dataset: Dataset, partition: Partition
) -> int:
    """Return how many processes share the clients' work: as requested, or as cores, clients and memory allow."""
    run, plan = experiment.run, net.plan
    if isinstance(plan, SplitPlan) or plan.pooled:
        return 1
    in_memory = 0 if isinstance(dataset.images, np.memmap) else dataset.images.nbytes
    message = max(tree.nbytes(net.shared), plan.dispatch(net.server(partition.seen), partition.seen[0]).nbytes)
    shared, each = free_shared_memory(), 2 * (message + net.memory_nbytes)  # in both directions
    room = math.inf if shared is None else (0.8 * shared - in_memory) // max(1, each)
    if wanted is not None or len(run.devices) > 1:
        count = max(wanted or 1, len(run.devices))
        if count > 1 and count > room:
            raise UserError(
                f"{count} worker processes need {(in_memory + count * each) / 0.8e6:.0f} MB of shared memory, found "
                f"{(shared or 0) / 1e6:.0f} MB free in /dev/shm: give the container more (docker run --shm-size), "
                "or use --workers 1"
            )
        return count
    cohort = len(partition.seen) if plan.trains == "everyone" else experiment.train.cohort
    on_cpu = run.devices[0] == "cpu"
    most = min(cores() // run.threads if on_cpu else device_count(run.devices), cohort or 1)
    if most <= 1:
        return 1
    fit = room
    if on_cpu:
        one = training_nbytes(experiment, net, partition.seen, tuple(dataset.images.shape[1:]))
        fit = min(room, (free_ram() - in_memory) // 2 // one)
    if fit < most:
        log.info("memory allows %d of %d worker processes", max(1, fit), most)
    return int(max(1, min(most, fit)))


def training_nbytes(experiment: Experiment, net: Net, clients: Sequence[str], shape: tuple[int, ...]) -> int:
    """Return the bytes of a process that acts as clients: its model twice, messages, and training or testing."""
    working = footprint_of(experiment, net, clients, shape).working_nbytes(experiment.train.batch)
    return round(2 * tree.nbytes(net.live) + 2 * tree.nbytes(net.initial) + working)


EMPTY_IMAGE = np.zeros((1, 1, 1, 3), dtype=np.uint8)


def device_count(devices: Sequence[str]) -> int:
    """Return the number of devices, which get one process each; `cuda` alone means every GPU."""
    return torch.cuda.device_count() if list(devices) == ["cuda"] else len(devices)
