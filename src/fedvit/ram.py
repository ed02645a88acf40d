"""How much memory there is and how much was used; Linux tells most, other systems what they can."""

import contextlib
import os
import resource
import shutil
import sys
from pathlib import Path

STATUS = Path("/proc/self/status")


def reset_peak_rss() -> None:
    """Start a new measurement, where the system lets us: several runs may share a process."""
    with contextlib.suppress(OSError):  # the peak is then that of the whole process so far
        Path("/proc/self/clear_refs").write_text("5")


def peak_rss_mb() -> float:
    """The most resident memory since the last reset, in megabytes of 10^6 bytes."""
    if STATUS.is_file():
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e6
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / 1e6


def free_shared_memory() -> int | None:
    """Bytes that processes can still share, where the system says; containers often have few."""
    place = Path("/dev/shm")
    return shutil.disk_usage(place).free if place.is_dir() else None


def free_ram() -> int:
    """Bytes that can be had without swapping."""
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
