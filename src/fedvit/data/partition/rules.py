"""The rules that partition images among clients, one function each."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedvit.core import randomness
from fedvit.core.errors import UserError
from fedvit.data.dataset import Dataset, Indices, Labels
from fedvit.data.partition.groups import Counts, hold_out
from fedvit.data.partition.records import ClientPartition, Partition, Request

MAX_REDRAWS = 10_000


# Rules over the pooled data: each client's images are divided into train and test afterwards.


def iid(dataset: Dataset, ask: Request) -> Partition:
    """Give every client the same number of images at random."""
    if dataset.official_test is not None:
        train, test = _official(dataset, ask)
        parts = [np.array_split(ask.generator.permutation(part), ask.clients) for part in (train, test)]
        return _train_only(parts, test)
    return _pooled(np.array_split(ask.generator.permutation(len(dataset)), ask.clients), ask)


def dirichlet(dataset: Dataset, ask: Request) -> Partition:
    """FedPerfix: pool train and test, draw p ~ Dir(alpha) per class; clients that are full get no more images."""
    everything = np.arange(len(dataset))
    counts = _dirichlet_counts(dataset.labels, dataset.classes, ask)
    return _pooled(_deal(everything, dataset.labels, counts, ask.generator), ask)


def _pooled(owned: Sequence[Indices], ask: Request) -> Partition:
    """Divide each client's images into train and test at random, not stratified; the global test set is the union."""
    clients = {}
    for number, indices in enumerate(owned):
        if ask.counts is not None:
            clients[str(number)] = _client_split(*_patients_held_out(ask.counts, indices, ask))
            continue
        order = ask.generator.permutation(indices)
        cut = len(order) - max(1, round(len(order) * ask.test))
        clients[str(number)] = _client_split(order[:cut], order[cut:])
    return Partition(clients, _union_of_tests(clients))


def _union_of_tests(clients: Mapping[str, ClientPartition]) -> Indices:
    return np.sort(np.concatenate([part.test for part in clients.values()]))


# Rules over domains and sites.


def by_site(dataset: Dataset, ask: Request) -> Partition:
    """Make every owner's folder a client, divided without regard to the other owners: the same as at its own site."""
    sites = _sites_of(dataset)
    if ask.clients != len(dataset.site_names):
        raise UserError(
            f"there are {len(dataset.site_names)} sites, so --clients {ask.clients} is not possible: leave it out"
        )
    clients: dict[str, ClientPartition] = {}
    for number, name in enumerate(dataset.site_names):
        alone = replace(ask, generator=randomness.numpy_generator(ask.seed, "partition", name))
        clients |= _stratified_clients(dataset, {name: np.flatnonzero(sites == number)}, alone).clients
    return Partition(clients, _union_of_tests(clients))


def by_domain(dataset: Dataset, ask: Request) -> Partition:
    """FedPerfix's Office-Home: the same number of clients in every domain, and Dir(alpha) per class inside it."""
    sites, domains = _sites_of(dataset), dataset.site_names
    each, rest = divmod(ask.clients, len(domains))
    if rest or not each:
        raise UserError(
            f"{ask.clients} clients cannot be divided among {len(domains)} domains ({', '.join(domains)}): "
            f"use a multiple of {len(domains)}"
        )
    owned: dict[str, Indices] = {}
    for number, domain in enumerate(domains):
        members = np.flatnonzero(sites == number)
        if each == 1:
            owned[domain] = members
            continue
        labels = dataset.labels[members]
        counts = _domain_counts(labels, dataset.classes, each, domain, ask)
        for client, part in enumerate(_deal(members, labels, counts, ask.generator)):
            owned[f"{domain}-{client}"] = part
    return _stratified_clients(dataset, owned, ask)


