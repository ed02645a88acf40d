"""Compute per-client metrics from predictors, and summarize them over clients."""

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedvit.core.batches import EVALUATION_BATCH, ClientData, InputSettings, image_batches
from fedvit.core.client import Predictor
from fedvit.core.clinical_message import clinical_problem, is_clinical
from fedvit.core.losses import cross_entropy

METRICS = ("accuracy", "balanced_accuracy", "loss")
AUROC = "auroc"  # an optional metric, missing where it is undefined
CONFUSION = "confusion"  # added to the metrics of view personal: confusion_<class>_<predicted class>
LARGEST = sys.float_info.max
RANGES = {  # of each score; no result can be computed from a value outside its range or from NaN
    "accuracy": (0, 100),
    "balanced_accuracy": (0, 100),
    "val_accuracy": (0, 100),
    "val_auroc": (0, 1),
    "loss": (-LARGEST, LARGEST),
    AUROC: (0, 1),
}
LONGEST_VIEW = 40  # characters of a view's name
MOST_IMAGES = 10**9  # in one cell of a confusion matrix


def view_scores(
    view: str, predict: Predictor, data: ClientData, inputs: InputSettings, device: torch.device, *, auroc: bool
) -> dict[str, float]:
    """Return a client's scores in one view by "<view>_<metric>": on its test images, and on val if it has any."""
    found = score(predict, data, data.test, inputs, device, auroc=auroc, confusion=view == "personal")
    if len(data.val):
        at_val = score(predict, data, data.val, inputs, device, auroc=data.several_labels)
        found |= {f"val_{metric}": at_val[metric] for metric in ("accuracy", AUROC) if metric in at_val}
    return {f"{view}_{metric}": value for metric, value in found.items()}


@torch.no_grad()
def score(
    predict: Predictor,
    data: ClientData,
    indices: Tensor,
    inputs: InputSettings,
    device: torch.device,
    *,
    auroc: bool = False,
    confusion: bool = False,
) -> dict[str, float]:
    """Return accuracy and balanced accuracy in percent, and the mean loss, on these images.

    Balanced accuracy is the mean recall over the classes that are present. AUROC and the confusion matrix are optional.
    With several labels per image, see `score_labels`.
    """
    loss, chosen, labels, outputs = 0.0, [], [], []
    for x, y in image_batches(data, indices, EVALUATION_BATCH, inputs, device):
        logits = predict(x)
        loss += cross_entropy(logits, y, "sum").item()
        chosen.append(logits.argmax(1).cpu())
        labels.append(y.cpu())
        if auroc or data.several_labels:
            outputs.append(logits.cpu())
    if data.several_labels:
        truth = torch.cat(labels)
        return {**score_labels(torch.cat(outputs), truth, auroc=auroc), "loss": loss / truth.numel()}
    guess, label = torch.cat(chosen), torch.cat(labels)
    hit = (guess == label).double()
    counts = torch.bincount(label, minlength=data.classes)
    hits = torch.bincount(label, weights=hit, minlength=data.classes)
    recall = hits[counts > 0] / counts[counts > 0]
    found = {
        "accuracy": 100 * hit.mean().item(),
        "balanced_accuracy": 100 * recall.mean().item(),
        "loss": loss / len(label),
    }
    area = area_under_roc(torch.cat(outputs), label) if auroc else None
    if area is not None:
        found[AUROC] = area
    if confusion:
        cells, times = torch.unique(label * data.classes + guess, return_counts=True)
        for cell, count in zip(cells.tolist(), times.tolist(), strict=True):
            found[f"{CONFUSION}_{cell // data.classes}_{cell % data.classes}"] = float(count)
    return found


def score_labels(logits: Tensor, labels: Tensor, *, auroc: bool) -> dict[str, float]:
    """Return the scores of several labels per image, each of which is a question with the answers yes and no.

    Accuracy is the share of right answers, over images and labels, where yes means a probability of at least a half.
    Balanced accuracy is the mean over labels of the recall of the answers that are present. `auroc_<label>` is there
    for labels that have both answers, and `auroc` is their mean.
    """
    right, yes = (logits >= 0) == (labels > 0), labels > 0
    recall = [
        torch.stack([right[mask, label].double().mean() for mask in (yes[:, label], ~yes[:, label]) if mask.any()])
        for label in range(labels.shape[1])
    ]
    found = {
        "accuracy": 100 * right.double().mean().item(),
        "balanced_accuracy": 100 * torch.stack([own.mean() for own in recall]).mean().item(),
    }
    areas = areas_of_labels(logits, labels) if auroc else {}
    if areas:
        found |= {AUROC: sum(areas.values()) / len(areas), **{f"{AUROC}_{k}": area for k, area in areas.items()}}
    return found


