"""Where worker processes come from. Imports no PyTorch: a command calls `prepare` before it does so itself.

On a CPU they are forked from one process that has imported PyTorch and done nothing else: it is imported once for all,
while the command is still reading its settings. With GPUs, and where there is no fork, each is a new process.
"""

import multiprocessing
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, SpawnContext

FORKED = "forkserver" in multiprocessing.get_all_start_methods()


def prepare() -> None:
    """Begin to import, in that process, what workers will need."""
    if FORKED:
        from multiprocessing import forkserver  # not on Windows

        multiprocessing.set_forkserver_preload(["fedvit.transport.workers"])
        forkserver.ensure_running()


def context_for(devices: Sequence[str]) -> "ForkServerContext | SpawnContext":
    """How to start workers for these devices."""
    if not FORKED or list(devices) != ["cpu"]:
        return multiprocessing.get_context("spawn")
    prepare()
    return multiprocessing.get_context("forkserver")
