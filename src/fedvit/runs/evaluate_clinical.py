"""Clinical scores of a model on a folder or manifest of labeled images."""

from dataclasses import replace

import numpy as np

from fedvit.core.cases import Cases, measured_classes, positive_class
from fedvit.core.clinical import SiteScore, score_cases
from fedvit.core.errors import UserError
from fedvit.core.thresholds import DEFAULT
from fedvit.runs.evaluate import Evaluation
from fedvit.runs.evaluate_labels import LabelEvaluation


def clinical_scores(
    found: Evaluation | LabelEvaluation, threshold: float | SiteScore | None, positive: str | None = None
) -> SiteScore:
    """Score every class against the rest, or of two exclusive classes the positive one.

    The threshold is a number, or that of every class in a client's scores, which were chosen on its validation images;
    None is the default, 0.5. Intervals are by patient where a manifest knows patients.
    """
    cases = _cases(found, positive)
    if isinstance(threshold, SiteScore):
        chosen = {one.number: (one.threshold, one.source) for one in threshold.classes}
        if set(chosen) != set(cases.columns):
            raise UserError("the run measured other classes, so its thresholds are of no use here: give --threshold")
        cuts, sources = zip(*(chosen[number] for number in cases.columns), strict=True)
        cases = replace(cases, threshold=cuts, source=sources)
    elif threshold is not None:
        count = len(cases.columns)
        cases = replace(cases, threshold=(threshold,) * count, source=("given",) * count)
    positives = cases.probability >= np.array(cases.threshold, dtype=np.float64)
    return score_cases(replace(cases, positive=positives), 0, "evaluate")


def _cases(found: Evaluation | LabelEvaluation, positive: str | None) -> Cases:
    """Return the images one by one, with the default threshold."""
    if isinstance(found, LabelEvaluation):
        if positive is not None:
            raise UserError(
                "--positive is for two exclusive classes, but every label is measured by itself: leave it out"
            )
        return found.cases
    number = positive_class(positive, found.classes, "--positive")
    columns = measured_classes(len(found.classes), several_labels=False, positive=number)
    probability = found.logits.double().softmax(1).numpy()[:, columns]
    index, truth = np.arange(found.images), found.labels.numpy()[:, None] == np.array(columns)
    cut, source = (DEFAULT,) * len(columns), ("default",) * len(columns)
    return Cases(columns, index, index, False, truth, probability, probability >= DEFAULT, cut, source)
