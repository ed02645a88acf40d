"""Losses of a batch's logits, for one label per image or several; `train.loss` chooses among them.

With one label per image, labels are class numbers (images). With several, they are 0 or 1 (images, labels), each label
is a question of its own with the classes no and yes, and the loss is the mean over images and labels.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fedvit.core.settings import LossName

Criterion = Callable[[Tensor, Tensor], Tensor]  # from logits and labels to the value to minimize


def cross_entropy(logits: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
    """Compute the cross-entropy; with several labels per image, the binary one."""
    if y.ndim == 2:
        return F.binary_cross_entropy_with_logits(logits, y.to(logits), reduction=reduction)
    return F.cross_entropy(logits, y, reduction=reduction)


def weighted(logits: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """Compute the mean of every answer's cross-entropy times the weight of its class (`class_weights`)."""
    own = weights[y] if y.ndim == 1 else torch.where(y > 0, weights[1], weights[0])
    return (own * cross_entropy(logits, y, "none")).mean()


def class_weights(counts: Tensor) -> Tensor:
    """Return weights inverse to the counts of the classes, the first axis, whose mean over the images is 1.

    A class without images has weight 0.
    """
    shares = counts.sum(0) / (counts > 0).sum(0)  # what each class that is present would have of equal classes
    return torch.where(counts > 0, shares / counts.clamp(min=1), 0.0)


def focal(logits: Tensor, y: Tensor, gamma: float) -> Tensor:
    """Compute the focal loss (Lin et al. 2017): -(1 - p)^gamma log p, for the probability p of the right answer."""
    losses = cross_entropy(logits, y, "none")
    return ((-torch.expm1(-losses)).clamp(min=1e-8) ** gamma * losses).mean()  # the clamp keeps slopes finite below 1


def balanced_softmax(logits: Tensor, y: Tensor, counts: Tensor) -> Tensor:
    """Compute the cross-entropy of logits to which the log of the class counts is added; an absent class drops out.

    With several labels, `counts` is (2, labels), and a label's logit rises by the log of its odds.
    """
    prior = counts.to(logits).clamp(min=1e-12).log()
    return cross_entropy(logits + (prior if y.ndim == 1 else prior[1] - prior[0]), y)


def make_criterion(name: LossName, gamma: float, counts: Tensor, device: torch.device) -> Criterion:
    """Return the loss of this name for a client with these counts (classes), or (2, labels) with several labels."""
    counts = counts.to(device)
    match name:
        case "cross_entropy":
            return cross_entropy
        case "weighted":
            weights = class_weights(counts).float()
            return lambda logits, y: weighted(logits, y, weights)
        case "focal":
            return lambda logits, y: focal(logits, y, gamma)
        case "balanced":
            return lambda logits, y: balanced_softmax(logits, y, counts)


def chance_loss(name: LossName, gamma: float, classes: int, *, several_labels: bool) -> float:
    """Return the loss of a model that finds every answer equally likely; `balanced` is at most this."""
    answers = 2 if several_labels else max(2, classes)
    return math.log(answers) * ((1 - 1 / answers) ** gamma if name == "focal" else 1.0)
