"""Several rows on the same data, split and seeds, Local always among them."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedvit import config, results
from fedvit.errors import UserError
from fedvit.experiment import LocalBaseline, Run
from fedvit.rounds import Round
from fedvit.running import start_or_resume
from fedvit.settings import Experiment

LOCAL = "local"


@dataclass(frozen=True)
class Row:
    """One line of the comparison: a label and its experiment for every seed."""

    label: str
    experiments: Mapping[int, Experiment]


def make_rows(
    rows: Sequence[str],
    seeds: Sequence[int],
    base: Path | None,
    sets: Mapping[str, Any],
    flags: Mapping[str, Any],
) -> list[Row]:
    """METHOD[+TUNE] or experiment files, Local first if it was not asked for."""
    wanted = list(dict.fromkeys(rows if LOCAL in rows else [LOCAL, *rows]))
    made = [Row(label_of(row), {seed: one(row, seed, base, sets, flags) for seed in seeds}) for row in wanted]
    check_sets_are_used(made, sets)
    first = made[0]
    for row in made[1:]:
        for seed, experiment in row.experiments.items():
            other = first.experiments[seed]
            same = {table: (getattr(other, table), getattr(experiment, table)) for table in ("data", "partition")}
            for table, (a, b) in same.items():
                if a != b:
                    different = config.changed({table: a.model_dump()}, {table: b.model_dump()})
                    raise UserError(
                        f"rows must share data and split, but {first.label} and {row.label} differ in "
                        f"{', '.join(f'{k} ({x} / {y})' for k, (x, y) in different.items())}"
                    )
            if experiment.train.batch != other.train.batch and experiment.partition.min_samples is None:
                raise UserError(
                    f"{first.label} and {row.label} have other batch sizes, which changes the split: "
                    "set partition.min_samples for both"
                )
    labels = [row.label for row in made]
    if len(set(labels)) < len(labels):
        raise UserError(f"two rows have the same name: {', '.join(labels)}; rename one of the files")
    return made


def label_of(row: str) -> str:
    return Path(row).stem if row.endswith(".toml") else row.removesuffix("+full")


def one(row: str, seed: int, base: Path | None, sets: Mapping[str, Any], flags: Mapping[str, Any]) -> Experiment:
    """The experiment of one row and seed. Options of other rows' methods are left out here."""
    if row.endswith(".toml"):
        tables = config.read(base) if base else {}
        file: Path | None = Path(row)
        names: dict[str, Any] = {}
    else:
        method, _, tune = row.partition("+")
        tables, file = (config.read(base) if base else {}), None
        names = {"method": method, "tune": tune or flags.get("tune") or "full"}
    given = {**flags, **names, "seed": seed}
    mine = {path: value for path, value in sets.items() if concerns(path, given, file)}
    return config.load(file, mine, given, base=tables)


def concerns(path: str, flags: Mapping[str, Any], file: Path | None) -> bool:
    """Whether a `--set` can apply to this row: a method's option goes to the rows whose method has it."""
    table, _, key = path.rpartition(".")
    named = config.read(file) if file else {}
    method = flags.get("method") or named.get("method", {}).get("name", "fedavg")
    tune = flags.get("tune") or named.get("tune", {}).get("name", "full")
    keys = config.keys_of_tables(str(method), str(tune))
    if table in ("method", "tune"):
        return key in keys[table]
    return bool(table) or any(key in names for names in keys.values())


def check_sets_are_used(rows: Iterable[Row], sets: Mapping[str, Any]) -> None:
    """A `--set` that no row takes is a mistake."""
    experiments = [next(iter(row.experiments.values())) for row in rows]
    for path in sets:
        key = path.rpartition(".")[2]
        tables = [config.keys_of_tables(str(e.method["name"]), str(e.tune["name"])) for e in experiments]
        if not any(key in names for table in tables for names in table.values()):
            raise UserError(f"--set {path}: no row has this key")


def default_folder(rows: Sequence[Row]) -> Path:
    """One folder for all comparisons on the same settings, so that finished rows are found again."""
    experiment = next(iter(rows[0].experiments.values()))
    tables = config.to_tables(experiment)
    for table in ("method", "tune"):
        tables.pop(table)
    tables["run"].pop("seed")
    digest = hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest()[:8]
    return Path("runs") / f"compare-{Path(experiment.data.name).stem}-{digest}"


def compare(
    rows: Sequence[Row], folder: Path, on_start: Callable[[Row, int, int], None] = lambda *_: None
) -> Iterator[Round]:
    """Run what is not finished, seed by seed, and write compare.json at the end."""
    for seed in rows[0].experiments:
        local_run = Run(folder / LOCAL / f"seed{seed}")
        for row in sorted(rows, key=lambda row: row.label != LOCAL):
            run = Run(folder / row.label / f"seed{seed}")
            local = None if row.label == LOCAL else LocalBaseline.of(local_run)
            steps = start_or_resume(row.experiments[seed], run.folder, resume=True, local=local)
            on_start(row, seed, len(run.rounds))
            yield from steps
    results.write_json(folder / "compare.json", [entry(row, folder) for row in rows])


def entry(row: Row, folder: Path) -> dict[str, Any]:
    """One row of compare.json: over clients, then over seeds."""
    seeds = list(row.experiments)
    summaries = [Run(folder / row.label / f"seed{seed}").summary for seed in seeds]
    views = [summary["views"]["personal"] for summary in summaries]
    gains = [summary["gain_over_local"] for summary in summaries]
    first = summaries[0]
    return {
        "label": row.label,
        "method": first["method"],
        "tune": first["tune"],
        "lr": first["lr"],
        "seeds": seeds,
        "view": "personal",
        "mean": mean(view["mean"] for view in views),
        "std": mean(view["std"] for view in views),
        "seed_std": float(np.std([view["mean"] for view in views])) if len(seeds) > 1 else None,
        "gain_mean": mean(gain["mean"] for gain in gains),
        "hurt": mean(gain["hurt"] for gain in gains),
        "nbytes_down": first["nbytes"]["down"],
        "nbytes_up": first["nbytes"]["up"],
        "seconds": mean(summary["seconds"] for summary in summaries),
    }


def mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))
