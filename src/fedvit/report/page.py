"""The report, one self-contained HTML page: which row won, by how much, for whom and at what cost."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from fedvit.core.errors import UserError
from fedvit.core.files import write_text
from fedvit.report.load import collect, differences, studied_view
from fedvit.report.sections.clients import clients
from fedvit.report.sections.clinical import clinical
from fedvit.report.sections.gains import gains
from fedvit.report.sections.missing import missing
from fedvit.report.sections.partition import partition
from fedvit.report.sections.parts import Group
from fedvit.report.sections.result import result
from fedvit.report.sections.rounds import rounds
from fedvit.report.sections.settings import commands, settings
from fedvit.report.sections.sites import sites
from fedvit.report.sections.table import table
from fedvit.report.sections.times import times
from fedvit.report.sections.updates import updates
from fedvit.report.statistics import Row

_MARK = b'<meta name="generator" content="fedvit">'  # page.html.j2 writes it; it marks a file that we may overwrite

# Anchor, title, template, and the function that prepares the content. A section without content is left out.
_SECTIONS: Sequence[tuple[str, str, str, Callable[[Group], object]]] = (
    ("result", "Result", "result", result),
    ("table", "Table", "table", table),
    ("sites", "Every client under every row", "sites", sites),
    ("clinical", "Clinical scores", "clinical", clinical),
    ("rounds", "Accuracy by round and by traffic", "rounds", rounds),
    ("gains", "Gain of every client over Local", "gains", gains),
    ("clients", "Every client", "clients", clients),
    ("missing", "Who was missing", "missing", missing),
    ("updates", "Updates by site", "updates", updates),
    ("split", "Who owns what", "partition", partition),
    ("time", "Where the time went", "times", times),
    ("settings", "Settings", "settings", settings),
    ("again", "Run it again", "commands", commands),
    ("words", "What the numbers mean", "words", lambda group: group),
)


@dataclass(frozen=True)
class _Section:
    id: str
    title: str
    template: str
    content: object


@dataclass(frozen=True)
class _Chapter:
    """The part of the page about one group of rows."""

    id: str
    title: str
    subtitle: str
    sections: Sequence[_Section]


def write_report(
    folders: Sequence[Path], out: Path, target: float | None = None, view: str | None = None
) -> list[list[Row]]:
    """Read the runs in these folders, write the page, and return the rows it shows.

    `view` says whose accuracy a target is: the server's for a study that is about it, otherwise the clients' own.
    """
    if not out.is_dir() and out.suffix.lower() not in (".html", ".htm"):
        raise UserError(
            f"a report is an HTML page, so --out expects a name that ends in .html, found {out}; for a table as "
            "LaTeX, Markdown or CSV, use `fedvit table`"
        )
    groups = collect(folders)
    view = view or studied_view(folders)
    known = {name for rows in groups for row in rows for record in row.records for name in record.views}
    if view not in known | {"personal"}:
        raise UserError(f"no run has the view {view!r}; they have {', '.join(sorted(known)) or 'none yet'}")
    if out.is_dir() or not out.parent.is_dir():
        raise UserError(f"--out expects a file in a folder that exists, such as report.html, found {out}")
    if out.is_file() and _MARK not in out.read_bytes()[:2000]:
        raise UserError(f"{out} is not a FedViT report, so it is not overwritten: give another --out")
    write_text(out, page(groups, target, view), errors="replace")
    return groups


def page(groups: Sequence[Sequence[Row]], target: float | None = None, view: str = "personal") -> str:
    """Render the whole page."""
    chapters = [_chapter(number, rows, target, view) for number, rows in enumerate(groups)]
    title = "Report on several datasets or partitions" if len(groups) > 1 else chapters[0].title
    return _environment().get_template("page.html.j2").render(title=title, groups=chapters, version=version("fedvit"))


def _environment() -> Environment:
    """Set up templates that escape every value except Markup, which only svg.py makes, and fail on an unknown name."""
    return Environment(
        loader=PackageLoader("fedvit.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _chapter(number: int, rows: Sequence[Row], target: float | None, view: str) -> _Chapter:
    group = Group(rows, target, view)
    sections = [
        _Section(f"g{number}-{anchor}", title, f"{template}.html.j2", content)
        for anchor, title, template, prepare in _SECTIONS
        if (content := prepare(group)) is not None
    ]
    return _Chapter(f"g{number}", _title(rows), _subtitle(rows), sections)


def _title(rows: Sequence[Row]) -> str:
    name = Path(str(rows[0].first.tables["data"]["name"])).stem
    return f"{name}: {rows[0].label if len(rows) == 1 else f'{len(rows)} rows compared'}"


def _subtitle(rows: Sequence[Row]) -> str:
    """Name the data, partition, model and length in one line, as far as all rows share them."""
    first, settings = rows[0].first, differences(rows)
    clients = len(first.split.get("clients", {})) or first.tables["partition"].get("clients", "?")

    def shared(key: str, form: str) -> str:
        values = set(settings.get(key, ["-"]))
        return form.format(*values) if len(values) == 1 and values != {"-"} else ""

    seeds = sorted({seed for row in rows for seed in row.seeds})
    parts = [
        f"{clients} clients, {len(first.class_names)} classes",
        shared("partition.name", "partition {}"),
        shared("model.name", "{}"),
        shared("train.rounds", "{} rounds"),
        shared("train.cohort", "{} clients per round"),
        f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}",
    ]
    return " · ".join(part for part in parts if part)
