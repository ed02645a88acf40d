"""Compare FedViT with other frameworks on the same work, in turns, in one table of ratios.

    python -m benchmarks.others [full] [digits] [head] [--frameworks flower pfl fluke processes] [--repeats 3]

Contestants are separate programs, `on_NAME.py`, each in its own environment (made at the first run, under .bench; each
has torch and timm in the versions of this environment). All get the same folder, with the model, the initial weights,
the images, the cohorts and the order of all batches (`works`), and two processes of one thread. fluke, which supports
only one process, gets two threads, and one on digits (`--threads-alone` tries another number). The first lines of each
script say what its framework does differently. `processes` is not a framework, but two bare processes.

There are two ratios for each, our time over theirs: one of the whole program, from its start to its end, and one of a
round after the first (the median), which excludes start-up and, in head tuning, our single pass through the frozen
body. The table also shows how far their final weights are from those of a bare loop, relative to how far the bare
loop's moved from the start: different work would end elsewhere. `--small` does a little of everything, to check that
everything works; its times mean nothing.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from benchmarks.common import Result, show
from benchmarks.others import environments, works

HERE = Path(__file__).parent
OURS, BARE = "fedvit", "processes"
FRAMEWORKS = (*environments.PACKAGES, BARE)
BEFORE = {"pfl": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "{processes}"]}
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "WANDB_MODE": "disabled",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class Time:
    """One run of one contestant."""

    total: float  # seconds from the start of the program to its end
    first: float  # to the end of the first round
    steady: float  # of a round after the first, the median
    versions: dict[str, str]
    end: dict[str, Tensor]


def python_for(name: str, folder: Path) -> Path:
    return environments.python_of(name, folder) if name in environments.PACKAGES else Path(sys.executable)


def run(name: str, python: Path, work: Path, out: Path, timeout: float) -> Time:
    """Run a contestant and read its line; all other output goes to a log next to its result."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    said = json.loads((work / "work.json").read_text())
    before = [part.format(processes=said["processes"]) for part in BEFORE.get(name, [])]
    paths = [str(HERE), *([os.environ["PYTHONPATH"]] if name == OURS and "PYTHONPATH" in os.environ else [])]
    environment = {**os.environ, **QUIET, "PYTHONPATH": os.pathsep.join(paths), "FLWR_HOME": str(out / "flwr")}
    environment.pop("OMP_NUM_THREADS", None)  # each sets its own
    command = [str(python), *before, str(HERE / f"on_{name}.py"), str(work), str(out)]
    begin = time.monotonic()
    with (out / "log.txt").open("w") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, cwd=out, start_new_session=True
        )
        try:
            printed, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"not done after {timeout:.0f} s; see {out / 'log.txt'}") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and everything that it has left behind
            process.wait()
    total = time.monotonic() - begin
    lines = [line for line in printed.splitlines() if line.startswith('{"marks"')]
    if process.returncode or not lines:
        words = (out / "log.txt").read_text().strip().splitlines() or ["no reason given"]
        raise RuntimeError(f"status {process.returncode}: {words[-1][:160]} (see {out / 'log.txt'})")
    answer = json.loads(lines[-1])
    marks = answer["marks"]
    if len(marks) != len(said["cohorts"]):
        raise RuntimeError(f"{len(marks)} rounds of {len(said['cohorts'])}")
    steady = statistics.median(b - a for a, b in itertools.pairwise(marks))
    return Time(total, marks[0] - begin, steady, answer["versions"], load_file(out / "end.safetensors"))


def distance(one: dict[str, Tensor], other: dict[str, Tensor], start: dict[str, Tensor]) -> float:
    """Measure how far two results are from each other, relative to the distance from the start to the first."""
    if one.keys() != other.keys():
        return math.inf
    apart = sum(float((one[name].double() - other[name].double()).square().sum()) for name in one)
    way = sum(float((one[name].double() - start[name].double()).square().sum()) for name in one)
    return math.sqrt(apart / way)


def bars(work: str, framework: str) -> tuple[float | None, float | None]:
    """Return the bars for the whole program and for a round after the first."""
    if work == "full":
        return (0.8 if framework == "flower" else None), 1.0
    if framework == BARE:
        return None, None
    return {"digits": (0.33, 0.33), "head": (0.05, 0.05)}[work]


def not_run(work: str, framework: str, reason: str) -> Result:
    return Result(f"{work}: ours / {framework}", [math.nan], None, beside=f"not run: {reason}")


