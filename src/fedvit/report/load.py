"""Load runs from their folders, and arrange them in rows that can be compared."""

import csv
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedvit.core.errors import UserError
from fedvit.core.files import read_json
from fedvit.report.statistics import DEEPEST, LOCAL, Record, Row, client_differences, text_of
from fedvit.runs.clinical import read_clinical
from fedvit.runs.folder import Run


def collect(folders: Sequence[Path]) -> list[list[Row]]:
    """Return the rows of all runs in these folders, grouped by model, dataset and partition."""
    found = {path.resolve(): path for folder in folders for path in run_folders(folder)}
    models: dict[str, list[Record]] = {}
    for record in (read_record(path) for path in found.values()):
        models.setdefault(_model_of(record), []).append(record)
    groups: dict[str, list[Record]] = {}
    for model, records in models.items():  # a gain over Local is one of the same model
        for record in with_gains(records):
            key: list[Any] = [model, record.tables["data"], record.tables["partition"]]
            if "min_samples" not in record.tables["partition"]:  # its default depends on the batch size
                key.append(record.tables["train"].get("batch"))
            groups.setdefault(text_of(*key), []).append(record)
    return [rows_of(group) for group in groups.values()]


def _model_of(record: Record) -> str:
    """Return what two runs must share to be compared: the model, its sizes and its initial weights."""
    table = record.tables["model"]
    keys = ("name", "image_size", "patch_size", "pretrained", "fingerprint")
    return text_of({key: table.get(key) for key in keys}, Path(str(table.get("weights", ""))).name)


def rows_in(folders: Sequence[Path]) -> list[Row]:
    """Return the rows of exactly these runs, which share dataset and partition."""
    return rows_of(with_gains([read_record(folder) for folder in folders]))


def run_folders(folder: Path) -> list[Path]:
    """Return the runs in a folder: the folder itself, those below it, or those of its study.json.

    Runs below the folder come in the order of compare.json if it exists.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: expected a run's or a comparison's folder, such as runs/NAME")
    if (folder / "run.toml").is_file():
        alone = folder / LOCAL  # of `fedvit run --also local`
        return [folder, alone] if (alone / "run.toml").is_file() else [folder]
    below = sorted(path.parent for depth in range(1, DEEPEST + 1) for path in folder.glob("*/" * depth + "run.toml"))
    below = [path for path in below if path.relative_to(folder).parts[0] != "search"]  # the trials of `--lr auto`
    below = below or _runs_of_study(folder)
    if not below:
        raise UserError(
            f"{folder} is not a run: expected a folder with run.toml in it, as `fedvit run --out` writes it, or one "
            "that holds such folders, as `fedvit compare --out` writes it"
        )
    order = comparison_order(folder)
    return sorted(below, key=lambda path: order.get(path.relative_to(folder).parts[0], len(order)))


def _runs_of_study(folder: Path) -> list[Path]:
    """Return the runs that study.json names: they lie beside this folder if other studies share them."""
    content = read_json(folder / "study.json", {})
    names = dict.fromkeys(row["runs"] for row in content.get("rows", []))
    places = (folder / name / f"seed{seed}" for name in names for seed in content.get("seeds", []))
    return [place for place in places if (place / "run.toml").is_file()]


def comparison_order(folder: Path) -> dict[str, int]:
    try:
        entries = json.loads((folder / "compare.json").read_text())
        return {entry["label"]: number for number, entry in enumerate(entries)}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def studied_view(folders: Sequence[Path]) -> str:
    """Return whose accuracy the studies in these folders are about: the clients' own unless all say the server's."""
    files = [file for folder in folders for level in ("study.json", "*/study.json") for file in folder.glob(level)]
    views = {row["figures"].get("view") for file in files for row in read_json(file, {}).get("rows", [])}
    return "server" if views == {"server"} else "personal"


def read_record(folder: Path) -> Record:
    """Read everything that a report shows about a run. Anything that an unfinished or older run lacks is empty."""
    try:
        run = Run(folder)
        tables = run.settings
        versions = tables.pop("versions", {})
        seed_folder = re.fullmatch(r"seed\d+", folder.resolve().name)
        method, tune = str(tables["method"]["name"]), str(tables["tune"]["name"])
        label = folder.resolve().parent.name if seed_folder else method if tune == "full" else f"{method}+{tune}"
        record = Record(
            folder=folder,
            label=label,
            tables=tables,
            versions=versions,
            summary=run.summary if run.finished else None,
            rounds=run.rounds,
            timings=run.timings,
            clients=run.clients,
            split=run.split,
            confusion=run.confusion,
            commands=run.commands,
            clinical=read_clinical(folder),
            edge=_edge_of_rate(folder, label),
        )
        gains = {row["client"]: row["gain"] for row in record.clients if row["gain"] is not None}
        _ = record.seed, record.planned, record.curve, record.phases, record.confusion.keys()  # fails if damaged
        return replace(record, gains=gains)
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OSError, csv.Error) as problem:
        kind = f"{type(problem).__name__}: {problem}"
        raise UserError(f"the files of the run in {folder} cannot be read ({kind}): is it damaged?") from problem


def _edge_of_rate(folder: Path, label: str) -> str:
    """Return where a searched rate lies among those tried; the search is next to the run, or next to its row."""
    for place in (folder, folder.resolve().parent.parent):
        for found in read_json(place / "search" / "search.json", []):
            if found["label"] == label:
                return str(found["at_edge"].get("train.lr", ""))
    return ""


def with_gains(records: Sequence[Record]) -> list[Record]:
    """Add gains over Local to runs that have none, if Local's run on the same test images is among the records."""
    alone = {record.test_images: record for record in records if record.method == LOCAL and record.clients}
    result = []
    for record in records:
        local = alone.get(record.test_images)
        if not record.gains and local:
            record = replace(record, gains=client_differences(record, local))
        result.append(record)
    return result


def rows_of(records: Sequence[Record]) -> list[Row]:
    """Group runs that differ only in the seed into one row; rows with the same name get their differences added to it.

    If a seed occurs more than once, one run is kept: the first finished one, or else the first.
    """
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
            words = re.sub(r"\b[0-9a-f]{64}\b", lambda found: found[0][:8], words)  # a fingerprint is no name
            row = replace(row, label=f"{row.label} ({words})")
        result.append(row)
    return result


def flat(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return every setting as text, under the key `table.key`."""
    return {f"{table}.{key}": str(value) for table, content in tables.items() for key, value in content.items()}


def differences(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return every setting, with its value in each row."""
    settings = [flat(row.first.tables) for row in rows]
    keys = dict.fromkeys(key for own in settings for key in own)
    return {key: [own.get(key, "-") for own in settings] for key in keys}
