"""Who owns which image. A rule turns labels into one `Split`; the same seed gives the same split everywhere."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedvit import randomness
from fedvit.data.datasets import Dataset, Indices, Labels
from fedvit.errors import UserError, nearest
from fedvit.settings import PartitionSettings

TEST_SHARE = 0.25
MAX_REDRAWS = 10_000


@dataclass(frozen=True)
class ClientSplit:
    """The indices of one client's images."""

    train: Indices
    test: Indices
    val: Indices


@dataclass(frozen=True)
class Split:
    """Every client's images, and the global test set."""

    clients: Mapping[str, ClientSplit]
    global_test: Indices

    def to_json(self) -> dict[str, Any]:
        body = {
            "clients": {
                name: {"train": part.train.tolist(), "val": part.val.tolist(), "test": part.test.tolist()}
                for name, part in self.clients.items()
            },
            "global_test": self.global_test.tolist(),
        }
        text = json.dumps(body, sort_keys=True)
        return {"hash": hashlib.sha256(text.encode()).hexdigest(), **body}


def split(dataset: Dataset, settings: PartitionSettings, *, batch: int, val: float, seed: int) -> Split:
    """Divide the data set over clients by the rule of this name."""
    rules: dict[str, Callable[[Dataset, PartitionSettings, int, Generator], Split]] = {
        "iid": iid,
        "dirichlet": dirichlet,
        "dirichlet_train": dirichlet_train,
        "pathological": pathological,
        "dh": dh,
    }
    if settings.name not in rules:
        raise UserError(f"unknown partition {settings.name!r}; {nearest(settings.name, rules)}")
    generator = randomness.numpy_generator(seed, "partition")
    least = least_samples(settings, len(dataset), batch)
    if settings.clients * max(least, 2) > len(dataset):
        raise UserError(
            f"{len(dataset)} images cannot serve {settings.clients} clients with at least {max(least, 2)} each; "
            f"at most {len(dataset) // max(least, 2)} clients are possible"
        )
    result = rules[settings.name](dataset, settings, least, generator)
    for name, part in result.clients.items():
        if len(part.train) == 0 or len(part.test) == 0:
            raise UserError(
                f"client {name} would have {len(part.train)} training and {len(part.test)} test images; "
                "use fewer clients or a larger partition.min_samples"
            )
    return hold_out_val(result, val, seed) if val else result


def least_samples(settings: PartitionSettings, total: int, batch: int) -> int:
    """The fewest images a client may have."""
    if settings.min_samples is not None:
        return settings.min_samples
    return int(min(batch / TEST_SHARE, total / settings.clients / 2))


def hold_out_val(whole: Split, share: float, seed: int) -> Split:
    """Take a share of every client's training images for choosing things; at least one, never all."""
    clients = {}
    for name, part in whole.clients.items():
        count = max(1, round(len(part.train) * share))
        if count >= len(part.train):
            raise UserError(f"data.val={share} leaves client {name} with {len(part.train)} images nothing to train on")
        order = randomness.numpy_generator(seed, "val", name).permutation(part.train)
        clients[name] = replace(part, val=np.sort(order[:count]), train=np.sort(order[count:]))
    return replace(whole, clients=clients)


# Rules over the pooled data: each client's images are divided into train and test afterwards.


def iid(dataset: Dataset, settings: PartitionSettings, least: int, generator: Generator) -> Split:
    """Every client gets the same number of images at random."""
    if dataset.official_test is not None:
        train, test = official(dataset, generator)
        shares = [generator.permutation(part) for part in (train, test)]
        return train_only([np.array_split(part, settings.clients) for part in shares], test)
    return pooled(np.array_split(generator.permutation(len(dataset)), settings.clients), generator)


def dirichlet(dataset: Dataset, settings: PartitionSettings, least: int, generator: Generator) -> Split:
    """FedPerfix: train and test pooled, per class p ~ Dir(alpha), full clients get no more."""
    everything = np.arange(len(dataset))
    counts = dirichlet_counts(dataset.labels, dataset.classes, settings, least, generator)
    return pooled(deal(everything, dataset.labels, counts, generator), generator)


def pooled(owned: Sequence[Indices], generator: Generator) -> Split:
    """75 % train and 25 % test per client at random, not stratified; the global test set is the union."""
    clients = {}
    for number, indices in enumerate(owned):
        order = generator.permutation(indices)
        cut = len(order) - max(1, round(len(order) * TEST_SHARE))
        clients[str(number)] = client_split(order[:cut], order[cut:])
    return Split(clients, np.sort(np.concatenate([part.test for part in clients.values()])))


# Rules over the official training set: the global test set is the official one.


def dirichlet_train(dataset: Dataset, settings: PartitionSettings, least: int, generator: Generator) -> Split:
    """FedPEFT: the training set by Dir(alpha) per class; test images in the client's class proportions."""
    train, test = official(dataset, generator)
    labels = dataset.labels[train]
    counts = dirichlet_counts(labels, dataset.classes, settings, least, generator)
    return by_shares(dataset, train, test, counts / np.maximum(counts.sum(axis=1, keepdims=True), 1), generator)


def pathological(dataset: Dataset, settings: PartitionSettings, least: int, generator: Generator) -> Split:
    """FedV: every client has `classes` classes, each class divided evenly over its owners."""
    per_client = settings.classes
    if not 1 <= per_client <= dataset.classes:
        raise UserError(f"partition.classes must lie in 1..{dataset.classes}, found {per_client}")
    owners = class_owners(dataset.classes, settings.clients, per_client, generator)
    train, test = official(dataset, generator)
    return by_shares(dataset, train, test, owners / np.maximum(owners.sum(axis=1, keepdims=True), 1), generator)


