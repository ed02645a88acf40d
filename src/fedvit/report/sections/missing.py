"""The section "Who was missing": clients that failed in a round or were not evaluated, and why."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedvit.report.sections.parts import Group, Line, Table
from fedvit.report.statistics import Record

_MOST_LINES = 40  # clients and reasons in the table
_UNKNOWN = "not recorded"
_PARTS = (("training", "failures"), ("evaluation", "failures_evaluation"))  # with the field of rounds.jsonl


@dataclass(frozen=True)
class _Absence:
    """A client that was missing in a part of these rounds for the same reason; it was sampled so many times."""

    client: str
    part: str
    rounds: tuple[int, ...]
    sampled: int
    reason: str


def missing(group: Group) -> Table | None:
    """Prepare the section; None if every client answered in every round."""
    records = [(row.label, record) for row in group.ranked for record in (*row.records, *row.waiting)]
    several = len(records) > 1
    who: dict[tuple[int, _Absence], list[str]] = {}  # simulated failures are those of the seed, the same in every row
    for label, record in records:
        for absence in _absences(record):
            who.setdefault((record.seed, absence), []).append(label)
    lines = []
    for (seed, absence), labels in who.items():
        rows = sum(record.seed == seed for _, record in records)
        whose = "all rows" if len(labels) == rows > 1 else ", ".join(labels)
        share = f"{len(absence.rounds)} of {absence.sampled}" if absence.sampled else str(len(absence.rounds))
        cells = [_ranges(absence.rounds), absence.reason, absence.part, share]
        lines.append(Line(absence.client, [*cells, *([f"{whose}, seed {seed}"] if several else [])]))
    if not lines:
        return None
    head = ["client", "rounds", "reason", "missing in", "how many", *(["row"] if several else [])]
    note = (
        "How many is out of the rounds in which the client was sampled. A client that was not evaluated does not count "
        "in that round."
    )
    hidden = len(lines) - _MOST_LINES
    if hidden > 0:
        note += f" {hidden} more lines are in rounds.jsonl of the runs, under failed and failures."
    return Table("Who was missing, and why", head, lines[:_MOST_LINES], note)


def _absences(record: Record) -> list[_Absence]:
    """Return who was missing in a run, those missing most often first."""
    found: dict[tuple[str, str, str], list[int]] = {}
    sampled: dict[str, int] = {}
    for row in record.rounds:
        for name in row["cohort"]:
            sampled[name] = sampled.get(name, 0) + 1
        for part, field in _PARTS:
            told = row.get(field) or {}
            names = row["failed"] if field == "failures" else told
            for name in names:
                found.setdefault((name, part, str(told.get(name, _UNKNOWN))), []).append(row["round"])
    every = [
        _Absence(name, part, tuple(rounds), sampled.get(name, 0) if part == "training" else 0, reason)
        for (name, part, reason), rounds in found.items()
    ]
    return sorted(every, key=lambda one: (-len(one.rounds), one.client, one.part))


def _ranges(rounds: Sequence[int]) -> str:
    """Write rounds as ranges, such as 1, 4–6."""
    parts: list[list[int]] = []
    for number in rounds:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    shown = [f"{part[0]}–{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts]
    return ", ".join([*shown[:12], "…"] if len(shown) > 12 else shown)
