"""Comparisons of several rows on the same data, partition and seeds, which always include Local."""

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedvit.config.hashing import settings_hash
from fedvit.config.load import read_tables
from fedvit.config.resolve import changed_settings, to_tables, versions
from fedvit.config.tables import Tables, stack_tables
from fedvit.core.errors import DivergedError, UserError
from fedvit.core.files import write_json
from fedvit.engine.loop import Round
from fedvit.report.load import rows_in
from fedvit.report.paired import against_local
from fedvit.report.sites import write_sites
from fedvit.report.statistics import LOCAL, Record, by_unit, count_hurt
from fedvit.report.statistics import Row as ReportRow
from fedvit.runs.folder import LocalBaseline, Run
from fedvit.studies.rows import OnStart, Row, diverged_runs, mean_of, refuse_unused, resolve_seeds, run_of, run_rows


def make_rows(
    rows: Sequence[str],
    seeds: Sequence[int],
    base: Path | None,
    sets: Mapping[str, Any],
    flags: Mapping[str, Any],
) -> list[Row]:
    """Make rows from METHOD[+TUNE] or experiment files, on top of the base file; Local is added if it is missing."""
    under = read_tables(base) if base else {}
    made = [make_row(row, seeds, under, sets, flags) for row in dict.fromkeys(rows)]
    if not any(row.is_local for row in made):
        made = [make_row(LOCAL, seeds, under, sets, flags), *made]
    refuse_unused(sets, made)
    for row in made[1:]:
        _check_same_data(made[0], row)
    labels = [row.label for row in made]
    if len(set(labels)) < len(labels):
        raise UserError(f"two rows have the same name: {', '.join(labels)}; leave one out, or rename its file")
    return made


def make_row(text: str, seeds: Sequence[int], under: Tables, sets: Mapping[str, Any], flags: Mapping[str, Any]) -> Row:
    """Make one row; a `--set` for a method or tune applies to the rows that have its key."""
    named = dict(flags)
    is_file = text.endswith(".toml")
    if is_file:
        under = stack_tables([under, read_tables(Path(text))])
    else:
        method, _, tune = text.partition("+")
        named.update(method=method, tune=tune or flags.get("tune"))
    plain, experiments = resolve_seeds(under, seeds, sets, named)
    return Row(Path(text).stem if is_file else plain.label, experiments)


def _check_same_data(first: Row, row: Row) -> None:
    """Refuse rows that do not use the same images of the same clients."""
    for seed, experiment in row.experiments.items():
        other = first.experiments[seed]
        old, new = (
            {table: getattr(e, table).model_dump(mode="json") for table in ("data", "partition")}
            for e in (other, experiment)
        )
        if experiment.partition.min_samples is None:  # its default depends on the batch
            old["train"], new["train"] = {"batch": other.train.batch}, {"batch": experiment.train.batch}
        different = changed_settings(old, new)
        if different:
            words = ", ".join(f"{key} ({a} / {b})" for key, (a, b) in different.items())
            raise UserError(f"rows must share data and partition, but {first.label} and {row.label} differ in {words}")


def comparison_folder(rows: Sequence[Row], sets: Mapping[str, Any]) -> Path:
    """Name one folder for all comparisons with the same settings, so that finished rows are found again."""
    experiment = rows[0].first
    digest = settings_hash(experiment, without=("run.seed", "method"), more=sets)[:8]
    return Path("runs") / f"compare-{Path(experiment.data.name).stem}-{digest}"


def compare(
    rows: Sequence[Row],
    folder: Path,
    on_start: OnStart = lambda *_: None,
    workers: int | None = 1,
) -> Iterator[Round]:
    """Run what is not finished, and write compare.json and sites.csv at the end, without rows that diverged."""
    alone = local_row(rows)
    yield from run_rows(rows, folder, lambda row, _: None if row is alone else alone, on_start, workers, tolerant=True)
    done = finished_rows(rows, folder)
    shown = compared_rows(done, folder)
    records = {record.folder: record for row in shown for record in row.records}
    write_json(folder / "compare.json", [_entry(row, folder, alone) | _clinical(row, folder, records) for row in done])
    write_sites(folder / "sites.csv", shown)


