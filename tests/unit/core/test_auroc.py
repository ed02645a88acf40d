"""AUROC beside accuracy, confusion by class, and names instead of numbers."""

import csv
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from fedvit.core.metrics import area_under_roc
from fedvit.core.settings import DataSettings
from fedvit.data.dataset import wants_auroc
from fedvit.data.sources import from_npz
from fedvit.runs.folder import Run
from tests.conftest import finish, tiny


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_the_area_is_scikit_learns(classes: int) -> None:
    generator = torch.Generator().manual_seed(classes)
    for size in (2, 5, 40, 300):
        labels = torch.randint(classes, (size,), generator=generator)
        logits = torch.randn(size, classes, generator=generator).round(decimals=1)  # with ties
        found = area_under_roc(logits, labels)
        present = labels.unique().tolist()
        if len(present) == 1:
            assert found is None
            continue
        scores = logits.double().softmax(1).numpy()
        if classes == 2:
            assert found == pytest.approx(roc_auc_score(labels.numpy(), scores[:, 1]), abs=1e-12)
            continue
        each = [roc_auc_score(labels.numpy() == c, scores[:, c]) for c in present]
        assert found == pytest.approx(np.mean(each), abs=1e-12)
        if len(present) == classes:  # nothing is missing: the same as macro one-vs-rest
            macro = roc_auc_score(labels.numpy(), scores, multi_class="ovr", average="macro")
            assert found == pytest.approx(macro, abs=1e-12)


def test_one_class_or_broken_scores_have_no_area() -> None:
    assert area_under_roc(torch.randn(5, 2), torch.ones(5, dtype=torch.int64)) is None
    assert area_under_roc(torch.full((4, 2), torch.nan), torch.tensor([0, 1, 0, 1])) is None


def two_classes(folder: Path, name: str = "scans.npz") -> Path:
    """Two classes that brightness tells apart, in MedMNIST's layout."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 2, 240)
    images = (generator.integers(0, 120, (240, 8, 8)) + 90 * labels[:, None, None]).astype(np.uint8)
    parts = {"train": slice(0, 180), "test": slice(180, 240)}
    arrays = {f"{part}_images": images[rows] for part, rows in parts.items()}
    arrays |= {f"{part}_labels": labels[rows, None] for part, rows in parts.items()}
    np.savez(folder / name, **arrays)
    return folder / name


def test_two_classes_get_an_auroc_in_every_file_and_one_class_an_empty_cell(tmp_path: Path) -> None:
    data = str(two_classes(tmp_path))
    sets = {"alpha": 0.2, "min_samples": 8}
    run = Run(finish(tiny("fedavg", sets, data=data, clients=8, seed=3), tmp_path / "r"))
    with (run.folder / "clients.csv").open() as stream:
        cells = {row["client"]: row["personal_auroc"] for row in csv.DictReader(stream)}
    split = json.loads((run.folder / "split.json").read_text())
    seen = {name: len(counts["test"]) for name, counts in split["class_counts"].items()}
    assert {1, 2} == set(seen.values()), "the test needs clients of both kinds"
    assert all((cells[name] == "") == (count == 1) for name, count in seen.items())
    areas = [float(cell) for cell in cells.values() if cell]
    assert all(0 <= area <= 1 for area in areas)
    view = run.summary["views"]["personal"]
    assert view["auroc"] == pytest.approx(np.mean(areas))
    assert view["auroc_clients"] == len(areas)
    assert 0 <= run.summary["views"]["server"]["auroc"] <= 1
    assert run.rounds[-1]["views"]["personal"]["auroc"] == view["auroc"]


@pytest.mark.parametrize("label", ["fedper", "fedv"])
def test_auroc_of_more_classes_on_request_for_every_kind_of_loop(label: str, tmp_path: Path) -> None:
    wanted = Run(finish(tiny(label, {"data.auroc": True}), tmp_path / "with"))
    plain = Run(finish(tiny(label), tmp_path / "without"))
    assert 0 <= wanted.summary["views"]["personal"]["auroc"] <= 1
    assert "auroc" not in plain.summary["views"]["personal"]
    for a, b in zip(wanted.clients, plain.clients, strict=True):
        assert {key: value for key, value in a.items() if key != "personal_auroc"} == b


def test_confusion_counts_every_test_image_and_holds_the_accuracy(tmp_path: Path) -> None:
    for label in ("fedper", "fedv"):
        run = Run(finish(tiny(label), tmp_path / label))
        confusion = json.loads((run.folder / "confusion.json").read_text())
        counts = json.loads((run.folder / "split.json").read_text())["class_counts"]
        for row in run.clients:
            cells = confusion[row["client"]]
            right = sum(n for true, predicted, n in cells if true == predicted)
            assert right / row["test_samples"] * 100 == pytest.approx(row["personal_accuracy"])
            for number in range(10):
                images = counts[row["client"]]["test"].get(str(number), 0)
                assert sum(n for true, _, n in cells if true == number) == images


def test_which_sets_get_an_auroc() -> None:
    assert wants_auroc(DataSettings(name="anything"), 2)
    assert wants_auroc(DataSettings(name="organamnist"), 11)
    assert wants_auroc(DataSettings(name="folder/pathmnist_64.npz"), 9)
    assert not wants_auroc(DataSettings(name="cifar10"), 10)
    assert wants_auroc(DataSettings(name="cifar10", auroc=True), 10)
    assert not wants_auroc(DataSettings(name="anything", auroc=False), 2)


def test_medmnist_files_get_their_class_names_and_other_files_keep_numbers(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert from_npz(two_classes(tmp_path, "pneumoniamnist.npz")).class_names == ("normal", "pneumonia")
        assert from_npz(two_classes(tmp_path, "breastmnist_64.npz")).class_names == ("malignant", "normal or benign")
        assert from_npz(two_classes(tmp_path, "octmnist.npz")).class_names == ("0", "1")  # four classes expected
        assert from_npz(two_classes(tmp_path)).class_names == ("0", "1")


def test_real_pneumonia_has_names_and_areas(shared_data: Path, tmp_path: Path) -> None:
    flags = {"data": "pneumoniamnist", "data_dir": shared_data, "samples": 300, "clients": 4, "image_size": 28}
    run = Run(finish(tiny("fedavg", **{**flags, "patch_size": 7, "rounds": 1}), tmp_path / "r"))
    assert json.loads((run.folder / "split.json").read_text())["class_names"] == ["normal", "pneumonia"]
    assert run.summary["views"]["personal"]["auroc_clients"] >= 1
