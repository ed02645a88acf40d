"""What a command prints below its table: whether to federate at all, and who gains or is hurt."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedvit.cli.flags import out

if TYPE_CHECKING:
    from fedvit.report.statistics import Row


def print_verdict(rows: "Sequence[Row]", file: Path) -> None:
    """Print the headline, and the table and sentences about every client or site; `file` holds all of it."""
    from fedvit.report.site_table import site_table
    from fedvit.report.verdict import headline

    words = headline(rows)
    if words:
        out.print(f"{words}\n", highlight=False, markup=False)
    for part in site_table(rows, str(file)):
        if isinstance(part, str):
            out.print(part, highlight=False, markup=False)
        else:
            out.print(part)
    out.print()
