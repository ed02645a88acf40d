"""What a report is made of: run folders, finished or not, read once and put together as rows over seeds."""

import csv
import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedvit import results
from fedvit.errors import UserError
from fedvit.experiment import STARTED
from fedvit.track import sent_in

LOCAL, POOLED = "local", "centralized"
SAME_OWNERS = ("site",)  # partitions under which a client is the same owner whatever the seed
DEEPEST = 3  # levels of folders below the one that is given
Tables = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Record:
    """One run's files. A run that is not finished has no summary."""

    folder: Path
    label: str
    tables: Tables
    versions: Mapping[str, str]
    summary: Mapping[str, Any] | None
    rounds: Sequence[Mapping[str, Any]]
    timings: Sequence[Mapping[str, Any]]
    clients: Sequence[Mapping[str, Any]]
    split: Mapping[str, Any]
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
        """Round -> (mean personal accuracy, bytes sent by then, both ways and all clients)."""
        points, sent = {}, 0.0
        for row in self.rounds:
            sent += sent_in(row)
            if row["views"]:
                points[row["round"]] = (row["views"]["personal"]["mean"], sent)
        return points

    @cached_property
    def confusion(self) -> Mapping[str, Sequence[Sequence[int]]]:
        """Client -> [class, predicted class, images]; empty where the run did not write it down."""
        found: dict[str, list[list[int]]] = read_json(self.folder / "confusion.json", {})
        return found

    @cached_property
    def phases(self) -> dict[str, float]:
        """Seconds by phase, in the order in which they come."""
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
    """One line of the table: a method's runs, one a seed. Once one is finished, those that are not are not counted."""

    label: str
    records: Sequence[Record]
    waiting: Sequence[Record] = ()  # begun, not finished and not counted

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
        """A number of a view, averaged over seeds."""
        return mean(record.views.get(view, {}).get(key) for record in self.records)

    def summary(self, *path: str) -> float | None:
        """A number of summary.json, averaged over the seeds that have one."""
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
        """Bytes of one sampled client in one round, both ways."""
        sizes = [results.nbytes_per_client(record.rounds) for record in self.records if record.rounds]
        return mean((size["down"] or 0) + (size["up"] or 0) for size in sizes)

    @property
    def sent(self) -> float | None:
        """Bytes of the whole run."""
        totals = [results.nbytes_of_run(record.rounds) for record in self.records if record.rounds]
        return mean(total["down"] + total["up"] for total in totals)

    @property
    def seconds(self) -> float | None:
        return mean(sum(record.phases.values()) for record in self.records if record.phases)

    @property
    def gains(self) -> list[float]:
        """Gain over Local of every client and seed; of every owner, averaged over seeds, where owners stay the same."""
        return paired([record.gains for record in self.records], self.first)

    @property
    def hurt(self) -> float | None:
        """How many clients are below Local, averaged over seeds."""
        return mean(sum(gain < 0 for gain in record.gains.values()) for record in self.records if record.gains)

    @cached_property
    def curve(self) -> list[tuple[int, float, float]]:
        """(round, accuracy, bytes so far), averaged over seeds, at the rounds that all of them have."""
        curves = [record.curve for record in self.records if record.curve]
        if not curves:
            return []
        shared = sorted(set.intersection(*(set(curve) for curve in curves)))
        return [(r, *(float(np.mean([curve[r][i] for curve in curves])) for i in (0, 1))) for r in shared]  # type: ignore[misc]


def paired(by_seed: Sequence[Mapping[str, float]], record: Record) -> list[float]:
    """Differences client by client. A client of another seed holds other images, so it is another client, unless
    clients are sites: then a site's differences are averaged over seeds."""
    known = [values for values in by_seed if values]
    if record.tables["partition"].get("name") in SAME_OWNERS and known:
        return [float(np.mean([values[name] for values in known if name in values])) for name in known[0]]
    return [value for values in known for value in values.values()]


def interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % t interval of the mean."""
    if len(values) < 2:
        return None
    from scipy.special import stdtrit

    half = float(stdtrit(len(values) - 1, 0.975)) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return float(np.mean(values)) - half, float(np.mean(values)) + half


def accuracy(record: Record) -> dict[str, float]:
    return {row["client"]: row["personal_accuracy"] for row in record.clients}


def lead(best: Row, other: Row) -> list[float]:
    """By how much each client is better off under one row than under another, over the seeds that both have."""
    rivals = {test_images(record): accuracy(record) for record in other.records}
    shared = [(accuracy(record), rivals[key]) for record in best.records if (key := test_images(record)) in rivals]
    differences = [{name: a[name] - b[name] for name in a if name in b} for a, b in shared]
    return paired(differences, best.first)


def rank(rows: Sequence[Row]) -> list[Row]:
    """Best mean first; rows without any evaluation last."""
    return sorted(rows, key=lambda row: (row.mean is None, -(row.mean or 0)))


# From folders to rows.


def collect(folders: Sequence[Path]) -> list[list[Row]]:
    """The rows of all runs in these folders, in groups that divide the same data in the same way."""
    found = {path.resolve(): path for folder in folders for path in run_folders(folder)}
    records = with_gains([read(path) for path in found.values()])
    groups: dict[str, list[Record]] = {}
    for record in records:
        key: list[Any] = [record.tables["data"], record.tables["partition"]]
        if "min_samples" not in record.tables["partition"]:  # its default comes from the batch, and decides the split
            key.append(record.tables["train"].get("batch"))
        groups.setdefault(text_of(*key), []).append(record)
    return [rows_of(group) for group in groups.values()]


def run_folders(folder: Path) -> list[Path]:
    """The runs in a folder: itself, or those below it, in the order of compare.json where there is one."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: expected a run's or a comparison's folder, such as runs/NAME")
    if (folder / "run.toml").is_file():
        return [folder]
    below = sorted(path.parent for depth in range(1, DEEPEST + 1) for path in folder.glob("*/" * depth + "run.toml"))
    if not below:
        raise UserError(
            f"{folder} is not a run: expected a folder with run.toml in it, as `fedvit run --out` writes it, or one "
            "that holds such folders, as `fedvit compare --out` writes it"
        )
    order = comparison_order(folder)
    return sorted(below, key=lambda path: order.get(path.relative_to(folder).parts[0], len(order)))


