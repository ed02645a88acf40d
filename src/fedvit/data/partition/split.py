"""Make a partition from a dataset and settings: which images each client trains, validates and tests on."""

import logging
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fedvit.core import randomness
from fedvit.core.errors import UserError, nearest
from fedvit.core.settings import DataSettings, PartitionSettings
from fedvit.data.dataset import Dataset, Indices, Labels, keep_only, keep_samples, one_class_each
from fedvit.data.partition.groups import Counts, by_patient, hold_out_patients, to_images, warn_of_gaps
from fedvit.data.partition.records import ClientPartition, Partition, Request
from fedvit.data.partition.rules import by_domain, by_site, dh, dirichlet, dirichlet_train, iid, pathological

log = logging.getLogger(__name__)
DEFAULT_CLIENTS = 24


def partition_counts(dataset: Dataset, split: Partition) -> dict[str, dict[str, list[int]]]:
    """Count the images of every class, for every client and part; with several labels, those that have it."""
    parts = list(split.clients.values())

    def count(kind: str) -> list[list[int]]:
        owned = [getattr(part, kind) for part in parts]
        owner = np.repeat(np.arange(len(parts)), [len(indices) for indices in owned])
        labels = dataset.labels[np.concatenate(owned)]
        if dataset.several_labels:
            totals = np.zeros((len(parts), dataset.classes), dtype=np.int64)
            np.add.at(totals, owner, labels)
            return totals.tolist()
        cells = owner * dataset.classes + labels
        rows: list[list[int]] = (
            np.bincount(cells, minlength=len(parts) * dataset.classes).reshape(len(parts), -1).tolist()
        )
        return rows

    table = zip(split.clients, count("train"), count("val"), count("test"), strict=True)
    return {name: {"train": train, "val": val, "test": test} for name, train, val, test in table}


POOLED_RULES = ("dirichlet", "domain", "site")  # these partition train and test images together