def compare(work: str, framework: str, times: dict[str, list[Time]], away: dict[str, float]) -> list[Result]:
    """Make two lines of the table, with and without start-up."""
    ours, theirs = times[OURS], times[framework]
    whole, steady = bars(work, framework)
    found = ", ".join(f"{package} {number}" for package, number in theirs[0].versions.items())
    ends = f"ends {away[framework]:.0e} from a bare loop, ours {away[OURS]:.0e}"
    if max(away[framework], away[OURS]) > works.RECIPES[work].agrees:
        ends = f"NOT THE SAME WORK: {ends}"
        whole = steady = None

    def line(what: str, key: str, bar: float | None, more: str) -> Result:
        ratios = [getattr(a, key) / getattr(b, key) for a, b in zip(ours, theirs, strict=True)]
        seconds = [statistics.median(getattr(t, key) for t in group) for group in (ours, theirs)]
        beside = f"{seconds[0]:.3g} s / {seconds[1]:.3g} s; {more}"
        return Result(f"{work}: ours / {framework}, {what}", ratios, bar, beside=beside)

    firsts = [statistics.median(t.first for t in group) for group in (ours, theirs)]
    return [
        line("end to end", "total", whole, f"to the end of round 1 {firsts[0]:.3g} s / {firsts[1]:.3g} s; {found}"),
        line("a later round", "steady", steady, ends),
    ]


def measure(
    work: str,
    pythons: dict[str, Path],
    place: Path,
    repeats: int,
    small: bool,
    timeout: float,
    threads_alone: int | None = None,
) -> list[Result]:
    """Run all contestants in turns on one work."""
    folder = place / "works" / (f"{work}-small" if small else work)
    works.write(work, folder, small=small, threads_alone=threads_alone)
    names = [OURS, *(name for name in pythons if name != OURS)]
    times: dict[str, list[Time]] = {name: [] for name in names}
    failed: dict[str, str] = {}
    for repeat in range(repeats):
        for name in names:
            if name in failed:
                continue
            print(f"{work} {repeat + 1}/{repeats}: {name} ...", file=sys.stderr, end=" ", flush=True)
            try:
                times[name].append(run(name, pythons[name], folder, place / "out" / f"{work}-{name}", timeout))
                print(f"{times[name][-1].total:.1f} s", file=sys.stderr, flush=True)
            except RuntimeError as problem:
                failed[name] = str(problem)
                print(problem, file=sys.stderr, flush=True)
    if OURS in failed:
        raise SystemExit(f"{work}: FedViT itself failed: {failed[OURS]}")
    start = load_file(folder / "start.safetensors")
    reference = times[BARE][-1].end if times.get(BARE) else times[OURS][-1].end
    away = {name: distance(reference, group[-1].end, start) for name, group in times.items() if group}
    return [
        row
        for name in names[1:]
        for row in ([not_run(work, name, failed[name])] if name in failed else compare(work, name, times, away))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("works", nargs="*", metavar="WORK", help=f"{', '.join(works.RECIPES)} (default: all)")
    parser.add_argument("--frameworks", nargs="+", choices=FRAMEWORKS, default=FRAMEWORKS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--small", action="store_true", help="do a little of everything, to check that everything works"
    )
    parser.add_argument("--folder", type=Path, default=Path(".bench"), help="folder for environments and results")
    parser.add_argument(
        "--timeout", type=float, default=3600, help="time limit in seconds for one run of one contestant"
    )
    parser.add_argument("--threads-alone", type=int, help="threads of a framework that supports only one process")
    asked = parser.parse_args()
    repeats = 1 if asked.small else asked.repeats
    unknown = set(asked.works) - set(works.RECIPES)
    if unknown:
        parser.error(f"no work {', '.join(sorted(unknown))}; there are {', '.join(works.RECIPES)}")
    place = asked.folder.resolve()
    pythons, missing = {OURS: python_for(OURS, place)}, {}
    for name in asked.frameworks:
        try:
            pythons[name] = python_for(name, place)
        except RuntimeError as problem:
            missing[name] = str(problem)
    rows = []
    for work in asked.works or works.RECIPES:
        rows += measure(work, pythons, place, repeats, asked.small, asked.timeout, asked.threads_alone)
        rows += [not_run(work, name, reason) for name, reason in missing.items()]
    print(f"{'; '.join(f'{name}: {works.RECIPES[name].about}' for name in asked.works or works.RECIPES)}")
    alone = asked.threads_alone or "two, on digits one"
    print(f"two processes of one thread each; threads of fluke, which supports one process: {alone}")
    show(rows)


if __name__ == "__main__":
    main()
