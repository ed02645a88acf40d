"""Score a model of several labels per image on the images of a manifest."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedvit.core.cases import Cases
from fedvit.core.clinical import METRICS, ClassScore, SiteScore, score_cases
from fedvit.core.errors import UserError
from fedvit.core.thresholds import DEFAULT
from fedvit.data.manifest import Row, class_names, is_manifest, numbers_of, read_manifest
from fedvit.runs.model_file import description_of
from fedvit.runs.predict import batches_of_logits, probabilities


@dataclass(frozen=True)
class LabelEvaluation:
    """A model's answers to the images of a manifest, and the scores of every label."""

    folder: Path  # the manifest
    classes: tuple[str, ...]
    files: tuple[Path, ...]
    names: tuple[str, ...]  # of the files, as the manifest gives them
    cases: Cases
    unreadable: tuple[str, ...]
    skipped: tuple[str, ...] = ()

    @property
    def images(self) -> int:
        return len(self.files)

    @property
    def score(self) -> SiteScore:
        return score_cases(self.cases, 0, "evaluate")

    @property
    def accuracy(self) -> float:
        """The percentage of right answers, over images and labels."""
        return 100 * float(np.equal(self.cases.positive, self.cases.truth).mean())

    @property
    def absent(self) -> list[str]:
        """The labels that no image has."""
        return [self.classes[number] for number in np.flatnonzero(~self.cases.truth.any(axis=0))]

    def to_json(self) -> dict[str, Any]:
        """Return every figure, for `--json`."""
        score = self.score
        return {
            "manifest": str(self.folder),
            "images": self.images,
            "patients": score.patients,
            "accuracy": self.accuracy,
            "auroc": mean_auroc(score),
            "labels": [{"name": self.classes[one.number], **_figures(one)} for one in score.classes],
            "unreadable": list(self.unreadable),
        }

    def csv_lines(self) -> Iterator[list[Any]]:
        """Yield a header and one line per image: what it is, and every probability."""
        yield ["image", *(f"true {name}" for name in self.classes), *(f"probability {name}" for name in self.classes)]
        for name, truth, chance in zip(self.names, self.cases.truth, self.cases.probability, strict=True):
            yield [name, *truth.astype(int).tolist(), *chance.tolist()]


def mean_auroc(score: SiteScore) -> float | None:
    """Return the mean over the labels that have both answers; None if there are none."""
    areas = [one.auroc for one in score.classes if one.auroc is not None]
    return sum(areas) / len(areas) if areas else None


def _figures(one: ClassScore) -> dict[str, Any]:
    return {
        "images": one.images,
        "positives": one.positives,
        "threshold": one.threshold,
        **{metric: one.metric(metric) for metric in METRICS},
        "intervals": {metric: list(ends) for metric, ends in one.intervals.items()},
    }


def evaluate_labels(model: nn.Module, place: Path) -> LabelEvaluation:
    """Score a model of several labels on a manifest that has these labels; yes is a probability of a half or more.

    Intervals are by patient if the manifest has a column patient.
    """
    classes = tuple(description_of(model).classes)
    if not is_manifest(place) or not place.is_file():
        raise UserError(
            f"this model gives an image several labels, which folders cannot: expected a manifest (.csv) with a column "
            f"labels, or label_NAME for each of {', '.join(classes)}; found {place}"
        )
    found = read_manifest(place, skip_bad=True, task="multi")
    problem = next((note.text for note in (*found.notes, *found.missing)), None)
    if problem is not None:
        raise UserError(problem)
    class_names(found, classes, place)  # raises an error if it has other labels
    rows = {row.file: row for row in found.rows}
    unreadable: list[str] = []
    files: list[Path] = []
    answers: list[torch.Tensor] = []
    for good, logits in batches_of_logits(model, list(rows), unreadable):
        files += good
        answers.append(probabilities(logits, description_of(model)))
    if not files:
        reason = f": {unreadable[0]}" if unreadable else ""
        raise UserError(f"none of the {len(rows)} images in {place} could be read{reason}")
    good_rows = [rows[file] for file in files]
    truth = numbers_of(good_rows, classes, several_labels=True) > 0
    probability = torch.cat(answers).double().numpy()
    cases = _cases(good_rows, truth, probability)
    names = tuple(row.name for row in good_rows)
    return LabelEvaluation(place, classes, tuple(files), names, cases, tuple(unreadable))


def _cases(rows: list[Row], truth: NDArray[np.bool_], probability: NDArray[np.float64]) -> Cases:
    columns, index = tuple(range(truth.shape[1])), np.arange(len(rows))
    known = all(row.patient for row in rows)
    patient = np.unique([row.patient for row in rows], return_inverse=True)[1] if known else index
    cut, kind = (DEFAULT,) * len(columns), ("default",) * len(columns)
    return Cases(columns, index, patient, known, truth, probability, probability >= DEFAULT, cut, kind)
