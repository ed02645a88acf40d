"""A dataset in memory: images, labels and the names that belong to them."""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedvit.core import randomness
from fedvit.core.errors import UserError
from fedvit.core.metrics import AUROC, METRICS
from fedvit.core.settings import DataSettings
from fedvit.data import medmnist

log = logging.getLogger(__name__)
Labels = NDArray[np.int64]
Indices = NDArray[np.int64]
Images = NDArray[np.uint8]


@dataclass(frozen=True)
class Dataset:
    """All images of one source, before they are partitioned among clients."""

    name: str
    images: Images  # (samples, height, width, 1 or 3), in memory or a memory map
    labels: Labels  # (samples) class numbers, or (samples, classes) 0 or 1 where an image may have several labels
    class_names: tuple[str, ...]
    official_test: NDArray[np.bool_] | None = None  # if the source defines a test set
    sites: Labels | None = None  # the domain or site of each image
    site_names: tuple[str, ...] = ()
    fingerprint: str = ""  # of the images; if empty, computed from the array
    files: tuple[str, ...] = ()  # the name of each image's file below a folder; empty for other sources
    official_val: NDArray[np.bool_] | None = None  # if a manifest says which images train, validate and test
    patients: Labels | None = None  # the number of each image's patient, if the source says whose it is
    patient_hashes: tuple[str, ...] = ()  # by number

    def __post_init__(self) -> None:
        if len(self.images) != len(self.labels):
            raise UserError(f"{self.name} has {len(self.images)} images and {len(self.labels)} labels")
        if len(self.labels) == 0:
            raise UserError(f"{self.name} has no images")

    @property
    def identity(self) -> str:
        """A hash that changes with the images or their labels."""
        source = self.fingerprint or hashlib.sha256(np.ascontiguousarray(self.images).data).hexdigest()
        return hashlib.sha256(source.encode() + self.labels.tobytes()).hexdigest()

    @property
    def classes(self) -> int:
        return len(self.class_names)

    @property
    def several_labels(self) -> bool:
        """Whether an image may have several of the classes, or none."""
        return self.labels.ndim == 2

    def __len__(self) -> int:
        return len(self.labels)


def join_parts(parts: Sequence[Images], source: object) -> Images:
    """Join parts of one size into one array; if gray and color images are mixed, all become color."""
    sizes = sorted({part.shape[1:3] for part in parts})
    if len(sizes) > 1:
        raise UserError(f"{source} has images of different sizes, {sizes}: resize them to one size")
    if len({part.shape[3] for part in parts}) > 1:
        log.warning("%s mixes gray and color images: all become color", source)
        parts = [np.broadcast_to(part, (*part.shape[:3], 3)) for part in parts]
    return np.concatenate(parts)


def with_channels(images: NDArray[Any], source: object) -> Images:
    """Return gray or color uint8 images as (samples, height, width, channels)."""
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or images.shape[3] not in (1, 3) or 0 in images.shape[1:3] or images.dtype != np.uint8:
        raise UserError(
            f"{source}: expected uint8 images of shape (samples, height, width) or (samples, height, width, 1 or 3), "
            f"found {images.dtype} {images.shape}"
        )
    return images


def checked_labels(labels: NDArray[Any], source: object) -> Labels:
    """Return class numbers (images), which MedMNIST stores as a column, or 0 and 1 by image and label."""
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    several = labels.ndim == 2 and labels.shape[1] > 0
    if several and np.issubdtype(labels.dtype, np.floating) and np.isin(labels, (0, 1)).all():
        labels = labels.astype(np.int64)  # as losses of several labels take them
    whole = np.issubdtype(labels.dtype, np.integer) or labels.dtype == np.bool_
    outside = len(labels) and (labels.min() < 0 or (several and labels.max() > 1))
    if not (several or labels.ndim == 1) or not whole or outside:
        raise UserError(
            f"{source}: expected one class number per image, from 0, or an array (images, labels) of 0 and 1; found "
            f"{labels.dtype} {labels.shape}{f' from {labels.min()} to {labels.max()}' if outside else ''}"
        )
    return labels.astype(np.int64)


