"""Tables of a model's score on a folder, for the terminal."""

from collections.abc import Iterator

import numpy as np
from rich.markup import escape
from rich.table import Table

from fedvit.core.clinical import SiteScore
from fedvit.report import units
from fedvit.report.clinical_tables import class_cells, score_table
from fedvit.report.tables import plain_table
from fedvit.runs.evaluate import Evaluation

MOST_CLASSES = 12  # in a confusion matrix that fits a terminal
MOST_MISTAKES = 10
WIDTH = 50  # of the names above a confusion matrix; beyond that, numbers stand for them


def evaluation_tables(found: Evaluation) -> Iterator[Table]:
    """Yield the scores, the recall and precision of every class, and the confusion matrix or its largest cells."""
    yield _scores(found)
    yield _classes(found)
    yield _matrix(found) if len(found.classes) <= MOST_CLASSES else _mistakes(found)


def clinical_table(found: Evaluation, measured: SiteScore) -> Table:
    """Make the table of clinical scores of every class, or of the positive one of two."""
    table = score_table("clinical scores, 95 % intervals over images", "class")
    for one in measured.classes:
        table.add_row(escape(found.classes[one.number]), *class_cells(one))
    return table


def _scores(found: Evaluation) -> Table:
    table = plain_table(f"{escape(str(found.folder))}: {found.images:,} images", header=False)
    table.add_column("score")
    table.add_column("value", justify="right")
    low, high = found.interval
    table.add_row("accuracy % (95 % interval)", f"{found.accuracy:.1f} ({low:.1f} to {high:.1f})")
    table.add_row("balanced accuracy %", units.percent(found.balanced_accuracy))
    table.add_row("AUROC", units.decimal(found.auroc))
    return table


def _classes(found: Evaluation) -> Table:
    table = plain_table("by class")
    table.add_column("class", overflow="fold")
    for name in ("images", "recall %", "precision %"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, count, recall, precision in zip(
        found.classes, found.confusion.sum(1), found.recall, found.precision, strict=True
    ):
        table.add_row(escape(name), f"{count:,}", units.percent(recall), units.percent(precision))
    return table


def _matrix(found: Evaluation) -> Table:
    table = plain_table("confusion (rows: true class)")
    table.add_column("", overflow="fold")
    fits = sum(len(name) + 2 for name in found.classes) <= WIDTH
    heads = [name if fits else str(number) for number, name in enumerate(found.classes, 1)]
    for head in heads:
        table.add_column(escape(head), justify="right", no_wrap=True)
    for number, name in enumerate(found.classes):
        cells = [
            f"[bold]{count}[/]" if column == number else str(count) if count else "."
            for column, count in enumerate(found.confusion[number])
        ]
        table.add_row(escape(name if fits else f"{heads[number]} {name}"), *cells)
    return table


def _mistakes(found: Evaluation) -> Table:
    """List the pairs of classes that are confused most often; --json has the whole matrix."""
    table = plain_table(f"the {MOST_MISTAKES} most frequent mistakes")
    for name in ("class", "predicted"):
        table.add_column(name, overflow="fold")
    table.add_column("images", justify="right")
    wrong = found.confusion - np.diag(np.diagonal(found.confusion))
    for cell in np.argsort(-wrong, axis=None, kind="stable")[:MOST_MISTAKES]:
        label, guess = divmod(int(cell), len(found.classes))
        if wrong[label, guess]:
            table.add_row(escape(found.classes[label]), escape(found.classes[guess]), f"{wrong[label, guess]:,}")
    return table
