"""Several labels per image at sites that keep their images."""

import json
from pathlib import Path

import pytest

from fedvit.config.load import load_experiment
from fedvit.network.boundary import Hello, read_hello
from tests.conftest import THREADS, finish
from tests.grid import Federated
from tests.labels import write_manifest


@pytest.mark.parametrize("method", ["fedavg", "fedper"])
def test_sites_score_labels_as_one_process_does(method: str, tmp_path: Path) -> None:
    sets = {"data.cache": str(tmp_path / "cache"), "data.val": 0.2, "train.loss": "weighted"}
    small = {"image_size": 8, "patch_size": 4, "rounds": 2, "epochs": 1, "batch": 8, "threads": THREADS}
    data = str(write_manifest(tmp_path / "xray"))
    experiment = load_experiment(None, sets, {**small, "method": method, "data": data})
    federated = Federated(experiment, tmp_path)
    federated.finish()
    alone = finish(experiment, tmp_path / "alone")
    for here, there in zip(*(rows_of(folder) for folder in (alone, federated.out)), strict=True):
        assert there["personal"] == here["personal"]
        assert len(there["personal"]["auroc_labels"]) == 3


def rows_of(folder: Path) -> list[dict[str, dict[str, object]]]:
    return [json.loads(line)["views"] for line in (folder / "rounds.jsonl").read_text().splitlines()]


def test_a_site_may_have_none_of_the_labels() -> None:
    about = {"site": "north", "train": 5, "test": 2, "classes": 0, "common": "{}"}
    found = read_hello(about)
    assert isinstance(found, Hello)
    assert found.holding.classes == 0
    for key in ("train", "test"):
        with pytest.raises(ValueError, match="not the hello of a site"):
            read_hello({**about, key: 0})
