"""A study's cells as experiments: which grid the study uses, and the row of runs that fills each cell.

Cells with the same settings share a row.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fedvit.config.hashing import settings_hash
from fedvit.config.resolve import changed_settings
from fedvit.core.errors import UserError
from fedvit.studies.cases import Case
from fedvit.studies.definitions.study import Study
from fedvit.studies.rows import Row, concerns, resolve_seeds
from fedvit.studies.small import has_data

Which = Literal["digits", "pretrained", "paper"]


@dataclass(frozen=True)
class Cell:
    """One cell of the table: what it asks for, and the row of runs that fills it."""

    case: Case
    row: Row

    @property
    def name(self) -> str:
        return f"{self.case.row}, {self.case.column}" if self.case.column else self.case.row


def choose_grid(study: Study, *, paper: bool, data: str | None, folder: Path | None) -> tuple[Which, Sequence[Case]]:
    """Choose the published grid, or the small one: on pre-trained weights if they are there, otherwise on digits."""
    if paper:
        return "paper", study.paper
    if study.pretrained is not None and data != "digits" and has_data(folder, study.pretrained):
        return "pretrained", study.pretrained
    return "digits", study.digits


def default_seeds(study: Study, which: Which) -> list[int]:
    """Return the published seeds; on digits, where runs are short, there are often three."""
    if which == "paper":
        return list(study.paper_seeds) or [int(study.paper[0].settings["run"]["seed"])]
    return list(study.seeds) if which == "digits" else [0]


def make_cells(
    cases: Sequence[Case], seeds: Sequence[int], sets: Mapping[str, Any], flags: Mapping[str, Any]
) -> list[Cell]:
    """Resolve every case for every seed; flags apply to all cells, and a `--set` to those that have its key."""
    cells: list[Cell] = []
    known: dict[str, Row] = {}
    used: set[str] = set()
    for case in cases:
        plain, experiments = resolve_seeds(case.settings, seeds, sets, flags)
        used |= {path for path in sets if concerns(path, plain)}
        row = Row("/".join(slug(part) for part in (case.column, case.row) if part), experiments)
        twin = known.setdefault(row.first.model_dump_json(), row)
        cells.append(Cell(case, twin))
    unused = [path for path in sets if path not in used]
    if unused:
        raise UserError(f"--set {unused[0]}: no row has this key")
    _refuse_equal_rows(cells)
    return cells


def slug(text: str) -> str:
    """Turn a title into the name of a folder."""
    return re.sub(r"[^A-Za-z0-9.=_+-]+", "-", text.replace("%", "pc")).strip("-")


def _refuse_equal_rows(cells: Sequence[Cell]) -> None:
    """Refuse a flag that sets what the study varies, since it would make rows the same."""
    seen: dict[tuple[str, str], Cell] = {}
    for cell in cells:
        twin = seen.setdefault((cell.case.column, cell.row.label), cell)
        if twin is not cell:
            varied = changed_settings(twin.case.settings, cell.case.settings)
            raise UserError(
                f"with these flags {twin.name!r} and {cell.name!r} are the same run: this study varies "
                f"{', '.join(varied)}; leave out the flag that sets it"
            )


def folder_name(name: str, cells: Sequence[Cell]) -> str:
    """Name one folder for a study with these settings, whatever its seeds."""
    digest = settings_hash(*(cell.row.first for cell in cells), without=("run.seed",))[:8]
    return f"{name}-{digest}"


def shared_cells(cells: Sequence[Cell]) -> list[Cell]:
    """Place every row by the hash of its settings, where all studies of a paper find it."""

    def place(row: Row) -> str:
        return f"runs/{settings_hash(row.first, without=('run.seed',))[:12]}/{row.first.label}"

    rows = {row.label: replace(row, place=place(row)) for row in unique_rows(cells)}
    return [replace(cell, row=rows[cell.row.label]) for cell in cells]


def unique_rows(cells: Sequence[Cell]) -> list[Row]:
    """List the rows of these cells, each of them once."""
    return list({cell.row.label: cell.row for cell in cells}.values())


def local_of(rows: Sequence[Row], row: Row, seed: int) -> Row | None:
    """Find the row in which the same clients train the same model alone; such a row has none itself."""

    def place(other: Row) -> tuple[Any, ...]:
        e = other.experiments[seed]
        return e.data, e.partition, e.model, e.train.batch, e.train.rounds, e.train.cohort

    if row.is_local:
        return None
    return next((other for other in rows if other.is_local and place(other) == place(row)), None)
