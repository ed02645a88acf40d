"""Thresholds chosen on validation images, against a slow search over every way to divide them."""

import numpy as np
import pytest
from sklearn.metrics import f1_score, recall_score

from fedvit.core.errors import UserError
from fedvit.core.thresholds import Rule, best_threshold, candidates, parse_threshold, thresholds_of_classes


def quality(positive: np.ndarray, probability: np.ndarray, cut: float, rule: Rule) -> float:
    guess = probability >= cut
    if rule == "f1":
        return float(f1_score(positive, guess, zero_division=0))
    return float(recall_score(positive, guess) + recall_score(~positive, ~guess) - 1)


@pytest.mark.parametrize("rule", ["youden", "f1"])
@pytest.mark.parametrize("seed", range(6))
def test_no_threshold_is_better_than_the_chosen_one(rule: Rule, seed: int) -> None:
    rng = np.random.default_rng(seed)
    positive = rng.random(40) < 0.3
    probability = np.round(np.clip(0.4 * positive + 0.6 * rng.random(40), 0, 1), 2 if seed % 2 else 9)  # with ties
    cut = best_threshold(probability, positive, rule)
    assert cut is not None
    assert 0 < cut < 1
    every = [quality(positive, probability, float(c), rule) for c in np.linspace(1e-6, 1 - 1e-6, 3000)]
    assert quality(positive, probability, cut, rule) == pytest.approx(max(every))


def test_a_threshold_is_halfway_between_neighbors_and_of_equals_the_closest_to_a_half() -> None:
    assert best_threshold(np.array([0.1, 0.2, 0.6, 0.9]), np.array([False, False, True, True]), "youden") == 0.4
    tie = best_threshold(np.array([0.1, 0.3, 0.5, 0.7]), np.array([False, True, False, True]), "youden")
    assert tie == 0.6  # 0.2 is just as good


def test_probabilities_at_the_ends_and_neighboring_floats_are_divided() -> None:
    assert candidates(np.array([0.0, 1.0])).tolist() == [0.5]
    after = np.nextafter(0.3, 1)
    cuts = candidates(np.array([0.3, after]))
    assert [int((np.array([0.3, after]) >= cut).sum()) for cut in cuts] == [2, 1, 0]


def test_one_class_only_has_no_best_threshold_and_keeps_a_half() -> None:
    assert best_threshold(np.array([0.2, 0.8]), np.array([True, True]), "f1") is None
    p, t = np.array([[0.2, 0.1], [0.8, 0.4]]), np.array([[True, False], [True, True]])
    assert thresholds_of_classes(p, t, "f1") == (0.5, 0.25)
    assert thresholds_of_classes(p, t, 0.3) == (0.3, 0.3)


@pytest.mark.parametrize("text", ["0", "1", "1.5", "-0.1", "nan", "inf", "best", ""])
def test_a_threshold_outside_0_and_1_is_a_mistake_that_says_what_to_give(text: str) -> None:
    with pytest.raises(UserError, match="number between 0 and 1"):
        parse_threshold(text)


def test_a_threshold_is_a_number_or_a_rule() -> None:
    assert [parse_threshold(text) for text in ("0.25", "youden", "f1")] == [0.25, "youden", "f1"]
