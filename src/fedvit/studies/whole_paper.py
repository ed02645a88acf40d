"""All studies of a paper at once: equal runs are run once, and a study that fails does not stop the others."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table

from fedvit.core.errors import UserError
from fedvit.studies import measure, tables
from fedvit.studies.cells import Cell
from fedvit.studies.definitions import studies_of
from fedvit.studies.run import Prepared, carry_out, paper_folder, prepare_study, runs_of

log = logging.getLogger(__name__)


def prepare_paper(
    paper: str,
    *,
    full: bool,
    seeds: str | None,
    flags: Mapping[str, Any],
    sets: Sequence[str] | None,
    out: Path | None,
) -> list[Prepared]:
    """Resolve every study of a paper, in small or with the published settings."""
    home = out or paper_folder(paper)
    return [
        prepare_study(name, paper=full, seeds=seeds, target=None, flags=flags, sets=sets, shared=home)
        for name in studies_of(paper)
    ]


def preview_paper(paper: str, plans: Sequence[Prepared]) -> Table:
    """Make the table that --dry-run shows: runs count in the first study that has them."""
    parts, seen, costs = [], set[Path](), dict[str, dict[str, Any]]()
    for plan in plans:
        runs = {run.folder: run for run in runs_of(plan)}
        new = {folder: run for folder, run in runs.items() if folder not in seen}
        parts.append(
            {
                "name": plan.name,
                "runs": len(runs),
                "shared": len(runs) - len(new),
                "finished": sum(run.finished for run in new.values()),
                "estimates": list(measure.estimates(_only(plan, new), costs)),
            }
        )
        seen |= runs.keys()
    return tables.paper_table(
        parts, f"all studies of {paper}, {'at full size' if plans[0].which == 'paper' else 'in small'}"
    )


def _only(plan: Prepared, folders: Mapping[Path, Any]) -> list[Cell]:
    """Return the cells of these runs."""
    kept = []
    for cell in plan.cells:
        here = {s: e for s, e in cell.row.experiments.items() if plan.home / cell.row.place / f"seed{s}" in folders}
        if here:
            kept.append(replace(cell, row=replace(cell.row, experiments=here)))
    return kept


def carry_out_paper(
    plans: Sequence[Prepared],
    workers: int | None,
    console: Console,
    *,
    quiet: bool,
    before: Callable[[Prepared], None] = lambda _: None,
) -> Iterator[RenderableType]:
    """Carry out one study after the other; those that cannot run are named at the end."""
    failed = {}
    for plan in plans:
        before(plan)
        try:
            yield from carry_out(plan, workers, console, quiet=quiet)
        except UserError as problem:
            log.warning("%s: %s; the other studies go on", plan.name, problem)
            failed[plan.name] = problem
    if failed:
        words = "; ".join(f"{name}: {problem}" for name, problem in failed.items())
        raise UserError(
            f"{len(failed)} of {len(plans)} studies have not finished; mend what is named here and give the command "
            f"again: {words}"
        )
