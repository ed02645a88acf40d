"""Score a model on a folder of labeled images, CLASS/image, with the metrics that a run's own evaluation has."""

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedvit.core.errors import UserError, hint
from fedvit.core.metrics import area_under_roc
from fedvit.core.randomness import numpy_generator
from fedvit.data import folders, manifest
from fedvit.data.sources import locate
from fedvit.runs.folder import Run
from fedvit.runs.model_file import description_of
from fedvit.runs.predict import batches_of_logits, images_below

RESAMPLES = 10_000


@dataclass(frozen=True)
class Evaluation:
    """A model's answers to the images of a folder."""

    folder: Path
    classes: tuple[str, ...]
    files: tuple[Path, ...]
    labels: Tensor  # (images), numbers of classes
    logits: Tensor  # (images, classes)
    unreadable: tuple[str, ...]  # files that could not be read, with the reason
    skipped: tuple[str, ...]  # folders that are no class of the model

    @cached_property
    def predicted(self) -> Tensor:
        return self.logits.argmax(1)

    @cached_property
    def confusion(self) -> NDArray[np.int64]:
        """The number of images by class (rows) and predicted class (columns)."""
        size = len(self.classes)
        cells = torch.bincount(self.labels * size + self.predicted, minlength=size * size)
        return cells.reshape(size, size).numpy()

    @property
    def images(self) -> int:
        return len(self.files)

    @property
    def accuracy(self) -> float:
        return 100 * float(np.trace(self.confusion)) / self.images

    @cached_property
    def interval(self) -> tuple[float, float]:
        """The 95 % bootstrap interval of the accuracy over images; the exact one if all answers are right, or none."""
        right, images = int(np.trace(self.confusion)), self.images
        if right in (0, images):  # images drawn again would show no spread at all
            widest = 100 * 0.025 ** (1 / images)
            return (widest, 100.0) if right else (0.0, 100 - widest)
        # To draw as many images again and count the right ones is to draw from a binomial distribution.
        drawn = numpy_generator(0, "evaluate").binomial(images, right / images, RESAMPLES)
        low, high = np.percentile(100 * drawn / images, (2.5, 97.5))
        return float(low), float(high)

    @property
    def recall(self) -> list[float | None]:
        """The percentage of each class's images that are recognized; None for a class without images."""
        return _shares(self.confusion, self.confusion.sum(1))

    @property
    def precision(self) -> list[float | None]:
        """The percentage of right answers among all answers that name a class; None if none does."""
        return _shares(self.confusion, self.confusion.sum(0))

    @property
    def balanced_accuracy(self) -> float:
        """The mean recall over the classes that are present."""
        return float(np.mean([share for share in self.recall if share is not None]))

    @property
    def auroc(self) -> float | None:
        """The area under the ROC curve, as in `fedvit run`; None if only one class is present."""
        return area_under_roc(self.logits, self.labels)

    @property
    def absent(self) -> list[str]:
        """The classes of the model without a single image."""
        return [name for name, count in zip(self.classes, self.confusion.sum(1), strict=True) if count == 0]

    def to_json(self) -> dict[str, Any]:
        """Return every figure, for `--json`."""
        return {
            "folder": str(self.folder),
            "images": self.images,
            "accuracy": self.accuracy,
            "accuracy_interval": list(self.interval),
            "balanced_accuracy": self.balanced_accuracy,
            "auroc": self.auroc,
            "classes": [
                {"name": name, "images": int(count), "recall": recall, "precision": precision}
                for name, count, recall, precision in zip(
                    self.classes, self.confusion.sum(1), self.recall, self.precision, strict=True
                )
            ],
            "confusion": self.confusion.tolist(),
            "unreadable": list(self.unreadable),
            "skipped": list(self.skipped),
        }

    def csv_lines(self) -> Iterator[list[Any]]:
        """Yield a header and one line per image: its path in the folder, what it is, and every probability."""
        yield ["image", "class", "predicted", "right", *(f"probability {name}" for name in self.classes)]
        chances = torch.softmax(self.logits, dim=1).tolist()
        answers = zip(self.files, self.labels.tolist(), self.predicted.tolist(), chances, strict=True)
        for file, label, guess, chance in answers:
            where = file.relative_to(self.folder).as_posix()
            yield [where, self.classes[label], self.classes[guess], int(label == guess), *chance]


