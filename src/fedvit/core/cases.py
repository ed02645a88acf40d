"""A client's test images one by one: what they are, how probable the model finds it, and what a threshold makes of it.

These are personal. They stay where the images are; what may leave is counted from them in `core.clinical`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedvit.core.batches import EVALUATION_BATCH, ClientData, InputSettings, image_batches
from fedvit.core.client import Predictor
from fedvit.core.errors import UserError, nearest
from fedvit.core.thresholds import DEFAULT, Rule, best_threshold
from fedvit.core.tree import Tree

CASES = "cases"  # the group of tensors in the answer of a client on this machine
SOURCES = ("given", "val", "default")  # of a threshold; default: 0.5, where validation images do not determine one


@dataclass(frozen=True)
class Cases:
    """Test images, one row each, under every class that is measured, one column each: one class against the rest."""

    columns: tuple[int, ...]  # the numbers of the classes
    index: NDArray[np.int64]  # the number of each image in the dataset
    patient: NDArray[np.int64]  # of each image; the image's own number where no patient is known
    by_patient: bool  # whether patients are known
    truth: NDArray[np.bool_]  # (images, columns)
    probability: NDArray[np.float64]
    positive: NDArray[np.bool_]  # whether the probability reaches the threshold
    threshold: tuple[float | None, ...]  # by column; None: clients with several thresholds
    source: tuple[str | None, ...]  # of the threshold
    several_labels: bool = False  # whether an image may belong to several classes

    def __len__(self) -> int:
        return len(self.index)

    def of_every_class(self, classes: int) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
        """Return truth and probability of all classes; of two exclusive ones, only the positive one was measured."""
        if len(self.columns) == classes:
            return self.truth, self.probability
        parts = ((self.truth, ~self.truth), (self.probability, 1 - self.probability))
        mine, other = self.columns[0], 1 - self.columns[0]
        order = [0, 1] if mine < other else [1, 0]
        truth, probability = (np.concatenate([part[number] for number in order], axis=1) for part in parts)
        return truth, probability

    def to_tree(self) -> Tree:
        """Return everything as tensors, for the way from a worker process to its parent."""
        thresholds = [(cut, SOURCES.index(str(kind))) for cut, kind in zip(self.threshold, self.source, strict=True)]
        return {
            "columns": torch.tensor(self.columns),
            "index": torch.from_numpy(self.index),
            "patient": torch.from_numpy(self.patient),
            "by_patient": torch.tensor([self.by_patient]),
            "several_labels": torch.tensor([self.several_labels]),
            "truth": torch.from_numpy(self.truth),
            "probability": torch.from_numpy(self.probability),
            "threshold": torch.tensor(thresholds, dtype=torch.float64),
        }

    @staticmethod
    def from_tree(tree: Mapping[str, Tensor]) -> "Cases":
        probability, thresholds = tree["probability"].numpy(), tree["threshold"].numpy()
        return Cases(
            tuple(tree["columns"].tolist()),
            tree["index"].numpy(),
            tree["patient"].numpy(),
            bool(tree["by_patient"].item()),
            tree["truth"].numpy(),
            probability,
            probability >= thresholds[:, 0],
            tuple(thresholds[:, 0].tolist()),
            tuple(SOURCES[int(number)] for number in thresholds[:, 1]),
            bool(tree["several_labels"].item()),
        )

    @staticmethod
    def joined(parts: Sequence["Cases"]) -> "Cases":
        """Return the images of all clients together. A class keeps its threshold if it is the same everywhere."""
        first = parts[0]

        return Cases(
            first.columns,
            np.concatenate([part.index for part in parts]),
            np.concatenate([part.patient for part in parts]),
            first.by_patient,
            np.concatenate([part.truth for part in parts]),
            np.concatenate([part.probability for part in parts]),
            np.concatenate([part.positive for part in parts]),
            tuple(shared(own) for own in zip(*(part.threshold for part in parts), strict=True)),
            tuple(shared(own) for own in zip(*(part.source for part in parts), strict=True)),
            first.several_labels,
        )


T = TypeVar("T")


def shared(values: Sequence[T]) -> T | None:
    """Return the value that all have; None if they differ."""
    return values[0] if len(set(values)) == 1 else None


def measured_classes(classes: int, *, several_labels: bool, positive: int = 1) -> tuple[int, ...]:
    """Return the classes that are measured against the rest: of two exclusive classes, only the positive one."""
    return (positive,) if classes == 2 and not several_labels else tuple(range(classes))


def positive_class(wanted: str | None, names: Sequence[str], setting: str = "run.positive") -> int:
    """Return the number of the class that is called positive if there are two: the one wanted, or the second."""
    if wanted is None:
        return 1
    if len(names) != 2:
        raise UserError(
            f"{setting} names one of two classes, but there are {len(names)}, each of which is measured against the "
            "rest: leave it out"
        )
    if wanted not in names:
        raise UserError(f"{setting}={wanted!r} is no class of the data; {nearest(wanted, names)}")
    return names.index(wanted)


def measure_cases(
    predict: Predictor,
    data: ClientData,
    patients: NDArray[np.int64] | None,
    inputs: InputSettings,
    device: torch.device,
    threshold: float | Rule,
    positive: int = 1,
) -> Cases | None:
    """Return a client's test images with their probabilities, which are softmax, or sigmoid with several labels.

    The threshold is a number, or chosen for every class on the client's validation images by a rule. None if a
    probability is not finite.
    """
    columns = list(measured_classes(data.classes, several_labels=data.labels.ndim == 2, positive=positive))
    probability, truth = _answers(predict, data, data.test, columns, inputs, device)
    if not np.isfinite(probability).all():
        return None
    if isinstance(threshold, str):
        found: list[float | None] = [None] * len(columns)
        if len(data.val):
            at_val, true_at_val = _answers(predict, data, data.val, columns, inputs, device)
            found = [best_threshold(p, t, threshold) for p, t in zip(at_val.T, true_at_val.T, strict=True)]
        cuts = [DEFAULT if cut is None else cut for cut in found]
        sources = ["default" if cut is None else "val" for cut in found]
    else:
        cuts, sources = [float(threshold)] * len(columns), ["given"] * len(columns)
    index = data.test.numpy()
    return Cases(
        tuple(columns),
        index,
        index if patients is None else patients[index],
        patients is not None,
        truth,
        probability,
        probability >= np.array(cuts),
        tuple(cuts),
        tuple(sources),
        data.labels.ndim == 2,
    )


@torch.no_grad()
def _answers(
    predict: Predictor,
    data: ClientData,
    indices: Tensor,
    columns: Sequence[int],
    inputs: InputSettings,
    device: torch.device,
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return probability and truth of these images, (images, columns)."""
    batches = image_batches(data, indices, EVALUATION_BATCH, inputs, device)
    logits = torch.cat([predict(x).cpu() for x, _ in batches]).double()
    labels = data.labels[indices]
    if labels.ndim == 2:
        return logits.sigmoid()[:, columns].numpy(), labels[:, columns].numpy() > 0
    return logits.softmax(1)[:, columns].numpy(), (labels[:, None] == torch.tensor(columns)).numpy()
