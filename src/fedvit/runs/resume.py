"""Which folder a run may use, and with which settings: new, to be continued, finished, or another run's."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from fedvit.config.load import load_experiment, read_tables
from fedvit.config.resolve import changed_settings, to_tables
from fedvit.core.errors import UserError
from fedvit.core.settings import PLANNED, Experiment, FromPython
from fedvit.data.dataset import Dataset
from fedvit.engine.loop import Round
from fedvit.engine.system import cores
from fedvit.runs.execute import run_rounds
from fedvit.runs.folder import LocalBaseline, Run

log = logging.getLogger(__name__)


def _run_folder(experiment: Experiment) -> Path:
    return Path("runs") / f"{experiment.label}-{Path(experiment.data.name).stem}-seed{experiment.run.seed}"


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
    experiment = None
    if out is None:
        experiment = load_experiment(file, sets, flags, sites=sites, own=own)
        out = _run_folder(experiment)
    saved = out / "run.toml"
    base = read_tables(saved) if resume and saved.is_file() else None
    if experiment is None or base is not None:
        experiment = load_experiment(file, sets, flags, base=base, sites=sites, own=own)
    return experiment, out


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
    found = standing(experiment, folder, resume=resume)
    if found == "finished":
        return iter(())
    return run_rounds(experiment, folder, resume=found == "begun", local=local, dataset=dataset, workers=workers)


def standing(experiment: Experiment, folder: Path, *, resume: bool) -> Literal["new", "begun", "finished"]:
    """Return how far this experiment is in its folder; raise an error if the folder holds something else."""
    if not (folder / "run.toml").is_file():
        if folder.exists() and (not folder.is_dir() or any(not _is_left_over(path) for path in folder.iterdir())):
            raise UserError(f"{folder} is not empty and does not hold a run: give another --out")
        return "new"
    if not resume:
        raise UserError(f"{folder} already holds a run: continue or show it with --resume, or give another --out")
    refuse_changes(folder, experiment)
    done = Run(folder).finished and Run(folder).experiment.train.rounds == experiment.train.rounds
    return "finished" if done else "begun"


def _is_left_over(path: Path) -> bool:
    """Return whether a file was left by a run that was stopped before its first round."""
    return path.suffix == ".partial" or path.name in ("flower", "sites", "lock", "error.txt", "network.json", "search")


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
    saved = to_tables(Run(folder).experiment)  # with the current defaults for settings that are newer than the run
    difference = changed_settings(saved, to_tables(experiment))
    for key in ("run.cache_mb", "run.track", "data.dir", "data.cache"):  # no result depends on these
        difference.pop(key, None)
    old, new = difference.get("train.rounds", (0, 0))
    if new > old:
        del difference["train.rounds"]
        if experiment.train.schedule in PLANNED:
            raise UserError(
                f"{folder} cannot be extended: train.schedule={experiment.train.schedule} plans its learning rates "
                f"over {old} rounds; start a new run with another --out"
            )
    if difference:
        words = ", ".join(f"{key} was {a}, now {b}" for key, (a, b) in difference.items())
        raise UserError(
            f"{folder} holds a run with other settings: {words}. Only --rounds may change, to a larger number; "
            "give another --out for a new run"
        )
