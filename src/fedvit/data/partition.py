"""Who owns which image. A rule turns labels into one `Split`; the same seed gives the same split everywhere."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedvit import randomness
from fedvit.data.datasets import Dataset, Indices, Labels, keep_samples, only
from fedvit.errors import UserError, nearest
from fedvit.settings import DataSettings, PartitionSettings

MAX_REDRAWS = 10_000
DEFAULT_CLIENTS = 24


@dataclass(frozen=True)
class ClientSplit:
    """The indices of one client's images."""

    train: Indices
    test: Indices
    val: Indices
    probe: Indices = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # held out for a method's own choices

    def to_json(self) -> dict[str, list[int]]:
        parts = {"train": self.train, "val": self.val, "test": self.test}
        if len(self.probe):
            parts["probe"] = self.probe
        return {name: indices.tolist() for name, indices in parts.items()}


@dataclass(frozen=True)
class Split:
    """Every client's images, the global test set, and the clients that never train."""

    clients: Mapping[str, ClientSplit]
    global_test: Indices
    class_names: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    source: str = ""  # hash of the images and labels it divides

    @property
    def seen(self) -> list[str]:
        unseen = set(self.unseen)
        return [name for name in self.clients if name not in unseen]

    def to_json(self) -> dict[str, Any]:
        body = {
            "clients": {name: part.to_json() for name, part in self.clients.items()},
            "unseen": list(self.unseen),
            "global_test": self.global_test.tolist(),
            "class_names": list(self.class_names),
            "source": self.source,
        }
        text = json.dumps(body, sort_keys=True)
        return {"hash": hashlib.sha256(text.encode()).hexdigest(), **body}


def split_counts(dataset: Dataset, split: Split) -> dict[str, dict[str, list[int]]]:
    """Images of every class, for every client and part."""
    parts = list(split.clients.values())

    def count(kind: str) -> list[list[int]]:
        owned = [getattr(part, kind) for part in parts]
        owner = np.repeat(np.arange(len(parts)), [len(indices) for indices in owned])
        cells = owner * dataset.classes + dataset.labels[np.concatenate(owned)]
        rows: list[list[int]] = (
            np.bincount(cells, minlength=len(parts) * dataset.classes).reshape(len(parts), -1).tolist()
        )
        return rows

    table = zip(split.clients, count("train"), count("val"), count("test"), strict=True)
    return {name: {"train": train, "val": val, "test": test} for name, train, val, test in table}


@dataclass(frozen=True)
class Request:
    """What a rule gets beside the data: its settings, the fewest images of a client, the share for testing."""

    settings: PartitionSettings
    clients: int
    least: int
    test: float
    generator: Generator
    seed: int


POOLED_RULES = ("dirichlet", "domain", "site")  # train and test are divided together


def split(
    dataset: Dataset,
    settings: PartitionSettings,
    data: DataSettings,
    *,
    batch: int,
    seed: int,
    probe: float = 0.0,
) -> Split:
    """Divide the data set over clients by the rule of this name; `probe` is the share a method holds out of train."""
    rules: dict[str, Callable[[Dataset, Request], Split]] = {
        "iid": iid,
        "dirichlet": dirichlet,
        "dirichlet_train": dirichlet_train,
        "pathological": pathological,
        "dh": dh,
        "domain": by_domain,
        "site": by_site,
    }
    name, clients = settings.name or "dirichlet", settings.clients or DEFAULT_CLIENTS
    if name not in rules:
        raise UserError(f"unknown partition {name!r}; {nearest(name, rules)}")
    whole, kept = dataset, None
    if data.samples is not None:
        kept = keep_samples(whole, data.samples, seed, train_only=name not in POOLED_RULES)
        dataset = only(whole, kept)
    total = len(dataset)
    if name not in POOLED_RULES and dataset.official_test is not None:
        total -= int(dataset.official_test.sum())
    least = least_samples(settings, clients, total, batch / data.test)
    if clients * least > total:
        raise UserError(
            f"{total} images cannot serve {clients} clients with at least {least} each; "
            f"at most {total // least} clients are possible"
        )
    generator = randomness.numpy_generator(seed, "partition")
    result = rules[name](dataset, Request(settings, clients, least, data.test, generator, seed))
    for client, part in result.clients.items():
        if len(part.train) == 0 or len(part.test) == 0:
            raise UserError(
                f"client {client} would have {len(part.train)} training and {len(part.test)} test images; use fewer "
                "clients or, where the source has no test set of its own, a larger data.test or partition.min_samples"
            )
    if kept is not None:
        result = renumbered(result, kept)
    if data.val:
        result = hold_out_val(result, data.val, seed)
    if probe:
        result = hold_out_probe(result, dataset.labels if kept is None else whole.labels, probe, seed)
    unseen = choose_unseen(list(result.clients), data.unseen, seed)
    return replace(result, class_names=dataset.class_names, unseen=unseen, source=whole.identity)


