"""Compare what `fedvit cost` says in advance with what runs then take: python -m benchmarks.estimate [--repeats 2]

Three settings are estimated by the table, estimated by --calibrate, and run, each as a command of its own. Images are
noise from seed 0, because no cost depends on what they show. A line shows how far the estimate is off, as 1 plus the
share of the measured value: 1.25 is 25 % too much or too little.

The seconds that are compared are those of computing, of the command plus its busiest worker, which other programs
hardly disturb; the time by the clock stands beside them and agrees on an idle machine. Memory is the peak of all
processes together, as summary.json has it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.common import Result, show
from fedvit.engine.system import cpu_seconds

TINY_AT = ["--model", "vit_tiny_patch16_224", "--clients", "16", "--cohort", "4", "--set", "train.optimizer=sgd"]
SETTINGS = {
    "digits, vit_micro, fedavg": ["--data", "digits", "--rounds", "60"],
    "32 px, ViT-Tiny at 96 px, fedavg+bias": [*TINY_AT, "--tune", "bias", "--image-size", "96", "--rounds", "6"],
    "32 px, ViT-Tiny at 64 px, fedper+head": [
        *[*TINY_AT, "--method", "fedper", "--tune", "head", "--image-size", "64", "--rounds", "30", "--epochs", "5"],
    ],
}
IMAGES, CLASSES = 2000, 100
WORKERS = 2


@dataclass(frozen=True)
class Taken:
    """What a run took: seconds of computing, seconds by the clock, and MB."""

    seconds: float
    clock: float
    megabytes: float


def results(repeats: int = 2) -> list[Result]:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        write_noise(Path(folder) / "noise.npz")
        for name, flags in SETTINGS.items():
            data = [] if "--data" in flags else ["--data", str(Path(folder) / "noise.npz")]
            found += compared(name, [*flags, *data, "--workers", str(WORKERS)], Path(folder), repeats)
    return found


def write_noise(path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {}
    for part, count in (("train", IMAGES * 3 // 4), ("test", IMAGES // 4)):
        arrays[f"{part}_images"] = rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        arrays[f"{part}_labels"] = np.arange(count) % CLASSES
    np.savez(path, **arrays)


def compared(name: str, flags: Sequence[str], folder: Path, repeats: int) -> list[Result]:
    """Estimate and run one setting several times, in turns."""
    said: dict[str, list[dict[str, Any]]] = {"table": [], "--calibrate": []}
    taken = []
    for repeat in range(repeats):
        cache = {**os.environ, "XDG_CACHE_HOME": str(folder / f"cache-{len(taken)}-{abs(hash(name))}")}
        for how, more in (("table", []), ("--calibrate", ["--calibrate"])):
            command = [sys.executable, "-m", "fedvit", "cost", *flags, "--json", *more]
            answer = subprocess.run(command, env=cache, check=True, capture_output=True, text=True)
            said[how].append(json.loads(answer.stdout)["run"])
        taken.append(measured(flags, folder / f"run-{abs(hash(name))}-{repeat}", cache))
    rows = []
    for how, estimates in said.items():
        for what, key, scale in (("seconds", "minutes", 60), ("megabytes", "memory_mb", 1)):
            values = [scale * one[key] for one in estimates]
            truths = [getattr(one, what) for one in taken]
            off = [1 + abs(value - truth) / truth for value, truth in zip(values, truths, strict=True)]
            beside = f"said {statistics.median(values):.1f}, took {statistics.median(truths):.1f} {what}"
            if what == "seconds":
                beside += f" ({statistics.median([one.clock for one in taken]):.1f} by the clock)"
            bar = 1.25 if how == "--calibrate" else None
            rows.append(Result(f"{name}: {what} by {how}", off, bar, beside=beside))
    return rows


def measured(flags: Sequence[str], out: Path, environment: dict[str, str]) -> Taken:
    """Run a command and watch how long its processes compute."""
    command = [sys.executable, "-m", "fedvit", "run", *flags, "--quiet", "--out", str(out)]
    begin = time.perf_counter()
    with subprocess.Popen(command, env=environment) as process:
        watched: dict[int, float] = {}
        watcher = threading.Thread(target=watch, args=(process, watched))
        watcher.start()
        status = process.wait()
        clock = time.perf_counter() - begin
        watcher.join()
    if status:
        raise SystemExit(f"{' '.join(command)} failed")
    workers = [seconds for pid, seconds in watched.items() if pid != process.pid]
    summary = json.loads((out / "summary.json").read_text())
    return Taken(watched[process.pid] + max(workers, default=0.0), clock, summary["peak_rss_mb"])


def watch(process: "subprocess.Popen[bytes]", seconds: dict[int, float]) -> None:
    """Note how long the command and its workers have computed; not the process that workers are forked from."""
    while process.poll() is None:
        try:
            seconds[process.pid] = cpu_seconds(process.pid)
            for child in psutil.Process(process.pid).children():
                for worker in child.children():
                    seconds[worker.pid] = cpu_seconds(worker.pid)
        except (psutil.Error, OSError):
            pass
        time.sleep(0.05)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2)
    show(results(**vars(parser.parse_args())))
