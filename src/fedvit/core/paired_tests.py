"""Tests of two models on the same images: McNemar's for who is right more often, DeLong's for who ranks better.

Images of one patient are not independent. Here patients are: McNemar's test exchanges the two models for all images of
a patient at once, and DeLong's sums its components by patient (Obuchowski, Biometrics 53, 1997). With one image per
patient, these are the exact McNemar test and the test of DeLong, DeLong and Clarke-Pearson.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Booleans = NDArray[np.bool_]
Floats = NDArray[np.float64]
Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class McNemar:
    """How many images only the first and only the second model has right, and the two-sided exact p-value."""

    first_only: int
    second_only: int
    p: float


@dataclass(frozen=True)
class DeLong:
    """The AUROC of the first model minus that of the second, its 95 % interval and its two-sided p-value."""

    difference: float
    interval: tuple[float, float]
    p: float


def mcnemar(first: Booleans, second: Booleans, patients: Numbers) -> McNemar:
    """Test whether two models are right equally often, from whether each has every image right.

    If they are equally good, each patient's difference is as likely with the other sign. The p-value is the chance of
    a total difference at least as large, exactly, over all signs.
    """
    owners = np.unique(patients, return_inverse=True)[1]
    apart = np.bincount(owners, weights=first.astype(np.float64) - second).astype(np.int64)
    steps = np.abs(apart[apart != 0])
    size = int(steps.sum())
    chances = np.zeros(2 * size + 1)  # of every total from -size to size
    chances[size] = 1.0
    for step in steps:
        chances = (np.roll(chances, step) + np.roll(chances, -step)) / 2  # nothing reaches the ends too early
    total = abs(int(apart.sum()))
    p = float(chances[np.abs(np.arange(-size, size + 1)) >= total].sum())
    return McNemar(int((first & ~second).sum()), int((second & ~first).sum()), min(1.0, p))


def delong(first: Floats, second: Floats, truth: Booleans, patients: Numbers) -> DeLong | None:
    """Test whether two models have the same AUROC, from their scores of the same images.

    None if there are not two patients with positive and two with negative images, or if the models do not differ
    anywhere in a way that shows how uncertain the difference is.
    """
    owners = np.unique(patients, return_inverse=True)[1]
    with_positive, with_negative = len(np.unique(owners[truth])), len(np.unique(owners[~truth]))
    if min(with_positive, with_negative) < 2:
        return None
    (ups, downs), (other_ups, other_downs) = components(first, truth), components(second, truth)
    difference = float(ups.mean() - other_ups.mean())
    size, count = int(owners.max()) + 1, len(np.unique(owners))
    by_positive = np.bincount(owners[truth], weights=ups - other_ups - difference, minlength=size)
    by_negative = np.bincount(owners[~truth], weights=downs - other_downs - difference, minlength=size)
    m, n = len(ups), len(downs)
    variance = (
        (by_positive**2).sum() * with_positive / (with_positive - 1) / m**2
        + (by_negative**2).sum() * with_negative / (with_negative - 1) / n**2
        + 2 * (by_positive * by_negative).sum() * count / (count - 1) / (m * n)
    )
    if variance <= 1e-18:
        return None
    deviation = math.sqrt(variance)
    half = 1.959963984540054 * deviation
    p = math.erfc(abs(difference) / deviation / math.sqrt(2))
    return DeLong(difference, (difference - half, difference + half), p)


def components(scores: Floats, truth: Booleans) -> tuple[Floats, Floats]:
    """Return the share of negatives below every positive, and of positives above every negative; ties count half."""
    positives, negatives = scores[truth], scores[~truth]
    return _share_below(positives, negatives), 1 - _share_below(negatives, positives)


def _share_below(values: Floats, others: Floats) -> Floats:
    ordered = np.sort(others)
    below, up_to = (np.searchsorted(ordered, values, side=side) for side in ("left", "right"))
    shares: Floats = (below + up_to) / (2 * len(others))
    return shares
