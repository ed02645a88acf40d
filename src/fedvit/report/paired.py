"""Paired tests of two runs, such as a run and Local: both models on the same test images, by predictions.csv."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedvit.core.clinical import ClassScore
from fedvit.core.paired_tests import DeLong, McNemar, delong, mcnemar
from fedvit.report.statistics import LOCAL, Record
from fedvit.runs.clinical import PREDICTIONS, Predictions, read_predictions

EVERYONE = ""  # the client of a test on all images together
EVERY_CLASS = "all classes"  # the name of the test whether the most probable of several exclusive classes is right


@dataclass(frozen=True)
class PairedTest:
    """Two runs on the same test images: one class at one client, or at all clients together."""

    client: str
    name: str  # of the class
    images: int
    mcnemar: McNemar
    delong: DeLong | None

    def to_json(self) -> dict[str, Any]:
        area = self.delong
        return {
            "client": self.client or None,
            "class": None if self.name == EVERY_CLASS else self.name,
            "images": self.images,
            "auroc_difference": None if area is None else area.difference,
            "auroc_difference_interval": None if area is None else list(area.interval),
            "delong_p": None if area is None else area.p,
            "only_first_right": self.mcnemar.first_only,
            "only_second_right": self.mcnemar.second_only,
            "mcnemar_p": self.mcnemar.p,
        }


@dataclass(frozen=True)
class _Side:
    """One model on some images: the probability of a class, and whether the call was right."""

    truth: NDArray[np.bool_]
    probability: NDArray[np.float64]
    right: NDArray[np.bool_]

    @staticmethod
    def of(own: Predictions, name: str, one: ClassScore) -> "_Side":
        truth, probability = own.truth[name], own.probability[name]
        assert one.threshold is not None  # a single client always has one
        return _Side(truth, probability, (probability >= one.threshold) == truth)

    @staticmethod
    def of_most_probable(own: Predictions) -> "_Side":
        """Return whether the most probable class is the true one; there is no single probability to rank by."""
        truth, probability = (np.stack(list(part.values())) for part in (own.truth, own.probability))
        right = truth.argmax(0) == probability.argmax(0)
        return _Side(np.ones_like(right), np.zeros(len(right)), right)

    @staticmethod
    def joined(sides: Sequence["_Side"]) -> "_Side":
        return _Side(*(np.concatenate([getattr(side, key) for side in sides]) for key in _Side.__dataclass_fields__))


def why_untested(one: Record, other: Record) -> str:
    """Say why two runs cannot be compared image by image; empty if they can."""
    without = [record.label for record in (one, other) if record.clinical is None]
    if without:
        return f"{' and '.join(without)} was run without clinical scores (run.clinical=true)"
    if one.split.get("network") or other.split.get("network"):
        return (
            "the images are at sites, which send no single prediction; with run.predictions=true, every site can test "
            "its own images with `fedvit paired-tests` on the folders that it keeps of both runs"
        )
    missing = [record.label for record in (one, other) if not (record.folder / PREDICTIONS).is_file()]
    if missing:
        return f"{' and '.join(missing)} wrote no {PREDICTIONS} (run.predictions=true)"
    return "" if one.test_images == other.test_images else "they tested other images"


def against_local(record: Record, records: Sequence[Record]) -> tuple[list[PairedTest], str]:
    """Test a run against Local's with the same seed among the records; without a test, say why not."""
    if record.method == LOCAL or record.clinical is None:
        return [], ""
    local = next((one for one in records if one.method == LOCAL and one.seed == record.seed), None)
    if local is None:
        return [], "Local was not run with the same seed"
    why = why_untested(record, local)
    return ([], why) if why else (paired_tests(record, local), "")


def paired_tests(one: Record, other: Record) -> list[PairedTest]:
    """Test a run against another, class by class: first on all images together, then at every client.

    `why_untested` must have found nothing.
    """
    assert one.clinical is not None
    assert other.clinical is not None
    mine, theirs = read_predictions(one.folder), read_predictions(other.folder)
    clients = [name for name in one.clinical.clients if name in other.clinical.clients]
    patients = _patients(one.split, clients)
    pairs: dict[str, dict[str, tuple[_Side, ...]]] = {}  # class -> client -> both models
    numbers = [score.number for score in one.clinical.pooled.classes]
    if len(numbers) > 1 and not any(own.several_labels for own in mine.values()):
        pairs[EVERY_CLASS] = {
            client: tuple(_Side.of_most_probable(own[client]) for own in (mine, theirs)) for client in clients
        }
    for number in numbers:
        name = one.clinical.name(number)
        pairs[name] = {
            client: tuple(
                _Side.of(own[client], name, _score_of(record, client, number))
                for own, record in ((mine, one), (theirs, other))
            )
            for client in clients
        }
    owners = np.concatenate([patients[client] for client in clients])
    found = [
        _test(EVERYONE, name, tuple(_Side.joined(sides) for sides in zip(*own.values(), strict=True)), owners)
        for name, own in pairs.items()
    ]
    return found + [
        _test(client, name, pair, patients[client]) for name, own in pairs.items() for client, pair in own.items()
    ]


def _score_of(record: Record, client: str, number: int) -> ClassScore:
    assert record.clinical is not None
    return next(one for one in record.clinical.clients[client].classes if one.number == number)


def _patients(split: Mapping[str, Any], clients: Sequence[str]) -> dict[str, NDArray[np.int64]]:
    """Return a number for the patient of every test image, or for the image itself where no patient is known."""
    tests = {client: split["clients"][client]["test"] for client in clients}
    names = split.get("patients")
    if names is None:
        return {client: np.array(images, dtype=np.int64) for client, images in tests.items()}
    numbers: dict[str, int] = {}
    return {
        client: np.array([numbers.setdefault(names[image], len(numbers)) for image in images], dtype=np.int64)
        for client, images in tests.items()
    }


def _test(client: str, name: str, pair: tuple[_Side, ...], owners: NDArray[np.int64]) -> PairedTest:
    first, second = pair
    area = delong(first.probability, second.probability, first.truth, owners)
    return PairedTest(client, name, len(owners), mcnemar(first.right, second.right, owners), area)
