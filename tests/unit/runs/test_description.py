"""An export's description and split.json say enough to repeat a prediction without FedViT."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision.transforms.v2
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

import fedvit
from fedvit.runs.folder import Run
from fedvit.runs.predict import batches_of_logits
from tests.conftest import finish, tiny
from tests.unit.runs.test_export import digits, small, written

DOCS = Path(__file__).parents[3] / "docs"


def photos(folder: Path, sizes: list[tuple[int, int]]) -> list[Path]:
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for number, (width, height) in enumerate(sizes):
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        image = Image.fromarray(pixels)
        if number % 3 == 1:
            image = image.convert("L")
        files.append(folder / f"{number}.png")
        image.save(files[-1])
    return files


def by_description(about: dict[str, Any], file: Path) -> torch.Tensor:
    """An image as the lines in docs/export.md prepare it: PIL and torchvision, and nothing but the description."""
    (block,) = re.findall(r"^```python\n(.*?)^```", (DOCS / "export.md").read_text(), re.DOTALL | re.MULTILINE)
    scope = {"about": about, "file": file, "Image": Image, "np": np, "torch": torch, "torchvision": torchvision}
    exec(compile(block, "export.md", "exec"), scope)
    result = scope["x"]
    assert isinstance(result, torch.Tensor)
    return result


def plain(path: Path) -> tuple[Any, dict[str, Any]]:
    with safe_open(path, "pt") as opened:
        about = json.loads(opened.metadata()["fedvit"])
    model = timm.create_model(**about["timm"]).eval()
    model.load_state_dict(load_file(path))
    return model, about


def check(run: Run, client: str, files: list[Path], out: Path) -> dict[str, Any]:
    """The run's own logits of these files are those of plain timm on images prepared by the description alone."""
    (one,) = written(run, out, client)
    model, about = plain(one.path)
    ((_, expected),) = batches_of_logits(run.model(client), files)
    with torch.no_grad():
        found = model(torch.stack([by_description(about, file) for file in files]))
        other = {**about, "reading": {**about["reading"], "interpolation": "nearest"}}
        missed = model(torch.stack([by_description(other, file) for file in files]))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (missed - expected).abs().max() > 0.01, "another interpolation is another image"
    return about


SIZES = [(40, 30), (9, 50), (8, 8), (12, 12), (200, 100), (5, 7)]


@pytest.mark.parametrize(
    ("stored", "size", "smooths"), [(None, 8, False), (20, 8, True), (6, 8, False)], ids=["as is", "shrunk", "grown"]
)
def test_images_of_a_folder_are_prepared_by_the_description_alone(
    stored: int | None, size: int, smooths: bool, tmp_path: Path
) -> None:
    for site in ("mercy", "north"):
        for label in ("calm", "wild"):
            photos(tmp_path / "data" / site / label, [(12, 10)] * 12)
    sets = {"data.cache": str(tmp_path / "cache"), "min_samples": 4, **({"data.size": stored} if stored else {})}
    experiment = tiny("fedper", sets, data=str(tmp_path / "data"), clients=None, rounds=1, image_size=size)
    run = Run(finish(experiment, tmp_path / "run"))
    about = check(run, "mercy", photos(tmp_path / "new", SIZES), tmp_path / "out")
    side = stored or size
    assert about["image"] == [side, side, 3]
    assert about["reading"] == {
        "mode": "RGB", "width": side, "height": side, "interpolation": "bilinear", "antialias": True, "gray": False,
    }  # fmt: skip
    assert about["input"]["antialias"] == smooths


def test_gray_images_are_prepared_by_the_description_alone(tmp_path: Path) -> None:
    run = Run(finish(small("fedper"), tmp_path / "run", dataset=digits()))
    about = check(run, "1", photos(tmp_path / "new", SIZES), tmp_path / "out")
    assert about["reading"]["gray"]


def test_a_file_without_the_new_fields_still_opens(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    run = Run(finish(small("fedper"), tmp_path / "run", dataset=digits()))
    (one,) = written(run, tmp_path, "1")
    with safe_open(one.path, "pt") as opened:
        about = json.loads(opened.metadata()["fedvit"])
    del about["reading"], about["input"]["interpolation"], about["input"]["antialias"]
    save_file(load_file(one.path), tmp_path / "old.safetensors", {"fedvit": json.dumps(about)})
    (file,) = photos(tmp_path / "new", [(9, 9)])
    (found,) = fedvit.predict(fedvit.load_model(tmp_path / "old.safetensors"), [file])
    assert found.classes


def test_split_json_names_the_file_of_every_image(tmp_path: Path) -> None:
    for site in ("mercy", "north"):
        for label in ("calm", "wild"):
            photos(tmp_path / "data" / site / label, [(12, 10)] * 12)
    (tmp_path / "data" / "mercy" / "calm" / "11.png").write_bytes(b"no image")
    sets = {"data.cache": str(tmp_path / "cache"), "min_samples": 4, "data.skip_bad": True, "data.val": 0.2}
    experiment = tiny("fedper", sets, data=str(tmp_path / "data"), clients=None, rounds=1)
    split = Run(finish(experiment, tmp_path / "run")).split
    files = split["files"]
    assert len(files) == 47
    assert "mercy/calm/11.png" not in files
    for client, parts in split["clients"].items():
        for part in ("train", "val", "test"):
            named = [files[number] for number in parts[part]]
            assert named
            assert all(name.startswith(f"{client}/") and (tmp_path / "data" / name).is_file() for name in named)
        counts = split["class_counts"][client]["train"]
        labels = [files[number].split("/")[1] for number in parts["train"]]
        assert counts == {str(n): labels.count(name) for n, name in enumerate(split["class_names"])}


def test_split_json_names_the_right_files_of_a_sample(tmp_path: Path) -> None:
    for label in ("calm", "wild"):
        photos(tmp_path / "data" / label, [(12, 10)] * 20)
    sets = {"data.cache": str(tmp_path / "cache"), "min_samples": 2}
    experiment = tiny("fedavg", sets, data=str(tmp_path / "data"), clients=2, partition="iid", rounds=1, samples=24)
    split = Run(finish(experiment, tmp_path / "run")).split
    for client, parts in split["clients"].items():
        labels = [split["files"][number].split("/")[0] for number in parts["train"]]
        counts = split["class_counts"][client]["train"]
        assert counts == {str(n): labels.count(name) for n, name in enumerate(split["class_names"]) if name in labels}


def test_sources_without_files_name_none(tmp_path: Path) -> None:
    assert "files" not in Run(finish(small("fedavg"), tmp_path / "run", dataset=digits())).split
