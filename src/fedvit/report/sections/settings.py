"""The sections "Settings" and "Run it again"."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedvit.report.load import differences, flat
from fedvit.report.sections.parts import Group
from fedvit.report.statistics import Record, Row

_MOST_COMMANDS = 12  # the page folds the others away


@dataclass(frozen=True)
class Settings:
    """The settings that all rows share and, if there are several rows, those in which they differ."""

    versions: str
    title: str
    shared: Mapping[str, str]
    differing: Sequence[tuple[str, str]]  # (row, its own settings)


def settings(group: Group) -> Settings:
    """Prepare the section "Settings"."""
    rows = group.rows
    every = {key: values for key, values in differences(rows).items() if key != "run.seed"}
    shared = {key: values[0] for key, values in every.items() if len(set(values)) == 1}
    versions = " · ".join(f"{name} {version}" for name, version in rows[0].first.versions.items())
    if len(rows) == 1:
        return Settings(versions, "All settings", shared, [])
    differing = []
    for row in rows:
        mine = flat(row.first.tables)
        words = ", ".join(f"{key} = {mine[key]}" for key in every if key not in shared and key in mine)
        differing.append((row.label, words))
    return Settings(versions, "Shared by all rows", shared, differing)


@dataclass(frozen=True)
class Commands:
    """The original commands, and the command that repeats each run. The page folds `more` away."""

    started: Sequence[str]
    again: Sequence[str]
    more: Sequence[str]


def commands(group: Group) -> Commands:
    """Prepare the section "Run it again"."""
    pairs = [(row, record) for row in group.rows for record in row.records]
    started = list(dict.fromkeys(words for _, record in pairs for words in record.commands))
    again = [_command(row, record) for row, record in pairs if not _is_from_python(record)]
    return Commands(started, again[:_MOST_COMMANDS], again[_MOST_COMMANDS:])


def _command(row: Row, record: Record) -> str:
    out = f"again/{row.label}-seed{record.seed}".replace(" ", "_")
    return shlex.join(["fedvit", "run", str(record.folder / "run.toml"), "--out", out])


def _is_from_python(record: Record) -> bool:
    """Tell whether the data, model or method was a Python object, which no file can bring back."""
    tables = record.tables
    named = "python" in (tables["data"].get("name"), tables["model"].get("name"))
    return named or bool(tables["method"].get("python"))
