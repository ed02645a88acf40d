"""The parts that sections share: the group of rows that they describe, figures and tables."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from markupsafe import Markup

from fedvit.report.statistics import LOCAL, Row, rank
from fedvit.report.verdict import eligible

MOST_LINES = 10  # rows in a chart; there are as many colors
MOST_DETAILS = 8  # rows whose clients are shown one by one
MOST_NAMES = 60  # clients in a heat map


@dataclass(frozen=True)
class Group:
    """The rows on one dataset and partition, the target accuracy if the user gave one, and whose accuracy it is."""

    rows: Sequence[Row]
    target: float | None = None
    view: str = "personal"

    @cached_property
    def ranked(self) -> list[Row]:
        """The rows, best first."""
        return rank(self.rows)

    @cached_property
    def eligible(self) -> list[Row]:
        """The rows that may be called best."""
        return eligible(self.rows)

    @cached_property
    def colors(self) -> dict[str, int]:
        """The rows that charts show, each with its color: Local, which is always shown in gray, and the best ones."""
        shown = [row for row in self.ranked if row.mean is not None]
        local = [row for row in shown if row.method == LOCAL][:1]
        others = [row for row in shown if row not in local][: MOST_LINES - 1]
        return {row.label: 0 for row in local} | {row.label: number + 1 for number, row in enumerate(others)}

    @property
    def left_out(self) -> str:
        """A sentence about the rows that charts leave out; empty if they show all rows."""
        scored = sum(row.mean is not None for row in self.ranked)
        if len(self.colors) == scored:
            return ""
        return f" {len(self.colors)} of {scored} rows are drawn: the best ones, and Local if there is one."


@dataclass(frozen=True)
class Figure:
    """A chart with its caption. A chart that scrolls keeps a readable size on a narrow screen."""

    chart: Markup
    caption: str
    legend: Sequence[tuple[str, str]] = ()  # (class of the color, name)
    scrolls: bool = False


@dataclass(frozen=True)
class Line:
    """One line of a table. `kind` is its CSS class, and the badge follows its name."""

    name: str
    cells: Sequence[str]
    kind: str = ""
    badge: str = ""


@dataclass(frozen=True)
class Table:
    """A table. Headings may contain line breaks, and screen readers announce the table by its label."""

    label: str
    head: Sequence[str]
    lines: Sequence[Line]
    note: str = ""
