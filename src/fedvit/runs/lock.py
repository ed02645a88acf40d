"""One process at a time writes to the folder of a run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from fedvit.core.errors import UserError
from fedvit.core.files import make_folder, writing

LOCK, TRIAL_LOCK = "lock", "trial.lock"  # files in the folder; the second is of the command that starts Flower


@contextmanager
def only_run(folder: Path, name: str = LOCK) -> Iterator[None]:
    """Make the folder if it does not exist, and prevent other processes from running in it."""
    make_folder(folder)
    lock = FileLock(folder / name)
    with writing(folder / name):
        try:
            lock.acquire(timeout=0)
        except Timeout as problem:
            raise UserError(
                f"another process is running in {folder}: wait for it, stop it first, or give another --out (out= over "
                "Flower)"
            ) from problem
    try:
        yield
    finally:
        lock.release()