def _domain_counts(labels: Labels, classes: int, clients: int, domain: str, ask: Request) -> NDArray[np.int64]:
    """Draw the number of images of each class for each client of one domain, until every client has enough."""
    sizes = np.bincount(labels, minlength=classes)
    fair = len(labels) // clients
    if ask.settings.min_samples is not None and ask.least > fair:
        raise UserError(
            f"{len(labels)} images of {domain} cannot give {clients} clients {ask.least} each, at most {fair}"
        )
    least = ask.least if ask.settings.min_samples is not None else min(ask.least, fair // 2)
    for _ in range(MAX_REDRAWS):
        shares = ask.generator.dirichlet(np.full(clients, ask.settings.alpha), size=classes)
        edges = np.round(np.cumsum(shares, axis=1) * sizes[:, None]).astype(np.int64)
        counts: NDArray[np.int64] = np.diff(edges, axis=1, prepend=0)
        if counts.sum(axis=0).min() >= least:
            return counts
    raise UserError(
        f"no partition of the {len(labels)} images of {domain} among {clients} clients with alpha {ask.settings.alpha} "
        f"gave every client {least} images in {MAX_REDRAWS:,} draws: use fewer clients, a larger alpha or a smaller "
        "partition.min_samples"
    )


def _sites_of(dataset: Dataset) -> Labels:
    if dataset.sites is None:
        raise UserError(
            f"{dataset.name} has no domains or sites: expected folders site/class/image; use another partition"
        )
    return dataset.sites


def _stratified_clients(dataset: Dataset, owned: Mapping[str, Indices], ask: Request) -> Partition:
    """Use the source's own train and test images of every client, or hold out a stratified fraction for testing."""
    clients = {}
    for name, indices in owned.items():
        if dataset.official_test is not None:
            test = dataset.official_test[indices]
            clients[name] = _client_split(indices[~test], indices[test])
        else:
            clients[name] = _client_split(*_stratified(dataset.labels, indices, ask))
    return Partition(clients, _union_of_tests(clients))


def _stratified(labels: Labels, indices: Indices, ask: Request) -> tuple[Indices, Indices]:
    """Hold out the same fraction of every class for testing; a class with one image is only trained on."""
    if ask.counts is not None:
        return _patients_held_out(ask.counts, indices, ask)
    train, test = [], []
    for label in np.unique(labels[indices]):
        members = ask.generator.permutation(indices[labels[indices] == label])
        count = 0 if len(members) == 1 else max(1, round(len(members) * ask.test))
        test.append(members[:count])
        train.append(members[count:])
    return np.concatenate(train), np.concatenate(test)


def _patients_held_out(counts: Counts, indices: Indices, ask: Request) -> tuple[Indices, Indices]:
    """Hold out patients who have the same fraction of the images of every class, as nearly as whole patients can."""
    held = hold_out(counts[indices], ask.test, ask.generator, every_class=True)
    return indices[~held], indices[held]


# Rules over the official training set: the global test set is the official one.


def dirichlet_train(dataset: Dataset, ask: Request) -> Partition:
    """FedPEFT: partition the training set by Dir(alpha) per class; test images follow each client's class mix.

    As in FedPerfix's code, clients that are full get no more images; FedPEFT does not mention such a cap.
    """
    train, test = _official(dataset, ask)
    counts = _dirichlet_counts(dataset.labels[train], dataset.classes, ask)
    return _by_shares(dataset, train, test, _normalised(counts), ask.generator)


def pathological(dataset: Dataset, ask: Request) -> Partition:
    """FedV: every client has `classes` classes, and each class is divided evenly among its owners."""
    per_client = ask.settings.classes
    if not 1 <= per_client <= dataset.classes:
        raise UserError(f"partition.classes must lie in 1..{dataset.classes}, found {per_client}")
    owners = _class_owners(dataset.classes, ask.clients, per_client, ask.generator)
    train, test = _official(dataset, ask)
    return _by_shares(dataset, train, test, _normalised(owners), ask.generator)


def dh(dataset: Dataset, ask: Request) -> Partition:
    """PFedEdit: each client lacks `level` percent of the classes; shares are nearly equal.

    Departs from its code, which floors each share: we round the cumulative share, so that no image is lost.
    """
    total, level = dataset.classes, ask.settings.level
    per_client = max(1, round(total * (1 - level / 100)), round(total / 10))
    if per_client * ask.clients % total:
        raise UserError(
            f"dh level {level} gives {per_client} classes per client; with {total} classes the number of clients must "
            f"be a multiple of {total // np.gcd(per_client, total)}, found {ask.clients}"
        )
    owners = _class_owners(total, ask.clients, per_client, ask.generator)
    shares = owners * ask.generator.uniform(0.4, 0.6, owners.shape)
    train, test = _official(dataset, ask)
    return _by_shares(dataset, train, test, _normalised(shares), ask.generator)


def _official(dataset: Dataset, ask: Request) -> tuple[Indices, Indices]:
    """Return the source's own train and test images; if it has no test set, hold out a stratified fraction."""
    mask = dataset.official_test
    if mask is None:
        return _stratified(dataset.labels, np.arange(len(dataset)), ask)
    return np.flatnonzero(~mask), np.flatnonzero(mask)


def _by_shares(
    dataset: Dataset, train: Indices, test: Indices, shares: NDArray[np.float64], generator: Generator
) -> Partition:
    """Divide the train and test images of every class by the same shares (classes x clients)."""
    parts = []
    for indices in (train, test):
        labels = dataset.labels[indices]
        sizes = np.bincount(labels, minlength=dataset.classes)
        edges = np.round(np.cumsum(shares, axis=1) * sizes[:, None]).astype(np.int64)
        parts.append(_deal(indices, labels, np.diff(edges, axis=1, prepend=0), generator))
    return _train_only(parts, test)


def _train_only(parts: Sequence[Sequence[Indices]], test: Indices) -> Partition:
    clients = {str(i): _client_split(a, b) for i, (a, b) in enumerate(zip(*parts, strict=True))}
    return Partition(clients, test)


def _client_split(train: Indices, test: Indices) -> ClientPartition:
    return ClientPartition(np.sort(train), np.sort(test), np.empty(0, dtype=np.int64))


# Shared pieces.


def _dirichlet_counts(labels: Labels, classes: int, ask: Request) -> NDArray[np.int64]:
    """Draw the number of images of each class for each client (classes x clients), until every client has enough."""
    sizes = np.bincount(labels, minlength=classes)
    alpha = ask.settings.alpha
    for _ in range(MAX_REDRAWS):
        counts = draw_counts(sizes, ask.clients, alpha, ask.generator)
        if counts.sum(axis=0).min() >= ask.least:
            return counts
    raise UserError(
        f"no partition of {len(labels)} images among {ask.clients} clients with alpha {alpha} gave every client "
        f"{ask.least} images in {MAX_REDRAWS:,} draws; {_possible(sizes, ask)}"
    )


def draw_counts(sizes: Labels, clients: int, alpha: float, generator: Generator) -> NDArray[np.int64]:
    """Make one draw, class by class; clients that already hold their fair share get no more."""
    counts = np.zeros((len(sizes), clients), dtype=np.int64)
    held = np.zeros(clients, dtype=np.int64)
    fair = sizes.sum() / clients
    for label, size in enumerate(sizes):
        share = generator.dirichlet(np.full(clients, alpha)) * (held < fair)
        if not share.sum() > 0:  # every client with a share is full, or alpha is so small that all shares underflow
            share = (held < fair).astype(np.float64)
        # The cumulative sum may end slightly below 1; floored as is, it would give the last client a stray image.
        edges = np.floor(np.cumsum(share / share.sum()) * size + 1e-6).astype(np.int64)
        edges[-1] = size
        counts[label] = np.diff(edges, prepend=0)
        held += counts[label]
    return counts


def _possible(sizes: Labels, ask: Request) -> str:
    """Suggest what would work instead: the largest smaller number of clients, the smallest larger alpha."""
    alpha = ask.settings.alpha

    def works(clients: int, alpha: float) -> bool:
        draws = (draw_counts(sizes, clients, alpha, ask.generator) for _ in range(100))
        return any(counts.sum(axis=0).min() >= ask.least for counts in draws)

    advice = []
    for clients in range(ask.clients - 1, 0, -max(1, ask.clients // 16)):
        if works(clients, alpha):
            advice.append(f"{clients} clients")
            break
    for factor in (2, 5, 10, 50, 100, 1000):
        if works(ask.clients, alpha * factor):
            advice.append(f"alpha {alpha * factor:g}")
            break
    return f"possible: {' or '.join([*advice, 'a smaller partition.min_samples'])}"


def _deal(indices: Indices, labels: Labels, counts: NDArray[np.int64], generator: Generator) -> list[Indices]:
    """Hand out the shuffled images of each class in these counts (classes x clients)."""
    owners, members = [], []
    for label, row in enumerate(counts):
        members.append(generator.permutation(indices[labels == label])[: row.sum()])
        owners.append(np.repeat(np.arange(len(row)), row))
    order = np.argsort(np.concatenate(owners), kind="stable")
    return np.split(np.concatenate(members)[order], np.cumsum(counts.sum(axis=0))[:-1])


def _class_owners(classes: int, clients: int, per_client: int, generator: Generator) -> NDArray[np.float64]:
    """Choose which classes each client owns (classes x clients), as evenly as the numbers allow.

    Each client in turn takes the classes with the most free places, none of them twice.
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


def _normalised(shares: NDArray[Any]) -> NDArray[np.float64]:
    """Scale every class's shares (classes x clients) to sum to 1; a class without owners stays at zero."""
    sums = shares.sum(axis=1, keepdims=True)
    result: NDArray[np.float64] = shares / np.where(sums > 0, sums, 1)
    return result
