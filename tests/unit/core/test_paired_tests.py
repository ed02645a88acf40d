"""Paired tests against direct computations: all pairs for DeLong's components, binomtest for McNemar's p-value."""

import itertools

import numpy as np
import pytest
from scipy.stats import binomtest, norm
from sklearn.metrics import roc_auc_score

from fedvit.core.paired_tests import components, delong, mcnemar

IMAGES = 50


def two_models(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    truth = rng.random(IMAGES) < 0.4
    first, second = (np.round(np.clip(a * truth + rng.random(IMAGES), 0, 2), 1) for a in (0.5, 0.2))  # with ties
    return truth, first, second


@pytest.mark.parametrize("seed", range(4))
def test_mcnemar_with_one_image_per_patient_is_the_exact_binomial_test(seed: int) -> None:
    rng = np.random.default_rng(seed)
    first, second = rng.random(IMAGES) < 0.8, rng.random(IMAGES) < 0.6
    found = mcnemar(first, second, np.arange(IMAGES))
    only_first, only_second = int((first & ~second).sum()), int((second & ~first).sum())
    assert (found.first_only, found.second_only) == (only_first, only_second)
    assert found.p == pytest.approx(binomtest(only_first, only_first + only_second).pvalue)


def test_mcnemar_without_a_difference_has_p_1() -> None:
    same = np.array([True, False, True])
    assert mcnemar(same, same, np.arange(3)).p == 1


def test_mcnemar_exchanges_all_images_of_a_patient_together() -> None:
    rng = np.random.default_rng(0)
    first, second, patients = rng.random(40) < 0.9, rng.random(40) < 0.5, rng.integers(0, 8, 40)
    apart = np.array([(first.astype(int) - second)[patients == one].sum() for one in range(8)])
    totals = [abs((apart * signs).sum()) for signs in itertools.product((-1, 1), repeat=8)]
    slow = np.mean([total >= abs(apart.sum()) for total in totals])
    assert mcnemar(first, second, patients).p == pytest.approx(slow)


def test_components_are_shares_of_pairs() -> None:
    truth, first, _ = two_models()
    ups, downs = components(first, truth)
    pairs = first[truth][:, None] - first[~truth][None, :]
    wins = (pairs > 0) + (pairs == 0) / 2
    assert ups == pytest.approx(wins.mean(axis=1))
    assert downs == pytest.approx(wins.mean(axis=0))


@pytest.mark.parametrize("seed", range(3))
def test_delong_is_the_direct_computation_over_all_pairs(seed: int) -> None:
    truth, first, second = two_models(seed)
    sides = [components(one, truth) for one in (first, second)]
    over_positives, over_negatives = (np.cov(sides[0][i], sides[1][i]) for i in (0, 1))
    covariance = over_positives / truth.sum() + over_negatives / (~truth).sum()
    variance = covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]
    difference = roc_auc_score(truth, first) - roc_auc_score(truth, second)
    found = delong(first, second, truth, np.arange(IMAGES))
    assert found is not None
    assert found.difference == pytest.approx(difference)
    assert found.p == pytest.approx(2 * norm.sf(abs(difference) / np.sqrt(variance)))
    assert found.interval == pytest.approx(norm.interval(0.95, difference, np.sqrt(variance)))


def test_copies_of_a_patients_image_make_delong_no_surer() -> None:
    """Every image ten times as one patient's: the same p, up to factors such as 50 / 49, and not that of 500 images."""
    truth, first, second = two_models(1)
    once = delong(first, second, truth, np.arange(IMAGES))
    copied = [np.repeat(values, 10) for values in (first, second, truth)]
    as_patients = delong(*copied, np.repeat(np.arange(IMAGES), 10))
    as_images = delong(*copied, np.arange(10 * IMAGES))
    assert once is not None
    assert as_patients is not None
    assert as_images is not None
    assert as_patients.p == pytest.approx(once.p)
    assert as_images.p < once.p / 2


def test_delong_of_patients_with_both_kinds_of_images_is_right_about_its_spread() -> None:
    """The variance with clusters against the spread of the difference over made-up tests."""
    rng, found, differences = np.random.default_rng(0), [], []
    for _ in range(300):
        patients = np.repeat(np.arange(30), 4)
        own, truth = rng.normal(0, 1, 30)[patients], rng.random(120) < 0.5
        first = truth + own + rng.normal(0, 1, 120)
        second = 0.5 * truth + rng.normal(0, 1, 120)
        one = delong(first, second, truth, patients)
        assert one is not None
        found.append((one.interval[1] - one.interval[0]) / 2 / 1.96)
        differences.append(one.difference)
    assert np.mean(found) == pytest.approx(np.std(differences), rel=0.15)


def test_delong_is_undefined_for_one_class_one_patient_or_the_same_scores() -> None:
    truth, first, second = two_models()
    assert delong(first, second, np.zeros(IMAGES, bool), np.arange(IMAGES)) is None
    assert delong(first, second, truth, np.zeros(IMAGES, int)) is None
    assert delong(first, first, truth, np.arange(IMAGES)) is None
