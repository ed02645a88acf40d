"""The rows of a comparison or study, and the one loop that runs them.

A row has one experiment, and therefore one run, per seed. Finished runs do not run again, and interrupted ones
continue.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from fedvit.config.load import load_experiment
from fedvit.config.resolve import keys_of_tables
from fedvit.config.tables import Tables
from fedvit.core.errors import DivergedError, UserError
from fedvit.core.settings import Experiment
from fedvit.engine.loop import Round
from fedvit.report.progress import Progress
from fedvit.report.statistics import LOCAL
from fedvit.runs.folder import LocalBaseline, Run
from fedvit.runs.gains import add_gains
from fedvit.runs.resume import start_or_resume
from fedvit.runs.tracking import sent_in

log = logging.getLogger(__name__)
OnStart = Callable[["Row", int, int], None]  # receives the row, the seed, and how many rounds are already done


@dataclass(frozen=True)
class Row:
    """A label, which is also the name of the row's folder unless it has a place, and an experiment for every seed."""

    label: str
    experiments: Mapping[int, Experiment]
    search: Mapping[str, Any] | None = None  # how its learning rate was found, if it was searched
    place: str = ""  # its folder if it is shared with other studies, which may run at the same time

    @property
    def first(self) -> Experiment:
        return next(iter(self.experiments.values()))

    @property
    def is_local(self) -> bool:
        """Whether every client trains alone here, so that gains can be measured against this row."""
        return bool(self.first.method["name"] == LOCAL)


def resolve_seeds(
    base: Tables, seeds: Sequence[int], sets: Mapping[str, Any], flags: Mapping[str, Any]
) -> tuple[Experiment, dict[int, Experiment]]:
    """Resolve a row without any `--set` but names, and then for every seed with those that concern it."""
    names = {path: value for path, value in sets.items() if path in ("method.name", "tune.name")}  # these bring keys
    plain = load_experiment(None, names, {**flags, "seed": seeds[0]}, base=base)
    mine = {path: value for path, value in sets.items() if concerns(path, plain)}
    return plain, {seed: load_experiment(None, mine, {**flags, "seed": seed}, base=base) for seed in seeds}


def refuse_unused(paths: Iterable[str], rows: Sequence[Row]) -> None:
    """Refuse a setting that no row has."""
    unused = [path for path in paths if not any(concerns(path, row.first) for row in rows)]
    if unused:
        raise UserError(f"--set {unused[0]}: no row has this key")


def starter(progress: Progress, folder: Path) -> OnStart:
    """Return what tells the progress display that a run begins."""
    return lambda row, seed, done: progress.start(
        f"{row.label}, seed {seed}", done, sum(map(sent_in, run_of(folder, row, seed).rounds))
    )


def concerns(path: str, experiment: Experiment) -> bool:
    """Tell whether a row has this key. A mistyped key of a shared table counts, so that `config` explains it."""
    table, _, key = path.rpartition(".")
    keys = keys_of_tables(str(experiment.method["name"]), str(experiment.tune["name"]))
    if table in ("method", "tune"):
        return key in keys[table]
    return bool(table) or any(key in names for names in keys.values())


def run_rows(
    rows: Sequence[Row],
    folder: Path,
    local_of: Callable[[Row, int], Row | None],
    on_start: OnStart,
    workers: int | None,
    *,
    tolerant: bool = False,
) -> Iterator[Round]:
    """Run what is not finished, seed by seed, with Local before the rows that are measured against it.

    `local_of` returns the row against which the gains of another row are measured, if there is one. If `tolerant`, a
    run that diverges is left as it is, and the others go on, unless they are measured against it.
    """
    for seed in rows[0].experiments:
        against = {row.label: local_of(row, seed) for row in rows}
        for row in sorted(rows, key=lambda row: not row.is_local or against[row.label] is not None):
            run, alone = run_of(folder, row, seed), against[row.label]
            local = LocalBaseline.of(run_of(folder, alone, seed)) if alone else None
            with _locked(run.folder) if row.place else nullcontext():
                steps = start_or_resume(row.experiments[seed], run.folder, resume=True, local=local, workers=workers)
                on_start(row, seed, len(run.rounds))
                try:
                    yield from steps
                except DivergedError as problem:
                    if not tolerant or row in [local_of(other, seed) for other in rows]:
                        raise
                    log.info("%s, seed %d: %s", row.label, seed, problem)
                if row.place and alone and run.finished and run.summary["gain_over_local"] is None:
                    add_gains(run, run_of(folder, alone, seed))  # the study that trained it did not have Local


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Wait while another command trains the run in this folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{folder}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        log.warning("waiting for another command, which trains %s", folder)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def diverged_runs(rows: Sequence[Row], folder: Path) -> dict[str, list[int]]:
    """Return the seeds, by row, whose runs a tolerant `run_rows` has left unfinished."""
    left = {row.label: [seed for seed in row.experiments if not run_of(folder, row, seed).finished] for row in rows}
    return {label: seeds for label, seeds in left.items() if seeds}


def run_of(folder: Path, row: Row, seed: int) -> Run:
    """Open the run of a row and seed."""
    return Run(folder / (row.place or row.label) / f"seed{seed}")


def mean_of(values: Iterable[float]) -> float:
    """Average the values into a plain float, which JSON can hold."""
    return float(np.mean(list(values)))
