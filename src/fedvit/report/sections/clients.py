"""The section "Every client": a collapsible part for each row, with bars, confusion matrices and chosen layers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup

from fedvit.report import svg
from fedvit.report.sections.confusion import Confusion, confusion
from fedvit.report.sections.layers import Layers, layers
from fedvit.report.sections.parts import MOST_DETAILS, Group
from fedvit.report.statistics import LOCAL, Record, Row, Unit, accuracy, by_unit, mean
from fedvit.report.svg import Bar
from fedvit.report.units import client, percent

MOST_BARS = 60  # clients with a bar of their own
_MOST_IN_COLUMN = 24  # more bars than this are drawn in two columns


@dataclass(frozen=True)
class Fold:
    """The clients of one row."""

    title: str
    bars: Sequence[Markup]
    caption: str
    confusion: Confusion | None
    layers: Layers | None


@dataclass(frozen=True)
class Clients:
    """The collapsible parts of the best rows, best first."""

    intro: str
    folds: Sequence[Fold]


def clients(group: Group) -> Clients | None:
    """Prepare the section."""
    rows = [row for row in group.ranked if row.mean is not None and row.first.clients]
    if not rows:
        return None
    return Clients(_intro(rows), [_fold(row) for row in rows[:MOST_DETAILS]])


def _intro(rows: Sequence[Row]) -> str:
    """Say which seeds and rows are shown."""
    parts = []
    if any(len(row.records) > 1 for row in rows):
        alike, other = (
            "Bars are means over seeds, matrices are of the first seed.",
            "Clients of the first seed. With another seed, clients hold other images.",
        )
        parts.append(alike if rows[0].same_owners else other)
    if len(rows) > MOST_DETAILS:
        parts.append(f"The {MOST_DETAILS} best of {len(rows)} rows are shown.")
    return " ".join(parts)


def _fold(row: Row) -> Fold:
    record = row.first
    seeds = f"seed {record.seed}"
    if row.same_owners and len(row.records) > 1:
        record, seeds = _averaged(row), f"seeds {', '.join(map(str, row.seeds))}"
    title = f"{row.label}: {percent(mean(accuracy(record).values()))} % ({seeds})"
    charts, caption = _bars(record)
    return Fold(title, charts, caption, confusion(row.first), layers(row.first))


def _averaged(row: Row) -> Record:
    """Return the first run with every site's accuracy and gain averaged over seeds, by the rule of `by_unit`."""
    means = by_unit({record.seed: accuracy(record) for record in row.records}, row.first.partition)
    lines = [
        {**line, "personal_accuracy": means[Unit(line["client"])]}
        for line in {line["client"]: line for record in reversed(row.records) for line in record.clients}.values()
    ]
    gains = {unit.name: gain for unit, gain in row.unit_gains.items()}
    return replace(row.first, clients=lines, gains=gains)


def _bars(record: Record) -> tuple[list[Markup], str]:
    """Draw every client's accuracy, sorted and with a mark for Local, in one or two charts with one caption."""
    ordered = sorted(record.clients, key=lambda row: -row["personal_accuracy"])
    bars: list[Bar | str] = []
    for row in ordered:
        gain = record.gains.get(row["client"])
        alone = None if gain is None or record.method == LOCAL else row["personal_accuracy"] - gain
        told = f"{client(row['client'])}: {row['personal_accuracy']:.1f} % of {row['test_samples']} test images"
        told += "" if alone is None else f", alone {alone:.1f} %"
        bars.append(Bar(row["client"], row["personal_accuracy"], alone, told))
    hidden = len(bars) - MOST_BARS
    if hidden > 0:
        half = MOST_BARS // 2
        bars = [*bars[:half], f"… {hidden} clients between …", *bars[-half:]]
    best, worst = (
        f"{client(row['client'])} with {row['personal_accuracy']:.1f} %" for row in (ordered[0], ordered[-1])
    )
    alt = f"Accuracy of every client, sorted: from {worst} to {best}"
    middle = len(bars) if len(bars) <= _MOST_IN_COLUMN else (len(bars) + 1) // 2
    charts = [svg.bar_chart(column, alt, "accuracy, %") for column in (bars[:middle], bars[middle:]) if column]
    return charts, _caption(record, bars)


def _caption(record: Record, bars: Sequence[Bar | str]) -> str:
    words = "Accuracy of each client's own model, best first."
    if any(isinstance(bar, Bar) and bar.mark is not None for bar in bars):
        words += (
            " The black or white mark is Local. A bar that ends before the mark, in the other color, is a client "
            "that is hurt."
        )
    if len(record.clients) > MOST_BARS:
        words += f" The {MOST_BARS // 2} best and worst of {len(record.clients)} clients are shown."
    never = sum(row["rounds_trained"] == 0 for row in record.clients)
    return words + (f" {never} of them {'was' if never == 1 else 'were'} never sampled." if never else "")
