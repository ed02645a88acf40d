"""Which folder a run may use: fresh, to be continued, finished, or another run's."""

from collections.abc import Iterator
from pathlib import Path

from fedvit import config
from fedvit.data.datasets import Dataset
from fedvit.errors import UserError
from fedvit.experiment import LocalBaseline, Run, run_rounds
from fedvit.rounds import Round
from fedvit.settings import Experiment


def default_folder(experiment: Experiment) -> Path:
    return Path("runs") / f"{experiment.label}-{Path(experiment.data.name).stem}-seed{experiment.run.seed}"


def start_or_resume(
    experiment: Experiment,
    folder: Path,
    *,
    resume: bool,
    local: LocalBaseline | None = None,
    dataset: Dataset | None = None,
) -> Iterator[Round]:
    """The rounds that are still to run; none for a finished run. Refuses a folder that holds something else."""
    saved = folder / "run.toml"
    if not saved.is_file():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{folder} is not empty and not a run of ours: give another --out")
        return run_rounds(experiment, folder, local=local, dataset=dataset)
    if not resume:
        raise UserError(f"{folder} already holds a run: continue or show it with --resume, or give another --out")
    old = Run(folder).experiment
    difference = config.changed(config.to_tables(old), config.to_tables(experiment))
    more = difference.pop("train.rounds", (0, 0))
    if difference or more[1] < more[0]:
        if more[1] < more[0]:
            difference["train.rounds"] = more
        words = ", ".join(f"{key} was {a}, now {b}" for key, (a, b) in difference.items())
        raise UserError(
            f"{folder} holds a run with other settings: {words}. Only a larger --rounds may change; "
            "give another --out for a new run"
        )
    if Run(folder).finished and more == (0, 0):
        return iter(())
    return run_rounds(experiment, folder, resume=True, local=local, dataset=dataset)
