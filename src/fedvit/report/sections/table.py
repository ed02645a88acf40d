"""The section "Table": all rows, and other views of their models."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedvit.report.sections.parts import MOST_DETAILS, Group, Line, Table
from fedvit.report.statistics import LOCAL, POOLED, Row, interval, mean
from fedvit.report.units import amount, count, decimal, duration, memory, nbytes, percent, points

_Column = tuple[str, Callable[[Row], str], Callable[[Row], Any]]  # heading, cell, the number behind it


@dataclass(frozen=True)
class Tables:
    """The table of all rows, the table of what they cost, and the table of other views if there are any."""

    main: Table
    costs: Table | None
    views: Table | None


def table(group: Group) -> Tables:
    """Prepare the section."""
    return Tables(_main(group), _costs(group), _views(group.ranked))


def _main(group: Group) -> Table:
    """List the rows, best first. Columns that are empty in every row are left out."""
    ranked = group.ranked
    every: list[_Column] = [
        ("accuracy %\n± clients", lambda r: _plus_minus(r.mean, r.view("std")), lambda r: r.mean),
        ("± seeds", lambda r: percent(r.seed_std), lambda r: r.seed_std),
        ("worst\ntenth", lambda r: percent(r.view("worst_decile")), lambda r: r.view("worst_decile")),
        ("best\ntenth", lambda r: percent(r.view("best_decile")), lambda r: r.view("best_decile")),
        ("gain over Local\n(95 % interval)", _gain, _has_gain),
        ("clients\nhurt", _hurt, _has_gain),
        ("AUROC", lambda r: decimal(r.view("auroc")), lambda r: r.view("auroc")),
        ("server\naccuracy %", lambda r: percent(r.view("mean", "server")), lambda r: r.view("mean", "server")),
        ("learning\nrate", _rate, lambda r: True),
        ("seeds", lambda r: ", ".join(map(str, r.seeds)), lambda r: len({str(row.seeds) for row in ranked}) > 1),
    ]
    if ranked[0].several_labels:  # which rows are ranked by
        every = [column for column in every if column[0] == "AUROC"] + [
            column for column in every if column[0] != "AUROC"
        ]
    return _of_columns(group, "Results, one line per row", every, _note(ranked))


def _costs(group: Group) -> Table | None:
    """List what the rows cost, in a table of its own, so that both tables fit on a screen."""
    every: list[_Column] = [
        ("sent per client\nand round", lambda r: nbytes(r.per_round), lambda r: r.per_round),
        ("sent in\nthe run", lambda r: nbytes(r.sent), lambda r: r.sent),
        ("MACs\nper image", _macs, lambda r: r.summary("macs_per_example")),
        ("time", lambda r: duration(r.seconds), lambda r: r.seconds),
        ("peak\nmemory", lambda r: memory(r.summary("peak_rss_mb")), lambda r: r.summary("peak_rss_mb")),
    ]
    table = _of_columns(group, "Costs, one line per row", every, "")
    return table if len(table.head) > 1 else None


def _of_columns(group: Group, label: str, every: Sequence[_Column], note: str) -> Table:
    """Make a table of the columns that are known for any row."""
    ranked = group.ranked
    columns = [column for column in every if any(_is_known(column[2](row)) for row in ranked)]
    best = next(iter(group.eligible), None) if len(ranked) > 1 else None
    lines = [Line(row.label, [cell(row) for _, cell, _ in columns], _kind(row, best), _badge(row)) for row in ranked]
    return Table(label, ["row", *(name for name, _, _ in columns)], lines, note)


def _kind(row: Row, best: Row | None) -> str:
    return "best" if row is best else "reference" if row.method in (LOCAL, POOLED) else ""


def _badge(row: Row) -> str:
    if not row.finished:
        return "not finished"
    return f"{len(row.records)} of {len(row.records) + len(row.waiting)} seeds" if row.waiting else ""


def _note(ranked: Sequence[Row]) -> str:
    words = (
        "Each client's own model on its own test images after the last round, averaged over seeds if there are several."
    )
    if ranked[0].several_labels:
        words += (
            " Images have several labels: AUROC is the mean over the labels and ranks the rows; accuracy is the share "
            "of right answers, over images and labels, at a probability of a half."
        )
    if any(row.gains for row in ranked):
        words += " The interval is a 95 % t interval of the mean gain over the same clients."
    if any(row.method == POOLED for row in ranked):
        words += " centralized pools all data: it is a reference, not a federated method."
    return words


def _is_known(value: object) -> bool:
    """Tell whether there is something to show; 0 counts as something."""
    return value is not None and value is not False


def _rate(row: Row) -> str:
    """Write the learning rate, marked if it was searched and is the smallest or largest of those tried."""
    rate = str(row.first.tables["train"].get("lr", "-"))
    return f"{rate} ({row.first.edge} tried)" if row.first.edge else rate


def _has_gain(row: Row) -> bool:
    return bool(row.gains) and row.method != LOCAL


def _gain(row: Row) -> str:
    """Write the mean gain and its interval. Local has no gain over itself."""
    if row.method == LOCAL:
        return "-"
    found = interval(row.gains)
    return points(mean(row.gains)) + ("" if found is None else f" ({points(found[0])} … {points(found[1])})")


def _hurt(row: Row) -> str:
    return "-" if row.method == LOCAL else amount(row.hurt)


def _macs(row: Row) -> str:
    """Write the multiply-adds of one forward pass and, in split learning, the client's share."""
    words = count(row.summary("macs_per_example"))
    client_part = row.summary("client_macs_per_example")
    return words if client_part is None else f"{words} (client {count(client_part)})"


def _plus_minus(value: float | None, deviation: float | None) -> str:
    return percent(value) if deviation is None else f"{percent(value)} ± {percent(deviation)}"


def _views(ranked: Sequence[Row]) -> Table | None:
    """List other evaluations: the server's model, before and after local training, unseen clients."""
    lines = []
    for row in ranked[:MOST_DETAILS]:
        views: dict[str, Mapping[str, Any]] = dict(row.first.views)
        unseen = (row.first.summary or {}).get("unseen") or {}
        views |= {f"unseen clients, {name}": view for name, view in unseen.items()}
        if set(views) != {"personal"}:
            lines += [Line(row.label, [name, *_view_cells(view)]) for name, view in views.items()]
    if not lines:
        return None
    best = f", the {MOST_DETAILS} best rows" if len(ranked) > MOST_DETAILS else ""
    note = f"Views of each row, seed {ranked[0].seeds[0]}{best}."
    return Table("Views", ["row", "view", "accuracy %", "balanced %", "loss", "AUROC"], lines, note)


def _view_cells(view: Mapping[str, Any]) -> list[str]:
    return [
        _plus_minus(view["mean"], view["std"]),
        percent(view["balanced_accuracy"]),
        decimal(view["loss"]),
        decimal(view.get("auroc")),
    ]
