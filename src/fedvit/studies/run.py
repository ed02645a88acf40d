"""The command `fedvit study`: from its flags to a grid, and from finished runs to a table, a picture and study.json.

A study that is killed and started again ends with the same study.json as one that runs without interruption.
"""

import logging
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, RenderableType

from fedvit.config.load import parse_sets
from fedvit.config.resolve import to_tables, versions
from fedvit.core.errors import UserError
from fedvit.core.files import finite, write_json
from fedvit.core.settings import DataSettings
from fedvit.report.progress import Progress
from fedvit.studies import measure, tables
from fedvit.studies.cells import (
    Cell,
    Which,
    choose_grid,
    default_seeds,
    local_of,
    make_cells,
    slug,
    study_folder,
    unique_rows,
)
from fedvit.studies.definitions import STUDIES, plain_name
from fedvit.studies.definitions.study import Study
from fedvit.studies.drawing import draw_study
from fedvit.studies.rows import run_of, run_rows, starter

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """A study whose cells are resolved; nothing has run yet."""

    name: str
    study: Study
    which: Which
    cells: Sequence[Cell]

    @property
    def title(self) -> str:  # as study_title, before there is a study.json
        first = self.cells[0].row.first
        seeds = ", ".join(map(str, self.cells[0].row.experiments))
        where = f"{first.data.name}, {first.model.name}, rounds: {first.train.rounds}, seeds: {seeds}"
        return f"{self.name} ({self.study.source}): {first.model.name if self.study.kind == 'cost' else where}"


def prepare_study(
    name: str,
    *,
    paper: bool,
    seeds: str | None,
    target: str | None,
    flags: Mapping[str, Any],
    sets: Sequence[str] | None,
) -> Prepared:
    """Resolve the grid that these flags ask for."""
    name = plain_name(name)
    study = STUDIES[name]
    folder = DataSettings(dir=flags.get("data_dir")).folder
    which, cases = choose_grid(study, paper=paper, data=flags.get("data"), folder=folder)
    if study.pretrained is not None and which == "digits":
        log.warning(
            "%s asks about pre-trained weights, but runs on digits from scratch: that shows the form of the study "
            "but gives no answer; set FEDVIT_DATA to a folder with office_caltech10 and the weights of ViT-Tiny",
            name,
        )
    if target is not None:
        if study.kind != "target":
            known = dict.fromkeys(plain_name(n) for n, s in STUDIES.items() if s.kind == "target")
            raise UserError(f"--target is only for {', '.join(known)}")
        cases = [replace(case, targets=tuple(_numbers(target, "--target", float))) for case in cases]
    chosen = _numbers(seeds, "--seeds", int) if seeds is not None else default_seeds(study, which)
    return Prepared(name, study, which, make_cells(cases, chosen, parse_sets(sets or []), flags))


