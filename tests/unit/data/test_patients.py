"""No patient is on two sides of anything, whatever the rule, the seed and the sizes; what cannot be met is said."""

import logging
from typing import Any

import numpy as np
import pytest

from fedvit.core.errors import UserError
from fedvit.core.settings import DataSettings, PartitionSettings
from fedvit.data.dataset import Dataset
from fedvit.data.partition.groups import by_patient, count_images, hold_out, to_images
from fedvit.data.partition.records import Partition
from fedvit.data.partition.split import partition_dataset

RULES = ("iid", "dirichlet", "dirichlet_train", "pathological", "dh", "domain", "site")


def cohort(seed: int, patients: int = 160, classes: int = 3, *, given: bool = False) -> Dataset:
    """Patients with one to nine images, most of them of one class; `given` says who trains, validates and tests."""
    rng = np.random.default_rng(seed)
    who = rng.permutation(np.repeat(np.arange(patients), rng.integers(1, 10, patients)))
    main = rng.integers(0, classes, patients)
    labels = np.where(rng.random(len(who)) < 0.8, main[who], rng.integers(0, classes, len(who)))
    site = rng.integers(0, 4, patients)
    part = rng.permutation(np.arange(patients) % 5)
    return Dataset(
        "cohort",
        np.zeros((len(who), 1, 1, 1), np.uint8),
        labels,
        tuple(map(str, range(classes))),
        part[who] == 0 if given else None,
        site[who],
        ("a", "b", "c", "d"),
        official_val=part[who] == 1 if given else None,
        patients=who,
        patient_hashes=tuple(map(str, range(patients))),
    )


def made(dataset: Dataset, rule: str, seed: int = 0, probe: float = 0.2, **data: Any) -> Partition:
    settings = PartitionSettings(name=rule, clients=4, alpha=1.0, level=0)
    return partition_dataset(dataset, settings, DataSettings(**data), batch=4, seed=seed, probe=probe)


def sides(whole: Partition) -> dict[tuple[str, str], np.ndarray]:
    """The images of every part of every client."""
    return {
        (name, part): getattr(own, part)
        for name, own in whole.clients.items()
        for part in ("train", "val", "test", "probe")
        if len(getattr(own, part))
    }


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(6))
def test_no_patient_is_in_two_parts_or_at_two_clients(rule: str, seed: int, given: bool) -> None:
    dataset = cohort(seed, given=given)
    assert dataset.patients is not None
    whole = made(dataset, rule, seed, val=0.0 if given and rule != "dirichlet" else 0.2, unseen=1)
    found = sides(whole)
    images = np.concatenate(list(found.values()))
    assert len(np.unique(images)) == len(images)
    owners: dict[int, set[tuple[str, str]]] = {}
    for side, indices in found.items():
        for patient in np.unique(dataset.patients[indices]):
            owners.setdefault(int(patient), set()).add(side)
    assert all(len(where) == 1 for where in owners.values())
    assert len(images) == len(dataset)  # nobody is lost
    assert all(len(own.train) and len(own.val) and len(own.test) and len(own.probe) for own in whole.clients.values())
    tests = np.concatenate([own.test for own in whole.clients.values()])
    assert np.array_equal(np.sort(tests), np.sort(whole.global_test))
    if given and rule != "dirichlet":
        assert dataset.official_test is not None
        assert dataset.official_val is not None
        assert np.array_equal(np.sort(tests), np.flatnonzero(dataset.official_test))
        vals = np.concatenate([own.val for own in whole.clients.values()])
        assert np.array_equal(np.sort(vals), np.flatnonzero(dataset.official_val))


@pytest.mark.parametrize("rule", RULES)
def test_the_seed_decides(rule: str) -> None:
    dataset = cohort(3)
    assert made(dataset, rule, 1).to_json() == made(dataset, rule, 1).to_json()
    assert made(dataset, rule, 1).to_json()["hash"] != made(dataset, rule, 2).to_json()["hash"]


def test_a_probe_smaller_than_what_is_held_out_is_part_of_it() -> None:
    dataset, settings = cohort(4), PartitionSettings(name="site", clients=4)
    wide, narrow = (
        partition_dataset(dataset, settings, DataSettings(), batch=4, seed=0, probe=probe, held_out=0.4)
        for probe in (0.4, 0.1)
    )
    for name, own in narrow.clients.items():
        assert np.array_equal(own.train, wide.clients[name].train)
        assert set(own.probe) < set(wide.clients[name].probe)
        assert abs(len(own.probe) / (len(own.train) + len(wide.clients[name].probe)) - 0.1) < 0.03


def test_samples_keep_patients_whole() -> None:
    dataset = cohort(5)
    assert dataset.patients is not None
    found = sides(made(dataset, "site", samples=300, val=0.2))
    assert sum(map(len, found.values())) == 300
    seen = [set(dataset.patients[indices]) for indices in found.values()]
    assert sum(map(len, seen)) == len(set().union(*seen))


def test_hold_outs_are_stratified_nearly_as_well_as_single_images_would_be() -> None:
    dataset = cohort(7, patients=400)
    for own in made(dataset, "site", probe=0, val=0.2).clients.values():
        train, val, test = (np.bincount(dataset.labels[i], minlength=3) for i in (own.train, own.val, own.test))
        assert np.abs(test / (train + val + test) - 0.25).max() < 0.02
        assert np.abs(val / (train + val) - 0.2).max() < 0.03


