"""The cells of a study before anything runs: what each one varies, and what the paper reports for it."""

from collections.abc import Mapping
from dataclasses import dataclass

from fedvit.config.tables import Tables
from fedvit.studies.published.common import Table, rows_of, settings_of


@dataclass(frozen=True)
class Case:
    """One cell of a study's table."""

    row: str
    column: str  # empty if the table has a single column
    settings: Tables
    published: str = ""  # what the paper reports
    targets: tuple[float, ...] = ()  # accuracies in percent whose cost the study measures
    costs: tuple[str, ...] = ()  # what the paper reports for a round and for every target, in its own way of counting


def grid(
    base: Tables,
    rows: Mapping[str, Tables],
    columns: Mapping[str, Tables] | None = None,
    targets: tuple[float, ...] = (),
) -> list[Case]:
    """Make a case for every row in every column."""
    return [
        Case(row, column, settings_of(base, here, own), targets=targets)
        for column, here in (columns or {"": {}}).items()
        for row, own in rows.items()
    ]


def panels(base: Tables, rows: Mapping[str, Mapping[str, Tables]]) -> list[Case]:
    """Make the cases for columns that have rows of their own."""
    return [case for column, own in rows.items() for case in grid(base, own, {column: {}})]


def of_table(*tables: Table, targets: Mapping[str, tuple[float, ...]] | None = None) -> list[Case]:
    """Make a case for every cell of published tables, column by column; a single column needs no name."""
    cells = [(column, name, value, settings) for t in tables for name, column, value, settings, _ in rows_of(t)]
    names = list(dict.fromkeys(column.words for column, *_ in cells))
    found = [
        Case(
            name,
            column.words if len(names) > 1 else "",
            settings,
            "" if value == "figure" else value,
            (targets or {}).get(column.words, ()),
        )
        for column, name, value, settings in cells
    ]
    return sorted(found, key=lambda case: names.index(case.column) if case.column else 0)
