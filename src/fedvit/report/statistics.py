"""Runs as rows of a report, with means over seeds and paired intervals."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedvit.runs.clinical import Clinical
from fedvit.runs.tracking import sent_in
from fedvit.runs.write import nbytes_of_run, nbytes_per_client

LOCAL, POOLED = "local", "centralized"
SAME_OWNERS = ("site",)  # partitions in which a client is the same owner for every seed
_ROUNDING = 1e-9  # points; a mean over seeds of exactly 0 may come out as a little less
DEEPEST = 4  # how many levels below the given folder are searched for runs
Tables = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Record:
    """A run as it was when the report read its folder. A run that has not finished has no summary."""

    folder: Path
    label: str
    tables: Tables
    versions: Mapping[str, str]
    summary: Mapping[str, Any] | None
    rounds: Sequence[Mapping[str, Any]]
    timings: Sequence[Mapping[str, Any]]
    clients: Sequence[Mapping[str, Any]]
    split: Mapping[str, Any]
    confusion: Mapping[str, Sequence[Sequence[int]]]
    commands: Sequence[str]
    gains: Mapping[str, float] = field(default_factory=dict)  # over Local, by client
    clinical: Clinical | None = None
    edge: str = ""  # "smallest" or "largest", if its learning rate was searched and is that of those tried

    @property
    def seed(self) -> int:
        return int(self.tables["run"]["seed"])

    @property
    def method(self) -> str:
        return str(self.tables["method"]["name"])

    @property
    def partition(self) -> str:
        return str(self.tables["partition"].get("name"))

    @property
    def planned(self) -> int:
        return int(self.tables["train"]["rounds"])

    @property
    def finished(self) -> bool:
        return self.summary is not None

    @property
    def views(self) -> Mapping[str, Mapping[str, Any]]:
        """Every view after the last round that was evaluated."""
        return next((row["views"] for row in reversed(self.rounds) if row["views"]), {})

    @property
    def class_names(self) -> list[str]:
        return list(self.split.get("class_names", []))

    @cached_property
    def test_images(self) -> str:
        """A key for the seed and each client's test images: runs with equal keys can be compared by client.

        The server of a network does not know which images its sites test. Its runs can be compared if the seed, the
        sites, the classes and the settings of data and partition are equal, and then only those clients that have as
        many test images of every class in both runs (`client_differences`).
        """
        parts = {name: part.get("test") for name, part in self.split.get("clients", {}).items()}
        if self.split.get("network") and None in parts.values():
            data = {key: value for key, value in self.tables["data"].items() if key not in ("dir", "cache")}
            return text_of(self.seed, "sites", sorted(parts), self.class_names, data, self.tables["partition"])
        return text_of(self.seed, self.split.get("source"), parts)

    @cached_property
    def curve(self) -> dict[int, tuple[float, float]]:
        """The curve of the clients' own models."""
        return self.curve_of("personal")

    def curve_of(self, view: str) -> dict[int, tuple[float, float]]:
        """For each evaluated round, a view's mean accuracy and the bytes sent so far, both ways, by all clients."""
        points, sent = {}, 0.0
        for row in self.rounds:
            sent += sent_in(row)
            if view in (row["views"] or {}):
                points[row["round"]] = (row["views"][view]["mean"], sent)
        return points

    @cached_property
    def phases(self) -> dict[str, float]:
        """The seconds spent in each phase, in the order of the phases."""
        spent: dict[str, float] = {}
        for timing in self.timings:
            for phase, seconds in timing["seconds"].items():
                spent[phase] = spent.get(phase, 0.0) + seconds
        if self.summary is not None:
            spent = {"set up": max(0.0, self.summary["seconds"] - sum(spent.values())), **spent}
        return spent


@dataclass(frozen=True)
class Unit:
    """What counts once: a site, averaged over seeds, or a client of one seed where another seed makes other clients."""

    name: str
    seed: int | None = None  # None: the same owner for every seed

    @property
    def label(self) -> str:
        return self.name if self.seed is None else f"{self.name} (seed {self.seed})"


def by_unit(by_seed: Mapping[int, Mapping[str, float]], partition: str) -> dict[Unit, float]:
    """Return one value per unit: this is the only place where clients are averaged over seeds.

    With the partitions of `SAME_OWNERS`, a unit is a site and its value is the mean over the seeds that have it. With
    any other partition, another seed gives a client other images, so that a client of one seed is a unit.
    """
    if partition in SAME_OWNERS:
        names = dict.fromkeys(name for values in by_seed.values() for name in values)
        return {
            Unit(name): float(np.mean([values[name] for values in by_seed.values() if name in values]))
            for name in names
        }
    return {Unit(name, seed): value for seed, values in by_seed.items() for name, value in values.items()}


def count_hurt(gains: Mapping[Unit, float]) -> float:
    """Return the number of units with a negative gain: of sites, or of clients as a mean per seed."""
    seeds = {unit.seed for unit in gains}
    return sum(gain < -_ROUNDING for gain in gains.values()) / max(1, len(seeds))


def mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