def _shares(confusion: NDArray[np.int64], totals: NDArray[np.int64]) -> list[float | None]:
    hits = np.diagonal(confusion)
    return [100 * float(hit) / float(total) if total else None for hit, total in zip(hits, totals, strict=True)]


def trained_on(run: Run, files: Sequence[Path]) -> int:
    """Count the images that a client of this run trained on; 0 if the run does not name its files."""
    split = run.split
    names = split.get("files")
    if not names:
        return 0
    data = run.experiment.data
    place = locate(data)
    if place is None:
        return 0
    root = (manifest.folder_of(place) if manifest.is_manifest(place) else place).resolve()
    parts = [part[kind] for part in split["clients"].values() for kind in ("train", "val", "probe") if kind in part]
    used = {os.path.join(root, names[number]) for numbers in parts for number in numbers}
    return sum(os.path.join(file.parent.resolve(), file.name) in used for file in files)


def evaluate(
    model: nn.Module, folder: Path, names: Mapping[str, str] | None = None, *, skip_unknown: bool = False
) -> Evaluation:
    """Score a model from `fedvit.load_model` or `run.model` on the images in FOLDER/CLASS/.

    `names` gives the class that a folder's name stands for. A folder that is no class of the model is an error, or is
    skipped with `skip_unknown`. Classes without images do not count in the balanced accuracy.
    """
    classes = tuple(description_of(model).classes)
    found, skipped = _class_folders(folder, classes, names or {}, skip_unknown=skip_unknown)
    by_file = {file: label for place, label in found for file in images_below(place)}
    if not by_file:
        raise UserError(f"no images in the class folders of {folder}: looked for {_suffixes()}")
    unreadable: list[str] = []
    files: list[Path] = []
    logits: list[Tensor] = []
    for good, answers in batches_of_logits(model, list(by_file), unreadable):
        files += good
        logits.append(answers)
    if not files:
        raise UserError(f"none of the {len(by_file)} files in {folder} could be read: {unreadable[0]}")
    labels = torch.tensor([by_file[file] for file in files])
    return Evaluation(folder, classes, tuple(files), labels, torch.cat(logits), tuple(unreadable), skipped)


def _class_folders(
    folder: Path, classes: tuple[str, ...], names: Mapping[str, str], *, skip_unknown: bool
) -> tuple[list[tuple[Path, int]], tuple[str, ...]]:
    """Return the folders of FOLDER with the numbers of their classes, and the names of those that are skipped."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: expected one with a subfolder per class, CLASS/image")
    places = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not places:
        raise UserError(
            f"{folder} has no subfolders: expected one per class, CLASS/image; the classes are {_listed(classes)}"
        )
    for name, label in names.items():
        if label not in classes:
            raise UserError(
                f"--classes {name}={label}: the model has no class {label!r}; {hint(label, classes)}"
                f"its classes are {_listed(classes)}"
            )
        if name not in {path.name for path in places}:
            there = _listed(path.name for path in places)
            raise UserError(f"--classes {name}={label}: {folder} has no folder {name!r}, only {there}")
    called = {path: names.get(path.name, path.name) for path in places}
    unknown = [path.name for path, name in called.items() if name not in classes]
    if unknown and not skip_unknown:
        missing = [name for name in classes if name not in called.values()]
        raise UserError(
            f"{folder} has folders that are no class of the model: {_listed(unknown)}; "
            f"classes without a folder: {_listed(missing) or 'none'}. Say which class a folder stands for with "
            f"--classes {unknown[0]}={_nearest(unknown[0], missing)},..., or leave such folders out with --skip-unknown"
        )
    return [(path, classes.index(name)) for path, name in called.items() if name in classes], tuple(unknown)


def _nearest(name: str, classes: Sequence[str]) -> str:
    """Return the class whose name is most like a folder's, or the word CLASS if none is."""
    plain = {label.lower(): label for label in classes}
    close = difflib.get_close_matches(name.lower(), list(plain), n=1)
    return plain[close[0]] if close else "CLASS"


def _listed(names: Iterable[str]) -> str:
    """Join names with commas; a list of a hundred classes is cut."""
    every = list(names)
    return ", ".join(every[:20]) + (f" and {len(every) - 20} more" if len(every) > 20 else "")


def _suffixes() -> str:
    return ", ".join(sorted(folders.SUFFIXES))
