"""Clinical scores against scikit-learn and slow, obvious versions; what is undefined is None."""

from dataclasses import replace

import numpy as np
import pytest
from sklearn.metrics import brier_score_loss, precision_score, recall_score, roc_auc_score

from fedvit.core import clinical
from fedvit.core.cases import Cases
from fedvit.core.clinical import (
    classes_everywhere,
    macro,
    mean_auroc,
    pool_counts,
    score_cases,
    weighted_auroc,
)
from fedvit.core.clinical_message import PATIENTS, clinical_problem, from_scalars, to_scalars
from fedvit.core.metrics import score_problem


def cases(
    truth: np.ndarray, probability: np.ndarray, patient: np.ndarray | None = None, threshold: float = 0.5
) -> Cases:
    """Cases of (images, classes)."""
    images, classes = truth.shape
    index = np.arange(images)
    return Cases(
        tuple(range(classes)), index, index if patient is None else patient, patient is not None, truth, probability,
        probability >= threshold, (threshold,) * classes, ("given",) * classes,
    )  # fmt: skip


def drawn(images: int = 60, classes: int = 2, seed: int = 0, patients: int | None = None) -> Cases:
    rng = np.random.default_rng(seed)
    truth = rng.random((images, classes)) < 0.4
    probability = np.round(np.clip(0.3 * truth + 0.7 * rng.random((images, classes)), 0, 1), 2)  # with ties
    return cases(truth, probability, None if patients is None else rng.integers(0, patients, images))


def test_rates_auroc_and_brier_are_those_of_scikit_learn() -> None:
    made = drawn()
    for k, one in enumerate(score_cases(made, 0, "a").classes):
        truth, guess, probability = made.truth[:, k], made.positive[:, k], made.probability[:, k]
        assert one.sensitivity == pytest.approx(recall_score(truth, guess))
        assert one.specificity == pytest.approx(recall_score(~truth, ~guess))
        assert one.ppv == pytest.approx(precision_score(truth, guess))
        assert one.npv == pytest.approx(precision_score(~truth, ~guess))
        assert one.auroc == pytest.approx(roc_auc_score(truth, probability))
        assert one.brier == pytest.approx(brier_score_loss(truth, probability))
        assert (one.images, one.positives) == (60, truth.sum())


def test_the_calibration_error_is_the_mean_distance_in_ten_bins() -> None:
    made = drawn()
    one = score_cases(made, 0, "a").classes[0]
    p, t = made.probability[:, 0], made.truth[:, 0]
    slow = 0.0
    for low in range(10):
        inside = (p * 10 >= low) & ((p * 10 < low + 1) | (low == 9))
        if inside.any():
            slow += inside.mean() * abs(p[inside].mean() - t[inside].mean())
    assert one.ece == pytest.approx(slow)
    assert sum(place.images for place in one.bins) == 60


def test_the_area_with_weights_is_that_of_images_repeated() -> None:
    made, rng = drawn(30), np.random.default_rng(1)
    p, t = made.probability[:, 0], made.truth[:, 0]
    weights = rng.integers(0, 4, (5, 30))
    slow = [roc_auc_score(np.repeat(t, row), np.repeat(p, row)) for row in weights]
    assert weighted_auroc(p, t, weights.astype(float)) == pytest.approx(slow)


def test_one_class_only_gives_none_and_not_0() -> None:
    one = score_cases(cases(np.zeros((5, 1), bool), np.full((5, 1), 0.2)), 0, "a").classes[0]
    assert (one.sensitivity, one.ppv, one.auroc) == (None, None, None)
    assert (one.specificity, one.npv) == (1.0, 1.0)
    assert {"sensitivity", "ppv", "auroc"}.isdisjoint(one.intervals)


