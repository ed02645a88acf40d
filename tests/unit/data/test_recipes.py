"""The snippets of docs/recipes.md make manifests from stand-ins of the datasets' own layouts."""

import csv
import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from fedvit.cli.main import app

PAGE = (Path(__file__).parents[3] / "docs" / "recipes.md").read_text()


def run(title: str, **changes: str) -> None:
    """Execute the snippet of a section, with other texts in it where its reader is told to change them."""
    (section,) = (text for text in re.split(r"^## ", PAGE, flags=re.MULTILINE) if text.startswith(title))
    (snippet,) = re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    for old, new in changes.items():
        assert f'"{old}": None' in snippet
        snippet = snippet.replace(f'"{old}": None', f'"{old}": "{new}"')
    exec(compile(snippet, title, "exec"), {})


def checked(manifest: str, *partition: str) -> tuple[Any, Any]:
    """What `fedvit datasets` and `fedvit partition` say of a manifest."""
    answers = []
    for words in (["datasets", manifest], ["partition", "--data", manifest, *partition]):
        result = CliRunner().invoke(app, [*words, "--json"])
        assert result.exit_code == 0, result.output
        answers.append(json.loads(result.stdout))
    return answers[0], answers[1]


def picture(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    seed = zlib.crc32(str(path).encode())  # every file has its own content
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (8, 8), dtype=np.uint8)).save(path)


def table(path: Path, header: str, rows: list[list[str]]) -> None:
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([header.split(","), *rows])


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_nih() -> None:
    root, rows, test = Path("nih"), [], []
    for patient in range(1, 31):
        for visit in range(2):
            name = f"{patient:08d}_{visit:03d}.png"
            picture(root / f"images_{patient % 3 + 1:03d}" / "images" / name)
            finding = "No Finding" if patient % 2 else "Effusion|Infiltration"
            rows.append([name, finding, str(visit), str(patient), "058", "M", "PA", "2682", "2749", "0.143", "0.143"])
            test += [name] * (patient > 20)
    rows.append(["00000099_000.png", "Mass", "0", "99", "060", "F", "AP", "2500", "2048", "0.168", "0.168"])  # not here
    header = (
        "Image Index,Finding Labels,Follow-up #,Patient ID,Patient Age,Patient Gender,View Position,"
        "OriginalImage[Width,Height],OriginalImagePixelSpacing[x,y]"
    )
    table(root / "Data_Entry_2017.csv", header, rows)
    (root / "test_list.txt").write_text("\n".join(test))
    run("NIH")
    found, split = checked("nih/manifest.csv", "--partition", "dirichlet_train", "--clients", "2", "--batch", "2")
    assert found["counts"] == {"": {"(no label)": 30, "Effusion": 30, "Infiltration": 30}}
    assert found["images"] == 60
    assert found["patients"][""]["patients"] == 30
    assert sum(part["test"] for part in split["patients"].values()) == 10


def test_chexpert() -> None:
    root = Path("CheXpert-v1.0-small")
    header = "Path,Sex,Age,Frontal/Lateral,AP/PA,No Finding,Pleural Effusion"
    for part, patients in (("train", range(1, 25)), ("valid", range(64540, 64550))):
        rows = []
        for patient in patients:
            answer = ("1.0", "0.0", "-1.0", "")[patient % 4]
            for view in ("view1_frontal", "view2_lateral"):
                path = f"{root}/{part}/patient{patient:05d}/study1/{view}.jpg"
                picture(Path(path))
                side = "Frontal" if "frontal" in view else "Lateral"
                rows.append([path, "Female", "68", side, "AP" if side == "Frontal" else "", "", answer])
        table(root / f"{part}.csv", header, rows)
    run("CheXpert")
    found, split = checked(f"{root}/manifest.csv", "--partition", "iid", "--clients", "2", "--batch", "2")
    assert found["counts"] == {"": {"effusion": 9, "no effusion": 9}}
    assert sum(part["test"] for part in split["patients"].values()) == 6


