"""A comparison from Python: run as `fedvit compare` does, and read back as tables."""

import json
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fedvit.core.errors import UserError
from fedvit.report.load import collect
from fedvit.report.page import write_report
from fedvit.report.plots import draw_comparison
from fedvit.runs.folder import Run
from fedvit.studies import compare as comparing
from fedvit.studies.drawing import comparison_title
from fedvit.studies.rates import parse_rates, search_rates
from fedvit.studies.rows import Row, run_of

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Comparison:
    """A finished comparison: the rows of compare.json, their runs, and their clients."""

    folder: Path
    entries: Sequence[Mapping[str, Any]]
    runs: Mapping[str, Sequence[Run]]

    @property
    def clients(self) -> list[dict[str, Any]]:
        """Every client of every run: the row's label, the seed, and the columns of clients.csv."""
        return [
            {"label": label, "seed": run.summary["seed"], **client}
            for label, runs in self.runs.items()
            for run in runs
            for client in run.clients
        ]

    def frame(self) -> "pandas.DataFrame":
        """Return one line per row, with the fields of compare.json, as a DataFrame; this needs pandas."""
        return _frame(self.entries)

    def client_frame(self) -> "pandas.DataFrame":
        """Return one line per row, seed and client, as a DataFrame; this needs pandas."""
        return _frame(self.clients)


def _frame(lines: Sequence[Mapping[str, Any]]) -> "pandas.DataFrame":
    try:
        import pandas
    except ImportError as problem:
        raise UserError(
            "a DataFrame needs pandas, which is not installed: pip install pandas; without it, use .entries and "
            ".clients, which are plain lists of dictionaries"
        ) from problem
    return pandas.DataFrame([dict(line) for line in lines])


def _rates(lr: Any) -> str | None:
    """Write a rate, several of them or "auto" as `--lr` takes them."""
    if lr is None or isinstance(lr, str):
        return lr
    return ",".join(map(str, lr)) if isinstance(lr, Iterable) else str(lr)


def _finished(steps: Generator[Any, None, list[Row]]) -> list[Row]:
    """Run a search to its end, and return its rows."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return list(end.value)


def run_comparison(
    rows: Sequence[str],
    seeds: Sequence[int],
    base: Path | None,
    out: Path | None,
    workers: int | None,
    sets: Mapping[str, Any],
    flags: Mapping[str, Any],
) -> Comparison:
    """Run what is not finished, write compare.json, compare.png and report.html, and return the comparison."""
    asked = _rates(flags.get("lr"))
    rate, by_search, rates = parse_rates(asked)
    made = comparing.make_rows(rows, seeds, base, sets, {**flags, "lr": rate})
    folder = out or comparing.comparison_folder(made, {**sets, "--lr": asked} if by_search else sets)
    if by_search:
        made = _finished(search_rates(made, rates, folder / "search", workers=workers))
    for _ in comparing.compare(made, folder, workers=workers):
        pass
    done = comparing.finished_rows(made, folder)
    runs = {row.label: tuple(run_of(folder, row, seed) for seed in seeds) for row in done}
    shown = [row for group in collect([folder]) for row in group if row.label in runs]
    draw_comparison(runs, folder / "compare.png", comparison_title(shown))
    write_report([folder], folder / "report.html")
    comparing.refuse_diverged(made, folder)
    entries = json.loads((folder / "compare.json").read_text())
    return Comparison(folder, tuple(entries), MappingProxyType(runs))
