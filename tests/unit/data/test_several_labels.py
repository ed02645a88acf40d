"""Several labels per image: how manifests, arrays and npz files give them, and how they are dealt out."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedvit.config.load import load_experiment
from fedvit.core.errors import UserError
from fedvit.core.settings import DataSettings
from fedvit.data.arrays import from_arrays, from_clients
from fedvit.data.check import check_files
from fedvit.data.dataset import Dataset, one_class_each
from fedvit.data.partition.split import partition_counts
from fedvit.data.size import size_of
from fedvit.data.sources import load_dataset, task_of
from fedvit.engine.worker import load_data
from tests.labels import LABELS, write_manifest


def manifest(folder: Path, *lines: str, name: str = "manifest.csv") -> DataSettings:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("\n".join(lines) + "\n")
    for number in range(4):
        Image.fromarray(np.full((8, 8), 40 * number, dtype=np.uint8)).save(folder / f"{number}.png")
    return DataSettings(name=str(folder / name), cache=folder / "cache")


COLUMNS = ("path,label_mass,label_edema", "0.png,1,0", "1.png,1,1", "2.png,0,0", "3.png,0,1.0")
CELLS = ("path,labels", "0.png,mass", "1.png, edema | mass ", "2.png,", "3.png,edema")


@pytest.mark.parametrize("lines", [COLUMNS, CELLS])
def test_columns_and_cells_give_the_same_labels(lines: Sequence[str], tmp_path: Path) -> None:
    found = load_dataset(manifest(tmp_path, *lines), 8)
    assert found.class_names == ("edema", "mass")
    assert found.labels.tolist() == [[0, 1], [1, 1], [0, 0], [1, 0]]
    assert task_of(manifest(tmp_path, *lines)) == "multi"


def test_the_settings_of_a_run_say_the_task(tmp_path: Path) -> None:
    path = write_manifest(tmp_path)
    assert load_experiment(None, None, {"data": str(path)}).data.task == "multi"
    assert load_experiment(None, None, {}).data.task is None


def test_a_column_label_keeps_its_meaning_beside_columns_of_labels(tmp_path: Path) -> None:
    lines = ("path,label,label_mass", "0.png,a,1", "1.png,b,0", "2.png,a,0", "3.png,b,1")
    data = manifest(tmp_path, *lines)
    assert load_dataset(data, 8).labels.tolist() == [0, 1, 0, 1]
    several = load_dataset(data.model_copy(update={"task": "multi"}), 8)
    assert several.labels.tolist() == [[1], [0], [0], [1]]


@pytest.mark.parametrize(
    ("lines", "settings", "told"),
    [
        (("path,site", "0.png,a"), {}, "no column label; .*for several labels per image, labels or label_NAME"),
        (("path,label", "0.png,a"), {"task": "multi"}, "no columns for several labels per image, as data.task=multi"),
        (COLUMNS, {"task": "single"}, "has no column label"),
        (("path,labels,label_mass", "0.png,mass,1"), {}, "keep one of the two forms"),
        (("path,label_a,label_a", "0.png,1,1"), {}, "has 2 columns label_a"),
        (("path,label_mass,label_edema", "0.png,1,-1"), {}, "line 2 of manifest.csv has '-1' in .* label_edema: expec"),
        (("path,label_mass,label_edema", "0.png,1,"), {}, "line 2 of manifest.csv has no label_edema"),
        (("path,labels", "0.png,", "1.png,"), {}, "gives no image a label"),
        (COLUMNS, {"class_names": "mass,edema,hernia"}, "has no column label_hernia, which data.class_names lists"),
        (COLUMNS, {"class_names": "mass"}, "has labels that data.class_names does not list: edema"),
        (CELLS, {"class_names": "mass"}, "has labels that data.class_names does not list: edema"),
    ],
)
def test_a_mistake_in_the_labels_is_named(
    lines: Sequence[str], settings: dict[str, str], told: str, tmp_path: Path
) -> None:
    data = manifest(tmp_path, *lines).model_copy(update=settings)
    with pytest.raises(UserError, match=told):
        load_dataset(data, 8)


def test_listed_classes_order_the_labels_and_may_be_absent_from_cells(tmp_path: Path) -> None:
    data = manifest(tmp_path, *CELLS).model_copy(update={"class_names": "mass,hernia,edema"})
    assert load_dataset(data, 8).labels.tolist() == [[1, 0, 0], [1, 0, 1], [0, 0, 0], [0, 0, 1]]


def test_manifests_of_sites_must_have_the_same_columns_of_labels(tmp_path: Path) -> None:
    manifest(tmp_path / "a", *COLUMNS)
    manifest(tmp_path / "b", "path,label_mass", "0.png,1")
    with pytest.raises(UserError, match=r"must agree on the columns .*b/manifest.csv has label_mass"):
        load_dataset(DataSettings(name=str(tmp_path / "*" / "manifest.csv"), cache=tmp_path / "cache"), 8)


def test_a_check_counts_every_label_and_every_image_once(tmp_path: Path) -> None:
    data = manifest(tmp_path, *CELLS)
    found = check_files(Path(data.name), data)
    assert (found.images, found.counts) == (4, {"": {"(no label)": 1, "edema": 2, "mass": 2}})
    assert not found.bad


def test_arrays_may_give_several_labels() -> None:
    images = np.zeros((4, 8, 8), dtype=np.uint8)
    labels = np.array([[0, 1], [1, 1], [0, 0], [1, 0]])
    assert from_arrays((images, labels), ["a", "b"]).several_labels
    torch_like = [(image, label) for image, label in zip(images, labels.astype(np.float32), strict=True)]
    assert from_arrays(torch_like).labels.tolist() == labels.tolist()
    with pytest.raises(UserError, match=r"an array \(images, labels\) of 0 and 1; found int64 \(4, 2\) from 0 to 2"):
        from_arrays((images, 2 * labels))
    with pytest.raises(UserError, match="the clients differ in their labels: x has 4 x 2, y has 4"):
        from_clients({"x": (images, labels), "y": (images, labels[:, 0])})


def test_an_npz_file_may_give_several_labels(tmp_path: Path) -> None:
    path = tmp_path / "mine.npz"
    images, labels = np.zeros((6, 8, 8), dtype=np.uint8), np.eye(6, 3, dtype=np.int64)
    np.savez(path, train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    data = DataSettings(name=str(path))
    assert task_of(data) == "multi"
    assert load_dataset(data, 8).labels.shape == (12, 3)
    assert size_of(data, 8).classes == 3
    with pytest.raises(UserError, match=r"data.task=single, but mine has several labels per image"):
        load_dataset(data.model_copy(update={"task": "single"}), 8)


# Dealing images out.


def dataset(labels: list[list[int]], sites: list[int] | None = None) -> Dataset:
    pixels = np.zeros((len(labels), 1, 1, 1), dtype=np.uint8)
    owners = None if sites is None else np.array(sites)
    names = ("north", "south") if sites else ()
    return Dataset("x", pixels, np.array(labels), ("a", "b"), sites=owners, site_names=names, fingerprint="x")


def test_an_image_is_dealt_out_as_its_rarest_label() -> None:
    found = one_class_each(dataset([[1, 0], [1, 1], [1, 0], [0, 0]]))
    assert [found.class_names[label] for label in found.labels] == ["a", "b", "a", "no label"]


def test_what_is_rare_at_a_site_does_not_depend_on_other_sites() -> None:
    here = [[1, 1], [1, 0], [0, 0]]
    elsewhere = [[0, 1], [0, 1], [0, 1]]
    whole = one_class_each(dataset(here + elsewhere, [0, 0, 0, 1, 1, 1]), by_site=True)
    alone = one_class_each(dataset(here, [0, 0, 0]), by_site=True)
    assert [whole.class_names[label] for label in whole.labels[:3]] == [alone.class_names[i] for i in alone.labels]
    assert whole.class_names[whole.labels[0]] == "b", "b is rarer at this site, though not everywhere"


@pytest.mark.parametrize("rule", ["iid", "dirichlet", "dirichlet_train", "pathological", "site"])
def test_every_rule_deals_every_image_once_and_keeps_patients(rule: str, tmp_path: Path) -> None:
    data = {"data": str(write_manifest(tmp_path)), "partition": rule, "clients": None if rule == "site" else 3}
    experiment = load_experiment(None, {"data.cache": str(tmp_path / "cache"), "data.val": 0.2}, data)
    whole, split = load_data(experiment, load_dataset(experiment.data, None))
    parts = [indices for own in split.clients.values() for indices in (own.train, own.val, own.test)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(90))
    assert whole.patients is not None
    owners = [set(whole.patients[part].tolist()) for part in parts]
    assert sum(map(len, owners)) == len(set.union(*owners)), "a patient is in two parts"
    counts = partition_counts(whole, split)
    total = sum(np.array(own[part]) for own in counts.values() for part in ("train", "val", "test"))
    assert total.tolist() == whole.labels.sum(0).tolist()
    assert split.class_names == tuple(sorted(LABELS))
