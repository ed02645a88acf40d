"""Available cores, and available and used memory. Linux reports the most; other systems report what they can."""

import contextlib
import os
import resource
import shutil
import sys
from pathlib import Path

import psutil

CONTAINER = Path("/sys/fs/cgroup")  # the limits of a container


def reset_peak_rss() -> None:
    """Start a new measurement if the system allows it, because several runs may share a process."""
    with contextlib.suppress(OSError):  # the peak is then that of the process so far
        Path("/proc/self/clear_refs").write_text("5")


def peak_rss_mb() -> float:
    """Return this process's peak resident memory since the last reset, in MB of 10^6 bytes."""
    found = _peak_nbytes(os.getpid())
    if found is not None:
        return found / 1e6
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / 1e6


def peak_of_all_mb() -> float:
    """Return the peak memory of this process and all that it started, in MB; memory that they share counts once.

    It is the sum of their peaks, which they reach at about the same time: workers repeat the same work all along.
    """
    here = psutil.Process()
    alone, shared = 0.0, 0.0
    for process in (here, *here.children(recursive=True)):
        with contextlib.suppress(psutil.Error, OSError):  # it has just ended
            resident = process.memory_info().rss
            own = _unshared_nbytes(process, resident)
            peak = 1e6 * peak_rss_mb() if process == here else _peak_nbytes(process.pid) or resident
            alone += max(0.0, peak - (resident - own))
            shared = max(shared, resident - own)
    return (alone + shared) / 1e6


def _unshared_nbytes(process: psutil.Process, resident: int) -> int:
    """Return the bytes that no other process has too; all of its memory if the system does not say."""
    try:
        return min(resident, int(process.memory_full_info().uss))
    except (psutil.AccessDenied, AttributeError):
        return resident


def _peak_nbytes(pid: int) -> int | None:
    """Return a process's peak resident memory, which psutil does not know on Linux."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None


def free_shared_memory() -> int | None:
    """Return the free bytes of shared memory, or None if the system does not say; containers often have few."""
    place = Path("/dev/shm")
    return shutil.disk_usage(place).free if place.is_dir() else None


def cores() -> int:
    """Return the number of cores that this process may use, within a container's limit."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # ValueError: "max", no limit
        quota, period = map(int, (CONTAINER / "cpu.max").read_text().split())
        here = min(here, max(1, quota // period))
    return here


def free_ram() -> int:
    """Return the bytes that are available without swapping or exceeding a container's limit."""
    here = int(psutil.virtual_memory().available)
    with contextlib.suppress(OSError, ValueError, KeyError):
        most, used = (int((CONTAINER / f"memory.{name}").read_text()) for name in ("max", "current"))
        lines = (line.split() for line in (CONTAINER / "memory.stat").read_text().splitlines())
        here = min(here, max(0, most - used + int(dict(lines)["inactive_file"])))  # cached files give way
    return here
