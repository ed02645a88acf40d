"""The section "Accuracy by round and by traffic", with the cost of reaching a target accuracy."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedvit.report import svg
from fedvit.report.sections.parts import Figure, Group, Line, Table
from fedvit.report.statistics import POOLED, Row
from fedvit.report.svg import Series
from fedvit.report.units import nbytes, percent

WHOSE = {"personal": "each client's own model", "server": "the server's model"}


@dataclass(frozen=True)
class Rounds:
    """The charts, and the rounds and bytes to each target. `asked` is true if the user chose the target."""

    figures: Sequence[Figure]
    targets: Table | None
    asked: bool
    whose: str = ""  # the view of the targets, in words


def rounds(group: Group) -> Rounds | None:
    """Prepare the section."""
    shown = [row for row in group.ranked if row.label in group.colors and row.curve]
    lengths = [len(row.curve) for row in shown]
    figures = [_by_round(group, shown)] if max(lengths, default=0) > 1 else []  # one point makes no curve
    figures += _by_traffic(group, shown) if figures or len(shown) > 1 else []
    targets = _to_target(group)
    whose = WHOSE.get(group.view, f"the view {group.view}")
    return Rounds(figures, targets, group.target is not None, whose) if figures or targets else None


def _by_round(group: Group, shown: Sequence[Row]) -> Figure:
    lines = [
        Series(row.label, group.colors[row.label], [p[0] for p in row.curve], [p[1] for p in row.curve])
        for row in shown
    ]
    last = ", ".join(f"{row.label} {percent(row.mean)} %" for row in shown)
    alt = f"Accuracy by round. At the end: {last}"
    return Figure(
        svg.line_chart(lines, "round", "mean accuracy, %", alt, whole=True),
        f"Mean accuracy of the own models of all clients, by round.{group.left_out}",
        [(f"s{one.color}", one.name) for one in lines],
    )


def _by_traffic(group: Group, shown: Sequence[Row]) -> list[Figure]:
    """Draw the same accuracy against the bytes sent. A row that sends nothing is a dashed line."""
    talking = [row for row in shown if row.curve[-1][2] > 0]
    if not talking:
        return []
    totals = [row.curve[-1][2] for row in talking]
    log = max(totals) > 20 * min(totals)
    lines = [
        Series(row.label, group.colors[row.label], [p[2] / 1e6 for p in row.curve], [p[1] for p in row.curve])
        for row in talking
    ]
    if log:
        lines = [one for one in map(_without_zero, lines) if one.xs]
    levels = [
        Series(row.label, group.colors[row.label], [0], [row.curve[-1][1]]) for row in shown if row.curve[-1][2] == 0
    ]
    words = f"megabytes sent so far, both ways, all clients{' (logarithmic)' if log else ''}"
    alt = "Accuracy against traffic. In total: " + ", ".join(
        f"{row.label} {nbytes(row.curve[-1][2])}" for row in talking
    )
    legend = [(f"s{one.color}", one.name) for one in lines]
    legend += [(f"dashed s{one.color}", f"{one.name} (sends nothing)") for one in levels]
    chart = svg.line_chart(lines, words, "mean accuracy, %", alt, levels=levels, log=log)
    caption = "The same accuracy against the traffic: further up and to the left is better."
    return [Figure(chart, caption, legend)]


def _without_zero(one: Series) -> Series:
    kept = [(x, y) for x, y in zip(one.xs, one.ys, strict=True) if x > 0]
    return Series(one.name, one.color, [x for x, _ in kept], [y for _, y in kept])


def _targets_of(rows: Sequence[Row], view: str) -> list[float]:
    """Choose up to three round numbers between chance and the best accuracy; none if no row is better than chance."""
    top = max(point[1] for row in rows for point in row.curve_of(view))
    chance = 100 / max(2, len(rows[0].first.class_names))
    step = 5.0 if top - chance > 15 else 1.0
    wanted = (chance + share * (top - chance) for share in (0.5, 0.75, 0.95))
    return sorted({goal for value in wanted if (goal := step * int(value / step)) > chance})


def _to_target(group: Group) -> Table | None:
    """List the rounds and bytes until each row that has the view reaches a target, as FedPEFT's Table 2 does."""
    rows = [row for row in group.ranked if row.curve_of(group.view) and row.method != POOLED]
    if not rows:
        return None
    goals = [group.target] if group.target is not None else _targets_of(rows, group.view)
    if not goals:
        return None
    lines = [Line(row.label, [_cost_until(row, group.view, goal) for goal in goals]) for row in rows]
    return Table("Cost to reach a target", ["row", *(f"to {goal:g} %" for goal in goals)], lines)


def _cost_until(row: Row, view: str, goal: float) -> str:
    reached = next((point for point in row.curve_of(view) if point[1] >= goal), None)
    return f"round {reached[0]}, {nbytes(reached[2])}" if reached else "-"
