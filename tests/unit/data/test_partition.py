"""Splits: every image once, the same for the same seed, and refused when impossible."""

import numpy as np
import pytest

from fedvit.core.errors import UserError
from fedvit.core.settings import DataSettings, PartitionSettings
from fedvit.data.dataset import Dataset
from fedvit.data.partition.records import Partition
from fedvit.data.partition.split import partition_dataset
from fedvit.data.sources import load_dataset

DIGITS = load_dataset(DataSettings(), 8)


def made(
    name: str, dataset: Dataset = DIGITS, seed: int = 0, batch: int = 8, val: float = 0.0, **settings: object
) -> Partition:
    partition = PartitionSettings(name=name, **{"clients": 10, **settings})  # type: ignore[arg-type]
    return partition_dataset(dataset, partition, DataSettings(val=val), batch=batch, seed=seed)


def everyone(whole: Partition) -> np.ndarray:
    return np.concatenate([np.concatenate([p.train, p.val, p.test]) for p in whole.clients.values()])


def official(train: int = 100, test: int = 20, classes: int = 10) -> Dataset:
    """A data set with a test set of its own: so many images per class."""
    labels = np.repeat(np.arange(classes), train + test)
    mask = np.tile(np.arange(train + test) >= train, classes)
    names = tuple(map(str, range(classes)))
    return Dataset("official", np.zeros((len(labels), 1, 1, 3), np.uint8), labels, names, mask)


@pytest.mark.parametrize("name", ["iid", "dirichlet", "dirichlet_train", "pathological", "dh"])
def test_every_image_is_used_once_and_the_seed_decides(name: str) -> None:
    whole = made(name)
    used = everyone(whole)
    assert len(set(used)) == len(used)
    assert len(used) >= len(DIGITS) - 20
    assert whole.to_json() == made(name).to_json()
    assert whole.to_json()["hash"] != made(name, seed=1).to_json()["hash"]
    assert all(len(part.train) and len(part.test) for part in whole.clients.values())


@pytest.mark.parametrize("name", ["iid", "dirichlet_train", "pathological", "dh"])
def test_an_official_test_set_stays_the_global_one(name: str) -> None:
    dataset = official()
    whole = made(name, dataset)
    assert whole.global_test.tolist() == np.flatnonzero(dataset.official_test).tolist()
    for part in whole.clients.values():
        assert not dataset.official_test[part.train].any()  # type: ignore[index]
        assert dataset.official_test[part.test].all()  # type: ignore[index]


def test_pooled_dirichlet_tests_on_the_union_and_respects_the_minimum() -> None:
    whole = made("dirichlet", alpha=0.1, min_samples=40)
    assert whole.global_test.tolist() == np.sort(np.concatenate([p.test for p in whole.clients.values()])).tolist()
    sizes = [len(p.train) + len(p.test) for p in whole.clients.values()]
    assert min(sizes) >= 40
    for part in whole.clients.values():
        assert len(part.test) == round((len(part.train) + len(part.test)) * 0.25)


def test_a_smaller_alpha_is_more_skewed() -> None:
    def classes(alpha: float) -> float:
        parts = made("dirichlet", alpha=alpha).clients.values()
        return float(np.mean([len(np.unique(DIGITS.labels[part.train])) for part in parts]))

    assert classes(0.05) < classes(0.5) < classes(100.0)


def test_pathological_gives_exactly_that_many_classes_in_equal_shares() -> None:
    dataset = official()
    whole = made("pathological", dataset, classes=2, clients=10)
    for part in whole.clients.values():
        labels, counts = np.unique(dataset.labels[part.train], return_counts=True)
        assert len(labels) == 2
        assert set(counts) == {50}
        assert set(np.unique(dataset.labels[part.test])) == set(labels)


@pytest.mark.parametrize(("level", "classes"), [(0, 10), (40, 6), (60, 4), (80, 2), (100, 1)])
def test_dh_levels_give_the_papers_class_counts(level: float, classes: int) -> None:
    dataset = official()
    whole = made("dh", dataset, level=level)
    owners = np.zeros(10)
    for part in whole.clients.values():
        present = np.unique(dataset.labels[part.train])
        assert len(present) == classes
        owners[present] += 1
    assert set(owners) == {classes}  # q = c * N / C owners for every class


def test_dirichlet_train_tests_clients_in_their_class_proportions() -> None:
    dataset = official(train=200, test=100)
    whole = made("dirichlet_train", dataset, alpha=0.3)
    for part in whole.clients.values():
        train = np.bincount(dataset.labels[part.train], minlength=10) / 2
        test = np.bincount(dataset.labels[part.test], minlength=10)
        assert np.abs(train - test).max() <= 1


def test_val_comes_out_of_train_only() -> None:
    plain, held = made("dirichlet"), made("dirichlet", val=0.2)
    for name, part in held.clients.items():
        assert part.test.tolist() == plain.clients[name].test.tolist()
        assert sorted([*part.train, *part.val]) == plain.clients[name].train.tolist()
        assert len(part.val) == max(1, round(0.2 * len(plain.clients[name].train)))


def test_what_is_impossible_is_refused_with_what_is_possible() -> None:
    with pytest.raises(UserError, match="at most 17 clients are possible"):
        made("dirichlet", clients=18, min_samples=100)
    with pytest.raises(UserError, match=r"in 10,000 draws; possible: \d+ clients or"):
        made("dirichlet", clients=17, min_samples=100, alpha=0.01)
    with pytest.raises(UserError, match="multiple of 5"):
        made("dh", clients=12)
    with pytest.raises(UserError, match=r"1\.\.10"):
        made("pathological", classes=11)


GOLDEN = {
    "iid": "db68fc9e9b8b16b8",
    "dirichlet": "118e2913db4f8899",
    "dirichlet_train": "d5b5b77cc8e20617",
    "pathological": "3c63bc72ba493824",
    "dh": "58aef2abcbc1d667",
}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_same_seed_gives_the_same_split_everywhere(name: str) -> None:
    assert made(name, seed=7).to_json()["hash"][:16] == GOLDEN[name]
