"""Where worker processes come from. Imports no PyTorch before a command asks for it.

On a CPU they are forked from one process that has imported PyTorch and done nothing else: it is imported once for all,
while the command is still reading its settings. With GPUs, and where there is no fork, each is a new process.
"""

import atexit
import gc
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING

from fedvit.engine.system import cores

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, SpawnContext

FORKED = sys.platform == "linux"  # elsewhere forking after an import of PyTorch is not safe, or there is no fork


def prepare(workers: int | None) -> None:
    """Import what a run needs, here and at the same time in the process that its workers will come from."""
    if workers != 1 and (workers is not None or cores() > 1):
        begin()
    import_quickly("fedvit.runs.execute")


def begin() -> bool:
    """Start that process, which only imports; whether there can be one."""
    if FORKED:
        from multiprocessing import forkserver  # not on Windows

        multiprocessing.set_forkserver_preload(["fedvit.engine.preload"])
        with suppress(OSError):  # the folder of temporary files has too long a name for a socket
            forkserver.ensure_running()
            return True
    return False


def import_quickly(module: str) -> None:
    """Import a module without looking for garbage among its objects, which are all in use: half a second less."""
    gc.disable()
    try:
        import_module(module)
    finally:
        gc.enable()


@contextmanager
def end_at_once() -> Iterator[None]:
    """A program that just stops after all else has ended: Python would take PyTorch apart for a second."""
    status: int | str | None = 1  # of an error that Python tells itself

    def stop() -> None:
        code = status if isinstance(status, int) else int(status is not None)
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except OSError:
            code = code or 120  # Python's own, where the last words cannot be written
        os._exit(code)

    atexit.register(stop)  # the first to register is the last to run
    try:
        yield
        status = 0
    except SystemExit as end:
        status = end.code
        raise


def context_for(devices: Sequence[str]) -> "ForkServerContext | SpawnContext":
    """How to start workers for these devices."""
    if list(devices) == ["cpu"] and begin():
        return multiprocessing.get_context("forkserver")
    return multiprocessing.get_context("spawn")
