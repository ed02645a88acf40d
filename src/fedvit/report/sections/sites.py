"""The section "Every client under every row": accuracy and gain with intervals, and who gains or is hurt."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedvit.report.sections.parts import MOST_DETAILS, Group
from fedvit.report.sites import SiteScore, site_scores, unit_names, units_of
from fedvit.report.statistics import LOCAL, Row, Unit
from fedvit.report.units import decimal, percent, points, whole_points
from fedvit.report.verdict import site_sentence

MOST_SITES = 30  # units in the table


@dataclass(frozen=True)
class SiteCell:
    """One unit under one row; `verdict` is also the class of its color."""

    accuracy: str
    more: str
    gain: str = ""
    verdict: str = ""


@dataclass(frozen=True)
class SiteLine:
    """One unit, with a cell for every row; None where the row does not have the unit."""

    name: str
    cells: Sequence[SiteCell | None]


@dataclass(frozen=True)
class Sites:
    """A sentence about every row, what is left out, the rows as columns, and a line for every unit."""

    sentences: Sequence[str]
    left_out: str
    who: str
    head: Sequence[str]
    lines: Sequence[SiteLine]
    compared: bool


def sites(group: Group) -> Sites | None:
    """Prepare the section; None before the first evaluation."""
    scored = [row for row in group.ranked if row.mean is not None and row.first.clients]
    if not scored:
        return None
    local = [row for row in scored if row.method == LOCAL][:1]
    rows = [*local, *[row for row in scored if row not in local][: MOST_DETAILS - len(local)]]
    scores = {row.label: {score.unit: score for score in site_scores(row, group.rows)} for row in rows}
    units = units_of(rows)
    shown = _shown(units, rows, scores)
    names = unit_names(units)
    who = "site" if rows[0].same_owners else "client"
    lines = [SiteLine(names[unit], [_cell(scores[row.label].get(unit)) for row in rows]) for unit in shown]
    sentences = [site_sentence(list(scores[row.label].values())) for row in rows]
    left_out = ""
    if len(shown) < len(units):
        left_out += (
            f" The {len(shown)} of {len(units)} {who}s that lose or gain most under {_reference(rows).label} are "
            "shown; sites.csv has all."
        )
    if len(rows) < len(scored):
        left_out += f" The {len(rows)} best of {len(scored)} rows are shown."
    compared = any(score.verdict for own in scores.values() for score in own.values())
    return Sites([words for words in sentences if words], left_out, who, [row.label for row in rows], lines, compared)


def _reference(rows: Sequence[Row]) -> Row:
    """Return the best row that is not Local, or else Local."""
    return next((row for row in rows if row.method != LOCAL), rows[0])


def _shown(units: Sequence[Unit], rows: Sequence[Row], scores: dict[str, dict[Unit, SiteScore]]) -> Sequence[Unit]:
    """Choose the units to show: all, or those with the largest losses and gains under the best row."""
    if len(units) <= MOST_SITES:
        return units
    own = scores[_reference(rows).label]
    ordered = sorted(own, key=lambda unit: own[unit].accuracy if (gain := own[unit].gain) is None else gain)
    half = MOST_SITES // 2
    return [*ordered[:half], *ordered[-half:]]


def _cell(score: SiteScore | None) -> SiteCell | None:
    if score is None:
        return None
    low, high = score.interval
    accuracy = f"{score.accuracy:.1f} % ({low:.0f} … {high:.0f})"
    more = f"balanced {percent(score.balanced)} %"
    more += "" if score.auroc is None else f", AUROC {decimal(score.auroc)}"
    if score.gain is None:
        return SiteCell(accuracy, more)
    gain = points(score.gain)
    if score.gain_interval is not None:
        gain += f" ({whole_points(score.gain_interval[0])} … {whole_points(score.gain_interval[1])})"
    return SiteCell(accuracy, more, gain, score.verdict)