def test_all_images_of_a_patient_are_drawn_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The intervals equal those of a loop that draws patients and copies their images."""
    made = drawn(40, 1, patients=9)
    owners = np.unique(made.patient)
    monkeypatch.setattr(clinical, "DRAWS", 40)
    times = np.concatenate(list(clinical._draw_patients(len(owners), 40, 3, "a")))
    found = score_cases(made, 3, "a").classes[0].intervals
    slow: dict[str, list[float]] = {"sensitivity": [], "npv": [], "auroc": [], "brier": []}
    for row in times.astype(int):
        rows = np.concatenate([np.flatnonzero(made.patient == owner) for owner in np.repeat(owners, row)])
        t, p, guess = made.truth[rows, 0], made.probability[rows, 0], made.positive[rows, 0]
        slow["sensitivity"].append(recall_score(t, guess))
        slow["npv"].append(precision_score(~t, ~guess))
        slow["auroc"].append(roc_auc_score(t, p))
        slow["brier"].append(brier_score_loss(t, p))
    for metric, values in slow.items():
        assert found[metric] == pytest.approx(tuple(np.quantile(values, (0.025, 0.975))))


def test_images_of_few_patients_say_less_than_as_many_images_of_many_patients() -> None:
    """Every image is there ten times: as one patient's, the copies are no news."""
    few, many = drawn(30, 1), drawn(30, 1)
    names = ("index", "patient", "truth", "probability", "positive")
    copies = [
        replace(one, **{name: np.repeat(getattr(one, name), 10, axis=0) for name in names}) for one in (few, many)
    ]
    together = replace(copies[0], by_patient=True)
    apart = replace(copies[1], patient=np.arange(300))
    low, high = score_cases(together, 0, "a").classes[0].intervals["sensitivity"]
    low_apart, high_apart = score_cases(apart, 0, "a").classes[0].intervals["sensitivity"]
    assert high - low > 2 * (high_apart - low_apart)


def test_one_patient_has_no_interval_and_all_right_is_not_certain() -> None:
    truth = np.array([[True], [True], [False], [False], [False]])
    right = truth * 0.8 + 0.1
    alone = score_cases(cases(truth, right, np.zeros(5, int)), 0, "a")
    assert alone.patients == 1
    assert alone.classes[0].intervals == {}
    of_images = score_cases(cases(truth, right), 0, "a")
    assert of_images.patients is None
    found = of_images.classes[0].intervals
    assert found["sensitivity"] == pytest.approx((0.025 ** (1 / 2), 1))
    assert found["specificity"] == pytest.approx((0.025 ** (1 / 3), 1))
    assert found["auroc"] == pytest.approx((0.025 ** (1 / 2), 1))
    wrong = score_cases(cases(truth, 1 - right), 0, "a").classes[0].intervals
    assert wrong["sensitivity"] == pytest.approx((0, 1 - 0.025 ** (1 / 2)))


def test_an_interval_contains_the_truth_about_as_often_as_it_says() -> None:
    """Sensitivity 0.7 in 200 made-up tests of 40 patients with 3 positive images each, some of them easier."""
    rng, inside = np.random.default_rng(0), 0
    for trial in range(200):
        easy = rng.beta(3.5, 1.5, 40)  # the chance that an image of this patient is recognized; on average 0.7
        hit = rng.random((40, 3)) < easy[:, None]
        made = cases(np.ones((120, 1), bool), np.where(hit, 0.9, 0.1).reshape(-1, 1), np.repeat(np.arange(40), 3))
        low, high = score_cases(made, trial, "a").classes[0].intervals["sensitivity"]
        inside += low <= 0.7 <= high
    assert 180 <= inside <= 199


def test_draws_have_an_address_and_other_sites_others() -> None:
    made = drawn()
    assert score_cases(made, 0, "a") == score_cases(made, 0, "a")
    assert score_cases(made, 0, "a") != score_cases(made, 0, "b")
    assert score_cases(made, 0, "a") != score_cases(made, 1, "a")


def test_counts_pool_to_the_scores_of_all_images_except_auroc() -> None:
    parts = [drawn(40, 2, seed) for seed in (1, 2)]
    whole, added = score_cases(Cases.joined(parts), 0, "all"), pool_counts(score_cases(p, 0, "a") for p in parts)
    for one, other in zip(whole.classes, added.classes, strict=True):
        assert (one.tp, one.fp, one.tn, one.fn) == (other.tp, other.fp, other.tn, other.fn)
        for metric in ("brier", "ece", "npv"):
            assert one.metric(metric) == pytest.approx(other.metric(metric))
        assert other.auroc is None