def finished_rows(rows: Sequence[Row], folder: Path) -> list[Row]:
    """Return the rows that are finished with every seed."""
    diverged = diverged_runs(rows, folder)
    return [row for row in rows if row.label not in diverged]


def refuse_diverged(rows: Sequence[Row], folder: Path) -> None:
    """Raise an error that names the rows that diverged; all others are finished and written by now."""
    diverged = diverged_runs(rows, folder)
    if diverged:
        names = [f"{label} (seed {', '.join(map(str, seeds))})" for label, seeds in diverged.items()]
        raise DivergedError(
            f"training diverged in {'; '.join(names)}, so these rows are not in the table; the others are finished. "
            "Give a smaller --lr, or --lr auto, which leaves such rates out"
        )


def compared_rows(rows: Sequence[Row], folder: Path) -> list[ReportRow]:
    """Return the finished rows as the report sees them, without other rows that the folder may hold."""
    return rows_in([run_of(folder, row, seed).folder for row in rows for seed in row.experiments])


def local_row(rows: Sequence[Row]) -> Row:
    """Find the row that gains are measured against."""
    return next(row for row in rows if row.is_local)


def _gains(run: Run, alone: Run) -> dict[str, float]:
    """Return every client's gain over Local; a run that was started on its own does not know it."""
    local = LocalBaseline.of(alone).accuracy
    return {row["client"]: row["personal_accuracy"] - local[row["client"]] for row in run.clients}


def _entry(row: Row, folder: Path, alone: Row) -> dict[str, Any]:
    """Make one row of compare.json, averaged over clients and then over seeds; gains are averaged over units."""
    seeds = list(row.experiments)
    summaries = [run_of(folder, row, seed).summary for seed in seeds]
    first, views = summaries[0], [summary["views"]["personal"] for summary in summaries]
    gains = by_unit(
        {seed: _gains(run_of(folder, row, seed), run_of(folder, alone, seed)) for seed in seeds}, first["partition"]
    )
    areas = [view["auroc"] for view in views if "auroc" in view]
    return {
        "label": row.label,
        "method": first["method"],
        "tune": first["tune"],
        "lr": first["lr"],
        "seeds": seeds,
        "view": "personal",
        "mean": mean_of(view["mean"] for view in views),
        "std": mean_of(view["std"] for view in views),
        "seed_std": float(np.std([view["mean"] for view in views])) if len(seeds) > 1 else None,
        "gain_mean": mean_of(gains.values()),
        "hurt": count_hurt(gains),
        "nbytes_down": first["nbytes"]["down"],
        "nbytes_up": first["nbytes"]["up"],
        "seconds": mean_of(summary["seconds"] for summary in summaries),
        **({"auroc": mean_of(areas)} if areas else {}),
        **({"search": row.search} if row.search is not None else {}),
    }


def _clinical(row: Row, folder: Path, records: Mapping[Path, Record]) -> dict[str, Any]:
    """Return a row's clinical scores by seed, and its tests against Local; nothing if they were not asked for."""
    found = []
    for seed in row.experiments:
        run = run_of(folder, row, seed)
        scores = run.summary.get("clinical")
        if scores is not None:
            tests, why = against_local(records[run.folder], list(records.values()))
            told = {"against_local": [test.to_json() for test in tests] or None, "untested": why or None}
            found.append({"seed": seed, **scores, **told})
    return {"clinical": found} if found else {}


def save_comparison(path: Path, rows: Sequence[Row], entries: Sequence[Mapping[str, Any]]) -> None:
    """Write the table, with everything needed to repeat it, as one JSON file for results/."""
    tables = to_tables(local_row(rows).first)
    common = {table: dict(tables[table]) for table in tables if table not in ("method", "tune")}
    own = []
    for row in rows:
        differs = to_tables(row.first)
        mine = {f"{table}.{key}": value for table in ("method", "tune") for key, value in differs[table].items()}
        for table, keys in common.items():
            mine |= {f"{table}.{key}": value for key, value in differs[table].items() if keys.get(key) != value}
        own.append({key: value for key, value in mine.items() if key != "run.seed"})
    content = {
        "command": shlex.join(["fedvit", *sys.argv[1:]]),
        "settings": common,  # Local's; a row lists where it differs
        "versions": versions(),
        "rows": [{**entry, "settings": settings} for entry, settings in zip(entries, own, strict=True)],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, content)
