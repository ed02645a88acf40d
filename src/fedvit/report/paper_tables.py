"""Tables for papers: the figures of a report as CSV, Markdown or LaTeX."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fedvit.core.files import csv_line
from fedvit.report import units
from fedvit.report.load import differences
from fedvit.report.sections.parts import Group
from fedvit.report.statistics import LOCAL, Row, interval, mean

FORMATS = {"csv": ".csv", "md": ".md", "latex": ".tex"}
OTHER_MARKS, SAME_MARKS = "†‡§¶‖", "abcdefghijklmnopqrstuvwxyz"
LATEX_MARKS = {"†": r"\dagger", "‡": r"\ddagger", "§": r"\S", "¶": r"\P", "‖": r"\Vert"}
GAIN = "gain over Local"
PLUS_MINUS, MINUS = "±", "\N{MINUS SIGN}"


@dataclass(frozen=True)
class Published:
    """A paper's figure for a row, in percent, and whether it is the figure that our row has, in the same settings."""

    value: float
    deviation: float | None
    source: str  # the paper, its table and its column
    note: str  # what the figure is and, if settings differ, those of the paper
    comparable: bool

    @property
    def words(self) -> str:
        return f"{self.value:.1f}" if self.deviation is None else f"{self.value:.1f} {PLUS_MINUS} {self.deviation:.1f}"

    @property
    def footnote(self) -> str:
        return f"{self.source}: {self.note}"


@dataclass(frozen=True)
class Line:
    """The figures of one row; None means that a figure does not apply or was not measured."""

    row: Row
    best: bool
    published: Published | None
    search: str = ""  # "chosen" if the learning rate was searched, "edge" if it is the smallest or largest tried

    @property
    def is_local(self) -> bool:
        return self.row.method == LOCAL

    @property
    def gain(self) -> float | None:
        return None if self.is_local else mean(self.row.gains)

    @property
    def ends(self) -> tuple[float, float] | None:
        """The 95 % interval of the gain."""
        return None if self.is_local else interval(self.row.gains)

    @property
    def hurt(self) -> float | None:
        return None if self.is_local else self.row.hurt

    @property
    def megabytes(self) -> float | None:
        """What one sampled client receives and sends in one round."""
        return None if self.row.per_round is None else self.row.per_round / 1e6

    @property
    def setting(self) -> Mapping[str, Mapping[str, Any]]:
        return self.row.first.tables


@dataclass(frozen=True)
class PaperTable:
    """The lines on one dataset and partition, in the order of the comparison."""

    lines: Sequence[Line]

    @property
    def rows(self) -> list[Row]:
        return [line.row for line in self.lines]


def paper_table(
    rows: Sequence[Row], published: Mapping[str, Published], searches: Mapping[str, str] | None = None
) -> PaperTable | None:
    """Make the table of all finished rows, or None if no row has finished.

    `published` has papers' figures by label, and `searches` how learning rates were found.
    """
    done = [row for row in rows if row.finished and row.mean is not None]
    best = next(iter(Group(done).eligible), None) if len(done) > 1 else None
    lines = [Line(row, row is best, published.get(row.label), (searches or {}).get(row.label, "")) for row in done]
    return PaperTable(lines) if lines else None


def write_tables(tables: Sequence[PaperTable], form: str) -> str:
    """Return the text of these tables in one of FORMATS."""
    if form == "csv":
        return _csv(tables)
    one: Callable[[PaperTable], str] = {"md": _markdown, "latex": _latex}[form]
    return "\n".join(one(table) for table in tables)


# CSV: plain numbers, and all settings that tell rows apart, so that one file may hold several tables.

_CSV: Mapping[str, Callable[[Line], Any]] = {
    "row": lambda line: line.row.label,
    "method": lambda line: line.row.method,
    "tune": lambda line: line.setting["tune"].get("name"),
    "data": lambda line: line.setting["data"].get("name"),
    "partition": lambda line: line.setting["partition"].get("name"),
    "clients": lambda line: _clients(line.row),
    "model": lambda line: line.setting["model"].get("name"),
    "rounds": lambda line: line.row.first.planned,
    "lr": lambda line: line.setting["train"].get("lr"),
    "lr_search": lambda line: line.search,
    "seeds": lambda line: " ".join(map(str, line.row.seeds)),
    "accuracy": lambda line: line.row.mean,
    "accuracy_std_clients": lambda line: line.row.view("std"),
    "accuracy_std_seeds": lambda line: line.row.seed_std,
    "gain": lambda line: line.gain,
    "gain_low": lambda line: line.ends and line.ends[0],
    "gain_high": lambda line: line.ends and line.ends[1],
    "hurt": lambda line: line.hurt,
    "auroc": lambda line: line.row.view("auroc"),
    "mb_per_client_and_round": lambda line: line.megabytes,
    "published": lambda line: line.published and line.published.value,
    "published_std": lambda line: line.published and line.published.deviation,
    "published_comparable": lambda line: line.published and ("yes" if line.published.comparable else "no"),
    "published_source": lambda line: line.published and line.published.footnote,
}


