"""Scores of several labels per image, against scikit-learn and by hand."""

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, balanced_accuracy_score, f1_score, roc_auc_score

from fedvit.core.cases import Cases
from fedvit.core.clinical import METRICS, average_precision, score_cases
from fedvit.core.clinical_message import clinical_problem, from_scalars, to_scalars
from fedvit.core.metrics import METRICS as BASIC
from fedvit.core.metrics import score_labels, score_problem
from fedvit.engine.loop import summarize


def drawn(seed: int = 0, images: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits with ties, and labels of which the last has no positive image."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(images, 4, generator=generator).round(decimals=1)
    labels = (torch.rand(images, 4, generator=generator) < torch.tensor([0.5, 0.2, 0.1, 0.0])).long()
    return logits, labels


def test_scores_of_labels_are_those_of_scikit_learn() -> None:
    logits, labels = drawn()
    found = score_labels(logits, labels, auroc=True)
    guess, truth = (logits >= 0).long().numpy(), labels.numpy()
    assert found["accuracy"] == pytest.approx(100 * (guess == truth).mean())
    balanced = [balanced_accuracy_score(truth[:, k], guess[:, k]) for k in range(3)]
    balanced.append(float((guess[:, 3] == 0).mean()))
    assert found["balanced_accuracy"] == pytest.approx(100 * np.mean(balanced))
    areas = [roc_auc_score(truth[:, k], logits[:, k]) for k in range(3)]
    assert [found[f"auroc_{k}"] for k in range(3)] == pytest.approx(areas)
    assert found["auroc"] == pytest.approx(np.mean(areas))
    assert "auroc_3" not in found, "a label without a positive image has no AUROC"


def test_without_a_label_that_has_both_answers_there_is_no_auroc() -> None:
    found = score_labels(torch.zeros(3, 2), torch.tensor([[1, 0], [1, 0], [1, 0]]), auroc=True)
    assert found == {"accuracy": 50.0, "balanced_accuracy": 50.0}
    assert "auroc" not in score_labels(torch.full((2, 1), torch.nan), torch.tensor([[0], [1]]), auroc=True)


def test_the_view_takes_the_mean_of_every_label_over_the_clients_that_can_test_it() -> None:
    basic = {f"personal_{metric}": 50.0 for metric in BASIC}
    a = {**basic, "personal_auroc": 0.6, "personal_auroc_0": 0.8, "personal_auroc_1": 0.4, "personal_val_auroc": 0.7}
    b = {**basic, "personal_auroc": 0.6, "personal_auroc_0": 0.6}
    view = summarize({"a": a, "b": b}, {"a": 5, "b": 5})["personal"]
    assert view["auroc_labels"] == pytest.approx({"0": 0.7, "1": 0.4})
    assert view["auroc"] == pytest.approx(0.55)
    assert view["val"] == pytest.approx(70.0)


def test_scores_of_labels_are_checked_when_they_arrive() -> None:
    good = {**{f"personal_{metric}": 50.0 for metric in BASIC}, "personal_auroc": 0.5, "personal_auroc_2": 0.5}
    assert score_problem(good, 3) is None
    assert score_problem(good, 2) == "no score is called 'personal_auroc_2'"
    assert score_problem({**good, "personal_auroc_2": 1.5}, 3) == "'personal_auroc_2' is not a number from 0 to 1"


def cases_of(logits: torch.Tensor, labels: torch.Tensor) -> Cases:
    probability, count = logits.double().sigmoid().numpy(), labels.shape[1]
    index = np.arange(len(labels))
    truth = labels.numpy() > 0
    cuts, kinds = (0.5,) * count, ("default",) * count
    return Cases(tuple(range(count)), index, index, False, truth, probability, probability >= 0.5, cuts, kinds)


def test_average_precision_and_f1_are_those_of_scikit_learn() -> None:
    logits, labels = drawn(3)
    cases = cases_of(logits, labels)
    for one in score_cases(cases, 0, "x").classes[:3]:
        truth, chance = cases.truth[:, one.number], cases.probability[:, one.number]
        assert one.average_precision == pytest.approx(average_precision_score(truth, chance))
        assert one.f1 == pytest.approx(f1_score(truth, chance >= 0.5))
    assert average_precision(np.array([0.2, 0.3]), np.array([False, False])) is None


def test_average_precision_survives_the_way_in_a_message() -> None:
    scored = score_cases(cases_of(*drawn()), 0, "x")
    scalars = to_scalars(scored)
    assert clinical_problem(scalars, 4) is None
    back = from_scalars(scalars)
    assert back is not None
    for one, again in zip(scored.classes, back.classes, strict=True):
        told = [name for name in METRICS if name != "ece"]  # a bin of few images travels as its middle
        assert [one.metric(name) for name in told] == pytest.approx([again.metric(name) for name in told])
    missing = {key: value for key, value in scalars.items() if key != "personal_clinical_average_precision_0"}
    assert "the AUROC of class 0" in str(clinical_problem(missing, 4))
