"""Scalars, settings and tags for other tools during a run: `--set run.track=tensorboard`, mlflow or wandb.

Nothing leaves this machine unless you say so: MLflow writes a database into the run's folder unless MLFLOW_TRACKING_URI
is set, and Weights & Biases stays offline unless WANDB_MODE is set.
"""

import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from fedvit.config.resolve import to_tables, versions
from fedvit.core.errors import UserError
from fedvit.core.files import read_json, write_json
from fedvit.core.settings import Experiment

Track = Callable[[Mapping[str, Any], Mapping[str, float]], None]  # a line of rounds.jsonl, and its seconds by phase
Log = Callable[[Mapping[str, float], int], None]  # scalars by name, and their round
TRACKER = "tracker.json"  # in the run's folder: the IDs under which trackers know the run, for --resume
_NEEDS = {
    "tensorboard": "torch.utils.tensorboard.SummaryWriter",
    "mlflow": "mlflow.MlflowClient",
    "wandb": "wandb.init",
}
_LONGEST = 500  # characters of a setting, which is a limit of older MLflow servers
_AT_ONCE = 100  # settings in one message, which is a limit of MLflow


def check_tracker(experiment: Experiment) -> None:
    """Check, before anything is written, that the tracker that the experiment asks for is installed."""
    name = experiment.run.track
    if name is None:
        return
    module, _, needed = _NEEDS[name].rpartition(".")
    try:
        getattr(import_module(module), needed)  # a folder called wandb can be imported too, but has nothing in it
    except (ImportError, AttributeError) as problem:
        raise UserError(
            f"run.track={name} needs the package {name}, which cannot be imported ({problem}): "
            f"pip install 'fedvit[{name}]', or leave run.track out"
        ) from problem


@contextmanager
def track_run(experiment: Experiment, folder: Path, done: int, nbytes: float) -> Iterator[Track]:
    """Yield a function to call after every round. A run resumed after round `done` goes on in the tracker too."""
    if experiment.run.track is None:
        yield lambda row, seconds: None
        return
    opened: dict[str, Callable[[Experiment, Path, int], AbstractContextManager[Log]]] = {
        "tensorboard": _tensorboard,
        "mlflow": _mlflow,
        "wandb": _wandb,
    }
    sent = nbytes
    with opened[experiment.run.track](experiment, folder, done) as log:

        def track(row: Mapping[str, Any], seconds: Mapping[str, float]) -> None:
            nonlocal sent
            sent += sent_in(row)
            log({**scalars(row), "sent/MB": sent / 1e6, "seconds/round": sum(seconds.values())}, row["round"])

        yield track


@contextmanager
def _tensorboard(experiment: Experiment, folder: Path, done: int) -> Iterator[Log]:
    """Write event files into the run's folder; events after round `done` are purged."""
    from torch.utils.tensorboard import SummaryWriter
    from torch.utils.tensorboard.summary import hparams

    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1)
    if not done:
        events: Any = writer._get_file_writer()  # type: ignore[no-untyped-call]
        for part in hparams(parameters(experiment), {"personal/accuracy": 0.0}):  # type: ignore[no-untyped-call]
            events.add_summary(part)
        for name, text in tags(experiment).items():
            writer.add_text(f"tags/{name}", text, 1)

    def log(numbers: Mapping[str, float], number: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, number)
        writer.flush()

    try:
        yield log
    finally:
        writer.close()


