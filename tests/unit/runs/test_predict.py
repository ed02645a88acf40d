"""`fedvit predict` reads images as the run read them, and says what the run's own evaluation said."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import fedvit
from fedvit.engine.worker import load_data
from fedvit.runs.folder import Run
from tests.conftest import finish, tiny
from tests.unit.cli.test_command_line import call
from tests.unit.runs.test_export import digits, small, written


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(finish(small("fedper"), tmp_path_factory.mktemp("run") / "fedper", dataset=digits()))


def save_images(run: Run, client: str, folder: Path, dataset: Any = None) -> int:
    """The client's test images as files, class by class; returns how many."""
    dataset, split = load_data(run.experiment, dataset)
    for number in split.clients[client].test:
        place = folder / dataset.class_names[dataset.labels[number]]
        place.mkdir(parents=True, exist_ok=True)
        pixels = np.asarray(dataset.images[number])
        Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(place / f"{number}.png")
    return len(split.clients[client].test)


def accuracy(table: Path) -> float:
    """Of a CSV of predictions for files in folders by class."""
    with table.open(newline="") as stream:
        right = [Path(row["image"]).parent.name == row["class"] for row in csv.DictReader(stream)]
    return 100 * sum(right) / len(right)


def test_the_accuracy_of_predictions_is_that_of_the_run(run: Run, tmp_path: Path) -> None:
    row = run.clients[2]
    assert save_images(run, "2", tmp_path / "test") == row["test_samples"]
    (one,) = written(run, tmp_path, "2")
    for source in (
        ["predict", run.folder, tmp_path / "test", "--client", "2"],
        ["predict", one.path, tmp_path / "test"],
    ):
        status, shown, message = call(*source, "--csv", tmp_path / "found.csv")
        assert status == 0, message
        assert f"{row['test_samples']} images" in shown
        assert accuracy(tmp_path / "found.csv") == pytest.approx(row["personal_accuracy"], abs=1e-9)


def test_pictures_of_a_folder_are_read_as_in_training(tmp_path: Path) -> None:
    """Grey, colour, transparent, with a palette, 16 bits, of any size: the very files the run was tested on."""
    rng = np.random.default_rng(0)
    for site in ("mercy", "north"):
        for label, tint in (("calm", 60), ("wild", 190)):
            folder = tmp_path / "data" / site / label
            folder.mkdir(parents=True)
            for number in range(24):
                pixels = np.clip(rng.normal(tint, 60, (10 + number % 3, 9, 3)), 0, 255).astype(np.uint8)
                image = Image.fromarray(pixels)
                kind = ("RGB", "L", "RGBA", "P", "I;16")[number % 5]
                if kind == "I;16":
                    image = Image.fromarray(pixels[..., 0].astype(np.uint16) * 257)
                elif kind == "RGBA":
                    image.putalpha(Image.fromarray(pixels[..., 0]))
                else:
                    image = image.convert(kind)
                image.save(folder / f"{number}.png")
    experiment = tiny(
        "fedper", {"data.cache": str(tmp_path / "cache"), "min_samples": 4}, data=str(tmp_path / "data"), clients=None,
        rounds=1, precision="bf16",
    )  # fmt: skip
    run = Run(finish(experiment, tmp_path / "run"))
    dataset, split = load_data(experiment)
    assert dataset.images.shape[1:] == (8, 8, 3)
    files = sorted((tmp_path / "data").rglob("*.png"), key=lambda path: (path.parts[:-1], path.name))
    for row in run.clients:
        tested = [files[number] for number in split.clients[row["client"]].test]
        found = list(fedvit.predict(run.model(row["client"]), tested))
        right = sum(one.classes[0] == one.image.parent.name for one in found)
        assert 100 * right / len(tested) == pytest.approx(row["personal_accuracy"], abs=1e-9)


def test_a_model_of_grey_images_takes_colour_ones_as_grey(run: Run, tmp_path: Path) -> None:
    model = run.model("1")
    grey = Image.fromarray(digits().images[0][..., 0])
    grey.save(tmp_path / "grey.png")
    grey.convert("RGBA").save(tmp_path / "rgba.png")
    grey.convert("RGB").save(tmp_path / "rgb.png")
    Image.merge("RGB", (grey, grey.point(lambda v: 255 - v), grey)).save(tmp_path / "tinted.png")
    a, b, c, d = (one.probabilities for one in fedvit.predict(model, [tmp_path], top=10))
    assert a == b == c
    assert d != a