def areas_of_labels(logits: Tensor, labels: Tensor) -> dict[int, float]:
    """Return the AUROC of every label that has both a positive and a negative image; none if a logit is not finite."""
    if not logits.isfinite().all():
        return {}
    scores, truth = logits.double().sigmoid().numpy(), labels.numpy() > 0
    both = [label for label in range(truth.shape[1]) if 0 < truth[:, label].sum() < len(truth)]
    return {label: _ranked_above(scores[:, label], truth[:, label]) for label in both}


def area_under_roc(logits: Tensor, labels: Tensor) -> float | None:
    """Return the AUROC of the softmax scores, from 0 to 1; with more than two classes, the one-vs-rest mean.

    The mean is over the classes that are present. If only one class is present, AUROC is undefined: None.
    """
    present = np.unique(labels.numpy()).tolist()
    if len(present) < 2 or not logits.isfinite().all():
        return None
    scores, truth = logits.double().softmax(1).numpy(), labels.numpy()
    if scores.shape[1] == 2:
        return _ranked_above(scores[:, 1], truth == 1)
    return float(np.mean([_ranked_above(scores[:, c], truth == c) for c in present]))


def _ranked_above(scores: NDArray[np.float64], positive: NDArray[np.bool_]) -> float:
    """Return the chance that a positive scores above a negative, ties counting half: the area under the ROC curve.

    This equals scikit-learn's roc_auc_score, whose import alone takes longer than the evaluation of a small run.
    """
    _, place, times = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(times) - (times - 1) / 2)[place]
    count = int(positive.sum())
    above = ranks[positive].sum() - count * (count + 1) / 2
    return float(above / (count * (len(scores) - count)))


def score_problem(scores: Mapping[str, float], classes: int) -> str | None:
    """Describe what is wrong with scores from a network without quoting any value; return None if nothing is wrong.

    An infinite loss is rejected too, because it would make the mean over clients useless.
    """
    views = {key.removesuffix("_balanced_accuracy") for key in scores if key.endswith("_balanced_accuracy")}
    if not all(view.isidentifier() and len(view) <= LONGEST_VIEW for view in views):
        return "a view has a name that no plan gives"
    missing = [f"{view}_{m}" for view in sorted({"personal", *views}) for m in METRICS if f"{view}_{m}" not in scores]
    if missing:
        return f"the score {missing[0][:60]!r} is missing"
    metrics = {**RANGES, **{f"{AUROC}_{label}": RANGES[AUROC] for label in range(classes)}}
    ranges = {f"{view}_{metric}": ends for view in views for metric, ends in metrics.items()}
    for name, value in scores.items():
        if is_clinical(name):
            continue
        if _is_cell(name, classes):
            if not (0 < value <= MOST_IMAGES and value == int(value)):
                return f"{name!r} is not a number of images"
        elif name not in ranges:
            return f"no score is called {name[:60]!r}"
        elif not ranges[name][0] <= value <= ranges[name][1]:
            low, high = ranges[name]
            expected = "a finite number" if high == LARGEST else f"a number from {low} to {high}"
            return f"{name[:60]!r} is not {expected}"
    return clinical_problem(scores, classes)


def _is_cell(name: str, classes: int) -> bool:
    """Return whether this names a count in a confusion matrix of `classes` classes."""
    start = f"personal_{CONFUSION}_"
    cell = name.removeprefix(start).split("_") if name.startswith(start) else []
    return len(cell) == 2 and all(_is_class(text, classes) for text in cell)


def _is_class(text: str, classes: int) -> bool:
    """Return whether this is a class number in the form in which we write it."""
    return text.isascii() and text.isdecimal() and len(text) < 9 and text == str(int(text)) and int(text) < classes


def pooled(scores: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Score one model on the images of all clients together, from each client's counts and loss."""
    start = f"personal_{CONFUSION}_"
    hits, counts, loss = Counter[str](), Counter[str](), 0.0
    for score in scores.values():
        images = 0.0
        for key, count in score.items():
            if key.startswith(start):
                label, guess = key.removeprefix(start).split("_")
                counts[label] += int(count)
                hits[label] += int(count) * (label == guess)
                images += count
        loss += images * score["personal_loss"]
    recall = [hits[label] / counts[label] for label in sorted(counts, key=int)]
    return {
        "accuracy": 100 * (hits.total() / counts.total()),
        "balanced_accuracy": 100 * (sum(recall) / len(recall)),
        "loss": loss / counts.total(),
    }


def over_clients(accuracies: Sequence[float], test_samples: Sequence[int]) -> dict[str, float]:
    """Return mean, population standard deviation, sample-weighted mean, and the means of the worst and best decile."""
    values = np.asarray(accuracies, dtype=np.float64)
    tenth = math.ceil(len(values) / 10)
    ordered = np.sort(values)
    return {
        "mean": float(values.mean()),
        "std": float(values.std()),
        "micro": float(np.average(values, weights=test_samples)),
        "worst_decile": float(ordered[:tenth].mean()),
        "best_decile": float(ordered[-tenth:].mean()),
    }
