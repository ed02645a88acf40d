"""Confusion matrices for all clients together and for each client."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from fedvit.report import svg
from fedvit.report.statistics import Record
from fedvit.report.units import client

MOST_MATRICES = 24  # clients with a confusion matrix of their own
_MOST_CLASSES = 12  # classes in a matrix
_LARGE = 6  # matrices with more classes than this need wider columns

Cells = Iterable[Sequence[int]]  # [class, predicted class, images]


@dataclass(frozen=True)
class Confusion:
    """The matrices with their titles, and the text above them."""

    words: str
    large: bool
    matrices: Sequence[tuple[str, Markup]]


def confusion(record: Record) -> Confusion | None:
    """Draw one matrix for all clients together and one for each; None if the run did not record them."""
    if not record.confusion:
        return None
    names = record.class_names
    pooled: dict[tuple[int, int], int] = {}
    for cells in record.confusion.values():
        for true, predicted, images in cells:
            pooled[true, predicted] = pooled.get((true, predicted), 0) + images
    scores = {row["client"]: row["personal_accuracy"] for row in record.clients}
    order = sorted(record.confusion, key=lambda name: -scores.get(name, 0))
    if len(order) > MOST_MATRICES:
        order = order[: MOST_MATRICES // 2] + order[-MOST_MATRICES // 2 :]
    whole = [(true, predicted, images) for (true, predicted), images in sorted(pooled.items())]
    matrices = [_matrix("all clients together", whole, names)]
    matrices += [
        _matrix(f"{client(name)}: {scores.get(name, 0):.0f} %", record.confusion[name], names) for name in order
    ]
    large = max(len(_classes(cells)) for cells in record.confusion.values()) > _LARGE
    return Confusion(_words(record, pooled), large, matrices)


def _words(record: Record, pooled: Mapping[tuple[int, int], int]) -> str:
    words = "Rows are true classes, columns are predicted ones, and the color shows the share of the true class."
    if len(_classes(pooled)) > _MOST_CLASSES:
        words += (
            f" At most {_MOST_CLASSES} classes are drawn, the most frequent ones; the last one stands for all others."
        )
    if len(record.confusion) > MOST_MATRICES:
        words += f" The {MOST_MATRICES // 2} best and worst of {len(record.confusion)} clients are shown."
    return words + _worst_pairs(pooled, record.class_names)


def _worst_pairs(pooled: Mapping[tuple[int, int], int], names: Sequence[str]) -> str:
    """Name the most frequent confusions."""
    totals: dict[int, int] = {}
    for (true, _), images in pooled.items():
        totals[true] = totals.get(true, 0) + images
    worst = sorted(((n, t, p) for (t, p), n in pooled.items() if t != p), key=lambda x: (-x[0], x[1:]))[:3]
    if not worst:
        return ""
    words = [f"{names[t]} classified as {names[p]} ({n} of {totals[t]})" for n, t, p in worst if max(t, p) < len(names)]
    return f" Most frequent confusions: {'; '.join(words)}."


def _classes(cells: Cells) -> set[int]:
    """Collect the classes that occur, true or predicted."""
    return {number for cell in cells for number in cell[:2]}


def _matrix(title: str, cells: Sequence[Sequence[int]], names: Sequence[str]) -> tuple[str, Markup]:
    table, shown = square(cells, names)
    right, whole = sum(n for true, predicted, n in cells if true == predicted), sum(n for _, _, n in cells)
    alt = f"Confusion matrix, {title}, {right} of {whole} images correct"
    return title, svg.matrix(table, shown, alt, rest=len(_classes(cells)) > len(shown))


def square(cells: Cells, names: Sequence[str]) -> tuple[list[list[int]], list[str]]:
    """Make a matrix of the classes that occur; beyond a dozen, the less frequent ones are merged."""
    kept = [tuple(cell) for cell in cells]
    weight: dict[int, int] = {}
    for true, predicted, images in kept:
        weight[true] = weight.get(true, 0) + 2 * images  # true classes matter more than predicted ones
        weight[predicted] = weight.get(predicted, 0) + images
    frequent = sorted(weight, key=lambda c: (-weight[c], c))
    some = sorted(weight) if len(weight) <= _MOST_CLASSES else sorted(frequent[: _MOST_CLASSES - 1])
    place = {c: number for number, c in enumerate(some)}
    shown = [names[c] if c < len(names) else str(c) for c in some]
    if len(some) < len(weight):
        shown.append(f"{len(weight) - len(some)} others")
    table = [[0] * len(shown) for _ in shown]
    for true, predicted, images in kept:
        table[place.get(true, len(some))][place.get(predicted, len(some))] += images
    return table, shown