def dh(dataset: Dataset, settings: PartitionSettings, least: int, generator: Generator) -> Split:
    """PFedEdit: `level` percent of the classes are missing at each client; shares are nearly equal."""
    total = dataset.classes
    per_client = max(1, round(total * (1 - settings.level / 100)), round(total / 10))
    if per_client * settings.clients % total:
        raise UserError(
            f"dh level {settings.level} gives {per_client} classes per client; with {total} classes the number of "
            f"clients must be a multiple of {total // np.gcd(per_client, total)}, found {settings.clients}"
        )
    owners = class_owners(total, settings.clients, per_client, generator)
    shares = owners * generator.uniform(0.4, 0.6, owners.shape)
    train, test = official(dataset, generator)
    return by_shares(dataset, train, test, shares / shares.sum(axis=1, keepdims=True), generator)


def official(dataset: Dataset, generator: Generator) -> tuple[Indices, Indices]:
    """The source's own train and test; where it has none, a stratified quarter is held out as test."""
    mask = dataset.official_test
    if mask is None:
        mask = np.zeros(len(dataset), dtype=bool)
        for label in range(dataset.classes):
            members = generator.permutation(np.flatnonzero(dataset.labels == label))
            mask[members[: round(len(members) * TEST_SHARE)]] = True
    return np.flatnonzero(~mask), np.flatnonzero(mask)


def by_shares(
    dataset: Dataset, train: Indices, test: Indices, shares: NDArray[np.float64], generator: Generator
) -> Split:
    """Divide train and test of every class by the same shares (classes x clients)."""
    parts = []
    for indices in (train, test):
        labels = dataset.labels[indices]
        sizes = np.bincount(labels, minlength=dataset.classes)
        edges = np.round(np.cumsum(shares, axis=1) * sizes[:, None]).astype(np.int64)
        parts.append(deal(indices, labels, np.diff(edges, axis=1, prepend=0), generator))
    return train_only(parts, test)


def train_only(parts: Sequence[Sequence[Indices]], test: Indices) -> Split:
    clients = {str(i): client_split(a, b) for i, (a, b) in enumerate(zip(*parts, strict=True))}
    return Split(clients, test)


def client_split(train: Indices, test: Indices) -> ClientSplit:
    return ClientSplit(np.sort(train), np.sort(test), np.empty(0, dtype=np.int64))


# Shared pieces.


def dirichlet_counts(
    labels: Labels, classes: int, settings: PartitionSettings, least: int, generator: Generator
) -> NDArray[np.int64]:
    """How many images of each class each client gets (classes x clients); redrawn until all have enough."""
    sizes = np.bincount(labels, minlength=classes)
    for _ in range(MAX_REDRAWS):
        counts = draw_counts(sizes, settings.clients, settings.alpha, generator)
        if counts.sum(axis=0).min() >= least:
            return counts
    raise UserError(
        f"no split of {len(labels)} images over {settings.clients} clients with alpha {settings.alpha} gave "
        f"every client {least} images in {MAX_REDRAWS:,} draws; {possible(sizes, settings, least, generator)}"
    )


def draw_counts(sizes: Labels, clients: int, alpha: float, generator: Generator) -> NDArray[np.int64]:
    """One draw: class by class, clients that hold their fair share already get no more."""
    counts = np.zeros((len(sizes), clients), dtype=np.int64)
    held = np.zeros(clients, dtype=np.int64)
    fair = sizes.sum() / clients
    for label, size in enumerate(sizes):
        share = generator.dirichlet(np.full(clients, alpha)) * (held < fair)
        if not share.sum() > 0:  # every client with a share is full, or alpha is so small that all underflow
            share = (held < fair).astype(np.float64)
        edges = np.floor(np.cumsum(share / share.sum()) * size).astype(np.int64)
        edges[-1] = size
        counts[label] = np.diff(edges, prepend=0)
        held += counts[label]
    return counts


def possible(sizes: Labels, settings: PartitionSettings, least: int, generator: Generator) -> str:
    """What would work instead: the largest smaller number of clients, the smallest larger alpha."""

    def works(clients: int, alpha: float) -> bool:
        return any(draw_counts(sizes, clients, alpha, generator).sum(axis=0).min() >= least for _ in range(100))

    advice = []
    for clients in range(settings.clients - 1, 0, -max(1, settings.clients // 16)):
        if works(clients, settings.alpha):
            advice.append(f"{clients} clients")
            break
    for factor in (2, 5, 10, 50, 100, 1000):
        if works(settings.clients, settings.alpha * factor):
            advice.append(f"alpha {settings.alpha * factor:g}")
            break
    return f"possible: {' or '.join([*advice, 'a smaller partition.min_samples'])}"


def deal(indices: Indices, labels: Labels, counts: NDArray[np.int64], generator: Generator) -> list[Indices]:
    """Hand out the shuffled images of each class in these counts (classes x clients)."""
    owned: list[list[Indices]] = [[] for _ in range(counts.shape[1])]
    for label, row in enumerate(counts):
        members = generator.permutation(indices[labels == label])
        for client, part in enumerate(np.split(members, np.cumsum(row))[:-1]):
            owned[client].append(part)
    return [np.concatenate(parts) for parts in owned]


def class_owners(classes: int, clients: int, per_client: int, generator: Generator) -> NDArray[np.float64]:
    """Which classes each client owns (classes x clients), as evenly as the numbers allow.

    Client by client, always among the classes with most free places, no class twice.
    """
    places = np.full(classes, per_client * clients // classes)
    extra = per_client * clients - places.sum()
    places[generator.permutation(classes)[:extra]] += 1
    owners = np.zeros((classes, clients))
    for client in range(clients):
        order = np.lexsort((generator.random(classes), -places))
        chosen = order[:per_client]
        owners[chosen, client] = 1
        places[chosen] -= 1
    return owners