def _numbers(text: str, flag: str, kind: Callable[[str], Any]) -> list[Any]:
    """Read numbers that are separated by commas, each of them once."""
    try:
        return list(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError as problem:
        expected = "whole numbers" if kind is int else "numbers"
        raise UserError(f"{flag} expects {expected} separated by commas, found {text!r}") from problem


def preview(plan: Prepared) -> RenderableType:
    """Make the table that --dry-run shows."""
    found = list(measure.estimates(plan.cells))
    runs = len(unique_rows(plan.cells)) * len(plan.cells[0].row.experiments)
    return tables.dry_table(plan.cells, found, runs, plan.title)


def carry_out(
    plan: Prepared, folder: Path | None, workers: int | None, console: Console, *, quiet: bool
) -> Iterator[RenderableType]:
    """Run what is missing, then measure, write and draw; yield what to show."""
    folder = folder or study_folder(plan.name, plan.cells)
    if plan.study.kind == "cost":
        found = [measure.resources(cell) for cell in plan.cells]
    else:
        _run_all(plan, folder, workers, console, quiet=quiet)
        found = [measure.figures(cell, folder, plan.study.view) for cell in plan.cells]
    pictures = _see(plan, folder) if plan.study.kind == "features" else {}
    if pictures:
        seen = (pictures[cell.name].silhouette for cell in plan.cells)
        found = [{**figure, "silhouette": silhouette} for figure, silhouette in zip(found, seen, strict=True)]
    content = _save(plan, found, folder)
    draw_study(content, plan.study, folder, folder / "study.png", pictures)
    yield from tables.study_tables(content, plan.study, plan.title)
    for column, pick in content.get("chosen", {}).items():
        edge = f"; it is the {pick['at_edge']} value tried" if pick["at_edge"] else ""
        picked = f"{pick['row']}, chosen on val ({pick['val']:.1f} %)"
        yield f"{column}: {picked}, has {pick['accuracy']:.1f} % on test{edge}"
    yield f"results: {folder / 'study.json'}\npicture: {folder / 'study.png'}"


def _run_all(plan: Prepared, folder: Path, workers: int | None, console: Console, *, quiet: bool) -> None:
    """Run what is not finished, and show the progress."""
    rows = unique_rows(plan.cells)
    total = sum(experiment.train.rounds for row in rows for experiment in row.experiments.values())
    with Progress(console, total, quiet=quiet) as progress:
        steps = run_rows(
            rows,
            folder,
            lambda row, seed: local_of(rows, row, seed),
            starter(progress, folder),
            workers,
            tolerant=plan.study.kind == "choose",
        )
        for done in steps:
            progress.step(done)


def _see(plan: Prepared, folder: Path) -> dict[str, Any]:
    """Compute the features of every row's first seed, and write them to features.npz."""
    from fedvit.studies.features import picture

    pictures = {cell.name: picture(run_of(folder, cell.row, next(iter(cell.row.experiments)))) for cell in plan.cells}
    arrays = {
        f"{slug(name)}.{part}": getattr(seen, part) for name, seen in pictures.items() for part in ("points", "labels")
    }
    np.savez(folder / "features.npz", **arrays)
    return pictures


def _save(plan: Prepared, found: Sequence[Mapping[str, Any]], folder: Path) -> dict[str, Any]:
    """Write study.json with rows, settings, figures and versions; the same study gives the same bytes."""
    cells, study = plan.cells, plan.study
    settings = [to_tables(cell.row.first) for cell in cells]
    common = {
        f"{table}.{key}": value
        for table, content in settings[0].items()
        for key, value in content.items()
        if key != "seed" and all(t.get(table, {}).get(key) == value for t in settings)
    }
    rows = []
    for cell, own, figure in zip(cells, settings, found, strict=True):
        flat = {f"{table}.{key}": value for table, content in own.items() for key, value in content.items()}
        rows.append(
            {
                "row": cell.case.row,
                "column": cell.case.column,
                "runs": cell.row.label,
                "published": cell.case.published or None,
                "settings": {k: v for k, v in flat.items() if k not in common and k != "run.seed"},
                "figures": figure,
            }
        )
    content: dict[str, Any] = {
        "study": study.aka[0] if study.aka else plan.name,
        "table": plan.name,  # the name after the paper's table, which is newer
        "asks": study.asks,
        "source": study.source,
        "grid": plan.which,
        "kind": study.kind,
        "command": shlex.join(["fedvit", *sys.argv[1:]]),
        "seeds": list(cells[0].row.experiments),
        "settings": common,  # of all rows; a row lists where it differs
        "versions": versions(),
        "rows": rows,
    }
    if study.kind == "choose":
        content["chosen"] = measure.chosen(cells, found)
        content["chosen_by"] = (
            "the mean over clients of the accuracy on held-out validation images, after the last round"
        )
    if study.kind == "target":
        content["targets"] = "fixed before the study, in the study or by --target; measured on test images by round"
    if study.overall:
        content["overall"] = measure.overall(cells, found)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "study.json", content)
    if study.kind != "cost":
        _save_seconds(cells, folder)
    return finite(content)  # type: ignore[no-any-return]


def _save_seconds(cells: Sequence[Cell], folder: Path) -> None:
    """Write timings.json, a file of its own because seconds differ each time and study.json must not."""
    runs = {(row.label, seed): run_of(folder, row, seed) for row in unique_rows(cells) for seed in row.experiments}
    seconds = {f"{label}/seed{seed}": run.summary["seconds"] for (label, seed), run in runs.items()}
    write_json(folder / "timings.json", {"seconds": seconds, "total": sum(seconds.values())})
