"""Learning rates by search: `--lr auto` and `--lr a,b,c` of a run or a comparison."""

import math
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedvit.config.hashing import settings_hash
from fedvit.core.errors import UserError
from fedvit.core.settings import PLANNED, Experiment
from fedvit.engine.loop import Round
from fedvit.studies.rows import OnStart, Row
from fedvit.studies.search import LR, Schedule, Values, rounded, save_search, search

AUTO = "auto"
AUTO_FACTORS = (0.1, 0.3, 1.0, 3.0)  # times the rate that holds without a search

Rates = Sequence[float] | None  # those to try; None: some around each row's own


def parse_rates(text: str | None) -> tuple[float | None, bool, Rates]:
    """Parse `--lr`: a single rate or none; whether to search; and the rates to search among."""
    if text is None or text == AUTO:
        return None, text == AUTO, None
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError as problem:
        raise UserError(f"--lr expects a number, several separated by commas, or auto, found {text!r}") from problem
    if len(rates) == 1:
        return rates[0], False, None
    if not all(0 < rate < math.inf for rate in rates):
        raise UserError(f"--lr expects rates above 0, found {text!r}")
    return None, True, rates


def auto_rates(experiment: Experiment) -> dict[str, list[Any]]:
    """Return the rates that `--lr auto` tries: around the one that holds without a search."""
    assert experiment.train.lr is not None
    return {LR: [rounded(factor * experiment.train.lr) for factor in AUTO_FACTORS]}


def with_values(row: Row, values: Values) -> Row:
    """Return the row with this learning rate, on which no other setting depends."""
    experiments = {
        seed: e.model_copy(update={"train": e.train.model_copy(update={"lr": values[LR]})})
        for seed, e in row.experiments.items()
    }
    return replace(row, experiments=experiments)


def search_rates(
    rows: Sequence[Row],
    rates: Rates,
    folder: Path,
    *,
    on_start: OnStart = lambda *_: None,
    workers: int | None = 1,
) -> Generator[Round, None, list[Row]]:
    """Search a learning rate for every row, on its first seed, and return the rows at the rates that were chosen.

    Without `rates`, each row tries some around its own; a best one at the edge makes the search look further.
    """
    chosen, found = [], []
    for row in rows:
        first = replace(row, experiments=dict([next(iter(row.experiments.items()))]))
        over = auto_rates(row.first) if rates is None else {LR: list(rates)}
        one = yield from search(
            row.label,
            lambda values, first=first: with_values(first, values),  # type: ignore[misc]
            over,
            Schedule.short(row.first.train.rounds),
            folder,
            widen=rates is None,
            on_start=on_start,
            workers=workers,
        )
        found.append(one)
        chosen.append(replace(with_values(row, one.chosen), search=one.to_json()))
    save_search(folder / "search.json", found)
    return chosen


def rates_folder(row: Row, rates: Rates) -> Path:
    """Name one folder for all searches for this row's rate, so that finished runs are found again."""
    digest = settings_hash(row.first, without=("train.lr",), more=rates)[:8]
    return Path("runs") / f"search-{row.label}-{Path(row.first.data.name).stem}-{digest}"


def words_of_search(rows: Sequence[Row], rates: Rates) -> str:
    """Say what `search_rates` will do."""
    count = len(AUTO_FACTORS) if rates is None else len(set(rates))
    plans = dict.fromkeys(Schedule.short(row.first.train.rounds).words(count) for row in rows)
    return f"{len(rows)} row{'s' * (len(rows) != 1)} ({'; '.join(plans)})"


def planned_rounds(row: Row, rates: Rates) -> int:
    """Return the rounds that `search_rates` will train for a row, unless it must look beyond its grid."""
    count = len(AUTO_FACTORS) if rates is None else len(set(rates))
    return Schedule.short(row.first.train.rounds).rounds(count, planned=row.first.train.schedule in PLANNED)
