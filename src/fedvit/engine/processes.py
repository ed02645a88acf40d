"""The creation of worker processes. PyTorch is not imported before a command asks for it.

On a CPU, workers are forked from one process that has imported PyTorch and done nothing else: the import happens once
for all of them, while the command is still reading its settings. With GPUs, and where there is no fork, each worker is
a new process.
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

FORKED = sys.platform == "linux"  # elsewhere, forking after importing PyTorch is unsafe or impossible


def prepare(workers: int | None) -> None:
    """Import what a run needs, here and at the same time in the process that its workers are forked from."""
    if workers != 1 and (workers is not None or cores() > 1):
        begin()
    import_quickly("fedvit.runs.execute")


def begin() -> bool:
    """Start the process that workers are forked from, which only imports; return whether that is possible."""
    if FORKED:
        from multiprocessing import forkserver  # does not exist on Windows

        multiprocessing.set_forkserver_preload(["fedvit.engine.preload"])
        with suppress(OSError):  # the path of the temporary folder may be too long for a socket
            forkserver.ensure_running()
            return True
    return False


def import_quickly(module: str) -> None:
    """Import a module without garbage collection, which saves half a second: all of its objects are in use."""
    gc.disable()
    try:
        import_module(module)
    finally:
        gc.enable()


@contextmanager
def end_at_once() -> Iterator[None]:
    """Exit at once after everything else has ended: Python would spend a second tearing down PyTorch."""
    status: int | str | None = 1  # for an error that Python itself reports

    def stop() -> None:
        code = status if isinstance(status, int) else int(status is not None)
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except OSError:
            code = code or 120  # Python's own status when the last output cannot be written
        os._exit(code)

    atexit.register(stop)  # the first to register is the last to run
    try:
        yield
        status = 0
    except SystemExit as end:
        status = end.code
        raise


def context_for(devices: Sequence[str]) -> "ForkServerContext | SpawnContext":
    """Return the multiprocessing context that starts workers for these devices."""
    if list(devices) == ["cpu"] and begin():
        return multiprocessing.get_context("forkserver")
    return multiprocessing.get_context("spawn")
