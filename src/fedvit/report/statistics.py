"""Runs as rows of a report, with means over seeds and paired intervals."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedvit.runs.tracking import sent_in
from fedvit.runs.write import nbytes_of_run, nbytes_per_client

LOCAL, POOLED = "local", "centralized"
SAME_OWNERS = ("site",)  # partitions in which a client is the same owner for every seed
DEEPEST = 3  # how many levels below the given folder are searched for runs
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

    @property
    def seed(self) -> int:
        return int(self.tables["run"]["seed"])

    @property
    def method(self) -> str:
        return str(self.tables["method"]["name"])

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
    def curve(self) -> dict[int, tuple[float, float]]:
        """For each evaluated round, the mean personal accuracy and the bytes sent so far, both ways, by all clients."""
        points, sent = {}, 0.0
        for row in self.rounds:
            sent += sent_in(row)
            if row["views"]:
                points[row["round"]] = (row["views"]["personal"]["mean"], sent)
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
    def gains(self) -> list[float]:
        """The gain over Local of every client and seed; if clients are sites, of every site, averaged over seeds."""
        return paired([record.gains for record in self.records], self.first)

    @property
    def hurt(self) -> float | None:
        """The number of clients below Local, averaged over seeds."""
        return mean(sum(gain < 0 for gain in record.gains.values()) for record in self.records if record.gains)

    @cached_property
    def curve(self) -> list[tuple[int, float, float]]:
        """Tuples of (round, accuracy, bytes so far), averaged over seeds, for the rounds that all seeds have."""
        curves = [record.curve for record in self.records if record.curve]
        if not curves:
            return []
        shared = sorted(set.intersection(*(set(curve) for curve in curves)))
        return [(r, *(float(np.mean([curve[r][i] for curve in curves])) for i in (0, 1))) for r in shared]  # type: ignore[misc]


def paired(by_seed: Sequence[Mapping[str, float]], record: Record) -> list[float]:
    """Return one difference per client and seed, because with another seed a client holds other images.

    If clients are sites, return one difference per site instead, averaged over seeds.
    """
    known = [values for values in by_seed if values]
    if record.tables["partition"].get("name") in SAME_OWNERS and known:
        return [float(np.mean([values[name] for values in known if name in values])) for name in known[0]]
    return [value for values in known for value in values.values()]


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
    """Return how much better each client does under one row than under another, over the seeds that both have."""
    rivals = {test_images(record): accuracy(record) for record in other.records}
    shared = [(accuracy(record), rivals[key]) for record in best.records if (key := test_images(record)) in rivals]
    differences = [{name: a[name] - b[name] for name in a if name in b} for a, b in shared]
    return paired(differences, best.first)


def rank(rows: Sequence[Row]) -> list[Row]:
    """Sort rows by their mean, best first; rows without any evaluation come last."""
    return sorted(rows, key=lambda row: (row.mean is None, -(row.mean or 0)))


def test_images(record: Record) -> str:
    """Return a key for the seed and each client's test images: runs with equal keys can be compared by client."""
    parts = {name: part.get("test") for name, part in record.split.get("clients", {}).items()}
    return text_of(record.seed, record.split.get("source"), parts)


def text_of(*content: Any) -> str:
    return json.dumps(content, sort_keys=True, default=str)
