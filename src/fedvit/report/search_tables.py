"""Tables and sentences about a search, for the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from fedvit.report import units
from fedvit.report.tables import plain_table

Found = Mapping[str, Any]  # one row's entry in search.json


def search_table(found: Sequence[Found], *, several_labels: bool = False) -> Table:
    """Make a table with one line per candidate: its score on validation images after each stage."""
    score = "mean AUROC of the labels, %," if several_labels else "accuracy %"
    table = plain_table(f"search, {score} on validation images")
    table.add_column("row", overflow="fold")
    table.add_column("tried", overflow="fold")
    stages = sorted({int(number) for one in found for trial in one["trials"] for number in trial["val"]})
    for number in stages:
        table.add_column(f"round {number}", justify="right", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    for one in found:
        trials = sorted(one["trials"], key=lambda trial: _order(trial["values"]))
        for place, trial in enumerate(trials):
            picked = trial["values"] == one["chosen"]
            vals = {int(number): value for number, value in trial["val"].items()}
            table.add_row(
                escape(one["label"]) if place == 0 else "",
                ("✓ " if picked else "  ") + escape(settings_words(trial["values"])),
                *(f"{vals[number]:.1f}" if number in vals else "diverged" if not vals else "" for number in stages),
                units.duration(trial["seconds"]),
                style="bold" if picked else "",
            )
    return table


def _order(values: Mapping[str, Any]) -> tuple[tuple[int, float, str], ...]:
    return tuple((0, float(v), "") if isinstance(v, int | float) else (1, 0.0, str(v)) for v in values.values())


def settings_words(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{path}={value}" for path, value in values.items())


def found_lines(found: Sequence[Found]) -> list[str]:
    """Say what was chosen for each row, what the search cost, and where to look further."""
    lines = []
    for one in found:
        lines.append(
            f"{one['label']}: {settings_words(one['chosen'])} (val {one['val']:.1f} %), found in {one['rounds']} "
            f"rounds, {units.duration(one['seconds'])}, {units.nbytes(one['nbytes'])}"
        )
        for path, side in one["at_edge"].items():
            lines.append(
                f"  {path}={one['chosen'][path]} is the {side} value tried: a {_further(side)} one may be better"
            )
    return lines


def _further(side: str) -> str:
    return "smaller" if side == "smallest" else "larger"