def renumbered(result: Split, kept: Indices) -> Split:
    """Indices into the kept images as indices into all of them."""
    clients = {
        name: ClientSplit(kept[part.train], kept[part.test], kept[part.val]) for name, part in result.clients.items()
    }
    return replace(result, clients=clients, global_test=kept[result.global_test])


def choose_unseen(clients: list[str], count: int, seed: int) -> tuple[str, ...]:
    """The clients that never train."""
    if count >= len(clients):
        raise UserError(f"data.unseen={count} of {len(clients)} clients leaves nobody to train")
    order = randomness.numpy_generator(seed, "unseen").permutation(len(clients))
    return tuple(clients[i] for i in sorted(order[:count]))


def least_samples(settings: PartitionSettings, clients: int, total: int, enough: float) -> int:
    """The fewest images a client may have: one batch to train on, or half an equal share; never fewer than two."""
    if settings.min_samples is not None:
        return max(2, settings.min_samples)
    return 2 if settings.name == "site" else max(2, int(min(enough, total / clients / 2)))


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


def hold_out_probe(whole: Split, labels: Labels, share: float, seed: int) -> Split:
    """Take a share of every client's training images for a method's own choices, in the client's mix of classes."""
    clients = {}
    for name, part in whole.clients.items():
        count = round(len(part.train) * share)
        if not 0 < count < len(part.train):
            fewest = min(len(other.train) for other in whole.clients.values())
            fits = f"choose {1 / fewest:.2g} to {int(100 - 100 / fewest) / 100:g}, which suits every client"
            raise UserError(
                f"method.probe={share:g} of the {len(part.train)} training images of client {name} is {count}; at "
                "least one must be held out and one left: "
                f"{fits if fewest > 1 else 'a client with one image cannot, raise partition.min_samples'}"
            )
        order = randomness.numpy_generator(seed, "probe", name).permutation(part.train)
        found, position = np.unique(labels[order], return_inverse=True)
        quota = np.bincount(position) * count / len(order)
        taken = np.floor(quota).astype(np.int64)
        taken[np.argsort(taken - quota, kind="stable")[: count - taken.sum()]] += 1  # the largest remainders
        held = np.concatenate([order[position == c][: taken[c]] for c in range(len(found))])
        clients[name] = replace(part, probe=np.sort(held), train=np.setdiff1d(part.train, held))
    return replace(whole, clients=clients)


# Rules over the pooled data: each client's images are divided into train and test afterwards.


def iid(dataset: Dataset, ask: Request) -> Split:
    """Every client gets the same number of images at random."""
    if dataset.official_test is not None:
        train, test = official(dataset, ask)
        parts = [np.array_split(ask.generator.permutation(part), ask.clients) for part in (train, test)]
        return train_only(parts, test)
    return pooled(np.array_split(ask.generator.permutation(len(dataset)), ask.clients), ask)


def dirichlet(dataset: Dataset, ask: Request) -> Split:
    """FedPerfix: train and test pooled, per class p ~ Dir(alpha), full clients get no more."""
    everything = np.arange(len(dataset))
    counts = dirichlet_counts(dataset.labels, dataset.classes, ask)
    return pooled(deal(everything, dataset.labels, counts, ask.generator), ask)


def pooled(owned: Sequence[Indices], ask: Request) -> Split:
    """Train and test per client at random, not stratified; the global test set is the union."""
    clients = {}
    for number, indices in enumerate(owned):
        order = ask.generator.permutation(indices)
        cut = len(order) - max(1, round(len(order) * ask.test))
        clients[str(number)] = client_split(order[:cut], order[cut:])
    return Split(clients, union_of_tests(clients))


