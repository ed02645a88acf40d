"""Which folder a run may use, and with which settings: new, to be continued, finished, or another run's."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import Any, Literal

import torch

from fedvit.config.hashing import NO_RESULT, settings_hash
from fedvit.config.load import load_experiment, read_tables
from fedvit.config.resolve import changed_settings, to_tables
from fedvit.core.errors import UserError
from fedvit.core.files import check_writable
from fedvit.core.settings import PLANNED, Experiment, FromPython
from fedvit.data.dataset import Dataset
from fedvit.data.sources import load_dataset
from fedvit.engine.loop import Round
from fedvit.engine.private import FOLDER as PRIVACY
from fedvit.engine.system import cores
from fedvit.engine.worker import load_data
from fedvit.runs.caution import warn_of_model
from fedvit.runs.execute import run_rounds
from fedvit.runs.folder import LocalBaseline, Run
from fedvit.runs.lock import LOCK, TRIAL_LOCK

log = logging.getLogger(__name__)


def _run_folder(experiment: Experiment) -> Path:
    """Name a folder that no run with other settings has: after the row, the data, the seed and the settings' hash."""
    digest = settings_hash(experiment, without=("run.seed",))[:8]
    return Path("runs") / f"{_start_of_name(experiment)}-{digest}"


def _start_of_name(experiment: Experiment) -> str:
    return f"{experiment.label}-{Path(experiment.data.name).stem}-seed{experiment.run.seed}"


def settle(
    file: Path | None,
    sets: Mapping[str, Any],
    flags: Mapping[str, Any],
    out: Path | None,
    *,
    resume: bool,
    sites: tuple[str, ...] | None = None,
    own: FromPython | None = None,
) -> tuple[Experiment, Path]:
    """Return the settings and folder of a run. A resumed run keeps its own settings where none are given."""

    def load(folder: Path) -> Experiment:
        saved = folder / "run.toml"
        base = read_tables(saved) if resume and saved.is_file() else None
        return load_experiment(file, sets, flags, base=base, sites=sites, own=own)

    if out is None:
        experiment = load_experiment(file, sets, flags, sites=sites, own=own)
        out = _run_folder(experiment)
        if resume and not (out / "run.toml").is_file():
            out = _begun_elsewhere(experiment, load) or out
    return load(out), out


def _begun_elsewhere(experiment: Experiment, load: Callable[[Path], Experiment]) -> Path | None:
    """Find the default folder of a run that --resume can mean: it differs only where nothing was given, or in rounds.

    A run that was started with other settings has another folder, because the settings' hash is in its name.
    """
    folders = sorted(path.parent for path in Path("runs").glob(f"{escape(_start_of_name(experiment))}*/run.toml"))
    fits, reasons = [], []
    for folder in folders:
        try:
            refuse_changes(folder, load(folder))
            fits.append(folder)
        except UserError as problem:
            reasons.append(str(problem))
    if len(fits) > 1:
        raise UserError(f"--resume can mean any of {', '.join(map(str, fits))}: say which one with --out")
    if not fits and reasons:
        log.warning("no run with these settings was begun, so a new one starts; %s", reasons[0])
    return fits[0] if fits else None


def start_or_resume(
    experiment: Experiment,
    folder: Path,
    *,
    resume: bool,
    local: LocalBaseline | None = None,
    dataset: Dataset | None = None,
    workers: int | None = 1,
) -> Iterator[Round]:
    """Return the rounds still to run, none for a finished run. Refuse a folder that holds something else."""
    _warn_of_too_many(experiment.run.threads, workers or 1)
    warn_of_slow_bf16(experiment.run.precision, experiment.run.devices)
    warn_of_model(experiment.model.name)
    with data_errors_first(experiment, dataset):
        found = standing(experiment, folder, resume=resume)
    if found == "finished":
        return iter(())
    return run_rounds(experiment, folder, resume=found == "begun", local=local, dataset=dataset, workers=workers)


