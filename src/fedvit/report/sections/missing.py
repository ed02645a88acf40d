"""The section "Who was missing": clients that failed in a round or were not evaluated, and why."""

from collections.abc import Sequence

from fedvit.report.sections.parts import Group, Line, Table
from fedvit.report.statistics import Record

_MOST_LINES = 40  # clients and reasons in the table
_UNKNOWN = "not recorded"
_PARTS = (("training", "failures"), ("evaluation", "failures_evaluation"))  # with the field of rounds.jsonl


def missing(group: Group) -> Table | None:
    """Prepare the section; None if every client answered in every round."""
    records = [(row.label, record) for row in group.ranked for record in (*row.records, *row.waiting)]
    several = len(records) > 1
    lines = []
    for label, record in records:
        for client, part, rounds, of, reason in _absences(record):
            run = [f"{label}, seed {record.seed}"] if several else []
            share = f"{len(rounds)} of {of}" if of else str(len(rounds))
            lines.append(Line(client, [*run, part, _ranges(rounds), share, reason]))
    if not lines:
        return None
    head = ["client", *(["row"] if several else []), "missing in", "rounds", "how many", "reason"]
    note = (
        "How many is out of the rounds in which the client was sampled. A client that was not evaluated does not count "
        "in that round."
    )
    hidden = len(lines) - _MOST_LINES
    if hidden > 0:
        note += f" {hidden} more lines are in rounds.jsonl of the runs, under failed and failures."
    return Table("Who was missing, and why", head, lines[:_MOST_LINES], note)


def _absences(record: Record) -> list[tuple[str, str, list[int], int, str]]:
    """Return (client, part, rounds, rounds in which it was sampled, reason), those missing most often first."""
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
    lines = [
        (name, part, rounds, sampled.get(name, 0) if part == "training" else 0, reason)
        for (name, part, reason), rounds in found.items()
    ]
    return sorted(lines, key=lambda line: (-len(line[2]), line[0], line[1]))


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
