"""Manifests: tables in CSV format that say, for every image, its label or labels, its patient, site and split."""

import csv
import glob
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedvit.core.errors import UserError
from fedvit.core.settings import DataSettings
from fedvit.data.folders import Note, Scan
from fedvit.data.patients import contradictions, find_patients

OPTIONAL = ("patient", "site", "split")
PARTS = ("train", "val", "test")
LABEL, LABELS, LABEL_START = "label", "labels", "label_"  # one label; several in one cell; one column for each
BETWEEN = "|"  # the names in a cell of the column labels
ANSWERS = {"0": False, "1": True, "0.0": False, "1.0": True}  # in a column for one label
Task = Literal["single", "multi"]


@dataclass(frozen=True)
class Row:
    """One image of a manifest; what its table does not say is empty."""

    file: Path
    name: str  # the file's path below the folder of the manifests
    labels: tuple[str, ...]  # exactly one, unless the manifest gives images several labels
    patient: str
    site: str
    part: str
    place: str  # what messages call it: a line of a file


@dataclass(frozen=True)
class Manifest:
    """The rows that can be used, the optional columns that there are, and what is wrong with other rows."""

    rows: tuple[Row, ...]
    columns: frozenset[str]
    notes: tuple[Note, ...]
    missing: tuple[Note, ...]  # files that do not exist
    several_labels: bool
    label_names: tuple[str, ...]  # of the columns that answer one label each


def is_manifest(path: Path) -> bool:
    """Return whether a path from `data.name` means a manifest, or several, and not a folder."""
    return path.suffix.lower() == ".csv"


def manifest_files(path: Path) -> tuple[Path, ...]:
    """Return the manifests that a path means: that file, or all that match if it has a `*`."""
    if path.is_file():
        return (path,)
    return tuple(Path(name) for name in sorted(glob.glob(str(path))) if Path(name).is_file())


def folder_of(path: Path) -> Path:
    """Return the folder of a manifest, or of several: the part of a pattern before its first `*`."""
    if path.is_file():
        return path.parent
    fixed = path.parts[:-1]
    first = next((i for i, part in enumerate(fixed) if glob.has_magic(part)), len(fixed))
    return Path(*fixed[:first])


def site_names(path: Path) -> tuple[str, ...]:
    """Return the sites that a manifest names, in order."""
    return tuple(sorted({row.site for row in read_manifest(path).rows if row.site}))


def task_of(path: Path) -> Task | None:
    """Return whether the images of a manifest have one label each or several, by its first line; None if unclear."""
    for file in manifest_files(path)[:1]:
        try:
            with file.open(newline="", encoding="utf-8-sig") as stream:
                header = [name.strip() for name in next(csv.reader(stream, skipinitialspace=True), [])]
        except (OSError, csv.Error, UnicodeDecodeError):
            return None
        if LABEL in header:
            return "single"
        return "multi" if _columns_of_labels(header) else None
    return None


def _columns_of_labels(header: Sequence[str]) -> list[str]:
    """Return the columns that give an image several labels."""
    return [name for name in header if name == LABELS or (name.startswith(LABEL_START) and name != LABEL_START)]


def read_manifest(
    path: Path,
    site: str | None = None,
    rule: str | None = None,
    *,
    skip_bad: bool = False,
    task: Task | None = None,
) -> Manifest:
    """Read one manifest or several; with a `site`, only its rows, and with data.patient's `rule`, patients by path.

    Without a `task`, the column label gives every image one label; a manifest without it gives several.
    """
    task = task or task_of(path) or "single"
    files = manifest_files(path)
    rows: list[Row] = []
    notes: list[Note] = []
    columns: dict[Path, frozenset[str]] = {}
    for file in files:
        own = "" if path.is_file() else file.parent.name  # the site, unless a column says it
        columns[file] = _read_one(file, folder_of(path), own, task, rows, notes)
    if len(set(columns.values())) > 1:
        told = "; ".join(f"{file} has {', '.join(sorted(c)) or 'none of them'}" for file, c in columns.items())
        which = (*OPTIONAL, *(("those of labels",) if task == "multi" else ()))
        raise UserError(f"the manifests must agree on the columns {', '.join(which)}: {told}")
    has = columns[files[0]] if files else frozenset()
    if site is not None and any(row.site for row in rows):
        found = sorted({row.site for row in rows})
        rows = [row for row in rows if row.site == site]
        if not rows:
            raise UserError(f"{path} has no row of the site {site}; its sites are {', '.join(found)}")
    missing = [Note("missing", (row.name,), f"{row.name} ({row.place}) does not exist") for row in _absent(rows)]
    gone = {note.names[0] for note in missing}
    duplicates, rows = _duplicates(rows), [row for row in rows if row.name not in gone]
    if rule is not None:
        if "patient" in has:
            raise UserError(
                f"{path} has a column patient, so data.patient={rule!r} is not needed: leave one of them out"
            )
        ids = find_patients([row.file for row in rows], [row.name for row in rows], rule, skip_bad=skip_bad)
        rows = [Row(**{**vars(row), "patient": patient}) for row, patient in zip(rows, ids, strict=True)]
        has |= {"patient"}
    wrong = (*notes, *duplicates, *_contradictions(rows, has))
    names = tuple(name.removeprefix(LABEL_START) for name in _columns_of_labels(sorted(has)) if name != LABELS)
    return Manifest(tuple(rows), has, wrong, tuple(missing), task == "multi", names)