@contextmanager
def _mlflow(experiment: Experiment, folder: Path, done: int) -> Iterator[Log]:
    """Log to MLFLOW_TRACKING_URI or else to a database in the run's folder."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    import mlflow.entities
    import mlflow.exceptions

    local = (folder / "mlflow.db").resolve()
    client = mlflow.MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{local}")
    known = _recall(folder, "mlflow")
    try:
        run = client.get_run(known) if known else None
    except mlflow.exceptions.MlflowException:  # another server, or a database that is gone
        run = None
    if run is None:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fedvit")
        home = client.get_experiment_by_name(name)
        place = None if os.environ.get("MLFLOW_TRACKING_URI") else (local.parent / "mlflow").as_uri()
        number = home.experiment_id if home else client.create_experiment(name, artifact_location=place)
        run = client.create_run(number, run_name=folder.name, tags=tags(experiment))
        _remember(folder, "mlflow", run.info.run_id)
    mine = run.info.run_id
    known_settings = client.get_run(mine).data.params  # a setting cannot be changed, such as the rounds of a longer run
    new = [
        mlflow.entities.Param(key, value[:_LONGEST])
        for key, value in parameters(experiment).items()
        if key not in known_settings
    ]
    for start in range(0, len(new), _AT_ONCE):
        client.log_batch(mine, params=new[start : start + _AT_ONCE])
    client.update_run(mine, status="RUNNING")

    def log(numbers: Mapping[str, float], number: int) -> None:
        now = int(1000 * time.time())
        metrics = [mlflow.entities.Metric(name, value, now, number) for name, value in numbers.items()]
        client.log_batch(mine, metrics=metrics)

    ended = "KILLED"
    try:
        yield log
        ended = "FINISHED"
    except Exception:
        ended = "FAILED"
        raise
    finally:
        client.set_terminated(mine, status=ended)


@contextmanager
def _wandb(experiment: Experiment, folder: Path, done: int) -> Iterator[Log]:
    """Log to Weights & Biases, by default offline: `wandb sync FOLDER/wandb/offline-run-*` uploads it later."""
    import wandb

    mine = _recall(folder, "wandb") or uuid.uuid4().hex[:8]
    _remember(folder, "wandb", mine)
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "fedvit"),
        name=folder.name,
        id=mine,
        resume="allow",
        dir=str(folder),
        config=parameters(experiment),
        tags=[f"{key}={text}"[:64] for key, text in tags(experiment).items()],
        mode=os.environ.get("WANDB_MODE", "offline"),
        settings=wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True),
    )
    status = 1
    try:
        yield lambda numbers, number: run.log(dict(numbers), step=number)
        status = 0
    finally:
        run.finish(exit_code=status)


def _recall(folder: Path, tracker: str) -> str | None:
    found: str | None = read_json(folder / TRACKER, {}).get(tracker)
    return found


def _remember(folder: Path, tracker: str, number: str) -> None:
    write_json(folder / TRACKER, {**read_json(folder / TRACKER, {}), tracker: number})


def parameters(experiment: Experiment) -> dict[str, str]:
    """Return every setting as `table.key`, with the versions of the software: what run.toml has."""
    tables = {**to_tables(experiment), "versions": versions()}
    return {f"{table}.{key}": str(value) for table, content in tables.items() for key, value in content.items()}


def tags(experiment: Experiment) -> dict[str, str]:
    """Return the words by which you would look for a run."""
    return {
        "method": str(experiment.method["name"]),
        "tune": str(experiment.tune["name"]),
        "model": experiment.model.name,
        "data": Path(experiment.data.name).name,
        "partition": str(experiment.partition.name),
        "seed": str(experiment.run.seed),
        "fedvit": versions()["fedvit"],
    }


def sent_in(row: Mapping[str, Any]) -> float:
    """Return the tensor bytes of a round's training messages, in both directions and for all clients."""
    answered = len(row["cohort"]) - len(row["failed"])
    return float(row["nbytes_down"] * len(row["cohort"]) + (row["nbytes_up"] or 0) * answered)


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a round that are worth plotting: the loss, and every view."""
    found = {"train/loss": row["loss"]}
    for view, numbers in (row["views"] or {}).items():
        for key in ("mean", "balanced_accuracy", "worst_decile", "best_decile", "loss", "auroc", "val"):
            found[f"{view}/{'accuracy' if key == 'mean' else key}"] = numbers.get(key)
    return {name: float(value) for name, value in found.items() if value is not None}
