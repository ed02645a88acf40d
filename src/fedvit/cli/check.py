"""What `fedvit datasets PATH` and `fedvit partition` say about the files of a dataset."""

from typing import Any

from rich.console import Console
from rich.table import Table

from fedvit.cli.flags import err
from fedvit.core.errors import UserError, nearest
from fedvit.core.settings import DataSettings
from fedvit.data.check import NO_LABEL, Check

MOST_COLUMNS = 12  # classes that get a column each
MOST_HINTS = 20


def data_settings(name: str | None, flags: dict[str, Any], *, others: bool = False) -> DataSettings:
    """Return the settings of the data alone, which can be read where an experiment cannot be resolved yet.

    `others` ignores settings of other tables, which the caller checks.
    """
    from pydantic import ValidationError

    from fedvit.config.load import parse_sets
    from fedvit.config.resolve import readable

    values = {}
    for path, value in parse_sets(flags["sets"] or []).items():
        table, _, key = path.rpartition(".")
        if table in ("", "data") and key in DataSettings.model_fields:
            values[key] = value
        elif not others:
            raise UserError(f"unknown key {path!r} in --set; {nearest(key, DataSettings.model_fields)}")
    given = {"name": name, "dir": flags["data_dir"]}
    try:
        return DataSettings(**{**values, **{key: value for key, value in given.items() if value is not None}})
    except ValidationError as problem:
        raise UserError(readable(problem)) from problem


def show(console: Console, title: str, check: Check) -> None:
    """Print counts by site and class, then all hints and everything that is bad."""
    from fedvit.report.tables import plain_table

    classes = sorted({name for counts in check.counts.values() for name in counts})
    table = plain_table(f"{title}: {check.images:,} images, {len({*classes} - {NO_LABEL})} classes")
    wide = len(classes) <= MOST_COLUMNS
    table.add_column("site", no_wrap=True)
    table.add_column("images", justify="right")
    for name in classes if wide else ["classes", "smallest class", "largest class"]:
        table.add_column(name, justify="right")
    for site, counts in check.counts.items():
        cells = [f"{counts.get(name, 0):,}" for name in classes]
        if not wide:
            order = sorted(counts, key=lambda name: counts[name])
            cells = [str(len(counts)), *(f"{name} ({counts[name]:,})" for name in (order[0], order[-1]))]
        table.add_row(site or "-", f"{check.images_of[site]:,}", *cells)
    console.print(table)
    if check.patients:
        console.print(_patients_table(check, classes if wide else []))
    for note in check.hints[:MOST_HINTS]:
        console.print(f"hint: {note.text}", soft_wrap=True, highlight=False, markup=False)
    if len(check.hints) > MOST_HINTS:
        console.print(f"and {len(check.hints) - MOST_HINTS} more hints: --json lists them", highlight=False)
    for note in check.bad:
        console.print(f"bad: {note.text}", soft_wrap=True, highlight=False, markup=False)


def _patients_table(check: Check, classes: list[str]) -> Table:
    """Make a table of every site's patients, the images that one has, and the patients who have images of a class."""
    from fedvit.report.tables import plain_table

    total = sum(found.patients for found in check.patients.values())
    table = plain_table(f"{total:,} patients, and those of each class")
    table.add_column("site", no_wrap=True)
    for name in ("patients", "images each (median)", *classes):
        table.add_column(name, justify="right")
    for site, found in check.patients.items():
        fewest, middle, most = found.images
        cells = [f"{found.classes.get(name, 0):,}" for name in classes]
        table.add_row(site or "-", f"{found.patients:,}", f"{fewest}-{most} ({middle:g})", *cells)
    return table


def end_if_bad(check: Check, *, skip_bad: bool) -> None:
    """Raise an error that says how many findings there are, unless they are bad files that are to be skipped."""
    serious = [note for note in check.bad if not skip_bad or note.kind not in SKIPPED]
    if serious:
        told = "1 finding is bad" if len(serious) == 1 else f"{len(serious)} findings are bad"
        skips = "" if skip_bad else ", or skip files that cannot be read with --set data.skip_bad=true"
        raise UserError(f"{told}: repair what is listed{skips}")
    if check.bad:
        err.print(f"{len(check.bad)} files are skipped (data.skip_bad)", highlight=False)


SKIPPED = ("not a file", "empty", "unreadable", "not an image", "truncated", "too large")