def test_lines_name_the_likeliest_classes(run: Run, tmp_path: Path) -> None:
    save_images(run, "0", tmp_path / "t")
    status, shown, _ = call("predict", run.folder, tmp_path / "t", "--client", "0", "--top", "3")
    assert status == 0
    first = shown.splitlines()[0]
    assert first.count("%") == 3
    assert (
        call("predict", run.folder, tmp_path / "t", "--client", "0", "--top", "99", "--csv", tmp_path / "x.csv")[0] == 0
    )
    header, line = (tmp_path / "x.csv").read_text().splitlines()[:2]
    assert header.startswith("image,class,probability,class_2,probability_2")
    chances = [float(cell) for cell in line.split(",")[2::2]]
    assert len(chances) == 10
    assert chances == sorted(chances, reverse=True)
    assert sum(chances) == pytest.approx(1, abs=1e-5)


def test_files_that_cannot_be_read_are_named_and_the_others_predicted(run: Run, tmp_path: Path) -> None:
    save_images(run, "0", tmp_path / "t")
    count = sum(1 for _ in (tmp_path / "t").rglob("*.png"))
    (tmp_path / "t" / "broken.png").write_bytes(b"no image")
    (tmp_path / "t" / "notes.txt").write_text("not looked at in a folder")
    (tmp_path / "t" / ".hidden.png").write_bytes(b"not looked at either")
    arguments = ["predict", run.folder, tmp_path / "t", "--client", "0"]
    status, _, message = call(*arguments, "--csv", tmp_path / "x.csv")
    assert status == 2
    assert "broken.png is not an image" in message.replace("\n", " ")
    assert len((tmp_path / "x.csv").read_text().splitlines()) == 1 + count
    with pytest.raises(ValueError, match=r"broken\.png is not an image"):
        list(fedvit.predict(run.model("0"), [tmp_path / "t"]))


MISTAKES = [
    (["{run}", "{here}", "--client", "77"], "no client '77'"),
    (["{run}", "{here}"], "say whose model: --client NAME or --server; the clients are 0, 1, 2, 3"),
    (["{run}", "{here}", "--server"], "no model of its own"),
    (["{run}", "{here}/none.png", "--client", "1"], "no image at"),
    (["{run}", "{here}/empty", "--client", "1"], "no images in"),
    (["{here}/none", "{here}"], "no model or run at"),
    (["{here}/notes.txt", "{here}"], "is not a safetensors file"),
    (["{here}/notes.txt", "{here}", "--client", "1"], "is one model"),
    (["{run}", "{here}/one.png", "--client", "1", "--csv", "{here}/no/x.csv"], "cannot be written"),
]


@pytest.mark.parametrize(("arguments", "told"), MISTAKES, ids=[told for _, told in MISTAKES])
def test_a_mistake_is_told(arguments: list[str], told: str, run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("hello")
    Image.fromarray(digits().images[0][..., 0]).save(tmp_path / "one.png")
    places = {"{run}": str(run.folder), "{here}": str(tmp_path)}
    filled = [argument.replace("{run}", places["{run}"]).replace("{here}", places["{here}"]) for argument in arguments]
    status, _, message = call("predict", *filled)
    assert status == 2
    assert told in message.replace("\n", " ")


def test_real_images_and_pretrained_weights_end_to_end(shared_data: Path, tmp_path: Path) -> None:
    flags: dict[str, Any] = {
        "data": "cifar100_small", "data_dir": shared_data, "model": "vit_tiny_patch16_224", "image_size": 64,
        "weights": "vit_tiny_patch16_224.fp16.safetensors", "tune": "lora", "clients": 3, "cohort": 2, "rounds": 1,
        "epochs": 1, "samples": 240, "eval_every": 0,
    }  # fmt: skip
    run = fedvit.run(method="fedper", out=tmp_path / "run", **flags)
    row = run.clients[1]
    save_images(run, "1", tmp_path / "test")
    (one,) = written(run, tmp_path, "1")
    assert one.description.timm.arguments() == {
        "model_name": "vit_tiny_patch16_224",
        "num_classes": 100,
        "img_size": 64,
    }
    assert call("predict", one.path, tmp_path / "test", "--csv", tmp_path / "x.csv")[0] == 0
    assert accuracy(tmp_path / "x.csv") == pytest.approx(row["personal_accuracy"], abs=1e-9)
