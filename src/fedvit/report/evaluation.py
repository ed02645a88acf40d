"""Tables of a model's score on a folder, for the terminal."""

from collections.abc import Iterator

import numpy as np
from rich.markup import escape
from rich.table import Table

from fedvit.core.clinical import SiteScore
from fedvit.core.thresholds import DEFAULT
from fedvit.report import units
from fedvit.report.clinical_tables import class_cells, score_table
from fedvit.report.tables import plain_table
from fedvit.runs.evaluate import Evaluation
from fedvit.runs.evaluate_labels import LabelEvaluation, mean_auroc

MOST_CLASSES = 12  # in a confusion matrix that fits a terminal
MOST_MISTAKES = 10
WIDTH = 50  # of the names above a confusion matrix; beyond that, numbers stand for them


def evaluation_tables(found: Evaluation) -> Iterator[Table]:
    """Yield the scores, the recall and precision of every class, and the confusion matrix or its largest cells."""
    yield _scores(found)
    yield _classes(found)
    yield _matrix(found) if len(found.classes) <= MOST_CLASSES else _mistakes(found)


def label_tables(found: LabelEvaluation) -> Iterator[Table]:
    """Yield the scores over all labels, and those of every label."""
    score = found.score
    by = "image" if score.patients is None else "patient"
    whole = plain_table(f"{escape(str(found.folder))}: {found.images:,} images", header=False)
    whole.add_column("score")
    whole.add_column("value", justify="right")
    whole.add_row("mean AUROC of the labels", units.decimal(mean_auroc(score)))
    whole.add_row("right answers, of images and labels %", units.percent(found.accuracy))
    yield whole
    table = plain_table(f"by label, yes from a probability of {DEFAULT:g}; 95 % intervals by {by}")
    table.add_column("label", overflow="fold")
    names = ("images", "positive", "AUROC", "AP", "F1", "sensitivity", "specificity")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for one in score.classes:
        low, high = one.intervals.get("auroc", (None, None))
        area = units.decimal(one.auroc) + ("" if low is None else f" ({units.decimal(low)}-{units.decimal(high)})")
        figures = (one.average_precision, one.f1, one.sensitivity, one.specificity)
        cells = [f"{one.images:,}", f"{one.positives:,}", area, *map(units.decimal, figures)]
        table.add_row(escape(found.classes[one.number]), *cells)
    yield table


def clinical_table(found: Evaluation | LabelEvaluation, measured: SiteScore) -> Table:
    """Make the table of clinical scores of every class, or of the positive one of two."""
    by = "images" if measured.patients is None else "patients"
    table = score_table(f"clinical scores, 95 % intervals over {by}", "class")
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