def count_classes(labels: Labels, classes: int) -> NDArray[np.int64]:
    """Count the images of every class; with several labels, those that have it."""
    counts: NDArray[np.int64] = labels.sum(0) if labels.ndim == 2 else np.bincount(labels, minlength=classes)
    return counts


def count_present(labels: Labels) -> int:
    """Return how many classes these images have."""
    return int(labels.any(0).sum()) if labels.ndim == 2 else len(np.unique(labels))


def metrics_of(settings: DataSettings, classes: int) -> tuple[str, ...]:
    """Return the metrics that are measured for every view."""
    return (*METRICS, AUROC) if wants_auroc(settings, classes) else METRICS


def wants_auroc(settings: DataSettings, classes: int) -> bool:
    """Return whether to measure AUROC too: as set; by default for two classes, several labels, and MedMNIST."""
    if settings.auroc is not None:
        return settings.auroc
    if settings.several_labels:
        return True
    return classes == 2 or medmnist.medmnist_name(Path(settings.name).stem) is not None


def one_class_each(dataset: Dataset, *, by_site: bool = False) -> Dataset:
    """Return the dataset with one class per image, for dealing images out: the rarest of its labels.

    An image without any label is of one more class. `by_site` counts what is rare within every site, so that a site
    that sees only its own images finds the same.
    """
    if not dataset.several_labels:
        return dataset
    classes = np.full(len(dataset), dataset.classes)
    owners = dataset.sites if by_site and dataset.sites is not None else np.zeros(len(dataset), dtype=np.int64)
    for owner in np.unique(owners):
        mine = dataset.labels[owners == owner]
        rarest = np.argsort(mine.sum(0), kind="stable")
        first = rarest[mine[:, rarest].argmax(1)]
        classes[owners == owner] = np.where(mine.any(1), first, dataset.classes)
    present, numbers = np.unique(classes, return_inverse=True)
    names = (*dataset.class_names, "no label")
    return replace(dataset, labels=numbers, class_names=tuple(names[number] for number in present))


# Training with fewer images.


def keep_samples(dataset: Dataset, wanted: int, seed: int, *, train_only: bool) -> Indices:
    """Return the indices of `wanted` images, the same number of every class as far as there are enough.

    With `train_only`, for rules that use the official test set, only training images are counted and dropped;
    without it, for rules that pool the data, all images are.
    """
    spared = dataset.official_test if train_only and dataset.official_test is not None else None
    pool = np.arange(len(dataset)) if spared is None else np.flatnonzero(~spared)
    if wanted > len(pool):
        raise UserError(f"--samples {wanted} of {len(pool)} images is too many: ask for fewer, or leave it out")
    generator = randomness.numpy_generator(seed, "samples")
    shuffled = generator.permutation(pool)
    order = np.argsort(dataset.labels[shuffled], kind="stable")
    by_class = dataset.labels[shuffled][order]
    rank = np.empty(len(pool), dtype=np.int64)  # the position of each image within its class
    rank[order] = np.arange(len(pool)) - np.searchsorted(by_class, by_class)
    tie = generator.permutation(dataset.classes)[dataset.labels[shuffled]]
    chosen = shuffled[np.lexsort((tie, rank))[:wanted]]
    return np.sort(chosen if spared is None else np.concatenate([chosen, np.flatnonzero(spared)]))


def keep_only(dataset: Dataset, kept: Indices) -> Dataset:
    """Keep only the labels of these images, for partitioning them; their pixels stay where they are."""
    return replace(
        dataset,
        images=np.broadcast_to(np.zeros((), np.uint8), (len(kept), 1, 1, 1)),
        labels=dataset.labels[kept],
        official_test=None if dataset.official_test is None else dataset.official_test[kept],
        sites=None if dataset.sites is None else dataset.sites[kept],
        official_val=None if dataset.official_val is None else dataset.official_val[kept],
        patients=None if dataset.patients is None else dataset.patients[kept],
        files=(),
    )
