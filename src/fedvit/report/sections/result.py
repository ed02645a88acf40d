"""The section "Result": the best row in a few numbers, and whether to federate at all."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from fedvit.report.sections.parts import Group
from fedvit.report.statistics import LOCAL, Record, Row, interval, mean
from fedvit.report.tables import kept_words
from fedvit.report.units import amount, decimal, nbytes, percent, points
from fedvit.report.verdict import headline
from fedvit.runs.doubts import AUTO, with_auto_rate

_MOST_UNFINISHED = 12  # the note names no more runs than this


@dataclass(frozen=True)
class Result:
    """The headline, notes on unfinished runs and on doubts, and the cards (number, words) of the best row."""

    headline: str
    unfinished: Sequence[str]
    doubts: Sequence[str]
    kept: Sequence[str]  # the rounds that runs have kept as their best, and what they score
    better_rates: Sequence[str]  # commands that search for them, where a rate may be to blame for a doubt
    cards: Sequence[tuple[str, str]]
    ranked_by: str
    open_doubts: int = 5  # the page folds the rest away


def result(group: Group) -> Result:
    """Prepare the section."""
    able = group.eligible
    return Result(
        headline(group.rows),
        _unfinished(group.rows),
        _doubts(group.rows),
        _kept(group.rows),
        _better_rates(group.rows),
        _cards(able) if able else [],
        "mean AUROC of the labels" if group.rows[0].several_labels else "accuracy",
    )


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
    if best.several_labels:
        first = "highest mean AUROC of the labels" if len(able) > 1 else "mean AUROC of the labels"
        right = "right answers to labels, over clients"
        cards = [
            (decimal(best.view("auroc")), f"{first}, with each client's own model: {best.label}"),
            (cards[0][0], right),
        ]
    if best.gains and best.method != LOCAL:
        cards.append((f"{points(mean(best.gains))} points", f"gain over training alone, {_interval_words(best.gains)}"))
        cards.append((f"{amount(best.hurt)} of {len(best.first.clients)}", _hurt_words(best)))
    else:
        cards.append((f"{percent(best.view('worst_decile'))} %", "mean of the worst tenth of the clients"))
    cards.append((nbytes(best.per_round), f"per sampled client and round; {nbytes(best.sent)} in the whole run"))
    if best.view("auroc") is not None and not best.several_labels:
        cards.append((f"{best.view('auroc'):.3f}", "mean AUROC of the clients with more than one class to test"))
    return cards


def _hurt_words(row: Row) -> str:
    """Say by which rule clients are counted, which is that of `count_hurt`."""
    several = len(row.records) > 1
    who = "sites" if row.same_owners else "clients"
    how = ", averaged over seeds," if several and row.same_owners else ", as a mean over seeds," if several else ""
    return f"{who}{how} are better off alone under {row.label}"


def _doubts(rows: Sequence[Row]) -> list[str]:
    """Return what the runs themselves warned of, by row and seed."""
    return [
        f"{row.label}, seed {record.seed}: {words}"
        for row in rows
        for record in row.records
        for words in (record.summary or {}).get("warnings") or ()
    ]


def _kept(rows: Sequence[Row]) -> list[str]:
    """Say which round each run has kept; the numbers of the page are those of the last round."""
    return [
        f"{row.label}, seed {record.seed}: {kept_words(record.summary)}"
        for row in rows
        for record in row.records
        if record.summary and record.summary.get("kept")
    ]


def _better_rates(rows: Sequence[Row]) -> list[str]:
    """Return the commands that started the runs with such a doubt, changed to search for their rates."""
    blamed = [
        record
        for row in rows
        for record in row.records
        if any(AUTO in words for words in (record.summary or {}).get("warnings") or ())
    ]
    started = dict.fromkeys(command for record in blamed for command in record.commands)
    ours = [shlex.split(command)[1:] for command in started if command.startswith(("fedvit run", "fedvit compare"))]
    return list(dict.fromkeys(with_auto_rate(words) for words in ours if "auto" not in words))


def _interval_words(values: Sequence[float]) -> str:
    found = interval(values)
    return "one client, so no interval" if found is None else f"95 % interval {points(found[0])} to {points(found[1])}"