def union_of_tests(clients: Mapping[str, ClientSplit]) -> Indices:
    return np.sort(np.concatenate([part.test for part in clients.values()]))


# Rules over domains and sites.


def by_site(dataset: Dataset, ask: Request) -> Split:
    """Every owner's folder is a client, split without regard to the other owners: the same as at its own site."""
    groups = groups_of(dataset)
    if ask.clients != len(dataset.group_names):
        raise UserError(
            f"there are {len(dataset.group_names)} sites, so --clients {ask.clients} cannot be: leave it out"
        )
    clients: dict[str, ClientSplit] = {}
    for number, name in enumerate(dataset.group_names):
        alone = replace(ask, generator=randomness.numpy_generator(ask.seed, "partition", name))
        clients |= stratified_clients(dataset, {name: np.flatnonzero(groups == number)}, alone).clients
    return Split(clients, union_of_tests(clients))


def by_domain(dataset: Dataset, ask: Request) -> Split:
    """FedPerfix's Office-Home: the same number of clients in every domain, Dir(alpha) per class inside."""
    groups, domains = groups_of(dataset), dataset.group_names
    each, rest = divmod(ask.clients, len(domains))
    if rest or not each:
        raise UserError(
            f"{ask.clients} clients cannot be divided over {len(domains)} domains ({', '.join(domains)}): "
            f"use a multiple of {len(domains)}"
        )
    owned: dict[str, Indices] = {}
    for number, domain in enumerate(domains):
        members = np.flatnonzero(groups == number)
        if each == 1:
            owned[domain] = members
            continue
        labels = dataset.labels[members]
        counts = domain_counts(labels, dataset.classes, each, domain, ask)
        for client, part in enumerate(deal(members, labels, counts, ask.generator)):
            owned[f"{domain}-{client}"] = part
    return stratified_clients(dataset, owned, ask)


