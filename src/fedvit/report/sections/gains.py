"""The section "Gain of every client over Local"."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedvit.report import svg
from fedvit.report.sections.parts import Figure, Group, Line, Table
from fedvit.report.sites import unit_names
from fedvit.report.statistics import LOCAL, Row, mean
from fedvit.report.svg import Dots, Series
from fedvit.report.units import client, points

_LEAST_FOR_DENSITY = 8  # units; fewer are drawn one by one


@dataclass(frozen=True)
class Gains:
    """The distribution and its quantiles. Both are None if no row can be compared with Local."""

    figure: Figure | None = None
    table: Table | None = None


def gains(group: Group) -> Gains | None:
    """Prepare the section, which resembles FedPerfix's Figure 3."""
    shown = [row for row in group.ranked if row.label in group.colors and row.method != LOCAL and row.gains]
    if shown:
        few = min(len(row.gains) for row in shown) < _LEAST_FOR_DENSITY
        return Gains(_points(group, shown) if few else _spread(group, shown), _quantiles(shown))
    return Gains() if any(row.method != LOCAL for row in group.ranked) else None


def _spread(group: Group, shown: Sequence[Row]) -> Figure:
    every = [gain for row in shown for gain in row.gains]
    grid = np.linspace(min(every) - 6, max(every) + 6, 121).tolist()
    lines = [Series(row.label, group.colors[row.label], grid, _density(row.gains, grid)) for row in shown]
    shares = ", ".join(f"{row.label} {_gaining(row)}" for row in shown)
    alt = f"Density of the clients' gains over Local. Share of clients that gain: {shares}"
    chart = svg.line_chart(lines, "gain over Local, points", "clients", alt, bare_y=True, zero=True)
    caption = (
        "Distribution of the clients' gains. To the right of the dotted line, a client is better off than alone. "
        f"There is one value per {_unit(shown[0])}.{group.left_out}"
    )
    return Figure(chart, caption, [(f"s{one.color}", one.name) for one in lines])


def _points(group: Group, shown: Sequence[Row]) -> Figure:
    """Draw every unit as a dot, because a density over a few values shows hills that nobody measured."""
    rows = []
    for row in shown:
        names = unit_names(row.unit_gains)
        dots = [(gain, f"{client(names[unit])}: {points(gain)}") for unit, gain in row.unit_gains.items()]
        rows.append(Dots(row.label, group.colors[row.label], dots))
    shares = ", ".join(f"{row.label} {_gaining(row)}" for row in shown)
    alt = f"Gain of every client over Local. Share of clients that gain: {shares}"
    caption = (
        f"Every dot is a {_unit(shown[0])}, every bar the mean. To the right of the dotted line, a client is better "
        f"off than alone.{group.left_out}"
    )
    return Figure(svg.dot_chart(rows, "gain over Local, points", alt), caption)


def _unit(row: Row) -> str:
    return "site" if row.same_owners else "client" if len(row.records) == 1 else "client of one seed"


def _density(values: Sequence[float], grid: Sequence[float]) -> list[float]:
    """Estimate the density with a Gaussian kernel and Scott's bandwidth, but at least one point wide."""
    data = np.asarray(values)
    width = max(1.0, float(data.std()) * len(data) ** -0.2)
    apart = (np.asarray(grid)[:, None] - data[None, :]) / width
    return [float(v) for v in np.exp(-0.5 * apart**2).sum(1) / (len(data) * width * np.sqrt(2 * np.pi)) * 100]


def _gaining(row: Row) -> str:
    return f"{100 * np.mean(np.asarray(row.gains) > 0):.0f} %"


def _quantiles(shown: Sequence[Row]) -> Table:
    lines = []
    for row in shown:
        least, median, most = (points(float(value)) for value in np.percentile(row.gains, (0, 50, 100)))
        lines.append(Line(row.label, [points(mean(row.gains)), least, median, most, _gaining(row)]))
    note = "Gain over Local in points, and the share of clients that gain."
    return Table("Gains over Local", ["row", "gain", "least", "median", "most", "gaining"], lines, note)
