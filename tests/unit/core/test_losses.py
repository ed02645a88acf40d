"""Every loss against a slow version, one answer at a time."""

import math

import pytest
import torch
from torch import Tensor

from fedvit.core.batches import ClientData
from fedvit.core.losses import chance_loss, class_weights, cross_entropy, focal, make_criterion
from fedvit.core.settings import LossName

LOGITS = torch.tensor([[0.5, -1.0, 2.0], [0.0, 0.3, -0.2], [1.5, 1.0, 0.1], [-2.0, 0.4, 0.6]])
ONE = torch.tensor([2, 0, 0, 1])
SEVERAL = torch.tensor([[0, 0, 1], [1, 0, 1], [0, 0, 0], [0, 1, 1]])
NAMES: tuple[LossName, ...] = ("cross_entropy", "weighted", "focal", "balanced")
TRAIN_ONE = [0, 0, 0, 0, 0, 1, 1, 2, 2, 2]
TRAIN_SEVERAL = [(0, 1, 0), (0, 1, 1), (1, 1, 0), (0, 1, 0), (0, 1, 0)]  # everyone has the second label


def data_of(labels: Tensor, classes: int = 3) -> ClientData:
    everything, nothing = torch.arange(len(labels)), torch.arange(0)
    images = torch.zeros(len(labels), 1, 1, 1, dtype=torch.uint8)
    return ClientData(images, labels, everything, nothing, nothing, nothing, classes)


def slow(name: str, scores: list[float], truth: int, counts: list[int], gamma: float) -> float:
    """One question with exclusive answers: scores and counts of the answers, and the right one."""
    if name == "balanced":
        scores = [score + math.log(max(count, 1e-12)) for score, count in zip(scores, counts, strict=True)]
    chance = math.exp(scores[truth]) / sum(map(math.exp, scores))
    loss = -math.log(chance)
    if name == "weighted":
        present = [count for count in counts if count]
        loss *= sum(counts) / len(present) / counts[truth] if counts[truth] else 0.0
    return (1 - chance) ** gamma * loss if name == "focal" else loss


@pytest.mark.parametrize("gamma", [0.5, 2.0])
@pytest.mark.parametrize("name", NAMES)
def test_a_loss_of_one_label_is_that_of_its_formula(name: LossName, gamma: float) -> None:
    counts = [TRAIN_ONE.count(number) for number in range(3)]
    expected = [slow(name, row.tolist(), int(y), counts, gamma) for row, y in zip(LOGITS, ONE, strict=True)]
    data = data_of(torch.tensor(TRAIN_ONE))
    found = make_criterion(name, gamma, data.answer_counts, torch.device("cpu"))(LOGITS, ONE)
    assert float(found) == pytest.approx(sum(expected) / len(expected), rel=1e-5)


@pytest.mark.parametrize("gamma", [0.5, 2.0])
@pytest.mark.parametrize("name", NAMES)
def test_a_loss_of_several_labels_is_the_mean_over_yes_no_questions(name: LossName, gamma: float) -> None:
    yes = [sum(row[label] for row in TRAIN_SEVERAL) for label in range(3)]
    expected = [
        slow(name, [0.0, float(LOGITS[i, k])], int(SEVERAL[i, k]), [len(TRAIN_SEVERAL) - yes[k], yes[k]], gamma)
        for i in range(4)
        for k in range(3)
    ]
    data = data_of(torch.tensor(TRAIN_SEVERAL))
    found = make_criterion(name, gamma, data.answer_counts, torch.device("cpu"))(LOGITS, SEVERAL)
    assert float(found) == pytest.approx(sum(expected) / len(expected), rel=1e-5)


@pytest.mark.parametrize("labels", [torch.tensor(TRAIN_ONE), torch.tensor(TRAIN_SEVERAL)])
def test_class_weights_average_to_one_over_the_images(labels: Tensor) -> None:
    counts = data_of(labels).answer_counts
    weights = class_weights(counts)
    torch.testing.assert_close((weights * counts).sum(0), counts.sum(0).float())
    assert (weights[counts == 0] == 0).all()


def test_a_gamma_of_zero_gives_the_cross_entropy() -> None:
    for y in (ONE, SEVERAL):
        torch.testing.assert_close(focal(LOGITS, y, 0.0), cross_entropy(LOGITS, y))


@pytest.mark.parametrize("gamma", [0.3, 1.0, 2.0])
def test_the_slope_of_the_focal_loss_is_finite_even_for_a_perfect_answer(gamma: float) -> None:
    logits = torch.tensor([[200.0, 0.0], [0.0, 200.0]], requires_grad=True)
    (slope,) = torch.autograd.grad(focal(logits, torch.tensor([0, 0]), gamma), logits)
    assert slope.isfinite().all()


@pytest.mark.parametrize("name", ["cross_entropy", "weighted", "focal"])
def test_equal_logits_have_the_loss_of_chance(name: LossName) -> None:
    for labels, several in ((torch.tensor(TRAIN_ONE), False), (torch.tensor(TRAIN_SEVERAL), True)):
        loss = make_criterion(name, 2.0, data_of(labels).answer_counts, torch.device("cpu"))
        chance = chance_loss(name, 2.0, 3, several_labels=several)
        assert float(loss(torch.zeros(len(labels), 3), labels)) == pytest.approx(chance, rel=1e-5)
