"""The command `fedvit study`: from its flags to a grid, and from finished runs to a table, a picture and study.json."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, RenderableType

from fedvit.config.load import parse_sets
from fedvit.core.errors import UserError, nearest
from fedvit.core.settings import DataSettings
from fedvit.report.progress import Progress
from fedvit.runs.folder import Run
from fedvit.runs.tracking import sent_in
from fedvit.studies import run as running
from fedvit.studies.compare import run_of
from fedvit.studies.definitions import STUDIES, Study
from fedvit.studies.run import Cell, Which

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """A study with its cells resolved; nothing has run."""

    name: str
    study: Study
    which: Which
    cells: Sequence[Cell]

    @property
    def title(self) -> str:
        first = self.cells[0].row.first
        seeds = ", ".join(map(str, self.cells[0].row.experiments))
        where = f"{first.data.name}, {first.model.name}, rounds: {first.train.rounds}, seeds: {seeds}"
        return (
            f"{self.name} ({self.study.source}): {where}"
            if self.study.kind != "cost"
            else f"{self.name} ({self.study.source}): {first.model.name}"
        )


def prepare_study(
    name: str,
    *,
    paper: bool,
    seeds: str | None,
    target: str | None,
    flags: Mapping[str, Any],
    sets: Sequence[str] | None,
) -> Prepared:
    """The grid of these flags."""
    if name not in STUDIES:
        raise UserError(f"unknown study {name!r}; {nearest(name, STUDIES)}")
    study = STUDIES[name]
    folder = DataSettings(dir=flags.get("data_dir")).folder
    which, cases = running.choose_grid(study, paper=paper, data=flags.get("data"), folder=folder)
    if study.pretrained is not None and which == "digits":
        log.warning(
            "%s asks about pre-trained weights, but runs on digits from scratch: that shows the form of the study, "
            "no answer; set FEDVIT_DATA to a folder with office_caltech10 and the weights of ViT-Tiny",
            name,
        )
    if target is not None:
        if study.kind != "target":
            raise UserError(f"--target belongs to {', '.join(n for n, s in STUDIES.items() if s.kind == 'target')}")
        cases = [replace(case, targets=tuple(numbers(target, "--target", float))) for case in cases]
    chosen = numbers(seeds, "--seeds", int) if seeds is not None else running.default_seeds(study, which)
    cells = running.make_cells(cases, chosen, parse_sets(sets or []), flags)
    return Prepared(name, study, which, cells)


def numbers(text: str, flag: str, kind: Any) -> list[Any]:
    """Numbers joined by commas, each once."""
    try:
        return list(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError as problem:
        expected = "whole numbers" if kind is int else "numbers"
        raise UserError(f"{flag} expects {expected} joined by commas, found {text!r}") from problem


def preview(plan: Prepared) -> RenderableType:
    """What --dry-run shows."""
    from fedvit.studies.figures import dry_table

    found = list(running.estimates(plan.cells))
    total = sum(figure["nbytes"] for figure in found), sum(figure["macs"] for figure in found)
    table = dry_table(plan.cells, found, plan.title)
    rows = len(running.unique_rows(plan.cells)) * len(plan.cells[0].row.experiments)
    table.caption = f"{rows} runs, {total[0] / 1e9:.3g} GB, {total[1] / 1e12:.3g} x 10^12 multiply-adds of training"
    table.caption_justify = "left"
    return table


def carry_out(
    plan: Prepared, folder: Path | None, workers: int | None, console: Console, *, quiet: bool
) -> Iterator[RenderableType]:
    """Run what is missing, measure, write and draw; gives what is to be shown."""
    from fedvit.studies import figures as report

    folder = folder or running.study_folder(plan.name, plan.cells)
    if plan.study.kind == "cost":
        found = [running.resources(cell) for cell in plan.cells]
    else:
        run_all(plan, folder, workers, console, quiet=quiet)
        found = [running.figures(cell, folder, plan.study.view) for cell in plan.cells]
    pictures = see(plan, folder) if plan.study.kind == "features" else {}
    found = [
        {**figure, "silhouette": pictures[cell.name].silhouette} if pictures else figure
        for cell, figure in zip(plan.cells, found, strict=True)
    ]
    content = running.save_study(plan.name, plan.study, plan.which, plan.cells, found, folder)
    draw(plan, content, pictures, folder)
    yield from report.study_tables(content, plan.study, plan.title)
    for column, pick in content.get("chosen", {}).items():
        yield f"{column}: {pick['row']}, chosen on val ({pick['val']:.1f} %), has {pick['accuracy']:.1f} % on test"
    yield f"results: {folder / 'study.json'}\npicture: {folder / 'study.png'}"


def run_all(plan: Prepared, folder: Path, workers: int | None, console: Console, *, quiet: bool) -> None:
    rows = running.unique_rows(plan.cells)
    total = sum(experiment.train.rounds for row in rows for experiment in row.experiments.values())
    with Progress(console, total, quiet=quiet) as progress:
        steps = running.run_study(
            plan.cells,
            folder,
            lambda row, seed, done: progress.start(
                f"{row.label}, seed {seed}", done, sum(map(sent_in, run_of(folder, row, seed).rounds))
            ),
            workers,
        )
        for done in steps:
            progress.step(done)


def first_run(cell: Cell, folder: Path) -> Run:
    return run_of(folder, cell.row, next(iter(cell.row.experiments)))


def see(plan: Prepared, folder: Path) -> dict[str, Any]:
    """The features of every row's first seed, also written to features.npz."""
    from fedvit.studies.features import picture

    pictures = {cell.name: picture(first_run(cell, folder)) for cell in plan.cells}
    arrays = {
        f"{running.slug(name)}.{part}": getattr(seen, part)
        for name, seen in pictures.items()
        for part in ("points", "labels")
    }
    np.savez(folder / "features.npz", **arrays)
    return pictures


def draw(plan: Prepared, content: Mapping[str, Any], pictures: Mapping[str, Any], folder: Path) -> None:
    """study.png."""
    from fedvit.report import plots
    from fedvit.studies import figures as report

    path, study = folder / "study.png", plan.study
    runs = {cell.row.label: [run_of(folder, cell.row, seed) for seed in cell.row.experiments] for cell in plan.cells}
    match study.kind:
        case "cost":
            report.draw_costs(content, path, plan.title)
        case "features":
            report.draw_features(pictures, path, plan.title)
        case "target":
            report.draw_targets(content, runs, study, path, plan.title)
        case "choose":
            report.draw_chosen(content, study, path, plan.title)
        case _ if len({cell.case.column for cell in plan.cells}) > 1:
            report.draw_columns(content, study, path, plan.title)
        case _:
            by_row = {cell.case.row: runs[cell.row.label] for cell in plan.cells}
            plots.draw_comparison(by_row, path, plan.title, study.view)