def _csv(tables: Sequence[PaperTable]) -> str:
    lines = [line for table in tables for line in table.lines]
    return csv_line(list(_CSV)) + "".join(csv_line([_plain(cell(line)) for cell in _CSV.values()]) for line in lines)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4) if abs(value) >= 0.1 else float(f"{value:.4g}")
    return "" if value is None else value


# What Markdown and LaTeX share: columns of text, with the same digits as the report.

_TEXT: Mapping[str, Callable[[Line], str]] = {
    "lr": lambda line: _rate(line),
    "accuracy %": lambda line: _plus_minus(line.row.mean, line.row.view("std")),
    "± seeds": lambda line: units.percent(line.row.seed_std),
    GAIN: lambda line: _gain(line),
    "hurt": lambda line: units.amount(line.hurt),
    "AUROC": lambda line: units.decimal(line.row.view("auroc")),
    "MB": lambda line: _megabytes(line.megabytes),
    "seeds": lambda line: ", ".join(map(str, line.row.seeds)),
}


def _columns(table: PaperTable) -> dict[str, list[str]]:
    """Return the cells of every column that says something: not empty, and not the same seeds in every row."""
    columns = {name: [cell(line) for line in table.lines] for name, cell in _TEXT.items()}
    if len({tuple(line.row.seeds) for line in table.lines}) == 1:
        del columns["seeds"]  # the caption names them
    return {name: cells for name, cells in columns.items() if set(cells) != {"-"}}


def _rate(line: Line) -> str:
    rate = line.setting["train"].get("lr")
    return "-" if rate is None else f"{rate:g}{'*' if line.search == 'edge' else ''}"


def _plus_minus(value: float | None, deviation: float | None) -> str:
    words = units.percent(value)
    return words if deviation is None else f"{words} {PLUS_MINUS} {units.percent(deviation)}"


def _bold(words: str, form: str) -> str:
    """Put the mean of a cell in bold, and leave its deviation as it is."""
    value, space, deviation = words.partition(" ")
    return form.format(value) + space + deviation


def _gain(line: Line) -> str:
    if line.gain is None:
        return "-"
    found = "" if line.ends is None else f" ({units.points(line.ends[0])} to {units.points(line.ends[1])})"
    return units.points(line.gain) + found


def _megabytes(value: float | None) -> str:
    """Write megabytes with three significant digits, never an exponent."""
    if value is None:
        return "-"
    return "0" if value == 0 else f"{value:.{max(0, 2 - _exponent(value))}f}"


def _exponent(value: float) -> int:
    return int(f"{value:e}".partition("e")[2])


