"""Change recorded real messages and files many times, feed every decoder, and print what came through: make fuzz

    python -m tests.fuzz [--inputs 1000000] [--seed 0] [--measured 50000] [TARGET ...]

An escape is any error that a decoder does not promise, or content that it accepts and that may not be trusted. The
branches of the decoders are counted over the first `--measured` inputs, because counting is slow.
"""

import argparse
import logging
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from pathlib import Path
from random import Random
from typing import Any

import coverage
import torch
from rich.console import Console
from rich.table import Table

from tests.fuzz.recorded import record
from tests.fuzz.targets import Target, targets

COLUMNS = ("target", "inputs", "accepted", "refused", "escapes", "branches", "taken", "slowest ms", "s")
SHARED = Path("/dev/shm")  # files in memory, where there is such a place


def fuzz(target: Target, inputs: int, seed: int, measured: int) -> tuple[Counter[str], tuple[int, int], float]:
    """Return how the inputs of a target ended, its branches and those taken, and the longest time of one input."""
    rng = Random(f"{seed} {target.name}")
    ends: Counter[str] = Counter()
    slowest = 0.0

    def feed(contents: Iterable[Any]) -> None:
        nonlocal slowest
        for content in contents:
            begin = time.perf_counter()
            ends[end_of(target, content)] += 1
            slowest = max(slowest, time.perf_counter() - begin)

    def drawn() -> Iterable[Any]:
        while True:
            yield target.mutate(rng.choice(target.real), rng)

    contents, measured = iter(drawn()), min(measured, inputs)
    branches = branches_of(target.covers, lambda: feed(chain(target.real, islice(contents, measured))))
    feed(islice(contents, inputs - measured))
    return ends, branches, slowest


def end_of(target: Target, content: Any) -> str:
    """Return accepted, refused, or how an input escaped."""
    try:
        return "accepted" if target.right(target.read(content)) else "may not be trusted"
    except target.refuses:
        return "refused"
    except Exception as problem:
        frames = traceback.extract_tb(problem.__traceback__)
        ours = [one for one in frames if "/fedvit/" in one.filename][-1:]
        places = " below ".join(f"{Path(one.filename).name}:{one.lineno}" for one in (frames[-1], *ours))
        return f"{type(problem).__name__} at {places}"


def branches_of(covers: Sequence[Callable[..., Any]], work: Callable[[], None]) -> tuple[int, int]:
    """Return how many branches these functions have, and how many of them the work takes."""
    files = sorted({one.__code__.co_filename for one in covers})
    counter = coverage.Coverage(branch=True, data_file=None, include=files, config_file=False)
    with counter.collect():
        work()
    has = taken = 0
    for file in files:
        found = counter._analyze(file).branch_stats()
        for one in (one for one in covers if one.__code__.co_filename == file):
            first = one.__code__.co_firstlineno
            last = max(line for code in codes_of(one.__code__) for *_, line in code.co_lines() if line is not None)
            for line, (total, hit) in found.items():
                if first <= line <= last:
                    has, taken = has + total, taken + hit
    return has, taken


def codes_of(code: Any) -> Iterable[Any]:
    yield code
    for one in code.co_consts:
        if hasattr(one, "co_lines"):
            yield from codes_of(one)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--measured", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    table = Table(box=None)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "target" else "right")
    escaped = 0
    with tempfile.TemporaryDirectory(dir=SHARED if SHARED.is_dir() else None) as place:
        folder = Path(place)
        (folder / "files").mkdir()
        known = targets(record(folder), folder / "files")
        unknown = set(given.targets) - {target.name for target in known}
        if unknown:
            names = ", ".join(target.name for target in known)
            raise SystemExit(f"no target {', '.join(sorted(unknown))}; there are {names}")
        for target in known:
            if given.targets and target.name not in given.targets:
                continue
            begin = time.perf_counter()
            ends, (has, taken), slowest = fuzz(target, given.inputs, given.seed, given.measured)
            escapes = {how: times for how, times in ends.items() if how not in ("accepted", "refused")}
            escaped += sum(escapes.values())
            counts = (sum(ends.values()), ends["accepted"], ends["refused"], sum(escapes.values()))
            seconds = time.perf_counter() - begin
            row = [target.name, *(f"{count:,}" for count in counts), str(has), f"{100 * taken / max(1, has):.0f} %"]
            table.add_row(*row, f"{1000 * slowest:.0f}", f"{seconds:.0f}")
            print(*row, f"{seconds:.0f} s", *(f"; {times} {how}" for how, times in escapes.items()), flush=True)
    Console(width=140, highlight=False).print(table)
    if escaped:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
