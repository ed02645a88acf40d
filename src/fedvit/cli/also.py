"""`fedvit run --also local`: Local with the same settings, so that a single run knows its gains."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedvit.core.errors import UserError

if TYPE_CHECKING:
    from fedvit.core.settings import Experiment
    from fedvit.report.progress import Progress, SeenRound
    from fedvit.report.statistics import Row

LOCAL = "local"


def check_also(also: Sequence[str] | None, settings: "Experiment", engine: str) -> bool:
    """Tell whether Local is to run too; refuse other values, and engines that do not exist, before anything runs."""
    if engine not in ("local", "flower"):
        raise UserError(f"--engine expects local or flower, found {engine!r}")
    wrong = [name for name in also or () if name != LOCAL]
    if wrong:
        raise UserError(f"--also expects local, the method that gains are measured against, found {wrong[0]!r}")
    if also and settings.method["name"] == LOCAL:
        raise UserError("--also local runs Local beside another method, but this run is Local: leave it out")
    return bool(also)


def start(
    settings: "Experiment", folder: Path, engine: str, *, resume: bool, workers: int | None
) -> "Iterator[SeenRound]":
    """Start or resume a run on its engine."""
    if engine == "flower":
        from fedvit.network.flower.trial import start_or_resume_trial

        return start_or_resume_trial(settings, folder, resume=resume, workers=workers)
    from fedvit.runs.resume import start_or_resume

    return start_or_resume(settings, folder, resume=resume, workers=workers)


def local_settings(settings: "Experiment") -> "Experiment":
    """Return Local's settings: those of the run, with another method."""
    from fedvit.config.load import load_experiment
    from fedvit.config.resolve import to_tables

    return load_experiment(base={**to_tables(settings), "method": {"name": LOCAL}})


def run_local_too(
    settings: "Experiment", folder: Path, engine: str, progress: "Progress", workers: int | None
) -> "list[Row]":
    """Run Local in the folder `local` of a finished run, or continue it, and add the gains to the run's files."""
    from fedvit.report.load import rows_in
    from fedvit.report.sites import write_sites
    from fedvit.runs.folder import Run
    from fedvit.runs.gains import add_gains
    from fedvit.runs.tracking import sent_in

    alone = folder / LOCAL
    steps = start(local_settings(settings), alone, engine, resume=True, workers=workers)
    past = Run(alone).rounds
    progress.start(LOCAL, len(past), sum(map(sent_in, past)))
    for done in steps:
        progress.step(done)
    add_gains(Run(folder), Run(alone))
    rows = rows_in([folder, alone])
    write_sites(folder / "sites.csv", rows)
    return rows
