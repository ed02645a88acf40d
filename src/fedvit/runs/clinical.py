"""The clinical files of a run: clinical.json with every client's scores, and predictions.csv if it is asked for."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedvit.core.cases import Cases
from fedvit.core.clinical import (
    METRICS,
    Bin,
    ClassScore,
    SiteScore,
    classes_everywhere,
    macro,
    mean_auroc,
    pool_counts,
    score_cases,
)
from fedvit.core.clinical_message import from_scalars
from fedvit.core.errors import UserError
from fedvit.core.files import read_json, replacing, strict_json, write_text
from fedvit.core.settings import Experiment

CLINICAL, PREDICTIONS = "clinical.json", "predictions.csv"
_POOLED = "all clients"  # names the draws of the bootstrap over all of them


@dataclass(frozen=True)
class Clinical:
    """The clinical scores after a round: of every client that reported them, and of all their test images together."""

    round: int
    class_names: tuple[str, ...]
    clients: Mapping[str, SiteScore]
    pooled: SiteScore
    one_by_one: bool  # whether `pooled` comes from the images of all clients; otherwise from their counts

    @property
    def macro_classes(self) -> tuple[int, ...]:
        """The classes over which macro means are taken: those that every client can test."""
        return classes_everywhere(self.clients.values())

    @property
    def by_patient(self) -> bool:
        """Whether intervals are by patient, at every client."""
        return self.pooled.patients is not None

    def name(self, number: int) -> str:
        return self.class_names[number]

    def within(self, number: int) -> float | None:
        """Return the mean of the clients' own AUROCs of a class."""
        return mean_auroc(self.clients.values(), number)

    def to_json(self) -> dict[str, Any]:
        """Return the content of clinical.json."""
        shared = self.macro_classes
        pooled = self._site(self.pooled)
        for content, one in zip(pooled["classes"], self.pooled.classes, strict=True):
            content["auroc_within_clients"] = self.within(one.number)
        return {
            "round": self.round,
            "class_names": list(self.class_names),
            "intervals_by": "patient" if self.by_patient else "image",
            "pooled_from": "images" if self.one_by_one else "counts",
            "macro_classes": [self.name(number) for number in shared],
            "pooled": pooled,
            "clients": {name: self._site(score) for name, score in self.clients.items()},
        }

    def _site(self, score: SiteScore) -> dict[str, Any]:
        return {
            "images": score.images,
            "patients": score.patients,
            "macro": macro(score, self.macro_classes),
            "classes": [{"class": self.name(one.number), **class_json(one)} for one in score.classes],
        }

    def summary(self) -> dict[str, Any]:
        """Return what summary.json says: the scores of all test images together, by class, and their macro means."""
        content = self.to_json()
        return {key: content[key] for key in ("intervals_by", "pooled_from", "macro_classes")} | {
            "macro": content["pooled"]["macro"],
            "classes": [
                {key: value for key, value in one.items() if key != "bins"} for one in content["pooled"]["classes"]
            ],
        }


def class_json(one: ClassScore) -> dict[str, Any]:
    """Return the scores of a class by name."""
    return {
        "images": one.images,
        "positives": one.positives,
        "threshold": one.threshold,
        "threshold_from": one.source,
        **{name: getattr(one, name) for name in ("tp", "fp", "tn", "fn")},
        **{metric: one.metric(metric) for metric in METRICS},
        "intervals": {metric: list(ends) for metric, ends in one.intervals.items()},
        "bins": [[place.images, place.probability, place.positives] for place in one.bins],
    }


def _site_of(content: Mapping[str, Any], numbers: Mapping[str, int]) -> SiteScore:
    return SiteScore(content["patients"], tuple(_class_of(one, numbers[one["class"]]) for one in content["classes"]))


def _class_of(one: Mapping[str, Any], number: int) -> ClassScore:
    return ClassScore(
        number, one["tp"], one["fp"], one["tn"], one["fn"], one["brier"] * one["images"], one["auroc"],
        tuple(Bin(*place) for place in one["bins"]), one["threshold"], one["threshold_from"],
        {metric: (ends[0], ends[1]) for metric, ends in one["intervals"].items()}, one["average_precision"],
    )  # fmt: skip


