"""Splits against flwr-datasets, where the rule is the same."""

import numpy as np
import pytest

from fedvit.core.settings import DataSettings, PartitionSettings
from fedvit.data.partition.rules import draw_counts
from fedvit.data.partition.split import partition_dataset
from tests.unit.data.test_partition import official

datasets = pytest.importorskip("datasets", reason="flwr-datasets is not installed")
partitioners = pytest.importorskip("flwr_datasets.partitioner", reason="flwr-datasets is not installed")


def theirs(partitioner: object, labels: np.ndarray, clients: int) -> np.ndarray:
    """Images of each class for each client (classes x clients), as flwr-datasets divides them."""
    partitioner.dataset = datasets.Dataset.from_dict({"label": labels.tolist()})  # type: ignore[attr-defined]
    parts = [partitioner.load_partition(i)["label"] for i in range(clients)]  # type: ignore[attr-defined]
    return np.array([np.bincount(np.asarray(part, dtype=int), minlength=10) for part in parts]).T


@pytest.mark.parametrize("seed", range(5))
def test_dirichlet_draws_the_same_counts_from_the_same_generator(seed: int) -> None:
    labels = np.repeat(np.arange(10), 200)
    partitioner = partitioners.DirichletPartitioner(
        num_partitions=12,
        partition_by="label",
        alpha=0.3,
        min_partition_size=0,
        self_balancing=True,
        shuffle=False,
        seed=seed,
    )
    ours = draw_counts(np.bincount(labels), 12, 0.3, np.random.default_rng(seed))
    expected = theirs(partitioner, labels, 12)
    assert np.abs(ours - expected).max() <= 1  # theirs may lose an image to a cumulative sum a hair below 1
    assert ours.sum() == expected.sum() == 2000


def test_pathological_gives_every_client_as_many_images_of_as_many_classes() -> None:
    dataset = official(train=120, test=20)
    settings = PartitionSettings(name="pathological", clients=10, classes=3)
    whole = partition_dataset(dataset, settings, DataSettings(), batch=4, seed=0)
    ours = np.array([np.bincount(dataset.labels[part.train], minlength=10) for part in whole.clients.values()]).T
    partitioner = partitioners.PathologicalPartitioner(
        num_partitions=10,
        partition_by="label",
        num_classes_per_partition=3,
        class_assignment_mode="deterministic",
        seed=0,
    )
    expected = theirs(partitioner, dataset.labels[~dataset.official_test], 10)  # type: ignore[operator]
    for table in (ours, expected):
        assert ((table > 0).sum(axis=0) == 3).all()
        assert table.sum() == 1200
    assert sorted(ours[ours > 0]) == sorted(expected[expected > 0])


def test_iid_gives_clients_of_the_same_sizes() -> None:
    dataset = official(train=101, test=20)
    whole = partition_dataset(dataset, PartitionSettings(name="iid", clients=7), DataSettings(), batch=4, seed=0)
    ours = sorted(len(part.train) for part in whole.clients.values())
    partitioner = partitioners.IidPartitioner(num_partitions=7)
    expected = theirs(partitioner, dataset.labels[~dataset.official_test], 7)  # type: ignore[operator]
    assert ours == sorted(expected.sum(axis=0).tolist())
