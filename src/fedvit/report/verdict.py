"""The verdict in words, for the terminal and the page: whether to federate at all, and who gains or is hurt."""

from collections.abc import Sequence

from fedvit.report.sites import SiteScore, Verdict, site_scores, unit_names
from fedvit.report.statistics import LOCAL, POOLED, Row, interval, lead, mean, rank
from fedvit.report.units import client, decimal, points

_MOST_NAMED = 6  # a sentence names no more units than this


def eligible(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that may be called best: finished, with as many seeds as any; or else all scored rows."""
    scored = [row for row in rank(rows) if row.mean is not None]
    done = [row for row in scored if row.finished and row.method != POOLED]
    most = max((len(row.records) for row in done), default=0)
    return [row for row in done if len(row.records) == most] or scored


def headline(rows: Sequence[Row]) -> str:
    """Say whether to federate at all, and how the best row compares with the second, Local included."""
    able = eligible(rows)
    words = _headline(able, rows)
    if not able or not able[0].several_labels:
        return words
    alone = next((row for row in rows if row.method == LOCAL and row is not able[0]), None)
    first = f"{able[0].label} has the highest mean AUROC of the labels, {decimal(able[0].headline)}"
    local = "" if alone is None else f"; training alone has {decimal(alone.headline)}"
    return f"{first}{local}. " + (f"In accuracy, the share of right answers to labels: {words}" if words else "")


def _headline(able: Sequence[Row], rows: Sequence[Row]) -> str:
    federated = [row for row in able if row.method not in (LOCAL, POOLED)]
    if not federated:
        return ""
    measured = [row for row in federated if row.gains]
    if not measured:
        words = "Whether federating helps is not known, because Local was not run on the same images."
        return " ".join(filter(None, [words, _second(able)]))
    return " ".join(filter(None, [_against_local(measured, rows), _second(able)]))


def _against_local(rows: Sequence[Row], all_rows: Sequence[Row]) -> str:
    """Compare the rows with training alone; the first row has the highest mean."""
    best = rows[0]
    if len(best.gains) == 1:
        return _one_unit(best, all_rows)
    ends = {row.label: interval(row.gains) for row in rows}
    above = [row for row in rows if (found := ends[row.label]) and found[0] > 0]
    if best in above:
        return f"{best.label} beats training alone: {_gain_words(best)}."
    if above:
        return (
            f"{best.label} has the highest mean of the methods but cannot be told from training alone "
            f"({_gain_words(best)}); {above[0].label} can: {_gain_words(above[0])}."
        )
    below = [row for row in rows if (found := ends[row.label]) and found[1] < 0]
    if len(below) == len(rows):
        which = {1: "this method", 2: "either method"}.get(len(rows), f"any of these {len(rows)} methods")
        nearest = "it loses" if len(rows) == 1 else f"the best of them, {best.label}, loses"
        return f"Do not federate with {which}: {nearest} against training alone, {_gain_words(best)}."
    if below:
        worse = _names([row.label for row in below])
        return (
            f"No method is distinguishably better than training alone here: the best, {best.label}, has "
            f"{_gain_words(best)}; worse than training alone: {worse}."
        )
    if len(rows) == 1:
        return f"{best.label} is not distinguishable from training alone here: {_gain_words(best)}."
    return f"No method is distinguishable from training alone here: the best, {best.label}, has {_gain_words(best)}."


def _one_unit(best: Row, rows: Sequence[Row]) -> str:
    """Speak of a single unit, for which only the interval over its own test images is known."""
    (score,) = site_scores(best, rows, list(best.unit_gains))
    told: dict[Verdict, str] = {
        "gains": "which excludes 0",
        "hurt": "which excludes 0",
        "cannot be told": "which includes 0: it is not distinguishable from training alone",
    }
    ends = score.gain_interval
    sure = f" (95 % interval over its test images {_ends(ends)}, {told[score.verdict]})" if ends else ""
    return (
        f"There is only one client to compare, so there is no interval over clients: under {best.label}, "
        f"{client(score.unit.name)} has a gain of {_points(best.gains[0])} over training alone{sure}."
    )


def _second(able: Sequence[Row]) -> str:
    """Compare the best row with the second, unit by unit; a sentence about Local has been said already."""
    if len(able) < 2 or LOCAL in (able[0].method, able[1].method):
        return ""
    best, second = able[0], able[1]
    apart = lead(best, second)
    if not apart:
        return f"The second row is {second.label}; the two did not test the same images, so they are not compared."
    found, difference = interval(apart), mean(apart) or 0.0
    sure = "over one client" if found is None else f"95 % interval {_ends(found)}"
    if abs(difference) < 0.05:
        return f"{best.label} and {second.label}, the second row, are equal to a tenth of a point ({sure})."
    words = f"{best.label} leads {second.label}, the second row, by {abs(difference):.1f} points ({sure})"
    if difference < 0:  # the row with the higher mean over all seeds is behind on the seeds that both have
        words = (
            f"{best.label} is {abs(difference):.1f} points behind {second.label}, the second row, on the seeds that "
            f"both have ({sure})"
        )
    if found is not None and not (found[0] > 0 or found[1] < 0):
        words += ", so the two cannot be told apart"
    return f"{words}."


def _gain_words(row: Row) -> str:
    found = interval(row.gains)
    unit = "site" if row.same_owners else "client" if len(row.records) == 1 else "client and seed"
    ends = f"95 % interval {_ends(found)}" if found else "no interval"
    return f"a mean gain of {_points(mean(row.gains) or 0.0)} ({ends} over {len(row.gains)} {_plural(unit)})"


def _plural(unit: str) -> str:
    return {"site": "sites", "client": "clients"}.get(unit, "pairs of client and seed")


def _points(value: float) -> str:
    return f"{points(value)} points"


def _ends(found: tuple[float, float]) -> str:
    return f"{points(found[0])} to {points(found[1])}"


def _names(names: Sequence[str]) -> str:
    shown = [*names[:_MOST_NAMED], f"{len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else list(names)
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def site_sentence(scores: Sequence[SiteScore]) -> str:
    """Say who gains under a row, who is hurt beyond doubt, and who cannot be told."""
    known = [score for score in scores if score.verdict]
    if not known:
        return ""
    names = unit_names([score.unit for score in known])
    by: dict[Verdict, list[str]] = {
        verdict: [_named(names[score.unit]) for score in known if score.verdict == verdict]
        for verdict in ("gains", "hurt", "cannot be told")
    }
    parts = [
        _clause(by["gains"], len(known), "gains", "gain"),
        _clause(by["hurt"], len(known), "is hurt beyond doubt", "are hurt beyond doubt"),
        _clause(by["cannot be told"], len(known), "cannot be told", "cannot be told"),
    ]
    parts[1] = parts[1] or "nobody is hurt beyond doubt"
    return f"{known[0].row}: {'; '.join(part for part in parts if part)}."


def _named(name: str) -> str:
    """Name a unit in a sentence, such as `client 3 (seed 0)` or `mercy`."""
    return f"client {name}" if name.partition(" (seed ")[0].isdigit() else name


def _clause(names: Sequence[str], total: int, one: str, many: str) -> str:
    if not names:
        return ""
    if len(names) == total and total > 1:
        return f"all {total} {many}"
    if len(names) > _MOST_NAMED and "hurt" not in one:  # only those who lose are always named
        return f"{len(names)} of {total} {many}"
    return f"{_names(names)} {one if len(names) == 1 else many}"