def test_the_mean_auroc_counts_sites_by_their_positive_images() -> None:
    scores = [score_cases(drawn(40, 1, seed), 0, "a") for seed in (1, 2)]
    none = score_cases(cases(np.zeros((5, 1), bool), np.full((5, 1), 0.2)), 0, "a")
    areas, positives = zip(*((s.classes[0].auroc, s.classes[0].positives) for s in scores), strict=True)
    assert mean_auroc([*scores, none], 0) == pytest.approx(np.average(areas, weights=positives))
    assert mean_auroc([none], 0) is None


def test_a_macro_mean_is_over_the_same_classes_everywhere_or_missing() -> None:
    full, partial = drawn(40, 3), drawn(40, 3, 1)
    partial.truth[:, 2] = False
    scores = [score_cases(one, 0, "a") for one in (full, partial)]
    assert classes_everywhere(scores) == (0, 1)
    assert macro(scores[0], (0, 1))["auroc"] == pytest.approx(np.mean([c.auroc for c in scores[0].classes[:2]]))
    assert macro(scores[1], (0, 1, 2))["auroc"] is None
    assert macro(scores[1], ()) == dict.fromkeys(clinical.METRICS)


# Over a network.


def test_scores_survive_the_message() -> None:
    for made in (drawn(), drawn(patients=9), cases(np.zeros((5, 1), bool), np.full((5, 1), 0.2))):
        score = score_cases(made, 0, "a")
        found = from_scalars(to_scalars(score))
        assert found is not None
        assert from_scalars(to_scalars(found)) == found
        for one, other in zip(found.classes, score.classes, strict=True):
            assert replace(one, bins=()) == replace(other, bins=())
            assert [(b.images, b.positives) for b in one.bins] == [(b.images, b.positives) for b in other.bins]
            assert one.ece == pytest.approx(other.ece, abs=0.05)
        assert clinical_problem(to_scalars(score), 2) is None
    assert from_scalars({"personal_accuracy": 1.0}) is None


def test_no_probability_of_a_single_image_is_in_the_message() -> None:
    """A bin of one image would tell its probability; a bin of five tells their mean."""
    p = np.array([[0.123], [0.876], *[[0.51 + number / 100] for number in range(5)]])
    sent = to_scalars(score_cases(cases(np.arange(7)[:, None] % 2 == 0, p), 0, "a"))
    assert sent["personal_clinical_bin_probability1_0"] == pytest.approx(0.15)
    assert sent["personal_clinical_bin_probability8_0"] == pytest.approx(0.85)
    assert sent["personal_clinical_bin_probability5_0"] == pytest.approx(p[2:].sum())


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"personal_clinical_tp_0": 1.5}, "not a number of images"),
        ({"personal_clinical_tp_0": float("nan")}, "not a number from 0"),
        ({"personal_clinical_tp_0": -1.0}, "not a number from 0"),
        ({"personal_clinical_tp_7": 1.0}, "no score is called"),
        ({"personal_clinical_file_0": 1.0}, "no score is called"),
        ({"personal_clinical_tp_00": 1.0}, "no score is called"),
        ({"personal_clinical_": 1.0}, "no score is called"),
        ({"personal_clinical_tp_0": 999.0}, "impossible"),
        ({"personal_clinical_threshold_0": 0.0}, "threshold"),
        ({"personal_clinical_source_0": 3.0}, "threshold"),
        ({"personal_clinical_squares_0": 61.0}, "squares"),
        ({"personal_clinical_auroc_0": 1.1}, "AUROC"),
        ({"personal_clinical_auroc_0": None}, "AUROC"),
        ({"personal_clinical_bin_images3_0": 0.0}, "bins"),
        ({"personal_clinical_npv_low_0": 0.9, "personal_clinical_npv_high_0": 0.1}, "intervals"),
        ({"personal_clinical_npv_low_0": None}, "intervals"),
        ({"personal_clinical_fn_1": None}, "is missing"),
        ({PATIENTS: 2.5}, "number of patients"),
    ],
)
def test_impossible_clinical_scores_are_turned_away(changes: dict[str, float | None], problem: str) -> None:
    plain = {"personal_accuracy": 50.0, "personal_balanced_accuracy": 50.0, "personal_loss": 1.0}
    scores = {**plain, **to_scalars(score_cases(drawn(patients=9), 0, "a"))}
    assert score_problem(scores, 2) is None
    changed = {key: value for key, value in {**scores, **changes}.items() if value is not None}
    found = score_problem(changed, 2)
    assert found is not None
    assert problem in found
