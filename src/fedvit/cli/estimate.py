"""The first line of a command that trains: what it will take."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedvit.cli.flags import err
from fedvit.core.errors import UserError

if TYPE_CHECKING:
    from fedvit.core.settings import Experiment
    from fedvit.data.size import DataSize
    from fedvit.engine.estimate import Estimate
    from fedvit.studies.rows import Row


class _Shown(logging.Handler):
    """Prints what a run logs about its cost."""

    def __init__(self, *, show: bool):
        super().__init__()
        self.show = show

    def emit(self, record: logging.LogRecord) -> None:
        if self.show:
            err.print(record.getMessage(), soft_wrap=True, highlight=False, markup=False)


@contextmanager
def foretold(*, show: bool) -> Iterator[None]:
    """Let runs estimate what they will take, for their log and, if `show`, for standard error."""
    logger, handler = logging.getLogger("fedvit.engine.estimate"), _Shown(show=show)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def say_of_rows(rows: Sequence["Row"], folder: Path, workers: int | None) -> None:
    """Print what is left to do of a comparison or study, all rows and seeds together."""
    from fedvit.engine.estimate import say, total
    from fedvit.studies.rows import run_of

    found = []
    for row in rows:
        left = [seed for seed in row.experiments if not run_of(folder, row, seed).finished]
        if left:
            try:
                one = estimate_of(row.experiments[left[0]], workers)
            except UserError:  # the run itself says what is wrong, and where
                return
            found += [one] * len(left)
    if found:
        runs = "1 run" if len(found) == 1 else f"{len(found)} runs"
        err.print(f"{runs}: {say(total(found))}", soft_wrap=True, highlight=False, markup=False)


def size_for(experiment: "Experiment") -> "DataSize":
    """Return the size of the experiment's dataset without reading images."""
    from fedvit.data.size import size_of
    from fedvit.models.build import input_size

    return size_of(experiment.data, input_size(experiment.model))


def estimate_of(experiment: "Experiment", workers: int | None, classes: int | None = None) -> "Estimate":
    """Estimate a run on the dataset of the settings, without reading images."""
    import torch

    from fedvit.engine.estimate import estimate

    torch.set_num_threads(experiment.run.threads)
    size = size_for(experiment)
    more: dict[str, Any] = {"tests": size.tests, "shape": size.shape, "sites": size.sites}
    return estimate(experiment, size.images, classes or size.classes, workers, **more)
