"""What advice looks at: how clients differ in size, labels and features, always on training images only."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedvit.core import randomness
from fedvit.core.errors import UserError
from fedvit.core.settings import Experiment
from fedvit.data.dataset import Dataset, Indices
from fedvit.data.partition.groups import count_images, hold_out
from fedvit.data.partition.records import ClientPartition, Partition
from fedvit.engine.net import make_net
from fedvit.engine.worker import client_data, image_tensors
from fedvit.studies.features import features_of

MOST_CLASSES, PER_CELL, MOST_IMAGES = 10, 6, 480  # of the images whose features are compared
MOST_CLIENTS = 16  # in a probe; more would only cost more
HELD_OUT = 0.4  # of every client's training images, for validation in the probe


@dataclass(frozen=True)
class Profile:
    """The data as the rules see it."""

    clients: int
    classes: int
    images: int  # for training, of all clients together
    smallest: int  # training images of the smallest client
    median: int
    largest: int
    classes_per_client: float  # median number of classes among a client's training images
    label_skew: float  # 0: every client has the same mix of classes; towards 1: no two clients share a class
    feature_skew: float | None  # 0: a class looks the same at all clients; 1: it only differs between clients
    features_of: int  # images behind feature_skew
    pretrained: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def owned_images(part: ClientPartition) -> Indices:
    """Return what a client may learn from: everything but its test images."""
    return np.concatenate([part.train, part.val, part.probe])


def profile_data(experiment: Experiment, dataset: Dataset, partition: Partition) -> Profile:
    """Describe the clients' training images; no test image and no test label is looked at."""
    owned = {name: owned_images(partition.clients[name]) for name in partition.seen}
    if len(owned) < 2:
        raise UserError(
            f"advice is about two clients or more, found {len(owned)}: with one owner of all data there is nothing to "
            "federate; give a folder of several sites, or --clients 2 or more"
        )
    counts = np.stack([np.bincount(dataset.labels[i], minlength=dataset.classes) for i in owned.values()])
    sizes = counts.sum(axis=1)
    skew, used = None, 0
    if not experiment.model.from_scratch:  # random weights say nothing about how images look
        skew, used = _measured_feature_skew(experiment, dataset, owned)
    return Profile(
        clients=len(owned),
        classes=dataset.classes,
        images=int(sizes.sum()),
        smallest=int(sizes.min()),
        median=int(np.median(sizes)),
        largest=int(sizes.max()),
        classes_per_client=float(np.median((counts > 0).sum(axis=1))),
        label_skew=label_skew(counts),
        feature_skew=skew,
        features_of=used,
        pretrained=not experiment.model.from_scratch,
    )


def label_skew(counts: NDArray[np.int64]) -> float:
    """Average over clients the total variation distance of a client's mix of classes from that of all images.

    `counts` is (clients, classes). 0 means the same mix everywhere; the most is near 1, for many clients that share no
    class.
    """
    mixes = counts / counts.sum(axis=1, keepdims=True)
    pooled = counts.sum(axis=0) / counts.sum()
    return float(np.abs(mixes - pooled).sum(axis=1).mean() / 2)


def feature_skew(features: NDArray[Any], labels: Sequence[int], clients: Sequence[int]) -> float | None:
    """Return the share of the variance within classes that lies between clients, from 0 to 1.

    What small groups would show by chance is subtracted. None if no class has two images at two clients.
    """
    between = within = 0.0
    groups_left = images_left = 0  # degrees of freedom
    truth, owner = np.asarray(labels), np.asarray(clients)
    for label in np.unique(truth):
        mine = truth == label
        cells = [features[mine & (owner == client)] for client in np.unique(owner[mine])]
        cells = [cell for cell in cells if len(cell) > 1]
        if len(cells) < 2:
            continue
        middle = np.concatenate(cells).mean(axis=0)
        between += sum(len(cell) * float(np.square(cell.mean(axis=0) - middle).sum()) for cell in cells)
        within += sum(float(np.square(cell - cell.mean(axis=0)).sum()) for cell in cells)
        groups_left += len(cells) - 1
        images_left += sum(map(len, cells)) - len(cells)
    if not groups_left or between + within == 0:
        return None
    by_chance = groups_left * within / images_left
    return float(np.clip((between - by_chance) / (between + within), 0, 1))


