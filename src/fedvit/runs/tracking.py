"""Scalars for other tools during a run: `--set run.track=tensorboard`."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedvit.core.errors import UserError
from fedvit.core.settings import Experiment

Track = Callable[[Mapping[str, Any], Mapping[str, float]], None]  # a line of rounds.jsonl, and its seconds by phase


def check_tracker(experiment: Experiment) -> None:
    """Check, before anything is written, that the tracker that the experiment asks for is installed."""
    if experiment.run.track is None:
        return
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as problem:
        raise UserError(
            f"run.track=tensorboard needs the package tensorboard, which cannot be imported ({problem}): "
            "pip install 'fedvit[tensorboard]', or leave run.track out"
        ) from problem


@contextmanager
def track_run(experiment: Experiment, folder: Path, done: int, nbytes: float) -> Iterator[Track]:
    """Yield a function to call after every round. A run resumed after round `done` overwrites what came later."""
    if experiment.run.track is None:
        yield lambda row, seconds: None
        return
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1)
    sent = nbytes

    def track(row: Mapping[str, Any], seconds: Mapping[str, float]) -> None:
        nonlocal sent
        sent += sent_in(row)
        for name, value in {**scalars(row), "sent/MB": sent / 1e6, "seconds/round": sum(seconds.values())}.items():
            writer.add_scalar(name, value, row["round"])
        writer.flush()

    try:
        yield track
    finally:
        writer.close()


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