def _read_one(file: Path, root: Path, own: str, task: Task, rows: list[Row], notes: list[Note]) -> frozenset[str]:
    """Append the rows of one file, and what is wrong with it; return its optional columns, and those of labels."""
    try:
        with file.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.reader(stream, skipinitialspace=True)
            header = [name.strip() for name in next(reader, [])]
            _check_header(file, header, task)
            several = _columns_of_labels(header) if task == "multi" else []
            has = frozenset(OPTIONAL).intersection(header) | set(several)
            filled = ("path", *(several or [LABEL]), *sorted(has.intersection(OPTIONAL)))
            for cells in reader:
                if not any(cell.strip() for cell in cells):
                    continue
                place = f"line {reader.line_num} of {file.name if not own else f'{own}/{file.name}'}"
                row = dict(zip(header, map(str.strip, cells), strict=False))
                empty = [name for name in filled if not row.get(name) and name != LABELS]
                strange = [name for name in several if name != LABELS and row.get(name, "") not in ANSWERS]
                part = row.get("split", "")
                if empty:
                    notes.append(Note("empty cell", (place,), f"{place} has no {' and no '.join(empty)}"))
                elif part and part not in PARTS:
                    text = f"{place} has the split {part!r}: expected {', '.join(PARTS[:-1])} or {PARTS[-1]}"
                    notes.append(Note("split", (place,), text))
                elif strange:
                    text = f"{place} has {row[strange[0]]!r} in the column {strange[0]}: expected 0 or 1"
                    notes.append(Note("label", (place,), text))
                else:
                    image = file.parent / row["path"]
                    name = os.path.relpath(image, root) if image.is_relative_to(root) else row["path"]
                    labels = _labels_of(row, several) if several else (row[LABEL],)
                    found = (labels, row.get("patient", ""), row.get("site", own), part)
                    rows.append(Row(image, name, *found, place))
    except UnicodeDecodeError as problem:
        raise UserError(f"{file} is not text in UTF-8: save it as CSV in UTF-8") from problem
    except (OSError, csv.Error) as problem:
        raise UserError(f"{file} cannot be read as CSV: {problem}") from problem
    return has


def _labels_of(row: Mapping[str, str], columns: Sequence[str]) -> tuple[str, ...]:
    """Return the labels of an image: the names in its cell, or the columns that have a 1."""
    if columns == [LABELS]:
        names = (name.strip() for name in row.get(LABELS, "").split(BETWEEN))
        return tuple(dict.fromkeys(name for name in names if name))
    return tuple(name.removeprefix(LABEL_START) for name in columns if ANSWERS[row[name]])


def _check_header(file: Path, header: Sequence[str], task: Task) -> None:
    several = _columns_of_labels(header) if task == "multi" else []
    lacking = [name for name in ("path", *(() if several else (LABEL,))) if name not in header]
    if task == "multi" and not several:
        raise UserError(
            f"{file} has no columns for several labels per image, as data.task=multi needs them; its first line names "
            f"{', '.join(header) or 'no columns'}: expected a column {LABELS} with names joined by {BETWEEN}, or a "
            f"column {LABEL_START}NAME with 0 and 1 for every label"
        )
    if lacking:
        also = f"; for several labels per image, {LABELS} or {LABEL_START}NAME" if LABEL in lacking else ""
        raise UserError(
            f"{file} has no column {' and no column '.join(lacking)}; its first line names "
            f"{', '.join(header) or 'no columns'}: expected path,label and perhaps {', '.join(OPTIONAL)}, separated by "
            f"commas{also}"
        )
    if len(several) > 1 and LABELS in several:
        raise UserError(f"{file} has the column {LABELS} and columns {LABEL_START}NAME: keep one of the two forms")
    for name, times in Counter(header).items():
        if times > 1 and name in ("path", LABEL, *several, *OPTIONAL):
            raise UserError(f"{file} has {times} columns {name}: keep one of them")


