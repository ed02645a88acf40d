"""Search for settings on validation images: every point of a grid, or successive halving.

A candidate is a row whose runs hold out validation images and never look at test images to be chosen. A candidate that
diverges is left out and named. A search that is stopped and started again continues where it was, and since its runs
are deterministic it ends with the same choice.
"""

import itertools
import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedvit.config.load import parse_value
from fedvit.core.errors import UserError
from fedvit.core.files import write_json
from fedvit.core.settings import PLANNED, Experiment
from fedvit.engine.loop import Round
from fedvit.runs.folder import Run
from fedvit.runs.tracking import sent_in
from fedvit.studies.rows import OnStart, Row, mean_of, run_of, run_rows

LR = "train.lr"
HELD_OUT = 0.2  # of each client's training images, unless data.val says otherwise
_STEP = 3.0  # between an edge of the grid and the next value, if `--lr auto` must look further
_MOST_STEPS = 2

Values = Mapping[str, Any]  # table.key -> value
Make = Callable[[Values], Row]


@dataclass(frozen=True)
class Schedule:
    """How long candidates train: after each number of rounds only the best go on, half of them each time."""

    rungs: tuple[int, ...]

    @staticmethod
    def grid(rounds: int) -> "Schedule":
        """Train every candidate to the end."""
        return Schedule((rounds,))

    @staticmethod
    def halving(rounds: int) -> "Schedule":
        """Train all for a quarter of the rounds, the best half for half of them, and the best quarter to the end."""
        first = max(1, rounds // 4)
        return Schedule(tuple(sorted({first, min(2 * first, rounds), rounds})))

    @staticmethod
    def short(rounds: int) -> "Schedule":
        """Train all for a quarter of the rounds and the best half for half of them."""
        first = max(1, rounds // 4)
        return Schedule((first, 2 * first) if 2 * first <= rounds else (first,))

    def survivors(self, candidates: int) -> list[int]:
        """Return how many candidates train at each rung."""
        return [max(1, math.ceil(candidates / 2**n)) for n in range(len(self.rungs))]

    def rounds(self, candidates: int, *, planned: bool) -> int:
        """Return the rounds of a whole search; if rates are `planned` over all rounds, each stage starts anew."""
        since = [0] * len(self.rungs) if planned else [0, *self.rungs[:-1]]
        return sum(n * (to - at) for n, to, at in zip(self.survivors(candidates), self.rungs, since, strict=True))

    def words(self, candidates: int) -> str:
        """Say it in a few words: 4 values x 4 rounds, the best 2 to round 8."""
        counts = self.survivors(candidates)
        parts = [f"{candidates} values x {self.rungs[0]} round{'s' * (self.rungs[0] != 1)}"]
        parts += [f"the best {n} to round {to}" for n, to in zip(counts[1:], self.rungs[1:], strict=True)]
        return ", ".join(parts)


@dataclass(frozen=True)
class Trial:
    """What a candidate reached: its accuracy on validation images, by round; none if it diverged."""

    values: Values
    val: Mapping[int, float]
    seconds: float
    nbytes: float


@dataclass(frozen=True)
class Found:
    """The result of a search for one row."""

    label: str
    trials: Sequence[Trial]
    chosen: Values
    val: float
    at_edge: Mapping[str, str]  # the chosen values that are the smallest or largest tried, and which of the two
    rounds: int
    seconds: float
    nbytes: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def parse_over(items: Iterable[str]) -> dict[str, list[Any]]:
    """Parse items such as train.lr=1e-3,3e-3 into values by path."""
    over: dict[str, list[Any]] = {}
    for item in items:
        path, equals, text = item.partition("=")
        values = list(dict.fromkeys(parse_value(part.strip()) for part in text.split(",") if part.strip()))
        if not equals or len(values) < 2:
            raise UserError(f"--over expects table.key=value,value with at least two values, found {item!r}")
        over[LR if path.strip() == "lr" else path.strip()] = values
    return over


def search(
    label: str,
    make: Make,
    over: Mapping[str, Sequence[Any]],
    schedule: Schedule,
    folder: Path,
    *,
    widen: bool = False,
    on_start: OnStart = lambda *_: None,
    workers: int | None = 1,
) -> Generator[Round, None, Found]:
    """Run the candidates and return the best on validation images; runs that are there are not run again.

    With `widen`, a best rate at an edge of the grid adds a rate beyond it before any candidate is dropped.
    """
    grid = {path: _ascending(values) for path, values in over.items()}
    alive = [_candidate(label, make, values, schedule) for values in _points(grid)]
    everyone = list(alive)
    for number, (rounds, most) in enumerate(zip(schedule.rungs, schedule.survivors(len(alive)), strict=True)):
        alive = _best(alive, folder, schedule.rungs[number - 1], most) if number else alive
        yield from _train(alive, folder, rounds, schedule, on_start, workers)
        for _ in range(_MOST_STEPS if widen and number == 0 and set(grid) == {LR} else 0):
            beyond = _beyond(grid[LR], _best(alive, folder, rounds, 1)[0].values[LR])
            if beyond is None:
                break
            grid[LR] = _ascending([*grid[LR], beyond])
            more = _candidate(label, make, {LR: beyond}, schedule)
            alive, everyone = [*alive, more], [*everyone, more]
            yield from _train([more], folder, rounds, schedule, on_start, workers)
    last = schedule.rungs[-1]
    winner = _best(alive, folder, last, 1)[0]
    val = winner.val(folder, last)
    if val is None:
        tried = "; ".join(_words(c.values) for c in everyone)
        raise UserError(f"{label} diverges with every value that was tried ({tried}): try smaller rates")
    trials = [c.trial(folder, schedule) for c in everyone]
    total = sum(c.rounds_run(folder, schedule) for c in everyone)
    at_edge = {path: side for path, values in grid.items() if (side := edge(values, winner.values[path]))}
    seconds, nbytes = sum(t.seconds for t in trials), sum(t.nbytes for t in trials)
    return Found(label, trials, winner.values, val, at_edge, total, seconds, nbytes)


def save_search(path: Path, found: Sequence[Found]) -> None:
    """Write every candidate of every row, and what was chosen."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, [one.to_json() for one in found])


def best_of(values: Sequence[float | None]) -> int | None:
    """Return the place of the highest value, the first of equal ones; None if there is none."""
    known = [(value, -place) for place, value in enumerate(values) if value is not None]
    return -max(known)[1] if known else None


@dataclass(frozen=True)
class _Candidate:
    values: Values
    row: Row
    planned: bool  # the schedule plans its rates over all rounds, so a longer run is another run

    def at(self, rounds: int, every: int) -> Row:
        """Return the row that trains for this long."""
        label = f"{self.row.label}/rounds{rounds}" if self.planned else self.row.label
        experiments = {seed: _for_search(e, rounds, every) for seed, e in self.row.experiments.items()}
        return Row(label, experiments)

    def runs(self, folder: Path, rounds: int) -> list[Run]:
        return [run_of(folder, self.at(rounds, rounds), seed) for seed in self.row.experiments]

    def val(self, folder: Path, rounds: int) -> float | None:
        """Return the mean accuracy on validation images after this round; None if it is not known."""
        found = [_val_after(run, rounds) for run in self.runs(folder, rounds)]
        return None if None in found else mean_of(value for value in found if value is not None)

    def trial(self, folder: Path, schedule: Schedule) -> Trial:
        by_round = {rounds: self.val(folder, rounds) for rounds in schedule.rungs}
        known = {rounds: value for rounds, value in by_round.items() if value is not None}
        runs = self._all_runs(folder, schedule)
        seconds = sum(sum(timing["seconds"].values()) for run in runs for timing in run.timings)
        return Trial(self.values, known, seconds, sum(sent_in(row) for run in runs for row in run.rounds))

    def rounds_run(self, folder: Path, schedule: Schedule) -> int:
        return sum(len(run.rounds) for run in self._all_runs(folder, schedule))

    def _all_runs(self, folder: Path, schedule: Schedule) -> list[Run]:
        lengths = schedule.rungs if self.planned else schedule.rungs[-1:]
        return [run for rounds in lengths for run in self.runs(folder, rounds)]


def _candidate(label: str, make: Make, values: Values, schedule: Schedule) -> _Candidate:
    row = make(values)
    planned = row.first.train.schedule in PLANNED and len(schedule.rungs) > 1
    return _Candidate(values, replace(row, label=f"{label}/{_words(values)}"), planned)


def _train(
    candidates: Sequence[_Candidate],
    folder: Path,
    rounds: int,
    schedule: Schedule,
    on_start: OnStart,
    workers: int | None,
) -> Generator[Round, None, None]:
    """Train these candidates up to a round; those that have been there stay as they are."""
    rows = [c.at(rounds, schedule.rungs[0]) for c in candidates if c.val(folder, rounds) is None]
    if rows:
        yield from run_rows(rows, folder, lambda *_: None, on_start, workers, tolerant=True)


def _best(candidates: Sequence[_Candidate], folder: Path, rounds: int, most: int) -> list[_Candidate]:
    """Return the best candidates after a round, in the order of the grid; those that diverged come last."""
    vals = [c.val(folder, rounds) for c in candidates]
    order = sorted(range(len(candidates)), key=lambda i: (vals[i] is None, -(vals[i] or 0.0), i))
    return [candidates[i] for i in sorted(order[:most])]


def _for_search(e: Experiment, rounds: int, every: int) -> Experiment:
    """Return the experiment with validation images held out, scored only where candidates are compared."""
    return e.model_copy(
        update={
            "data": e.data.model_copy(update={"val": e.data.val or HELD_OUT}),
            "train": e.train.model_copy(update={"rounds": rounds}),
            "run": e.run.model_copy(
                update={
                    "eval_every": every,
                    "until_accuracy": None,
                    "keep": "last",
                    "patience": None,
                    "track": None,
                    "clinical": False,
                }
            ),
        }
    )


def _val_after(run: Run, rounds: int) -> float | None:
    if not (run.folder / "rounds.jsonl").is_file():
        return None
    views = next((row["views"] for row in run.rounds if row["round"] == rounds), None)
    return None if views is None else views["personal"].get("val")


def _points(grid: Mapping[str, Sequence[Any]]) -> list[Values]:
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def _ascending(values: Sequence[Any]) -> list[Any]:
    """Sort numbers; other values keep their order."""
    return sorted(set(values)) if all(_is_number(value) for value in values) else list(dict.fromkeys(values))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def edge(values: Sequence[Any], chosen: Any) -> str:
    """Return whether a chosen number is the smallest or the largest of those tried."""
    if len(values) < 2 or not all(_is_number(value) for value in values):
        return ""
    return "smallest" if chosen == min(values) else "largest" if chosen == max(values) else ""


def _beyond(rates: Sequence[float], chosen: float) -> float | None:
    """Return the next rate outside the grid, if the chosen one lies at its edge."""
    side = edge(rates, chosen)
    return None if not side else rounded(chosen / _STEP if side == "smallest" else chosen * _STEP)


def rounded(rate: float) -> float:
    """Return a rate with two digits, as people write it."""
    return float(f"{rate:.2g}")


def _words(values: Values) -> str:
    return ",".join(f"{path.rpartition('.')[2]}={value}" for path, value in values.items())
