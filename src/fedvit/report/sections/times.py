"""The section "Where the time went"."""

from dataclasses import dataclass

from fedvit.report import svg
from fedvit.report.sections.parts import Figure, Group, Line, Table
from fedvit.report.statistics import mean
from fedvit.report.units import duration

_PHASES = ("set up", "data", "train", "updates", "aggregate", "store", "evaluate", "checkpoint")


@dataclass(frozen=True)
class Times:
    """The time of every phase, as bars and as numbers."""

    figure: Figure
    table: Table


def times(group: Group) -> Times | None:
    """Prepare the section; None if no row has been timed."""
    rows = [row for row in group.ranked if row.seconds]
    if not rows:
        return None
    phases = list(dict.fromkeys(phase for row in rows for record in row.records for phase in record.phases))
    phases.sort(key=lambda phase: _PHASES.index(phase) if phase in _PHASES else len(_PHASES))
    bars = []
    for row in rows:
        timed = [record.phases for record in row.records if record.phases]
        seconds = [mean([spent.get(phase, 0.0) for spent in timed]) or 0.0 for phase in phases]
        bars.append((row.label, seconds, duration(sum(seconds))))
    alt = "Time of each row: " + ", ".join(f"{name} {words}" for name, _, words in bars[:12])
    caption = (
        "Wall time of one run by phase, averaged over seeds. Times of rows that shared a machine with other work are "
        "not comparable."
    )
    legend = [(f"p{number}", phase) for number, phase in enumerate(phases)]
    lines = [Line(name, [duration(value) for value in seconds]) for name, seconds, _ in bars]
    return Times(
        Figure(svg.stacked_bars(bars, phases, alt), caption, legend), Table("Time by phase", ["row", *phases], lines)
    )
