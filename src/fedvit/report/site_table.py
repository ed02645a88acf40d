"""The table of every unit under every row, for the terminal."""

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from fedvit.report.sites import SiteScore, site_scores, unit_names, units_of
from fedvit.report.statistics import LOCAL, Row, Unit, rank
from fedvit.report.tables import plain_table
from fedvit.report.units import decimal, percent, points, whole_points
from fedvit.report.verdict import site_sentence

_MOST_LINES = 40  # lines of the full table; beyond that, a line per unit shows gains alone
_MOST_ROWS, _MOST_UNITS = 8, 30
_FEW = 5  # the units with the largest losses, if there are too many for a table
_WORDS = {"gains": "gains", "hurt": "hurt", "cannot be told": "cannot tell", "": ""}
_LEGEND = "▲ gains and ▼ is hurt beyond doubt; the others cannot be told."
_MARKS = {"gains": "▲", "hurt": "▼", "cannot be told": " ", "": " "}


def site_table(rows: Sequence[Row], file: str = "sites.csv") -> list[Table | str]:
    """Return tables and sentences about every unit: all of it, gains alone, or the worst losses, as it fits."""
    shown = [row for row in rank(rows) if row.mean is not None and row.first.clients]
    if not any(row.unit_gains and row.method != LOCAL for row in shown):
        return []
    hidden = len(shown) - _MOST_ROWS
    if hidden > 0:
        local = [row for row in shown if row.method == LOCAL][:1]
        shown = [row for row in shown if row not in local][: _MOST_ROWS - len(local)] + local
    units = units_of(shown)
    scores = {row.label: site_scores(row, rows) for row in shown}
    several = "clients" if not shown[0].same_owners else "sites"
    parts: list[Table | str] = []
    if len(units) > _MOST_UNITS:
        parts += [_losses(shown, scores, several), f"all {len(units)} {several}: {file}"]
    elif len(units) * len(shown) <= _MOST_LINES:
        parts.append(_full(units, shown, scores, several))
    else:
        parts += [_gains_alone(units, shown, scores, several), f"{_LEGEND} Accuracies and intervals: {file}"]
    if hidden > 0:
        parts.append(f"{hidden} more rows: {file}")
    return [*parts, *filter(None, (site_sentence(scores[row.label]) for row in shown if row.method != LOCAL))]


def _title(several: str) -> str:
    return f"{several}, with 95 % intervals over their test images"


def _full(units: Sequence[Unit], rows: Sequence[Row], scores: dict[str, list[SiteScore]], several: str) -> Table:
    """Make the table with one line per unit and row."""
    found = {(score.unit, score.row): score for several_ in scores.values() for score in several_}
    areas = any(score.auroc is not None for score in found.values())
    table = _scores_table(several, areas)
    for unit, name in unit_names(units).items():
        for number, row in enumerate(row for row in rows if (unit, row.label) in found):
            last = number == sum((unit, row.label) in found for row in rows) - 1
            score = found[unit, row.label]
            table.add_row(escape(name) if number == 0 else "", *_cells(score, areas), end_section=last)
    return table


def _losses(rows: Sequence[Row], scores: dict[str, list[SiteScore]], several: str) -> Table:
    """Make the table of the units that lose most, over all rows."""
    every = [score for row in rows for score in scores[row.label] if score.gain is not None]
    worst = sorted(every, key=lambda score: score.gain or 0.0)[:_FEW]
    areas = any(score.auroc is not None for score in worst)
    table = _scores_table(f"the {len(worst)} largest losses: {several}", areas)
    names = unit_names(score.unit for score in every)
    for score in worst:
        table.add_row(escape(names[score.unit]), *_cells(score, areas))
    return table


def _scores_table(several: str, areas: bool) -> Table:
    table = plain_table(_title(several))
    table.add_column("client", overflow="fold", max_width=16)
    table.add_column("row", overflow="fold", max_width=16)
    for name in ("accuracy %", "bal.\n%", *(["AUROC"] if areas else []), "gain over Local"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    return table


def _cells(score: SiteScore, areas: bool) -> list[str]:
    low, high = score.interval
    gain = "-" if score.gain is None else points(score.gain)
    if score.gain_interval is not None:
        gain += f" ({whole_points(score.gain_interval[0])}…{whole_points(score.gain_interval[1])})"
    return [
        escape(score.row),
        f"{score.accuracy:.1f} ({low:.0f}…{high:.0f})",
        percent(score.balanced),
        *([decimal(score.auroc)] if areas else []),
        gain,
        _WORDS[score.verdict],
    ]


def _gains_alone(units: Sequence[Unit], rows: Sequence[Row], scores: dict[str, list[SiteScore]], several: str) -> Table:
    """Make the table with one line per unit: Local's accuracy, and the gain of every other row with its verdict."""
    found = {(score.unit, score.row): score for several_ in scores.values() for score in several_}
    local = next((row for row in rows if row.method == LOCAL), None)
    others = [row for row in rows if row is not local]
    table = plain_table(f"{several}: gain over Local in points")
    table.pad_edge = False
    names = unit_names(units)
    longest = max(map(len, names.values()))
    table.add_column("client", overflow="fold", min_width=min(14, longest), max_width=16)
    if local is not None:
        table.add_column("Local\n%", justify="right", no_wrap=True)
    width = 12 if len(others) < 6 else 6  # 80 columns hold seven rows
    for row in others:
        table.add_column(escape(_folded(row.label, width)), justify="right", no_wrap=True, min_width=6)
    for unit, name in names.items():
        cells = [] if local is None else [_accuracy(found.get((unit, local.label)))]
        cells += [_gain(found.get((unit, row.label))) for row in others]
        table.add_row(escape(name), *cells)
    return table


def _folded(label: str, width: int) -> str:
    """Break a label at its plus sign and after so many letters."""
    parts = label.replace("+", "\n+").split("\n")
    return "\n".join(part[i : i + width] for part in parts for i in range(0, len(part), width))


def _accuracy(score: SiteScore | None) -> str:
    return "-" if score is None else percent(score.accuracy)


def _gain(score: SiteScore | None) -> str:
    return "-" if score is None or score.gain is None else f"{points(score.gain)}{_MARKS[score.verdict]}"
