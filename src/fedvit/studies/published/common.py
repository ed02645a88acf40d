"""What the papers' modules share: a table of a paper, its columns, and the settings of each of its cells.

Every paper has a module of its own, which holds its settings and its published figures. `experiments/published.py`
writes some of the tables as experiment files, and `fedvit study --paper` runs all of them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fedvit.config.tables import TABLES, Tables, stack_tables

NOT_CLIPPED: Tables = {"train": {"clip_grad": 0.0}}  # no paper clips gradients; by default, pre-trained weights do
SIZES = {  # the images, classes and official test images of datasets that may not be on this machine
    "organamnist": (58_850, 11, 17_778), "office_home": (15_500, 65, 0), "lyme": (3_027, 4, 0),
    "tiny-imagenet-200": (110_000, 200, 10_000),
}  # fmt: skip


@dataclass(frozen=True)
class Column:
    """A column of a table: its folder, its title, where its settings differ from the paper's, and what is not given."""

    folder: str
    words: str
    settings: Tables
    note: str = ""


@dataclass(frozen=True)
class Table:
    """A table of a paper. `row` returns the settings of a row in a given column, and a note on them."""

    folder: str  # paper/table
    words: str
    settings: Tables
    columns: Sequence[Column]
    published: str  # one line per row: our name of the method, then one value per column
    row: Callable[[str, Column], tuple[Tables, str]]
    what: str = ""  # what a value is, if it is no accuracy


def settings_of(*layers: Tables) -> Tables:
    """Stack the layers of a cell, and order the tables as an experiment file lists them."""
    merged = stack_tables(layers)
    return {name: merged[name] for name in TABLES if merged.get(name)}


def method(name: str, lr: float | None = None, **options: Any) -> Tables:
    """Return the tables of a row: its method with options and, if it has one, its own learning rate."""
    return {"method": {"name": name, **options}, **({} if lr is None else {"train": {"lr": lr}})}


def rows_of(table: Table) -> Iterator[tuple[str, Column, str, Tables, str]]:
    """Yield row, column, published value, settings and note of every cell; a value of - means that there is none."""
    for line in table.published.strip().splitlines():
        name, *values = line.split()
        for column, value in zip(table.columns, values, strict=True):
            if value != "-":
                own, note = table.row(name, column)
                settings = settings_of(table.settings, column.settings, own)
                model = settings.get("model", {})
                unclipped = NOT_CLIPPED if model.get("pretrained") or model.get("weights") else {}
                yield name, column, value, settings_of(unclipped, settings), note