@pytest.mark.parametrize("origin", [False, True])
def test_ham10000(origin: bool) -> None:
    root, rows = Path("ham10000"), []
    for lesion in range(24):
        for take in range(1 + lesion % 3):
            name = f"ISIC_{lesion * 10 + take:07d}"
            picture(root / f"HAM10000_images_part_{lesion % 2 + 1}" / f"{name}.jpg")
            place = ["vidir_modern", "rosendahl"][lesion % 2]
            kind = ("nv", "mel", "bkl")[lesion // 2 % 3]
            rows.append(
                [f"HAM_{lesion:07d}", name, kind, "histo", "80.0", "male", "scalp", *([place] if origin else [])]
            )
    header = "lesion_id,image_id,dx,dx_type,age,sex,localization" + (",dataset" if origin else "")
    table(root / "HAM10000_metadata.csv", header, rows)
    run("HAM10000")
    more = () if origin else ("--clients", "2", "--batch", "2", "--set", "alpha=10")
    found, split = checked("ham10000/manifest.csv", *more)
    assert found["images"] == len(rows) == 48
    assert sum(site["patients"] for site in found["patients"].values()) == 24
    assert list(split["clients"]) == (["rosendahl", "vidir_modern"] if origin else ["0", "1"])


def test_domainnet() -> None:
    root, styles, kinds = Path("domainnet"), ("clipart", "quickdraw"), ("aircraft_carrier", "zebra")
    for style in styles:
        lines: dict[str, list[str]] = {"train": [], "test": []}
        for label, kind in ((0, kinds[0]), (344, kinds[1])):
            for number in range(1, 13):
                path = f"{style}/{kind}/{style}_{label:03d}_{number:06d}.jpg"
                picture(root / path)
                lines["test" if number > 9 else "train"].append(f"{path} {label}")
        for part, rows in lines.items():
            (root / f"{style}_{part}.txt").write_text("\n".join(rows) + "\n")
    (root / "real_train.txt").write_text("real/zebra/real_344_000001.jpg 344\n")  # an archive that is not here
    run("DomainNet")
    found, split = checked("domainnet/manifest.csv", "--batch", "2")
    assert found["counts"] == {style: dict.fromkeys(kinds, 12) for style in styles}
    assert {name: sum(part["test"]) for name, part in split["clients"].items()} == dict.fromkeys(styles, 6)
    (root / "manifest.csv").unlink()
    for path in root.glob("*.txt"):
        path.unlink()
    folders, _ = checked("domainnet", "--set", "data.layout=domain", "--clients", "2", "--batch", "2")
    assert folders["counts"] == found["counts"]


@pytest.mark.parametrize("owners", [False, True])
def test_hugging_face(owners: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="needs datasets: pip install datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", Path.cwd() / "cache")
    rng = np.random.default_rng(0)
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["normal", "pneumonia"])}
    features |= {key: datasets.Value("string") for key in ("case", "hospital")}
    for part, first, count in (("train", 0, 24), ("validation", 24, 8), ("test", 32, 8)):
        who = range(first, first + count)
        pixels = [Image.fromarray(rng.integers(0, 256, (8, 8), dtype=np.uint8)) for _ in who]
        pixels[0] = pixels[0].convert("CMYK")  # a kind of image that PNG cannot hold
        columns = {
            "image": pixels,
            "label": [number % 2 for number in who],
            "case": [f"c{number // 4}" for number in who],
            "hospital": [("north", "south")[number // 4 % 2] for number in who],
        }
        Path("hub-set/data").mkdir(parents=True, exist_ok=True)
        made = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
        made.to_parquet(f"hub-set/data/{part}-00000-of-00001.parquet")
    run("Hugging Face", **({"patient": "case", "site": "hospital"} if owners else {}))
    more = ("--batch", "2") if owners else ("--partition", "dirichlet_train", "--clients", "2", "--batch", "2")
    found, split = checked("from-hub/manifest.csv", *more)
    assert found["images"] == 40
    assert list(split["clients"]) == (["north", "south"] if owners else ["0", "1"])
    parts = {key: sum(sum(own[key]) for own in split["clients"].values()) for key in ("train", "val", "test")}
    assert parts == {"train": 24, "val": 8, "test": 8}
    if owners:
        assert found["counts"] == {"north": {"normal": 10, "pneumonia": 10}, "south": {"normal": 10, "pneumonia": 10}}
        assert {name: of["patients"] for name, of in found["patients"].items()} == {"north": 5, "south": 5}