@dataclass(frozen=True)
class Row:
    """One line of the table: a method's runs, one per seed. Once one has finished, unfinished ones are not counted."""

    label: str
    records: Sequence[Record]
    waiting: Sequence[Record] = ()  # started, not finished and not counted

    @property
    def first(self) -> Record:
        return self.records[0]

    @property
    def method(self) -> str:
        return self.first.method

    @property
    def seeds(self) -> list[int]:
        return [record.seed for record in self.records]

    @property
    def finished(self) -> bool:
        return all(record.finished for record in self.records)

    def view(self, key: str, view: str = "personal") -> float | None:
        """Return a number of a view, averaged over seeds."""
        return mean(record.views.get(view, {}).get(key) for record in self.records)

    def summary(self, *path: str) -> float | None:
        """Return a number from summary.json, averaged over the seeds that have it."""
        found = []
        for record in self.records:
            value: Any = record.summary or {}
            for key in path:
                value = (value or {}).get(key)
            found.append(value)
        return mean(found)

    @property
    def mean(self) -> float | None:
        return self.view("mean")

    @property
    def several_labels(self) -> bool:
        """Whether an image may have several labels."""
        return self.first.tables["data"].get("task") == "multi"

    @property
    def headline(self) -> float | None:
        """The score by which rows are ranked: accuracy or, with several labels, the mean AUROC of the labels."""
        return self.view("auroc" if self.several_labels else "mean")

    @property
    def seed_std(self) -> float | None:
        means = [record.views["personal"]["mean"] for record in self.records if record.views]
        return float(np.std(means)) if len(means) > 1 else None

    @property
    def per_round(self) -> float | None:
        """The bytes that one sampled client receives and sends in one round."""
        sizes = [nbytes_per_client(record.rounds) for record in self.records if record.rounds]
        return mean((size["down"] or 0) + (size["up"] or 0) for size in sizes)

    @property
    def sent(self) -> float | None:
        """The bytes sent in the whole run, both ways."""
        totals = [nbytes_of_run(record.rounds) for record in self.records if record.rounds]
        return mean(total["down"] + total["up"] for total in totals)

    @property
    def seconds(self) -> float | None:
        return mean(sum(record.phases.values()) for record in self.records if record.phases)

    @property
    def same_owners(self) -> bool:
        """Whether a client is the same owner for every seed."""
        return self.first.partition in SAME_OWNERS

    @cached_property
    def unit_gains(self) -> dict[Unit, float]:
        """The gain over Local of every unit."""
        return by_unit({record.seed: record.gains for record in self.records}, self.first.partition)

    @property
    def gains(self) -> list[float]:
        """The gain over Local of every unit, as a list."""
        return list(self.unit_gains.values())

    @property
    def hurt(self) -> float | None:
        """The number of clients below Local, by the one rule of `count_hurt`."""
        return count_hurt(self.unit_gains) if self.unit_gains else None

    @cached_property
    def curve(self) -> list[tuple[int, float, float]]:
        """The curve of the clients' own models."""
        return self.curve_of("personal")

    def curve_of(self, view: str) -> list[tuple[int, float, float]]:
        """Tuples of (round, accuracy, bytes so far), averaged over seeds, for the rounds that all seeds have."""
        curves = [curve for record in self.records if (curve := record.curve_of(view))]
        if not curves:
            return []
        shared = sorted(set.intersection(*(set(curve) for curve in curves)))
        return [(r, *(float(np.mean([curve[r][i] for curve in curves])) for i in (0, 1))) for r in shared]  # type: ignore[misc]


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % t interval of the mean, or None for fewer than two values."""
    if len(values) < 2:
        return None
    from scipy.special import stdtrit

    half = float(stdtrit(len(values) - 1, 0.975)) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return float(np.mean(values)) - half, float(np.mean(values)) + half


def accuracy(record: Record) -> dict[str, float]:
    return {row["client"]: row["personal_accuracy"] for row in record.clients}


def lead(best: Row, other: Row) -> list[float]:
    """Return how much better each unit does under one row than under another, over the seeds that both have."""
    rivals = {record.test_images: record for record in other.records}
    apart = {
        record.seed: client_differences(record, rivals[key])
        for record in best.records
        if (key := record.test_images) in rivals
    }
    return list(by_unit(apart, best.first.partition).values())


def client_differences(record: Record, other: Record) -> dict[str, float]:
    """Return how much better each client does in one run than in another; their `test_images` must be equal."""
    a, b = accuracy(record), accuracy(other)
    return {name: a[name] - b[name] for name in a if name in b and _tests_alike(record, other, name)}


def _tests_alike(record: Record, other: Record, client: str) -> bool:
    """Tell whether a client tests as many images of every class in both runs, if the runs do not list the images."""
    if "test" in record.split.get("clients", {}).get(client, {}):
        return True
    totals = [class_totals(one.confusion.get(client, ())) for one in (record, other)]
    if not all(totals):  # one of the runs did not record classes
        totals = [
            {0: int(row["test_samples"])} for one in (record, other) for row in one.clients if row["client"] == client
        ]
    return totals[0] == totals[1]


def class_totals(cells: Iterable[Sequence[int]]) -> dict[int, int]:
    """Return the images of every true class among the cells of a confusion matrix."""
    totals: dict[int, int] = {}
    for true, _, images in cells:
        totals[true] = totals.get(true, 0) + images
    return totals


def rank(rows: Sequence[Row]) -> list[Row]:
    """Sort rows by their headline score, best first; rows without any evaluation come last."""
    return sorted(rows, key=lambda row: (row.headline is None, -(row.headline or 0)))


def text_of(*content: Any) -> str:
    return json.dumps(content, sort_keys=True, default=str)