def partition_dataset(
    dataset: Dataset,
    settings: PartitionSettings,
    data: DataSettings,
    *,
    batch: int,
    seed: int,
    probe: float = 0.0,
    held_out: float | None = None,
) -> Partition:
    """Partition the dataset by the rule that the settings name.

    A method may choose by a fraction `probe` of every client's training images, and train on all but a fraction
    `held_out` of them, by default the same. An image with several labels is dealt out as one with its rarest label.
    """
    rules: dict[str, Callable[[Dataset, Request], Partition]] = {
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
        kept = keep_samples(one_class_each(whole), data.samples, seed, train_only=name not in POOLED_RULES)
        dataset = keep_only(whole, kept)
    images, counts = dataset, None
    dataset = one_class_each(dataset, by_site=name == "site")
    enough = batch / data.test
    if dataset.patients is not None:  # from here to the end, an index is that of a patient
        dataset, counts = by_patient(dataset)
        enough *= len(dataset) / len(images)
    if dataset.official_val is not None and name == "dirichlet":
        log.warning("the rule dirichlet pools all images, so the manifest's column split is not used")
    total = len(dataset)
    if name not in POOLED_RULES and dataset.official_test is not None:
        total -= int(dataset.official_test.sum())
    least = _least_samples(settings, clients, total, enough)
    if clients * least > total:
        raise UserError(
            f"{total} {'images' if counts is None else 'patients'} are not enough for {clients} clients with at least "
            f"{least} each; at most {total // least} clients are possible"
        )
    generator = randomness.numpy_generator(seed, "partition")
    result = rules[name](dataset, Request(settings, clients, least, data.test, generator, seed, counts))
    for client, part in result.clients.items():
        if len(part.train) == 0 or len(part.test) == 0:
            raise UserError(_one_sided(client, part, patients=counts is not None))
    if dataset.official_val is not None and name != "dirichlet":
        result = _take_val(result, dataset.official_val)
    if data.val:
        result = _hold_out_val(result, data.val, seed, counts)
    if probe and counts is not None:
        result = hold_out_patients(result, counts, "probe", probe, seed, held_out=held_out)
    elif probe:
        result = hold_out_probe(result, dataset.labels, probe, seed, held_out=held_out)
    if counts is not None and images.patients is not None:
        result = to_images(result, images.patients)
        warn_of_gaps(result, images, data.test if dataset.official_test is None or name == "dirichlet" else None)
    if kept is not None:
        result = _renumbered(result, kept)
    unseen = _choose_unseen(list(result.clients), data.unseen, seed)
    return replace(result, class_names=whole.class_names, unseen=unseen, source=whole.identity)


def _one_sided(client: str, part: ClientPartition, *, patients: bool) -> str:
    """Return the error message for a client without training or without test images."""
    what = "patients" if patients else "images"
    whole = "; train and test cannot share a patient, so a client needs two at least" if patients else ""
    return (
        f"client {client} would have {len(part.train)} training and {len(part.test)} test {what}{whole}; use fewer "
        "clients or, if the source has no test set of its own, a larger data.test or partition.min_samples"
    )


def _renumbered(result: Partition, kept: Indices) -> Partition:
    """Convert indices into the kept images to indices into all images."""
    clients = {
        name: ClientPartition(kept[part.train], kept[part.test], kept[part.val], kept[part.probe])
        for name, part in result.clients.items()
    }
    return replace(result, clients=clients, global_test=kept[result.global_test])


def _choose_unseen(clients: list[str], count: int, seed: int) -> tuple[str, ...]:
    """Choose the clients that never train."""
    if count >= len(clients):
        raise UserError(f"data.unseen={count} of {len(clients)} clients leaves no client to train")
    order = randomness.numpy_generator(seed, "unseen").permutation(len(clients))
    return tuple(clients[i] for i in sorted(order[:count]))


def _least_samples(settings: PartitionSettings, clients: int, total: int, enough: float) -> int:
    """Return the fewest images a client may have: one batch to train on, or half an equal share; at least two."""
    if settings.min_samples is not None:
        return max(2, settings.min_samples)
    return 2 if settings.name == "site" else max(2, int(min(enough, total / clients / 2)))


def _take_val(whole: Partition, is_val: NDArray[np.bool_]) -> Partition:
    """Validate on the training images that the source gives for validation."""
    clients = {}
    for name, part in whole.clients.items():
        val = is_val[part.train]
        if val.all():
            raise UserError(f"all images of client {name} are for validation: mark some as train in the column split")
        clients[name] = replace(part, val=part.train[val], train=part.train[~val])
    return replace(whole, clients=clients)


def _hold_out_val(whole: Partition, share: float, seed: int, counts: Counts | None) -> Partition:
    """Hold out a fraction of every client's training images for validation: at least one, never all.

    A client whose source gives validation images keeps to them. With `counts`, an index is that of a patient.
    """
    without = {name: part for name, part in whole.clients.items() if not len(part.val)}
    if counts is not None:
        found = hold_out_patients(replace(whole, clients=without), counts, "val", share, seed)
        return replace(whole, clients={**whole.clients, **found.clients})
    clients = dict(whole.clients)
    for name, part in without.items():
        count = max(1, round(len(part.train) * share))
        if count >= len(part.train):
            raise UserError(
                f"data.val={share} leaves client {name}, with {len(part.train)} images, nothing to train on"
            )
        order = randomness.numpy_generator(seed, "val", name).permutation(part.train)
        clients[name] = replace(part, val=np.sort(order[:count]), train=np.sort(order[count:]))
    return replace(whole, clients=clients)


def hold_out_probe(
    whole: Partition, labels: Labels, share: float, seed: int, *, held_out: float | None = None
) -> Partition:
    """Hold out a fraction of every client's training images, in its mix of classes, for a method's own choices.

    If more is held out than the method uses, the rest is not used at all.
    """
    out = share if held_out is None else held_out
    clients = {}
    for name, part in whole.clients.items():
        images = len(part.train)
        used, count = round(images * share), round(images * out)
        if not 0 < used <= count < images:
            key, asked, number = ("probe", share, used) if used == 0 or held_out is None else ("held_out", out, count)
            fewest = min(len(other.train) for other in whole.clients.values())
            fits = f"choose {1 / fewest:.2g} to {int(100 - 100 / fewest) / 100:g}, which suits every client"
            raise UserError(
                f"method.{key}={asked:g} of the {images} training images of client {name} is {number}; at "
                "least one must be held out and one left: "
                f"{fits if fewest > 1 else 'a client with one image cannot do that, so raise partition.min_samples'}"
            )
        order = randomness.numpy_generator(seed, "probe", name).permutation(part.train)
        held = _in_its_mix(order, labels, count)
        clients[name] = replace(
            part, probe=np.sort(_in_its_mix(held, labels, used)), train=np.setdiff1d(part.train, held)
        )
    return replace(whole, clients=clients)


def _in_its_mix(images: Indices, labels: Labels, count: int) -> Indices:
    """Take the first images of every class, in the classes' proportions."""
    found, position = np.unique(labels[images], return_inverse=True)
    quota = np.bincount(position) * count / len(images)
    taken = np.floor(quota).astype(np.int64)
    taken[np.argsort(taken - quota, kind="stable")[: count - taken.sum()]] += 1  # the largest remainders
    return np.concatenate([images[position == c][: taken[c]] for c in range(len(found))])
