"""The section "Result": the best row in a few numbers, and whether its lead is clear."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedvit.report.sections.parts import Group
from fedvit.report.statistics import LOCAL, Record, Row, interval, lead, mean
from fedvit.report.units import nbytes, percent, points

_MOST_UNFINISHED = 12  # the note names no more runs than this


@dataclass(frozen=True)
class Result:
    """Notes on unfinished runs, the cards (number, words) of the best row, and its lead over the second best."""

    unfinished: Sequence[str]
    cards: Sequence[tuple[str, str]]
    verdict: str


def result(group: Group) -> Result:
    """Prepare the section."""
    able = group.eligible
    return Result(_unfinished(group.rows), _cards(able) if able else [], _verdict(able))


def _unfinished(rows: Sequence[Row]) -> list[str]:
    """Say how far each unfinished run has come."""
    lines = [
        f"{row.label}, seed {record.seed}: {_progress(record)}{', not counted' if record in row.waiting else ''}"
        for row in rows
        for record in (*row.records, *row.waiting)
        if not record.finished
    ]
    hidden = len(lines) - _MOST_UNFINISHED
    return [*lines[:_MOST_UNFINISHED], f"and {hidden} more"] if hidden > 0 else lines


def _progress(record: Record) -> str:
    done = record.rounds[-1]["round"] if record.rounds else 0
    scored = max(record.curve, default=0)
    words = f"round {done} of {record.planned}" if done else f"no round of {record.planned} yet"
    if done != scored:
        words += f", scored after round {scored}" if scored else ", not scored yet"
    return words


def _cards(able: Sequence[Row]) -> list[tuple[str, str]]:
    """Sum up the best row in three to five numbers."""
    best = able[0]
    head = f"{'highest mean accuracy' if len(able) > 1 else 'mean accuracy'} of a client's own model: {best.label}"
    cards = [(f"{percent(best.mean)} % ± {percent(best.view('std'))}", f"{head} (± over clients)")]
    if best.gains and best.method != LOCAL:
        hurt = f"{best.hurt:.1f}".removesuffix(".0")
        cards.append((f"{points(mean(best.gains))} points", f"gain over training alone, {_interval_words(best.gains)}"))
        cards.append((f"{hurt} of {len(best.first.clients)}", "clients would be better off alone"))
    else:
        cards.append((f"{percent(best.view('worst_decile'))} %", "mean of the worst tenth of the clients"))
    cards.append((nbytes(best.per_round), f"per sampled client and round; {nbytes(best.sent)} in the whole run"))
    if best.view("auroc") is not None:
        cards.append((f"{best.view('auroc'):.3f}", "mean AUROC of the clients with more than one class to test"))
    return cards


def _verdict(able: Sequence[Row]) -> str:
    """Compare the best row with the second best, client by client."""
    rivals = [row for row in able[1:] if row.method != LOCAL]
    if not rivals or able[0].method == LOCAL:
        return ""
    best, second = able[0], rivals[0]
    apart = lead(best, second)
    found = interval(apart)
    if found is None:
        return ""
    clear = found[0] > 0 or found[1] < 0
    words = "which excludes 0" if clear else "which includes 0: the two cannot be told apart on these clients"
    return (
        f"{best.label} leads {second.label} by {points(mean(apart))} points, client by client "
        f"({_interval_words(apart)}, {words}). Rows are ranked by their accuracy on the test images of the last round; "
        "a row with fewer seeds than others is not called best."
    )


def _interval_words(values: Sequence[float]) -> str:
    found = interval(values)
    return "one client, so no interval" if found is None else f"95 % interval {points(found[0])} to {points(found[1])}"