def _absent(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if not os.path.exists(row.file)]


def _duplicates(rows: Sequence[Row]) -> list[Note]:
    first: dict[str, Row] = {}
    notes = []
    for row in rows:
        before = first.setdefault(os.path.normpath(row.file), row)
        if before is not row:
            text = f"{row.name} is listed twice, in {before.place} and {row.place}"
            notes.append(Note("listed twice", (before.place, row.place), text))
    return notes


def _contradictions(rows: Sequence[Row], has: frozenset[str]) -> list[Note]:
    notes = []
    parts = {row.part for row in rows}
    if "split" in has and rows:
        for part in ("train", "test"):
            if part not in parts:
                notes.append(Note("split", (), f"the column split has no row with {part}: add some, or leave it out"))
    if "patient" in has:
        patients, sites = [row.patient for row in rows], [row.site for row in rows]
        notes += contradictions(patients, sites, [row.part for row in rows], lambda n: rows[n].place)
    return notes


def scan_manifest(path: Path, settings: DataSettings) -> Scan:
    """Return what the manifest says about every image; anything wrong is an error."""
    found = read_manifest(path, settings.site, settings.patient, skip_bad=settings.skip_bad, task=settings.task)
    names = class_names(found, settings.class_list, path)
    wrong = [*found.notes, *(() if settings.skip_bad else found.missing)]
    if wrong:
        more = f"; and {len(wrong) - 1} more: `fedvit datasets {path}` lists all" if len(wrong) > 1 else ""
        skips = (
            ", and --set data.skip_bad=true leaves out files that do not exist" if wrong[0].kind == "missing" else ""
        )
        raise UserError(f"{wrong[0].text}{more}{skips}")
    rows = found.rows
    if not rows:
        raise UserError(f"{path} has no images: expected one line for each below the line of column names")
    sites = tuple(sorted({row.site for row in rows if row.site}))
    split = "split" in found.columns
    where = {name: number for number, name in enumerate(sites)}
    return Scan(
        tuple(row.file for row in rows),
        numbers_of(rows, names, several_labels=found.several_labels),
        names,
        np.array([row.part == "test" for row in rows]) if split else None,
        np.array([where[row.site] for row in rows], dtype=np.int64) if sites else None,
        sites,
        np.array([row.part == "val" for row in rows]) if split else None,
        tuple(row.patient for row in rows) if "patient" in found.columns else None,
        missing=tuple(note.text for note in found.missing),
    )


def numbers_of(rows: Sequence[Row], names: Sequence[str], *, several_labels: bool) -> NDArray[np.int64]:
    """Return the class number of every row, or 0 and 1 by row and label."""
    place = {name: number for number, name in enumerate(names)}
    if not several_labels:
        return np.array([place[row.labels[0]] for row in rows], dtype=np.int64)
    table = np.zeros((len(rows), len(names)), dtype=np.int64)
    for number, row in enumerate(rows):
        table[number, [place[name] for name in row.labels]] = 1
    return table


def class_names(manifest: Manifest, listed: Sequence[str], path: Path) -> tuple[str, ...]:
    """Return the classes as data.class_names lists them, or all labels in order, numbers by their size."""
    found = {name for row in manifest.rows for name in row.labels} | set(manifest.label_names)
    if listed:
        strange = sorted(found - set(listed))
        if strange:
            raise UserError(f"{path} has labels that data.class_names does not list: {', '.join(strange)}")
        lacking = [f"{LABEL_START}{name}" for name in listed if manifest.label_names and name not in found]
        if lacking:
            raise UserError(
                f"{path} has no column {' and no column '.join(lacking)}, which data.class_names lists: add it, or "
                "leave the label out everywhere"
            )
        return tuple(listed)
    if not found and manifest.rows:
        raise UserError(f"{path} gives no image a label: expected names joined by {BETWEEN} in the column {LABELS}")
    return tuple(sorted(found, key=int) if all(label.isdecimal() for label in found) else sorted(found))