def _measured_feature_skew(
    experiment: Experiment, dataset: Dataset, owned: Mapping[str, Indices]
) -> tuple[float | None, int]:
    """Compute the frozen features of a few hundred training images once, and compare them between clients."""
    chosen, owner = _few_images(dataset.labels, list(owned.values()), experiment.run.seed)
    if not len(chosen):
        return None, 0
    device = torch.device("cpu")
    torch.set_num_threads(experiment.run.threads)
    net = make_net(experiment, dataset.classes, device)
    images, labels = image_tensors(dataset)
    none = np.empty(0, dtype=np.int64)
    data = client_data(images, labels, dataset.classes, ClientPartition(chosen, none, none))
    features = features_of(net.module, data, torch.from_numpy(chosen), net).numpy()
    return feature_skew(features, dataset.labels[chosen].tolist(), owner.tolist()), len(chosen)


def _few_images(labels: NDArray[np.int64], owned: Sequence[Indices], seed: int) -> tuple[Indices, Indices]:
    """Choose images of the classes that most clients have, a few of each class from each client, with their owners."""
    generator = randomness.numpy_generator(seed, "advise", "features")
    kept = generator.permutation(len(owned))[:MOST_CLIENTS]
    counts = np.stack([np.bincount(labels[owned[i]], minlength=int(labels.max()) + 1) for i in kept])
    shared = (counts > 1).sum(axis=0)
    classes = [c for c in np.argsort(-shared, kind="stable")[:MOST_CLASSES] if shared[c] > 1]
    parts, owners = [], []
    for client in kept:
        order = generator.permutation(owned[client])
        for label in classes:
            found = order[labels[order] == label][:PER_CELL]
            parts.append(found)
            owners.append(np.full(len(found), client))
    if not parts:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    chosen, owner = np.concatenate(parts), np.concatenate(owners)
    step = max(1, -(-len(chosen) // MOST_IMAGES))
    return chosen[::step], owner[::step]


def _held_out(dataset: Dataset, images: Indices, seed: int, name: str) -> NDArray[np.bool_]:
    """Choose which of a client's shuffled images validate in a probe: the first ones, or those of whole patients."""
    if dataset.patients is None:
        return np.arange(len(images)) < max(1, round(len(images) * HELD_OUT))
    whose = np.unique(dataset.patients[images], return_inverse=True)[1]
    counts = count_images(whose, dataset.labels[images], dataset.classes)
    generator = randomness.numpy_generator(seed, "advise", name, "patients")
    return hold_out(counts, HELD_OUT, generator, every_class=True)[whose]


def probe_dataset(dataset: Dataset, partition: Partition, seed: int) -> Dataset:
    """Make the data of a probe: training images only, some of each client's held out, which the probe is scored on.

    Every client is a site of its own, with what is held out as its test images. The real test images are not in it, so
    that no probe can see them.
    """
    unit = np.arange(len(dataset)) if dataset.patients is None else dataset.patients  # what is held out as a whole
    names = [name for name in partition.seen if len(np.unique(unit[owned_images(partition.clients[name])])) > 1]
    order = randomness.numpy_generator(seed, "advise", "clients").permutation(len(names))[:MOST_CLIENTS]
    kept = [names[i] for i in sorted(order)]
    parts, sites, held = [], [], []
    for number, name in enumerate(kept):
        images = owned_images(partition.clients[name])
        images = randomness.numpy_generator(seed, "advise", name).permutation(images)
        parts.append(images)
        sites.append(np.full(len(images), number))
        held.append(_held_out(dataset, images, seed, name))
    chosen = np.concatenate(parts)
    return Dataset(
        "python",
        np.ascontiguousarray(dataset.images[chosen]),
        dataset.labels[chosen],
        dataset.class_names,
        official_test=np.concatenate(held),
        sites=np.concatenate(sites),
        site_names=tuple(kept),
        patients=None if dataset.patients is None else dataset.patients[chosen],
        patient_hashes=dataset.patient_hashes,
    )
