"""Manifests: tables in CSV format that say, for every image, its label and perhaps its patient, site and split."""

import csv
import glob
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedvit.core.errors import UserError
from fedvit.core.settings import DataSettings
from fedvit.data.folders import Note, Scan
from fedvit.data.patients import contradictions, find_patients

NEEDED, OPTIONAL = ("path", "label"), ("patient", "site", "split")
PARTS = ("train", "val", "test")


@dataclass(frozen=True)
class Row:
    """One image of a manifest; what its table does not say is empty."""

    file: Path
    name: str  # the file's path below the folder of the manifests
    label: str
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


def read_manifest(path: Path, site: str | None = None, rule: str | None = None, *, skip_bad: bool = False) -> Manifest:
    """Read one manifest or several; with a `site`, only its rows, and with data.patient's `rule`, patients by path."""
    files = manifest_files(path)
    rows: list[Row] = []
    notes: list[Note] = []
    columns: dict[Path, frozenset[str]] = {}
    for file in files:
        own = "" if path.is_file() else file.parent.name  # the site, unless a column says it
        columns[file] = _read_one(file, folder_of(path), own, rows, notes)
    if len(set(columns.values())) > 1:
        told = "; ".join(f"{file} has {', '.join(sorted(c)) or 'none of them'}" for file, c in columns.items())
        raise UserError(f"the manifests must agree on the columns {', '.join(OPTIONAL)}: {told}")
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
    return Manifest(tuple(rows), has, (*notes, *duplicates, *_contradictions(rows, has)), tuple(missing))


def _read_one(file: Path, root: Path, own: str, rows: list[Row], notes: list[Note]) -> frozenset[str]:
    """Append the rows of one file, and what is wrong with it; return its optional columns."""
    try:
        with file.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.reader(stream, skipinitialspace=True)
            header = [name.strip() for name in next(reader, [])]
            _check_header(file, header)
            has = frozenset(OPTIONAL).intersection(header)
            for cells in reader:
                if not any(cell.strip() for cell in cells):
                    continue
                place = f"line {reader.line_num} of {file.name if not own else f'{own}/{file.name}'}"
                row = dict(zip(header, map(str.strip, cells), strict=False))
                empty = [name for name in (*NEEDED, *sorted(has)) if not row.get(name)]
                part = row.get("split", "")
                if empty:
                    notes.append(Note("empty cell", (place,), f"{place} has no {' and no '.join(empty)}"))
                elif part and part not in PARTS:
                    text = f"{place} has the split {part!r}: expected {', '.join(PARTS[:-1])} or {PARTS[-1]}"
                    notes.append(Note("split", (place,), text))
                else:
                    image = file.parent / row["path"]
                    name = os.path.relpath(image, root) if image.is_relative_to(root) else row["path"]
                    found = (row["label"], row.get("patient", ""), row.get("site", own), part)
                    rows.append(Row(image, name, *found, place))
    except UnicodeDecodeError as problem:
        raise UserError(f"{file} is not text in UTF-8: save it as CSV in UTF-8") from problem
    except (OSError, csv.Error) as problem:
        raise UserError(f"{file} cannot be read as CSV: {problem}") from problem
    return has


def _check_header(file: Path, header: Sequence[str]) -> None:
    lacking = [name for name in NEEDED if name not in header]
    if lacking:
        raise UserError(
            f"{file} has no column {' and no column '.join(lacking)}; its first line names "
            f"{', '.join(header) or 'no columns'}: expected path,label and perhaps {', '.join(OPTIONAL)}, separated by "
            "commas"
        )
    for name, times in Counter(header).items():
        if times > 1 and name in (*NEEDED, *OPTIONAL):
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
    found = read_manifest(path, settings.site, settings.patient, skip_bad=settings.skip_bad)
    names = class_names([row.label for row in found.rows], settings.class_list, path)
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
    numbers = {name: number for number, name in enumerate(names)}
    where = {name: number for number, name in enumerate(sites)}
    return Scan(
        tuple(row.file for row in rows),
        np.array([numbers[row.label] for row in rows], dtype=np.int64),
        names,
        np.array([row.part == "test" for row in rows]) if split else None,
        np.array([where[row.site] for row in rows], dtype=np.int64) if sites else None,
        sites,
        np.array([row.part == "val" for row in rows]) if split else None,
        tuple(row.patient for row in rows) if "patient" in found.columns else None,
        missing=tuple(note.text for note in found.missing),
    )


def class_names(labels: Sequence[str], listed: Sequence[str], path: Path) -> tuple[str, ...]:
    """Return the classes as data.class_names lists them, or all labels in order, numbers by their size."""
    found = set(labels)
    if listed:
        strange = sorted(found - set(listed))
        if strange:
            raise UserError(f"{path} has labels that data.class_names does not list: {', '.join(strange)}")
        return tuple(listed)
    return tuple(sorted(found, key=int) if all(label.isdecimal() for label in found) else sorted(found))
