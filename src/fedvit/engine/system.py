"""Available cores, and available and used memory. Linux reports the most; other systems report what they can."""

import contextlib
import os
import resource
import shutil
import sys
from pathlib import Path

import psutil

STATUS = Path("/proc/self/status")
CONTAINER = Path("/sys/fs/cgroup")  # the limits of a container


def reset_peak_rss() -> None:
    """Start a new measurement if the system allows it, because several runs may share a process."""
    with contextlib.suppress(OSError):  # the peak is then that of the process so far
        Path("/proc/self/clear_refs").write_text("5")


def peak_rss_mb() -> float:
    """Return the peak resident memory since the last reset, in MB of 10^6 bytes. psutil has no peak on Linux."""
    if STATUS.is_file():
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e6
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / 1e6


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
