"""Whole patients: a dataset in which every patient counts as one image, and hold-outs that never divide a patient.

A rule partitions patients as it would partition images, each with the class of most of its images. What is held out,
for testing, validating or a method's probe, is chosen to hold the wanted share of every class's images as nearly as
whole patients allow.
"""

import logging
from dataclasses import replace

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedvit.core import randomness
from fedvit.core.errors import UserError
from fedvit.data.dataset import Dataset, Indices, Labels, count_classes
from fedvit.data.partition.records import ClientPartition, Partition

log = logging.getLogger(__name__)
Counts = NDArray[np.int64]
TRIES, STEPS = 16, 200_000  # orders in which a hold-out is tried; fewer for very many patients
NAMED = 5  # gaps that a warning names


def count_images(patients: Indices, labels: Labels, classes: int) -> Counts:
    """Count the images of every patient by class (patients x classes)."""
    number = int(patients.max()) + 1
    return np.bincount(patients * classes + labels, minlength=number * classes).reshape(number, -1)


def by_patient(dataset: Dataset) -> tuple[Dataset, Counts]:
    """Return a dataset with one image per patient, numbered from 0, and the patients' images by class.

    A patient has the class of most of its images; if several are equal, the one that is rarest in the dataset.
    """
    assert dataset.patients is not None
    present, first, numbers = np.unique(dataset.patients, return_index=True, return_inverse=True)
    counts = count_images(numbers, dataset.labels, dataset.classes)
    rarest = np.argsort(counts.sum(axis=0), kind="stable")
    return (
        replace(
            dataset,
            images=np.broadcast_to(np.zeros((), np.uint8), (len(present), 1, 1, 1)),
            labels=rarest[counts[:, rarest].argmax(axis=1)],
            official_test=None if dataset.official_test is None else dataset.official_test[first],
            official_val=None if dataset.official_val is None else dataset.official_val[first],
            sites=None if dataset.sites is None else dataset.sites[first],
            patients=None,
            files=(),
        ),
        counts,
    )


def hold_out(counts: Counts, share: float, generator: Generator, *, every_class: bool) -> NDArray[np.bool_]:
    """Choose patients with about this share of the images of every class; `counts` is (patients, classes).

    At least one patient is chosen and one is left. With `every_class`, a class of two patients or more has one on each
    side wherever that is possible. Of several random orders, in which a patient is taken unless that leads away from
    the shares, the one that ends nearest to them wins.
    """
    totals = counts.sum(axis=0)
    weights = 1 / np.maximum(totals, 1)  # by class: the squared error in images, relative to the class
    best, least = np.zeros(len(counts), dtype=np.bool_), np.inf
    for _ in range(max(1, min(TRIES, STEPS // len(counts)))):
        held, short = np.zeros(len(counts), dtype=np.bool_), totals * share
        for patient in generator.permutation(len(counts)):
            after = short - counts[patient]
            if (weights * (after**2 - short**2)).sum() <= 1e-9:
                held[patient], short = True, after
        if every_class:
            short = _add_missing_classes(held, counts, short, weights)
        error = float((weights * short**2).sum())
        if error < least - 1e-9:
            best, least = held, error
    if not best.any() and len(counts) > 1:
        best[counts.sum(axis=1).argmin()] = True
    if best.all():
        best[counts.sum(axis=1).argmin()] = False
    return best


def _add_missing_classes(
    held: NDArray[np.bool_], counts: Counts, short: NDArray[np.float64], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Hold out one more patient for every class that is not held out yet; return what is short then."""
    has = counts > 0
    for label in np.argsort(has.sum(axis=0), kind="stable"):
        if has[held, label].any():
            continue
        left = has[~held].sum(axis=0)
        spare = ~held & has[:, label] & (~has | (left > 1)).all(axis=1)  # no class of theirs would lose its last
        if spare.any():
            after = (weights * (short - counts) ** 2).sum(axis=1)
            patient = int(np.where(spare, after, np.inf).argmin())
            held[patient], short = True, short - counts[patient]
    return short


def hold_out_patients(
    whole: Partition, counts: Counts, part: str, share: float, seed: int, *, held_out: float | None = None
) -> Partition:
    """Move patients with this share of every client's training images to another part, val or probe.

    If more is held out than the part uses, the rest is not used at all.
    """
    out, clients = share if held_out is None else held_out, {}
    for name, own in whole.clients.items():
        if len(own.train) < 2:
            setting = {"val": "data.val", "probe": "method.probe"}[part]
            raise UserError(
                f"{setting}={share:g} leaves client {name}, which has one patient to train on, nothing to train on: "
                "leave the setting out, or the client"
            )
        generator = randomness.numpy_generator(seed, part, name)
        held = hold_out(counts[own.train], out, generator, every_class=False)
        used = own.train[held]
        if share < out and len(used) > 1:
            used = used[hold_out(counts[used], share / out, generator, every_class=False)]
        clients[name] = replace(own, **{part: used, "train": own.train[~held]})
    return replace(whole, clients=clients)


def to_images(whole: Partition, patients: Indices) -> Partition:
    """Replace patients by all their images; `patients` has the number of every image's patient."""
    numbers = np.unique(patients, return_inverse=True)[1]
    order = np.argsort(numbers, kind="stable")
    starts = np.searchsorted(numbers[order], np.arange(numbers.max() + 2))

    def images(chosen: Indices) -> Indices:
        parts = [order[starts[patient] : starts[patient + 1]] for patient in chosen]
        return np.sort(np.concatenate(parts)) if parts else np.empty(0, dtype=np.int64)

    clients = {
        name: ClientPartition(images(own.train), images(own.test), images(own.val), images(own.probe))
        for name, own in whole.clients.items()
    }
    return replace(whole, clients=clients, global_test=images(whole.global_test))


def warn_of_gaps(whole: Partition, dataset: Dataset, share: float | None) -> None:
    """Say where whole patients could not be divided as wanted: classes on one side only, and shares far off.

    `share` is that of the test images, or None if the source has its own.
    """
    gaps = []
    for name, own in whole.clients.items():
        train, test = (count_classes(dataset.labels[i], dataset.classes) for i in (own.train, own.test))
        for label in np.flatnonzero((train > 0) != (test > 0)):
            gaps.append(f"{name} has {dataset.class_names[label]!r} only in {'train' if train[label] else 'test'}")
        found = len(own.test) / sum(map(len, (own.train, own.val, own.probe, own.test)))
        if share is not None and abs(found - share) > max(0.1, share / 2):
            gaps.append(f"{name} tests on {found:.0%} of its images instead of {share:.0%}")
    if gaps:
        more = f"; and {len(gaps) - NAMED} more" if len(gaps) > NAMED else ""
        log.warning(
            "patients stay whole, so not every class is where it should be: %s%s", "; ".join(gaps[:NAMED]), more
        )


def count_patients(whole: Partition, dataset: Dataset) -> dict[str, dict[str, int]]:
    """Count the patients of every client and part."""
    assert dataset.patients is not None
    who = dataset.patients
    return {
        name: {part: len(np.unique(who[indices])) for part, indices in _parts(own).items()}
        for name, own in whole.clients.items()
    }


def _parts(own: ClientPartition) -> dict[str, Indices]:
    parts = {"train": own.train, "val": own.val, "test": own.test}
    return {**parts, "probe": own.probe} if len(own.probe) else parts
