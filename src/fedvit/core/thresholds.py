"""Choose the threshold above which a probability is called positive, on validation images: never on test images.

An image is positive if its probability is at least the threshold.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedvit.core.errors import UserError

Rule = Literal["youden", "f1"]  # maximize sensitivity + specificity - 1, or F1
RULES: tuple[Rule, ...] = ("youden", "f1")
DEFAULT = 0.5


def parse_threshold(text: str) -> float | Rule:
    """Return the threshold that a setting names: a number between 0 and 1, or a rule; anything else is a mistake."""
    for rule in RULES:
        if text == rule:
            return rule
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if 0 < number < 1:
        return number
    raise UserError(
        f"a threshold is a number between 0 and 1 (both excluded), youden or f1, found {text!r}: give one of them"
    )


def best_threshold(probability: NDArray[np.float64], positive: NDArray[np.bool_], rule: Rule) -> float | None:
    """Return the threshold that is best by the rule, halfway between two neighboring probabilities.

    Of several that are equally good, it is the one closest to 0.5, then the smaller one. None without both a positive
    and a negative image: no threshold is better than another there.
    """
    if not positive.any() or positive.all():
        return None
    cuts = candidates(probability)
    order = np.argsort(probability, kind="stable")
    below = np.searchsorted(probability[order], cuts, side="left")  # images under each cut
    missed = np.concatenate(([0], np.cumsum(positive[order])))[below]
    positives, negatives = int(positive.sum()), int((~positive).sum())
    true_positive, true_negative = positives - missed, below - missed
    if rule == "f1":
        value = 2 * true_positive / (positives + len(probability) - below)
    else:  # whole numbers, so that equally good thresholds are equal: (sensitivity + specificity) times a constant
        value = true_positive * negatives + true_negative * positives
    best = cuts[value == value.max()]
    return float(best[np.argmin(np.abs(best - DEFAULT))])


def candidates(probability: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return one threshold for every way to divide the probabilities in two, all between 0 and 1, ascending."""
    ends = np.concatenate(([0.0], np.unique(probability), [1.0]))
    low, high = ends[:-1], ends[1:]
    middle = (low + high) / 2
    cuts = np.where(middle > low, middle, high)  # two neighboring floats have nothing between them
    inside: NDArray[np.float64] = cuts[(cuts > 0) & (cuts < 1)]
    return inside


def thresholds_of_classes(
    probabilities: NDArray[np.float64], truth: NDArray[np.bool_], chosen: float | Rule
) -> tuple[float, ...]:
    """Return a threshold for every column of (images, classes): the number itself, or the best one by the rule.

    A class that has no positive or no negative image here has the default, 0.5.
    """
    if not isinstance(chosen, str):
        return tuple(float(chosen) for _ in probabilities.T)
    cuts = [best_threshold(p, t, chosen) for p, t in zip(probabilities.T, truth.T, strict=True)]
    return tuple(DEFAULT if cut is None else cut for cut in cuts)