def read_clinical(folder: Path) -> Clinical | None:
    """Read clinical.json; None if the run has not measured clinical scores."""
    content = read_json(folder / CLINICAL, None)
    if content is None:
        return None
    names = tuple(content["class_names"])
    numbers = {name: number for number, name in enumerate(names)}
    return Clinical(
        content["round"],
        names,
        {name: _site_of(site, numbers) for name, site in content["clients"].items()},
        _site_of(content["pooled"], numbers),
        content["pooled_from"] == "images",
    )


def write_clinical(
    folder: Path,
    experiment: Experiment,
    class_names: Sequence[str],
    round_: int,
    scores: Mapping[str, Mapping[str, float]],
    cases: Mapping[str, Cases],
) -> None:
    """Write clinical.json of a round that has clinical scores, and predictions.csv where the images are here."""
    found = {name: from_scalars(score) for name, score in scores.items()}
    clients = {name: score for name, score in found.items() if score is not None}
    if not clients or not experiment.run.clinical:
        return
    own = {name: cases[name] for name in clients if name in cases}
    here = len(own) == len(clients)
    pooled = (
        score_cases(Cases.joined(list(own.values())), experiment.run.seed, _POOLED)
        if here
        else pool_counts(clients.values())
    )
    content = Clinical(round_, tuple(class_names), clients, pooled, one_by_one=here).to_json()
    write_text(folder / CLINICAL, strict_json(content) + "\n")
    if here and experiment.run.predictions:
        write_predictions(folder / PREDICTIONS, own, class_names)


# Images one by one: they are named by their position in the client's list of test images, never by a file.


def write_predictions(path: Path, cases: Mapping[str, Cases], class_names: Sequence[str]) -> None:
    """Write one line per test image: the client, its position in the client's test list, its classes, probabilities.

    With several labels per image, `class` is replaced by a column of 0 and 1 for every class.
    """
    with replacing(path) as partial, partial.open("w", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        first = next(iter(cases.values()))
        truth = [f"true {name}" for name in class_names] if first.several_labels else ["class"]
        writer.writerow(["client", "index", *truth, *(f"probability {name}" for name in class_names)])
        for client, own in cases.items():
            is_true, probability = own.of_every_class(len(class_names))
            for row in range(len(own)):
                label = (
                    is_true[row].astype(int).tolist() if own.several_labels else [class_names[is_true[row].argmax()]]
                )
                writer.writerow([client, row, *label, *probability[row].tolist()])


@dataclass(frozen=True)
class Predictions:
    """One client's lines of predictions.csv, in the order of its list of test images."""

    truth: dict[str, np.ndarray[Any, np.dtype[np.bool_]]]  # by class
    probability: dict[str, np.ndarray[Any, np.dtype[np.float64]]]
    several_labels: bool  # whether an image may belong to several classes


def read_predictions(folder: Path) -> dict[str, Predictions]:
    """Read predictions.csv of a run by client; empty if the run did not write it."""
    path = folder / PREDICTIONS
    if not path.is_file():
        return {}
    with path.open(newline="") as stream:
        lines = list(csv.DictReader(stream))
    by_client: dict[str, list[dict[str, str]]] = {}
    for line in lines:
        by_client.setdefault(line["client"], []).append(line)
    start = "probability "
    names = [key.removeprefix(start) for key in (lines[0] if lines else {}) if key.startswith(start)]
    found = {}
    for client, own in by_client.items():
        if [line["index"] for line in own] != [str(number) for number in range(len(own))]:
            raise UserError(f"{path}: the lines of client {client} are not those of its test images in order")
        several = "class" not in own[0]
        truth = {
            name: np.array([line[f"true {name}"] == "1" if several else line["class"] == name for line in own])
            for name in names
        }
        probability = {name: np.array([float(line[start + name]) for line in own]) for name in names}
        found[client] = Predictions(truth, probability, several)
    return found
