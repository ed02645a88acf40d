"""The command `fedvit study`: from its flags to a grid, and from finished runs to a table, a picture and study.json.

A study that is killed and started again ends with the same study.json as one that runs without interruption.
"""

import logging
import os
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
from fedvit.runs.folder import Run
from fedvit.studies import measure, tables
from fedvit.studies.cells import (
    Cell,
    Which,
    choose_grid,
    default_seeds,
    folder_name,
    local_of,
    make_cells,
    shared_cells,
    slug,
    unique_rows,
)
from fedvit.studies.definitions import STUDIES, paper_of, plain_name
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
    home: Path  # where the runs are
    folder: Path  # where study.json and study.png are

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
    out: Path | None = None,
    shared: Path | None = None,
) -> Prepared:
    """Resolve the grid that these flags ask for.

    A study with an `out` of its own has its runs there, by row. Otherwise it shares them with the other studies of its
    paper, in the folder `shared`: runs with the same settings are run once.
    """
    name = plain_name(name)
    study = STUDIES[name]
    folder = DataSettings(dir=flags.get("data_dir")).folder
    which, cases = choose_grid(study, paper=paper, data=flags.get("data"), folder=folder)
    pretrained = any(case.settings["model"].get("pretrained") for case in study.paper)
    if study.pretrained is not None and which == "digits" and pretrained:
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
    cells = make_cells(cases, chosen, parse_sets(sets or []), flags)
    if out is not None:
        return Prepared(name, study, which, cells, out, out)
    home = shared or paper_folder(paper_of(name))
    return Prepared(name, study, which, shared_cells(cells), home, home / folder_name(name, cells))


def paper_folder(paper: str) -> Path:
    """Name the folder of all studies of a paper."""
    return Path("runs") / f"study-{paper}"


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
    runs = runs_of(plan)
    return tables.dry_table(plan.cells, found, len(runs), sum(run.finished for run in runs), plan.title)


def runs_of(plan: Prepared) -> list[Run]:
    """List the runs of a study, each of them once; a study of costs has none."""
    if plan.study.kind == "cost":
        return []
    return [run_of(plan.home, row, seed) for row in unique_rows(plan.cells) for seed in row.experiments]


def carry_out(plan: Prepared, workers: int | None, console: Console, *, quiet: bool) -> Iterator[RenderableType]:
    """Run what is missing, then measure, write and draw; yield what to show."""
    folder = plan.folder
    if plan.study.kind == "cost":
        found = [measure.resources(cell) for cell in plan.cells]
    else:
        _run_all(plan, workers, console, quiet=quiet)
        rows = unique_rows(plan.cells)
        found = [measure.figures(cell, rows, plan.home, plan.study.view) for cell in plan.cells]
    if plan.study.kind == "gains":
        found = [
            {**figure, "gains": measure.gains(cell, plan.home)} for cell, figure in zip(plan.cells, found, strict=True)
        ]
    if plan.study.kind == "prefix":
        found = [
            {**figure, "prefix_share": _shares(plan, cell)} for cell, figure in zip(plan.cells, found, strict=True)
        ]
    if plan.study.costs is not None:
        found = [{**figure, "costs": measure.resources(cell)} for cell, figure in zip(plan.cells, found, strict=True)]
    pictures = _see(plan) if plan.study.kind == "features" else {}
    if pictures:
        seen = (pictures[cell.name].silhouette for cell in plan.cells)
        found = [{**figure, "silhouette": silhouette} for figure, silhouette in zip(found, seen, strict=True)]
    content = _save(plan, found)
    draw_study(content, plan.study, folder, folder / "study.png", pictures)
    yield from tables.study_tables(content, plan.study, plan.title)
    for column, pick in content.get("chosen", {}).items():
        edge = f"; it is the {pick['at_edge']} value tried" if pick["at_edge"] else ""
        picked = f"{pick['row']}, chosen on val ({pick['val']:.1f} %)"
        yield f"{column}: {picked}, has {pick['accuracy']:.1f} % on test{edge}"
    yield f"results: {folder / 'study.json'}\npicture: {folder / 'study.png'}"


def _run_all(plan: Prepared, workers: int | None, console: Console, *, quiet: bool) -> None:
    """Run what is not finished, and show the progress."""
    rows = unique_rows(plan.cells)
    total = sum(experiment.train.rounds for row in rows for experiment in row.experiments.values())
    with Progress(console, total, quiet=quiet) as progress:
        steps = run_rows(
            rows,
            plan.home,
            lambda row, seed: local_of(rows, row, seed),
            starter(progress, plan.home),
            workers,
            tolerant=plan.study.kind == "choose",
        )
        for done in steps:
            progress.step(done)


def _shares(plan: Prepared, cell: Cell) -> list[float]:
    """Return the mean over seeds of the share of attention that goes to the prefix, by block."""
    from fedvit.studies.prefix_shares import shares_by_block

    by_seed = [shares_by_block(run_of(plan.home, cell.row, seed)) for seed in cell.row.experiments]
    return [float(share) for share in np.mean(by_seed, axis=0)]


def _see(plan: Prepared) -> dict[str, Any]:
    """Compute the features of every row's first seed, and write them to features.npz."""
    from fedvit.studies.features import picture

    pictures = {
        cell.name: picture(run_of(plan.home, cell.row, next(iter(cell.row.experiments)))) for cell in plan.cells
    }
    arrays = {
        f"{slug(name)}.{part}": getattr(seen, part) for name, seen in pictures.items() for part in ("points", "labels")
    }
    plan.folder.mkdir(parents=True, exist_ok=True)
    np.savez(plan.folder / "features.npz", **arrays)
    return pictures


def _save(plan: Prepared, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Write study.json with rows, settings, figures and versions; the same study gives the same bytes."""
    cells, study, folder = plan.cells, plan.study, plan.folder
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
                "runs": Path(os.path.relpath(plan.home / (cell.row.place or cell.row.label), folder)).as_posix(),
                "published": cell.case.published or None,
                "published_costs": list(cell.case.costs),
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
        _save_seconds(plan)
    return finite(content)  # type: ignore[no-any-return]


def _save_seconds(plan: Prepared) -> None:
    """Write timings.json, a file of its own because seconds differ each time and study.json must not."""
    rows = unique_rows(plan.cells)
    runs = {(row.label, seed): run_of(plan.home, row, seed) for row in rows for seed in row.experiments}
    seconds = {f"{label}/seed{seed}": run.summary["seconds"] for (label, seed), run in runs.items() if run.finished}
    write_json(plan.folder / "timings.json", {"seconds": seconds, "total": sum(seconds.values())})
