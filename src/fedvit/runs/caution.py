"""Warnings about settings that are allowed, but that hardly anybody means."""

import logging

from fedvit.core.plan import Plan
from fedvit.core.settings import Experiment
from fedvit.data.partition.records import Partition
from fedvit.engine.net import Net
from fedvit.engine.pool_size import training_nbytes
from fedvit.engine.system import free_ram
from fedvit.models.build import is_claimed

log = logging.getLogger(__name__)
LARGE_BATCH = 256  # below it, memory is not estimated


def warn_of_model(name: str) -> None:
    """Warn about a model that runs, but that nobody has tested here."""
    if not is_claimed(name):
        log.warning(
            "%s is neither a ViT nor a DeiT of timm: methods that average weights work, but no test covers it, and "
            "layer groups, plugins and split learning may not fit",
            name,
        )


def warn_of_batch(experiment: Experiment, net: Net, partition: Partition, shape: tuple[int, ...]) -> None:
    """Warn about a batch that is larger than the training images of every client, or than the memory.

    `shape` is that of a stored image.
    """
    batch, device = experiment.train.batch, experiment.run.devices[0]
    pooled = isinstance(net.plan, Plan) and net.plan.pooled
    sizes = {name: len(partition.clients[name].train) for name in partition.seen}
    largest = max(sizes, key=lambda name: sizes[name])
    if batch > sizes[largest] and not pooled:
        log.warning(
            "--batch %d is more than the training images of any client (%s has the most, %d): every epoch is one step "
            "on all of them; a smaller batch, such as %d, trains in more steps",
            batch, largest, sizes[largest], max(1, min(32, sizes[largest] // 4)),
        )  # fmt: skip
    images = min(batch, sum(sizes.values()) if pooled else sizes[largest])
    if device == "cpu" and images > LARGE_BATCH:
        actual = experiment.model_copy(update={"train": experiment.train.model_copy(update={"batch": images})})
        needed, free = training_nbytes(actual, net, partition.seen, shape), free_ram()
        if needed > free:
            log.warning(
                "a batch of %d images needs about %.1f GB in one process, but %.1f GB are free: lower --batch",
                images, needed / 1e9, free / 1e9,
            )  # fmt: skip
