"""What noised gradients spend, against closed forms and a second accountant."""

import logging
import math

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from fedvit.core.errors import UserError
from fedvit.privacy.accounting import Steps, epsilon_of, noise_for, per_step_noise

DELTA = 1e-5


def exact_without_sampling(noise: float, count: int, delta: float) -> float:
    """Balle and Wang 2018: many Gaussian mechanisms are one, of the noise divided by the root of their number."""
    mu = math.sqrt(count) / noise
    return float(
        brentq(lambda e: norm.cdf(mu / 2 - e / mu) - math.exp(e) * norm.cdf(-mu / 2 - e / mu) - delta, 1e-6, 200)
    )


def by_convolution(
    noise: float, share: float, count: int, delta: float, step: float = 1e-3, reach: float = 40.0
) -> float:
    """A second accountant: the distribution of the privacy loss on a grid, convolved with itself `count` times.

    The larger of both directions counts: an image more, and an image less.
    """
    grid = np.arange(-reach, reach, step)
    worst = 0.0
    for sign in (1, -1):
        x = np.linspace(-30 * noise, 1 + 30 * noise, 2_000_001)
        mixed = (1 - share) * norm.pdf(x, 0, noise) + share * norm.pdf(x, 1, noise)
        plain = norm.pdf(x, 0, noise)
        above, below = (mixed, plain) if sign == 1 else (plain, mixed)
        kept = (above > 0) & (below > 0)
        loss, mass = np.log(above[kept] / below[kept]), above[kept] * (x[1] - x[0])
        cells = np.clip(np.round((loss + reach) / step).astype(int), 0, len(grid) - 1)
        one = np.bincount(cells, mass, len(grid))
        many = np.real(np.fft.ifft(np.fft.fft(np.roll(one, -len(grid) // 2)) ** count))
        many = np.roll(np.clip(many, 0, None), len(grid) // 2)

        def missing(epsilon: float, many: np.ndarray = many) -> float:
            over = grid > epsilon
            return float((many[over] * -np.expm1(epsilon - grid[over])).sum()) - delta

        worst = max(worst, float(brentq(missing, 1e-3, reach - 1)))
    return worst


@pytest.mark.parametrize(("noise", "count"), [(4.0, 1), (10.0, 50)])
def test_without_sampling_the_closed_form_holds(noise: float, count: int) -> None:
    exact = exact_without_sampling(noise, count, DELTA)
    assert epsilon_of([Steps(noise, 1.0, count)], DELTA, "prv") == pytest.approx(
        exact, rel=0.01, abs=0.011
    )  # its own error is 0.01
    assert exact <= epsilon_of([Steps(noise, 1.0, count)], DELTA, "rdp") <= 1.2 * exact


@pytest.mark.parametrize(("noise", "share", "count"), [(1.0, 0.1, 100), (0.8, 0.05, 300)])
def test_a_second_accountant_agrees_to_one_percent(noise: float, share: float, count: int) -> None:
    ours = epsilon_of([Steps(noise, share, count)], DELTA, "prv")
    assert ours == pytest.approx(by_convolution(noise, share, count, DELTA), rel=0.01)
    assert ours < epsilon_of([Steps(noise, share, count)], DELTA, "rdp") < 1.3 * ours


def test_gradients_add_up_however_they_are_listed() -> None:
    whole = epsilon_of([Steps(1.5, 0.1, 60)], DELTA)
    assert epsilon_of([Steps(1.5, 0.1, 20)] * 3, DELTA) == whole
    assert epsilon_of([Steps(1.5, 0.1, 20)], DELTA) < whole
    assert epsilon_of([], DELTA) == 0
    assert math.isinf(epsilon_of([Steps(0.0, 0.1, 1)], DELTA))


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_the_noise_of_a_budget_is_the_least_that_keeps_it(accountant: str) -> None:
    noise = noise_for(3.0, DELTA, [(0.1, 200)], accountant)  # type: ignore[arg-type]
    assert epsilon_of([Steps(noise, 0.1, 200)], DELTA, accountant) <= 3.0  # type: ignore[arg-type]
    assert epsilon_of([Steps(0.99 * noise, 0.1, 200)], DELTA, accountant) > 3.0  # type: ignore[arg-type]


def test_fedpefts_noise_is_that_of_every_step_alone() -> None:
    assert noise_for(5.0, 1e-3, [(64 / 781, 130)], "per_step") == per_step_noise(5.0, 1e-3)
    assert per_step_noise(5.0, 1e-3) == pytest.approx(0.755, abs=5e-4)
    once, six = ([Steps(0.755, 64 / 781, 130 * times)] for times in (1, 6))
    assert epsilon_of(once, 1e-3, "per_step") == pytest.approx(9, abs=1)  # what it spends in truth
    assert epsilon_of(six, 1e-3, "per_step") == pytest.approx(27, abs=3)


def test_a_budget_that_no_noise_keeps_says_what_to_change() -> None:
    with pytest.raises(UserError, match=r"no noise keeps 1,000,000 gradients within epsilon 1e-06 .*--epsilon"):
        noise_for(1e-6, DELTA, [(1.0, 1_000_000)], "rdp")


def test_counting_leaves_the_logging_of_the_program_alone() -> None:
    before = list(logging.getLogger().handlers)
    epsilon_of([Steps(2.0, 0.1, 3)], DELTA)
    assert logging.getLogger().handlers == before
