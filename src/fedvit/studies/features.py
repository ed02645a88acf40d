"""What models see: the features before the classifier, embedded in two dimensions by t-SNE."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedvit.core.batches import ClientData, image_batches
from fedvit.core.errors import UserError
from fedvit.core.training import holding
from fedvit.engine.checkpoint import load_checkpoint
from fedvit.engine.client_store import ClientStore
from fedvit.engine.net import POOLED, Net, make_net
from fedvit.engine.worker import Worker, load_data
from fedvit.models.plugins.attach import tapped
from fedvit.runs.folder import Run
from fedvit.runs.models import client_model, open_run

MOST_CLASSES, MOST_IMAGES, BATCH = 10, 800, 128
Array = NDArray[Any]


@dataclass(frozen=True)
class Picture:
    """Test images as points: where they lie, their classes, and how well the features separate the classes."""

    points: Array  # (images, 2)
    labels: Array
    class_names: tuple[str, ...]
    silhouette: float  # of the full features by class, from -1 to 1
    model: str  # "server", or "clients" if every image went through its owner's model


def picture(run: Run) -> Picture:
    """Embed the test images of the ten most frequent classes, by the server's model if there is one."""
    experiment, cpu = run.experiment, torch.device("cpu")
    torch.set_num_threads(experiment.run.threads)
    dataset, split = load_data(experiment)
    net = make_net(experiment, dataset.classes, cpu)
    worker = Worker(experiment, net, dataset, split, cpu)
    shown = _chosen_images(torch.from_numpy(split.global_test), worker.labels)
    if net.one_global_model:
        found = [_server_features(run, net, worker, shown)]
    else:
        found = list(_client_features(run, net, worker, shown))
    features, labels = (torch.cat([pair[i] for pair in found]).numpy() for i in (0, 1))
    return Picture(
        _embedded(features, experiment.run.seed),
        labels,
        dataset.class_names,
        _silhouette(features, labels),
        "server" if net.one_global_model else "clients",
    )


def _chosen_images(test: Tensor, labels: Tensor) -> Tensor:
    """Choose test images of the most frequent classes, the same ones for every row."""
    counts = torch.bincount(labels[test])
    classes = torch.argsort(counts, descending=True, stable=True)[:MOST_CLASSES]
    kept = test[torch.isin(labels[test], classes)].sort().values
    step = max(1, -(-len(kept) // MOST_IMAGES))
    return kept[::step]


def _server_features(run: Run, net: Net, worker: Worker, shown: Tensor) -> tuple[Tensor, Tensor]:
    """Compute features with the server's model after the last round."""
    server = load_checkpoint(
        run.folder / "checkpoint", ClientStore(run.folder / "checkpoint", in_ram=False), clean=False
    )
    if server is None:
        raise UserError(f"{run.folder} has no checkpoint, from which the features are computed: run it first")
    client = worker.client(POOLED, server.round, {})
    with holding(client, server.shared):
        return features_of(client.module, client.data, shown, net), worker.labels[shown]


def _client_features(run: Run, net: Net, worker: Worker, shown: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Compute features with every client's own model on its own test images."""
    opened = open_run(run, last=True)
    for name in worker.partition.seen:
        mine = torch.from_numpy(worker.partition.clients[name].test)
        mine = mine[torch.isin(mine, shown)]
        if len(mine):
            data = replace(worker.client(name, 0, {}).data, activations=None)  # this model takes images only
            yield features_of(client_model(opened, name), data, mine, net), worker.labels[mine]


@torch.no_grad()
def features_of(model: nn.Module, data: ClientData, indices: Tensor, net: Net) -> Tensor:
    """Return what enters the classifier, (images, dim); of a model with two classifiers, what enters the first."""
    model.eval()
    parts = []
    with tapped(model) as tap:
        for x, _ in image_batches(data, indices, BATCH, net.inputs, torch.device("cpu")):
            tap.features.clear()
            model(x)
            parts.append(tap.features[0].float())
    return torch.cat(parts)


def _embedded(features: Array, seed: int) -> Array:
    """Run t-SNE in two dimensions, on one thread because the number of threads changes floating-point sums."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    near = min(30.0, max(2.0, (len(features) - 1) / 4))
    with threadpool_limits(1):
        points: Array = TSNE(perplexity=near, init="pca", learning_rate="auto", random_state=seed).fit_transform(
            features.astype(np.float64)
        )
    return points


def _silhouette(features: Array, labels: Array) -> float:
    """Measure how much closer images lie to their own class than to the next: 1 is far apart, 0 is mixed."""
    from sklearn.metrics import silhouette_score

    return float(silhouette_score(features, labels)) if 1 < len(np.unique(labels)) < len(labels) else float("nan")