def _marks(table: PaperTable) -> dict[str, tuple[str, Published]]:
    """Give every footnote a mark: a letter if the figure is comparable with ours, a dagger or the like if not."""
    found: dict[str, tuple[str, Published]] = {}
    for published in (line.published for line in table.lines if line.published):
        if published.footnote not in found:
            number = sum(other.comparable == published.comparable for _, other in found.values())
            signs = SAME_MARKS if published.comparable else OTHER_MARKS
            found[published.footnote] = (signs[number % len(signs)] * (number // len(signs) + 1), published)
    return found


def caption(table: PaperTable) -> str:
    """Say in full sentences what the table shows, in which settings and over which seeds."""
    names = [*_columns(table)]
    seeds = sorted({seed for row in table.rows for seed in row.seeds})
    over = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    words = [
        f"{_settings(table)}, {over}.",
        "Accuracy in percent of each client's own model on its own test images after the last round: mean ± deviation "
        "over clients, averaged over seeds." if len(seeds) > 1 else
        "Accuracy in percent of each client's own model on its own test images after the last round: mean ± deviation "
        "over clients.",
    ]  # fmt: skip
    if any(line.search for line in table.lines):
        edge = "; * at the edge of the rates tried" if any(line.search == "edge" for line in table.lines) else ""
        words.append(f"Learning rates were chosen on validation images{edge}.")
    if GAIN in names:
        words.append("Gain over Local: mean over clients in points, and its 95 % interval; hurt: clients below Local.")
    if "MB" in names:
        words.append("MB: received and sent by a client per round.")
    return " ".join(words)


def _settings(table: PaperTable) -> str:
    """Name the data, partition, model and length, as far as all rows share them."""
    settings = differences(table.rows)

    def shared(key: str, form: str) -> str:
        values = set(settings.get(key, ["-"]))
        return form.format(*values) if len(values) == 1 and values != {"-"} else ""

    first = table.rows[0]
    rule = str(first.first.tables["partition"].get("name"))
    detail = {"pathological": "classes", "dh": "level", "iid": "", "site": ""}.get(rule, "alpha")
    parts = [
        Path(str(first.first.tables["data"]["name"])).stem,
        shared("data.samples", "{} images"),
        f"{_clients(first)} clients",
        shared("partition.name", "partition {}") + (shared(f"partition.{detail}", f" with {detail} {{}}")),
        shared("model.name", "{}"),
        shared("train.cohort", "{} clients per round"),
        shared("train.rounds", "rounds: {}"),
        shared("train.epochs", "local epochs: {}"),
        shared("train.batch", "batch size: {}"),
        shared("train.optimizer", "{}"),
    ]
    return ", ".join(part for part in parts if part)


def _clients(row: Row) -> int | str:
    return len(row.first.split.get("clients", {})) or str(row.first.tables["partition"].get("clients", "?"))


# Markdown.


def _markdown(table: PaperTable) -> str:
    columns, marks = _columns(table), _marks(table)
    heads = ["row", *columns, *(["published"] if marks else [])]
    lines = [_md_line(heads), _md_line(["---", *["---:"] * (len(heads) - 1)])]
    for number, line in enumerate(table.lines):
        cells = {name: cells[number] for name, cells in columns.items()}
        if line.best:
            cells["accuracy %"] = _bold(cells["accuracy %"], "**{}**")
        told = []
        if marks:
            told = [f"{line.published.words} {marks[line.published.footnote][0]}" if line.published else "-"]
        lines.append(_md_line([_md_text(line.row.label), *cells.values(), *told]))
    notes = [f"{mark} {_md_text(note)}" for note, (mark, _) in marks.items()]
    return "\n\n".join(["\n".join(lines), _md_text(caption(table)), *notes]) + "\n"


def _md_line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _md_text(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<>|$~])", r"\\\1", " ".join(text.split()))


# LaTeX.

_SPECIAL = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': "''", PLUS_MINUS: r"$\pm$", MINUS: "$-$",
}  # fmt: skip


def latex_text(text: str) -> str:
    """Escape a text for LaTeX; signs that only math has become math."""
    return "".join(_SPECIAL.get(sign, sign) for sign in " ".join(text.split()))


def _latex(table: PaperTable) -> str:
    columns, marks = _columns(table), _marks(table)
    heads = ["row", *columns, *(["published"] if marks else [])]
    body = [_latex_line([latex_text(head) for head in heads])]
    for number, line in enumerate(table.lines):
        cells = {name: latex_text(cells[number]) for name, cells in columns.items()}
        if line.best:
            cells["accuracy %"] = _bold(cells["accuracy %"], r"\textbf{{{}}}")
        told = []
        if marks:
            told = [_latex_published(line.published, marks) if line.published else "-"]
        body.append(_latex_line([latex_text(line.row.label), *cells.values(), *told]))
    first, *rest = body
    notes = [f"  \\par\\footnotesize {_latex_mark(mark)} {latex_text(note)}" for note, (mark, _) in marks.items()]
    about = " ".join(caption(table).split())
    return "\n".join(
        [
            f"% fedvit {version('fedvit')}: {about}",
            "% Needs \\usepackage{booktabs}; the row in bold has the highest mean accuracy.",
            "\\begin{table}",
            "  \\centering\\small\\setlength{\\tabcolsep}{4pt}",
            f"  \\caption{{{latex_text(about)}}}",
            f"  \\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}",
            "    \\toprule",
            first,
            "    \\midrule",
            *rest,
            "    \\bottomrule",
            "  \\end{tabular}",
            *notes,
            "\\end{table}",
            "",
        ]
    )


def _latex_line(cells: Sequence[str]) -> str:
    return f"    {' & '.join('--' if cell == '-' else cell for cell in cells)} \\\\"


def _latex_published(published: Published, marks: Mapping[str, tuple[str, Published]]) -> str:
    return latex_text(published.words) + _latex_mark(marks[published.footnote][0])


def _latex_mark(mark: str) -> str:
    return f"$^{{{''.join(LATEX_MARKS.get(sign, sign) for sign in mark)}}}$"