def domain_counts(labels: Labels, classes: int, clients: int, domain: str, ask: Request) -> NDArray[np.int64]:
    """Images of each class for each client of one domain; redrawn until all have enough."""
    sizes = np.bincount(labels, minlength=classes)
    fair = len(labels) // clients
    if ask.settings.min_samples is not None and ask.least > fair:
        raise UserError(
            f"{len(labels)} images of {domain} cannot give {clients} clients {ask.least} each; at most {fair}"
        )
    least = ask.least if ask.settings.min_samples is not None else min(ask.least, fair // 2)
    for _ in range(MAX_REDRAWS):
        shares = ask.generator.dirichlet(np.full(clients, ask.settings.alpha), size=classes)
        edges = np.round(np.cumsum(shares, axis=1) * sizes[:, None]).astype(np.int64)
        counts: NDArray[np.int64] = np.diff(edges, axis=1, prepend=0)
        if counts.sum(axis=0).min() >= least:
            return counts
    raise UserError(
        f"no split of the {len(labels)} images of {domain} over {clients} clients with alpha {ask.settings.alpha} gave "
        f"every client {least} images in {MAX_REDRAWS:,} draws: use fewer clients, a larger alpha or a smaller "
        "partition.min_samples"
    )


def groups_of(dataset: Dataset) -> Labels:
    if dataset.groups is None:
        raise UserError(
            f"{dataset.name} has no domains or sites: expected folders site/class/image; use another partition"
        )
    return dataset.groups


def stratified_clients(dataset: Dataset, owned: Mapping[str, Indices], ask: Request) -> Split:
    """The source's own train and test of every client, or a stratified share for testing."""
    clients = {}
    for name, indices in owned.items():
        if dataset.official_test is not None:
            test = dataset.official_test[indices]
            clients[name] = client_split(indices[~test], indices[test])
        else:
            clients[name] = client_split(*stratified(dataset.labels, indices, ask))
    return Split(clients, union_of_tests(clients))


def stratified(labels: Labels, indices: Indices, ask: Request) -> tuple[Indices, Indices]:
    """The same share of every class for testing; a class with one image is trained on."""
    train, test = [], []
    for label in np.unique(labels[indices]):
        members = ask.generator.permutation(indices[labels[indices] == label])
        count = 0 if len(members) == 1 else max(1, round(len(members) * ask.test))
        test.append(members[:count])
        train.append(members[count:])
    return np.concatenate(train), np.concatenate(test)


# Rules over the official training set: the global test set is the official one.


def dirichlet_train(dataset: Dataset, ask: Request) -> Split:
    """FedPEFT: the training set by Dir(alpha) per class; test images in the client's class proportions."""
    train, test = official(dataset, ask)
    counts = dirichlet_counts(dataset.labels[train], dataset.classes, ask)
    return by_shares(dataset, train, test, normalised(counts), ask.generator)


def pathological(dataset: Dataset, ask: Request) -> Split:
    """FedV: every client has `classes` classes, each class divided evenly over its owners."""
    per_client = ask.settings.classes
    if not 1 <= per_client <= dataset.classes:
        raise UserError(f"partition.classes must lie in 1..{dataset.classes}, found {per_client}")
    owners = class_owners(dataset.classes, ask.clients, per_client, ask.generator)
    train, test = official(dataset, ask)
    return by_shares(dataset, train, test, normalised(owners), ask.generator)


def dh(dataset: Dataset, ask: Request) -> Split:
    """PFedEdit: `level` percent of the classes are missing at each client; shares are nearly equal.

    Departs from its code: cuts are rounded on the cumulative share, so that no image is lost; it floors each share.
    """
    total, level = dataset.classes, ask.settings.level
    per_client = max(1, round(total * (1 - level / 100)), round(total / 10))
    if per_client * ask.clients % total:
        raise UserError(
            f"dh level {level} gives {per_client} classes per client; with {total} classes the number of clients must "
            f"be a multiple of {total // np.gcd(per_client, total)}, found {ask.clients}"
        )
    owners = class_owners(total, ask.clients, per_client, ask.generator)
    shares = owners * ask.generator.uniform(0.4, 0.6, owners.shape)
    train, test = official(dataset, ask)
    return by_shares(dataset, train, test, normalised(shares), ask.generator)


def normalised(shares: NDArray[Any]) -> NDArray[np.float64]:
    """Every class's shares (classes x clients) to sum 1; a class nobody owns stays at nothing."""
    sums = shares.sum(axis=1, keepdims=True)
    result: NDArray[np.float64] = shares / np.where(sums > 0, sums, 1)
    return result


def official(dataset: Dataset, ask: Request) -> tuple[Indices, Indices]:
    """The source's own train and test; where it has none, a stratified share is held out as test."""
    mask = dataset.official_test
    if mask is None:
        return stratified(dataset.labels, np.arange(len(dataset)), ask)
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


def dirichlet_counts(labels: Labels, classes: int, ask: Request) -> NDArray[np.int64]:
    """How many images of each class each client gets (classes x clients); redrawn until all have enough."""
    sizes = np.bincount(labels, minlength=classes)
    alpha = ask.settings.alpha
    for _ in range(MAX_REDRAWS):
        counts = draw_counts(sizes, ask.clients, alpha, ask.generator)
        if counts.sum(axis=0).min() >= ask.least:
            return counts
    raise UserError(
        f"no split of {len(labels)} images over {ask.clients} clients with alpha {alpha} gave every client "
        f"{ask.least} images in {MAX_REDRAWS:,} draws; {possible(sizes, ask)}"
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
        # The cumulative sum may end a hair below 1; floored as it is, the last client would get a stray image.
        edges = np.floor(np.cumsum(share / share.sum()) * size + 1e-6).astype(np.int64)
        edges[-1] = size
        counts[label] = np.diff(edges, prepend=0)
        held += counts[label]
    return counts


def possible(sizes: Labels, ask: Request) -> str:
    """What would work instead: the largest smaller number of clients, the smallest larger alpha."""
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


def deal(indices: Indices, labels: Labels, counts: NDArray[np.int64], generator: Generator) -> list[Indices]:
    """Hand out the shuffled images of each class in these counts (classes x clients)."""
    owners, members = [], []
    for label, row in enumerate(counts):
        members.append(generator.permutation(indices[labels == label])[: row.sum()])
        owners.append(np.repeat(np.arange(len(row)), row))
    order = np.argsort(np.concatenate(owners), kind="stable")
    return np.split(np.concatenate(members)[order], np.cumsum(counts.sum(axis=0))[:-1])


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