@contextmanager
def data_errors_first(experiment: Experiment, dataset: Dataset | None = None) -> Iterator[None]:
    """If the folder cannot be used, read the data before saying so: a mistake there must not stay hidden."""
    try:
        yield
    except UserError:
        load_data(experiment, dataset or load_dataset(experiment.data, None))
        raise


def standing(experiment: Experiment, folder: Path, *, resume: bool) -> Literal["new", "begun", "finished"]:
    """Return how far this experiment is in its folder; raise an error if the folder cannot be used for it."""
    if not (folder / "run.toml").is_file():
        if folder.exists() and (not folder.is_dir() or any(not _is_left_over(path) for path in folder.iterdir())):
            raise UserError(f"{folder} is not empty and does not hold a run: give another --out")
        check_writable(folder)
        return "new"
    if not resume:
        raise UserError(_already_there(folder, experiment))
    refuse_changes(folder, experiment)
    if Run(folder).finished and Run(folder).experiment.train.rounds == experiment.train.rounds:
        return "finished"
    check_writable(folder)
    return "begun"


def _already_there(folder: Path, experiment: Experiment) -> str:
    """Say which run is in the folder, how far it is, and how to go on."""
    run = Run(folder, experiment.own)
    difference = _difference(run, experiment)
    if difference:
        return f"{folder} already holds a run with other settings: {_in_words(difference)}; give another --out"
    if run.finished:
        return (
            f"{folder} already holds a run with these settings, which is finished: show it with --resume or `fedvit "
            f"report {folder}`, or give another --out to run it again"
        )
    return (
        f"{folder} already holds a run with these settings, stopped after round {len(run.rounds)} of "
        f"{experiment.train.rounds}: continue it with --resume, or give another --out to start again"
    )


def _is_left_over(path: Path) -> bool:
    """Return whether a file was left by a run that was stopped before its first round."""
    left = ("flower", "sites", LOCK, TRIAL_LOCK, "error.txt", "network.json", "search", PRIVACY)
    return path.suffix == ".partial" or path.name in left


def _warn_of_too_many(threads: int, workers: int) -> None:
    """Warn about more threads than cores, which only wait for each other."""
    if threads * workers > (here := cores()):
        log.warning("%d workers x %d threads are more than the %d cores here: this is slower", workers, threads, here)


def warn_of_slow_bf16(precision: str, devices: Sequence[str]) -> None:
    """Warn about a processor that cannot compute in bf16 and emulates it."""
    if precision == "bf16" and "cpu" in devices and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        log.warning("this processor has no instructions for bf16: --precision fp32 is many times faster here")


def refuse_changes(folder: Path, experiment: Experiment) -> None:
    """Refuse to resume a run with other settings, except more rounds if they do not change past learning rates."""
    difference = _difference(Run(folder, experiment.own), experiment)
    old, new = difference.get("train.rounds", (0, 0))
    if new > old:
        del difference["train.rounds"]
        if experiment.train.schedule in PLANNED:
            raise UserError(
                f"{folder} cannot be extended: train.schedule={experiment.train.schedule} plans its learning rates "
                f"over {old} rounds; start a new run with another --out"
            )
        if experiment.privacy.epsilon is not None:
            raise UserError(
                f"{folder} cannot be extended: its noise was chosen so that {old} rounds spend privacy.epsilon="
                f"{experiment.privacy.epsilon:g}; start a new run with another --out, which spends as much again"
            )
    if difference:
        raise UserError(
            f"{folder} holds a run with other settings: {_in_words(difference)}. Only --rounds may change, to a larger "
            "number; give another --out for a new run"
        )


def _difference(run: Run, experiment: Experiment) -> dict[str, tuple[Any, Any]]:
    """Return the settings, among those that results depend on, in which a run differs: table.key -> (old, new)."""
    saved = to_tables(run.experiment)  # with the current defaults for settings that are newer than the run
    found = changed_settings(saved, to_tables(experiment))
    return {key: pair for key, pair in found.items() if key not in NO_RESULT}


def _in_words(difference: Mapping[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"{key} was {a}, now {b}" for key, (a, b) in difference.items())