def test_a_site_at_its_own_place_holds_out_the_same_images() -> None:
    """What a site decides depends on its own patients only, as it does over a network."""
    dataset = cohort(2)
    assert dataset.patients is not None
    assert dataset.sites is not None
    whole = made(dataset, "site", probe=0.2, val=0.2)
    mine = np.flatnonzero(dataset.sites == 1)
    alone = Dataset(
        "alone",
        dataset.images[mine],
        dataset.labels[mine],
        dataset.class_names,
        sites=np.zeros(len(mine), dtype=np.int64),
        site_names=("b",),
        patients=np.unique(dataset.patients[mine], return_inverse=True)[1],
    )
    own = partition_dataset(
        alone, PartitionSettings(name="site", clients=1), DataSettings(val=0.2), batch=4, seed=0, probe=0.2
    ).clients["b"]
    for part in ("train", "val", "test", "probe"):
        assert np.array_equal(mine[getattr(own, part)], getattr(whole.clients["b"], part))


@pytest.mark.parametrize("patients", [2, 3, 4, 7])
def test_few_patients_are_divided_too(patients: int) -> None:
    for seed in range(20):
        counts = np.random.default_rng(seed).integers(0, 5, (patients, 2)) + np.eye(patients, 2, dtype=np.int64)
        held = hold_out(counts, 0.25, np.random.default_rng(seed), every_class=True)
        assert 0 < held.sum() < patients
        has = counts > 0
        if patients > 3 and has.all():
            assert has[held].any(axis=0).all()
            assert has[~held].any(axis=0).all()


def test_a_class_of_two_patients_is_trained_on_and_tested() -> None:
    counts = np.array([[5, 0], [5, 0], [5, 0], [5, 0], [0, 1], [0, 9]])
    for seed in range(20):
        held = hold_out(counts, 0.25, np.random.default_rng(seed), every_class=True)
        assert held[4] != held[5]


def test_the_same_patients_are_not_always_held_out() -> None:
    counts = np.arange(1, 21)[:, None] * np.array([[1, 1]])
    times = np.mean([hold_out(counts, 0.25, np.random.default_rng(s), every_class=True) for s in range(200)], axis=0)
    assert times.min() > 0.1
    assert times.max() < 0.8  # small ones fill the last gap more often


def test_a_patient_has_the_class_of_most_of_its_images() -> None:
    patients, labels = np.array([4, 4, 4, 9, 9, 7]), np.array([0, 1, 1, 1, 0, 1])
    dataset = Dataset("d", np.zeros((6, 1, 1, 1), np.uint8), labels, ("x", "y"), patients=patients)
    people, counts = by_patient(dataset)
    assert counts.tolist() == [[1, 2], [0, 1], [1, 1]]  # patients 4, 7 and 9
    assert people.labels.tolist() == [1, 1, 0]  # of two equal classes, the rarer one
    assert count_images(patients, labels, 2).sum() == 6


def test_patients_become_all_their_images() -> None:
    dataset = cohort(0)
    assert dataset.patients is not None
    people = partition_dataset(
        by_patient(dataset)[0], PartitionSettings(name="site", clients=4), DataSettings(), batch=4, seed=0
    )
    found = to_images(people, dataset.patients)
    for name, own in people.clients.items():
        assert np.array_equal(found.clients[name].train, np.flatnonzero(np.isin(dataset.patients, own.train)))


def small(patients: list[int], labels: list[int], sites: list[int] | None = None) -> Dataset:
    return Dataset(
        "small",
        np.zeros((len(labels), 1, 1, 1), np.uint8),
        np.array(labels),
        ("normal", "pneumonia"),
        sites=np.array(sites) if sites else np.zeros(len(labels), dtype=np.int64),
        site_names=("north", "south") if sites else ("north",),
        patients=np.array(patients),
    )


def test_a_site_with_one_patient_is_refused_by_name() -> None:
    dataset = small([0, 0, 1, 2, 3, 3], [0, 1, 0, 1, 0, 1], [0, 0, 1, 1, 1, 1])
    settings = PartitionSettings(name="site", clients=2)
    with pytest.raises(UserError, match=r"client north would have 1 training and 0 test patients.*needs two"):
        partition_dataset(dataset, settings, DataSettings(), batch=4, seed=0)


@pytest.mark.parametrize(("data", "probe", "said"), [({"val": 0.2}, 0.0, "data.val"), ({}, 0.2, "method.probe")])
def test_too_few_patients_for_another_hold_out_are_refused(data: Any, probe: float, said: str) -> None:
    dataset = small([0, 0, 1, 1], [0, 1, 0, 1])
    with pytest.raises(UserError, match=f"{said}=0.2 leaves client north, which has one patient to train on"):
        partition_dataset(
            dataset, PartitionSettings(name="site", clients=1), DataSettings(**data), batch=4, seed=0, probe=probe
        )


def test_what_whole_patients_cannot_meet_is_said(caplog: pytest.LogCaptureFixture) -> None:
    dataset = small([0] * 4 + [1] * 4 + [2] * 8, [0] * 8 + [1] * 8)
    with caplog.at_level(logging.WARNING):
        partition_dataset(dataset, PartitionSettings(name="site", clients=1), DataSettings(), batch=4, seed=0)
    assert "north has 'pneumonia' only in train" in caplog.text


def test_minimum_samples_count_patients() -> None:
    whole = partition_dataset(
        cohort(1),
        PartitionSettings(name="dirichlet", clients=4, alpha=1.0, min_samples=30),
        DataSettings(),
        batch=4,
        seed=0,
    )
    who = cohort(1).patients
    assert who is not None
    assert all(len(np.unique(who[np.concatenate([c.train, c.test])])) >= 30 for c in whole.clients.values())
    with pytest.raises(UserError, match="160 patients are not enough for 4 clients with at least 50 each"):
        partition_dataset(
            cohort(1), PartitionSettings(name="iid", clients=4, min_samples=50), DataSettings(), batch=4, seed=0
        )
