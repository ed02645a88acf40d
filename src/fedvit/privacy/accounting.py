"""How much privacy noised gradients spend, by Opacus's accountants, and how much noise a budget needs."""

import logging
import math
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

from fedvit.core.errors import UserError

Accountant = Literal["rdp", "prv", "per_step"]
MOST_NOISE = 1e4  # in multiples of the clipping norm; a budget that needs more is none
TOLERANCE = 1e-3  # relative, of the noise that a budget needs


class Steps(NamedTuple):
    """Gradients that were taken in the same way: the noise, each image's chance to be in a batch, and how many."""

    noise: float
    share: float
    times: int


def epsilon_of(history: Sequence[Steps], delta: float, accountant: Accountant = "rdp") -> float:
    """Return the epsilon of all these gradients together, at this delta; infinite without noise, 0 without gradients.

    per_step is a way to choose the noise, not to add it up: its total is RDP's.
    """
    history = joined(history)
    if not history:
        return 0.0
    if any(steps.noise == 0 for steps in history):
        return math.inf
    return _epsilon(tuple(history), delta, "prv" if accountant == "prv" else "rdp")


def joined(history: Sequence[Steps]) -> list[Steps]:
    """Add up the gradients that were taken in the same way."""
    counts: dict[tuple[float, float], int] = {}
    for noise, share, times in history:
        counts[noise, share] = counts.get((noise, share), 0) + times
    return [Steps(noise, share, times) for (noise, share), times in counts.items() if times]


@cache
def _epsilon(history: tuple[Steps, ...], delta: float, accountant: Literal["rdp", "prv"]) -> float:
    made = _opacus()[accountant]()
    made.history = [tuple(steps) for steps in history]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the best order lies at the end of those tried, which is still a bound
        return float(made.get_epsilon(delta=delta))


def _opacus() -> dict[str, Any]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        from opacus.accountants import PRVAccountant, RDPAccountant
    except ImportError as problem:
        raise UserError(
            "training with privacy needs Opacus, which counts what is spent: pip install 'fedvit[privacy]'"
        ) from problem
    finally:
        root.handlers[:], root.level = handlers, level  # the import sets up logging for the whole process
    return {"rdp": RDPAccountant, "prv": PRVAccountant}


def noise_for(epsilon: float, delta: float, planned: Sequence[tuple[float, int]], accountant: Accountant) -> float:
    """Return the least noise with which the planned gradients, (share, count), stay within epsilon at delta."""
    if accountant == "per_step":
        return per_step_noise(epsilon, delta)
    if not sum(count for _, count in planned):
        return 0.0

    def spent(noise: float) -> float:
        return epsilon_of([Steps(noise, share, count) for share, count in planned], delta, accountant)

    high = 1.0
    while spent(high) > epsilon:
        high *= 2
        if high > MOST_NOISE:
            raise UserError(
                f"no noise keeps {sum(count for _, count in planned):,} gradients within epsilon {epsilon:g} at delta "
                f"{delta:g}: choose a larger --epsilon, fewer --rounds or --epochs, or a smaller --batch"
            )
    low = 0.0 if high == 1.0 else high / 2
    while high - low > TOLERANCE * high:
        middle = (low + high) / 2
        if middle > 0.01 and spent(middle) <= epsilon:
            high = middle
        else:
            low = middle
            if middle <= 0.01:
                break
    return high


def per_step_noise(epsilon: float, delta: float) -> float:
    """Return FedPEFT's noise, that of the Gaussian mechanism for a single step; it is proven for epsilon < 1."""
    return math.sqrt(2 * math.log(1.25 / delta)) / epsilon