def comparison_order(folder: Path) -> dict[str, int]:
    try:
        entries = json.loads((folder / "compare.json").read_text())
        return {entry["label"]: number for number, entry in enumerate(entries)}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def read(folder: Path) -> Record:
    """All files of a run that a report shows. Files that an unfinished or an older run lacks are empty."""
    try:
        tables = tomllib.loads((folder / "run.toml").read_text())
        versions = tables.pop("versions", {})
        seed_folder = re.fullmatch(r"seed\d+", folder.resolve().name)
        method, tune = str(tables["method"]["name"]), str(tables["tune"]["name"])
        label = folder.resolve().parent.name if seed_folder else method if tune == "full" else f"{method}+{tune}"
        log = (folder / "log.txt").read_text(errors="replace") if (folder / "log.txt").is_file() else ""
        commands = [line.split(STARTED, 1)[1].strip() for line in log.splitlines() if STARTED in line]
        record = Record(
            folder=folder,
            label=label,
            tables=tables,
            versions=versions,
            summary=read_json(folder / "summary.json", None),
            rounds=results.read_lines(folder / "rounds.jsonl"),
            timings=results.read_lines(folder / "timings.jsonl"),
            clients=results.read_clients(folder / "clients.csv") if (folder / "clients.csv").is_file() else [],
            split=read_json(folder / "split.json", {}),
            commands=list(dict.fromkeys(commands)),
        )
        gains = {row["client"]: row["gain"] for row in record.clients if row["gain"] is not None}
        _ = record.seed, record.planned, record.curve, record.phases, record.confusion.keys()  # damage is found here
        return replace(record, gains=gains)
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OSError, csv.Error) as problem:
        kind = f"{type(problem).__name__}: {problem}"
        raise UserError(f"the files of the run in {folder} cannot be read ({kind}): is it damaged?") from problem


def read_json(path: Path, otherwise: Any) -> Any:
    try:
        return json.loads(path.read_text()) if path.is_file() else otherwise
    except ValueError as problem:
        raise UserError(f"{path} cannot be read ({problem}): is it damaged?") from problem


def with_gains(records: Sequence[Record]) -> list[Record]:
    """Gains over Local where a run was not told them but Local's run on the same test images is here too."""
    alone = {test_images(record): accuracy(record) for record in records if record.method == LOCAL and record.clients}
    result = []
    for record in records:
        local = alone.get(test_images(record))
        if not record.gains and local:
            gains = {name: value - local[name] for name, value in accuracy(record).items() if name in local}
            record = replace(record, gains=gains)
        result.append(record)
    return result


def test_images(record: Record) -> str:
    """Who is tested on what, with this seed: two runs that share it can be compared client by client."""
    parts = {name: part.get("test") for name, part in record.split.get("clients", {}).items()}
    return text_of(record.seed, record.split.get("source"), parts)


def text_of(*content: Any) -> str:
    return json.dumps(content, sort_keys=True, default=str)


def rows_of(records: Sequence[Record]) -> list[Row]:
    """Runs that differ in the seed alone are one row; rows of the same name are told apart by what differs."""
    same: dict[str, dict[int, Record]] = {}
    for record in records:
        run = {key: value for key, value in record.tables["run"].items() if key not in ("seed", "track", "cache_mb")}
        seeds = same.setdefault(text_of(record.label, {**record.tables, "run": run}), {})
        if record.seed not in seeds or (record.finished and not seeds[record.seed].finished):  # else a repetition
            seeds[record.seed] = record
    return told_apart([row_of([by[seed] for seed in sorted(by)]) for by in same.values()])


def row_of(records: Sequence[Record]) -> Row:
    done = [record for record in records if record.finished]
    if not done:
        return Row(records[0].label, records)
    return Row(records[0].label, done, [record for record in records if not record.finished])


def told_apart(rows: Sequence[Row]) -> list[Row]:
    result = []
    for row in rows:
        twins = [other for other in rows if other.label == row.label]
        if len(twins) > 1:
            names = [key for key, values in differences(twins).items() if key != "run.seed" and len(set(values)) > 1]
            own = flat(row.first.tables)
            words = ", ".join(f"{key.partition('.')[2]} {own.get(key, '-')}" for key in names) or row.first.folder.name
            row = replace(row, label=f"{row.label} ({words})")
        result.append(row)
    return result


def flat(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """table.key -> value, as text."""
    return {f"{table}.{key}": str(value) for table, content in tables.items() for key, value in content.items()}


def differences(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Every setting, with its value in every row."""
    settings = [flat(row.first.tables) for row in rows]
    keys = dict.fromkeys(key for own in settings for key in own)
    return {key: [own.get(key, "-") for own in settings] for key in keys}
