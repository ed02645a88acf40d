"""From predictors to per-client metrics, and from clients to one line."""

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedvit.client import Predictor
from fedvit.data import pipeline
from fedvit.data.pipeline import ClientData
from fedvit.models.classifier import InputSettings

EVALUATION_BATCH = 256
METRICS = ("accuracy", "balanced_accuracy", "loss")


@torch.no_grad()
def score(
    predict: Predictor, data: ClientData, indices: Tensor, inputs: InputSettings, device: torch.device
) -> dict[str, float]:
    """Accuracy and balanced accuracy in percent, and mean loss, on these images.

    Balanced accuracy is the mean recall over the classes that are present.
    """
    loss, right, labels = 0.0, [], []
    for x, y in pipeline.batches(data, indices, EVALUATION_BATCH, inputs, device):
        logits = predict(x)
        loss += F.cross_entropy(logits, y, reduction="sum").item()
        right.append((logits.argmax(1) == y).cpu())
        labels.append(y.cpu())
    hit, label = torch.cat(right).double(), torch.cat(labels)
    counts = torch.bincount(label, minlength=data.classes)
    hits = torch.bincount(label, weights=hit, minlength=data.classes)
    recall = hits[counts > 0] / counts[counts > 0]
    return {
        "accuracy": 100 * hit.mean().item(),
        "balanced_accuracy": 100 * recall.mean().item(),
        "loss": loss / len(label),
    }


def over_clients(accuracies: Sequence[float], test_samples: Sequence[int]) -> dict[str, float]:
    """Mean, population deviation, mean over samples, and the means of the worst and best tenth of the clients."""
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
