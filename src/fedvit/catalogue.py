"""What there is to choose from, read off the methods and tunes themselves."""

import inspect
import sys
from typing import Any, Literal

from rich.table import Table

from fedvit.methods import METHODS
from fedvit.report.tables import plain_table
from fedvit.tunes import TUNES


def catalogue(kind: Literal["methods", "tunes"]) -> list[dict[str, Any]]:
    """Name, one sentence and options of each. A method's sentence is the first line of its file."""
    entries = []
    for name, function in (METHODS if kind == "methods" else TUNES).items():
        text = sys.modules[function.__module__].__doc__ if kind == "methods" else function.__doc__
        parameters = inspect.signature(function).parameters
        defaults = {key: parameter.default for key, parameter in parameters.items()}
        entries.append({"name": name, "summary": (text or "").strip().splitlines()[0], "options": defaults})
    return entries


def catalogue_tables() -> list[Table]:
    """Methods and tunes for the terminal."""
    tables = []
    for kind in ("methods", "tunes"):
        table = plain_table(kind)
        table.add_column(kind.removesuffix("s"), no_wrap=True)
        table.add_column("what it does")
        table.add_column("options (--set)")
        for entry in catalogue(kind):
            options = ", ".join(f"{key}={value}" for key, value in entry["options"].items())
            table.add_row(entry["name"], entry["summary"], options)
        tables.append(table)
    return tables
