"""The command `fedvit search`: from its flags to a search for every row."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedvit.config.hashing import settings_hash
from fedvit.config.load import read_tables
from fedvit.core.errors import UserError
from fedvit.core.settings import PLANNED
from fedvit.engine.loop import Round
from fedvit.studies.compare import make_row
from fedvit.studies.rates import auto_rates
from fedvit.studies.rows import OnStart, Row, refuse_unused
from fedvit.studies.search import Found, Make, Schedule, Values, search


@dataclass(frozen=True)
class RowSearch:
    """One row's search: how to make its candidates, the values to try, and how long they train."""

    row: Row
    make: Make
    over: Mapping[str, Sequence[Any]]
    schedule: Schedule

    @property
    def candidates(self) -> int:
        count = 1
        for values in self.over.values():
            count *= len(set(values))
        return count

    @property
    def rounds(self) -> int:
        planned = self.row.first.train.schedule in PLANNED
        return self.schedule.rounds(self.candidates, planned=planned) * len(self.row.experiments)


def prepare_searches(
    texts: Sequence[str],
    over: Mapping[str, Sequence[Any]],
    *,
    halving: bool,
    seeds: Sequence[int],
    base: Path | None,
    sets: Mapping[str, Any],
    flags: Mapping[str, Any],
) -> list[RowSearch]:
    """Resolve every row and check every value before anything is trained."""
    under = read_tables(base) if base else {}
    both = [path for path in over if path in sets]
    if both:
        raise UserError(f"--over and --set both give {both[0]}: leave one of them out")

    def made(text: str, values: Values) -> Row:
        return make_row(text, seeds, under, {**sets, **values}, flags)

    searches = []
    for text in dict.fromkeys(texts):
        row = made(text, {})
        grid = over or auto_rates(row.first)
        schedule = (Schedule.halving if halving else Schedule.grid)(row.first.train.rounds)
        searches.append(RowSearch(row, partial(made, text), grid, schedule))
        for path, values in grid.items():
            for value in values:
                made(text, {path: value})  # an impossible value is refused here
    refuse_unused([*sets, *over], [one.row for one in searches])
    return searches


def search_folder(searches: Sequence[RowSearch]) -> Path:
    """Name one folder for all searches with the same settings, so that finished runs are found again."""
    more = [[one.over, one.schedule.rungs, list(one.row.experiments)] for one in searches]
    digest = settings_hash(*(one.row.first for one in searches), more=more)[:8]
    return Path("runs") / f"search-{Path(searches[0].row.first.data.name).stem}-{digest}"


def run_searches(
    searches: Sequence[RowSearch], folder: Path, on_start: OnStart, workers: int | None
) -> Generator[Round, None, list[Found]]:
    """Search for every row in turn."""
    found = []
    for one in searches:
        steps = search(one.row.label, one.make, one.over, one.schedule, folder, on_start=on_start, workers=workers)
        found.append((yield from steps))
    return found
