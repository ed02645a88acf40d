"""The section "Updates by site": how long every client's updates are, where they point, and which stand out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedvit.report import svg
from fedvit.report.sections.parts import MOST_DETAILS, Figure, Group, Line, Table
from fedvit.report.statistics import Record
from fedvit.report.svg import Dots
from fedvit.report.units import client
from fedvit.runs.updates import ClientUpdates, about_updates, updates_of

_MOST = 24  # clients of a row that are shown
_NORMAL, _STANDS_OUT = 1, 2  # colors


@dataclass(frozen=True)
class Fold:
    """The updates of one row; open if somebody stands out."""

    title: str
    sentence: str
    figures: Sequence[Figure]
    table: Table
    open: bool


@dataclass(frozen=True)
class UpdatesBySite:
    """The rows with measured updates, best first."""

    folds: Sequence[Fold]
    left_out: str


def updates(group: Group) -> UpdatesBySite | None:
    """Prepare the section; None if nobody sent an update."""
    several = any(len(row.records) > 1 for row in group.ranked)
    records = [(row.label, row.first) for row in group.ranked]
    folds = [fold for label, record in records if (fold := _fold(label, record)) is not None]
    if not folds:
        return None
    left_out = " Updates are those of the first seed." if several else ""
    if len(folds) > MOST_DETAILS:
        left_out += f" The {MOST_DETAILS} best of {len(folds)} rows are shown."
    return UpdatesBySite(folds[:MOST_DETAILS], left_out)


def _fold(label: str, record: Record) -> Fold | None:
    about = about_updates(record.rounds)
    if not about:
        return None
    ordered = sorted(about, key=lambda name: (not about[name].stands_out, -about[name].length))
    shown = ordered[:_MOST]
    out = [name for name in ordered if about[name].stands_out]
    claims = [f"{client(name)} reported {one.claimed:,.0f}" for name, one in about.items() if one.claimed is not None]
    sentence = "; ".join(_words(name, about[name]) for name in out) or "No update stands out"
    if len(about) < 3:
        sentence = "With fewer than three clients, nobody can stand out"
    if claims:
        sentence += f". More training images than agreed on: {', '.join(claims)}"
    note = f"{_MOST} of {len(about)} clients are shown; rounds.jsonl has all." if len(about) > _MOST else ""
    title = (
        f"{label}: {len(out)} of {len(about)} {'stands' if len(out) == 1 else 'stand'} out"
        if out
        else f"{label}: nobody stands out"
    )
    table = Table(
        "Updates by site",
        ["client", "rounds", "norm", "relative\nlength", "cosine", "shortened", ""],
        [_line(name, about[name]) for name in shown],
        note,
    )
    return Fold(title, f"{sentence}.", _charts(shown, about, record), table, bool(out or claims))


def _words(name: str, one: ClientUpdates) -> str:
    said = []
    if one.long:
        said.append(f"are {one.length:.1f} times as long as the median of their rounds")
    if one.away:
        said.append(f"point away from those of the others (cosine {one.cosine:.2f})")
    return f"The updates of {client(name)} {' and '.join(said)}"


def _line(name: str, one: ClientUpdates) -> Line:
    cosine = "-" if one.cosine is None else f"{one.cosine:.2f}"
    words = " and ".join(word for word, holds in (("long", one.long), ("away", one.away)) if holds)
    cells = [str(one.rounds), f"{one.norm:.3g}", f"{one.length:.2f}", cosine, str(one.clipped), words]
    return Line(name, cells, badge="stands out" if one.stands_out else "")


def _charts(names: Sequence[str], about: Mapping[str, ClientUpdates], record: Record) -> list[Figure]:
    """Draw a dot for every round: lengths, and cosines where there are any."""
    every = updates_of(record.rounds)
    lengths, cosines = [], []
    for name in names:
        color = _STANDS_OUT if about[name].stands_out else _NORMAL
        lengths.append(Dots(name, color, [(u.length, f"{name}, round {u.round}: {u.length:.2f}") for u in every[name]]))
        dots = [(u.cosine, f"{name}, round {u.round}: {u.cosine:.2f}") for u in every[name] if u.cosine is not None]
        if dots:
            cosines.append(Dots(name, color, dots))
    alt = ", ".join(f"{name} {about[name].length:.2f}" for name in names)
    figures = [
        Figure(
            svg.dot_chart(lengths, "length / median of the round", f"Relative length of the updates: {alt}"),
            "The length (L2 norm) of every update, relative to the median of its round; the bar is the mean.",
        )
    ]
    if cosines:
        alt = ", ".join(f"{name} {about[name].cosine:.2f}" for name in names if about[name].cosine is not None)
        figures.append(
            Figure(
                svg.dot_chart(cosines, "cosine with the others", f"Cosine of the updates with the others: {alt}"),
                "The cosine of every update with the mean direction of the other clients in its round.",
            )
        )
    return figures
