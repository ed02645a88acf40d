"""Manifests: what they say, what is wrong with them, and that nothing names a patient afterwards."""

import json
import re
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import fedvit
from fedvit.cli.main import app
from fedvit.core.errors import UserError
from fedvit.core.settings import DataSettings, PartitionSettings
from fedvit.data.dataset import Dataset
from fedvit.data.partition.split import partition_dataset
from fedvit.data.patients import SALT
from fedvit.data.sources import load_dataset, sites_of
from fedvit.runs.folder import Run

HEADER = "path,label,patient,site,split"


def picture(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (8, 8), dtype=np.uint8)).save(path)


def manifest(folder: Path, rows: list[str], header: str = HEADER, name: str = "manifest.csv") -> Path:
    """A manifest with an image for every row."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, row in enumerate(rows):
        picture(folder / row.split(",")[0], number)
    (folder / name).write_text("\n".join([header, *rows]) + "\n")
    return folder / name


def hospital(folder: Path, *, sites: tuple[str, ...] = ("north", "south"), patients: int = 8) -> Path:
    """Two images a patient, as many patients of each class at each site."""
    rows = [
        f"images/{site}-{p}-{i}.png,{('normal', 'pneumonia')[p % 2]},{site}MRN{p:04d},{site}"
        for site in sites
        for p in range(patients)
        for i in range(2)
    ]
    return manifest(folder, rows, "path,label,patient,site")


def settings(path: Path, tmp_path: Path, **more: Any) -> DataSettings:
    return DataSettings(name=str(path), cache=tmp_path / "cache", **more)


def load(path: Path, tmp_path: Path, size: int | None = 8, **more: Any) -> Dataset:
    return load_dataset(settings(path, tmp_path, **more), size)


def call(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, " ".join(result.stderr.split())


def test_a_manifest_says_label_patient_site_and_split(tmp_path: Path) -> None:
    rows = [
        "a.png,ill,p1,north,train",
        "b.png,well,p1,north,train",
        "c.png,ill,p2,south,test",
        "d.png,well,p3,south,val",
    ]
    data = load(manifest(tmp_path / "d", rows), tmp_path)
    assert data.class_names == ("ill", "well")
    assert data.labels.tolist() == [0, 1, 0, 1]
    assert data.site_names == ("north", "south")
    assert data.sites is not None
    assert data.official_test is not None
    assert data.official_val is not None
    assert data.patients is not None
    assert data.sites.tolist() == [0, 0, 1, 1]
    assert data.official_test.tolist() == [False, False, True, False]
    assert data.official_val.tolist() == [False, False, False, True]
    assert data.patients.tolist() == [0, 0, 1, 2]
    assert data.files == ("a.png", "b.png", "c.png", "d.png")
    assert data.images.shape == (4, 8, 8, 3)


def test_columns_in_any_order_a_byte_order_mark_and_other_columns_are_fine(tmp_path: Path) -> None:
    picture(tmp_path / "a.png", 0)
    picture(tmp_path / "b.png", 1)
    (tmp_path / "m.csv").write_bytes('\ufefflabel, path ,age\r\n10, "a.png",77\r\n9,b.png,\r\n\r\n'.encode())
    data = load(tmp_path / "m.csv", tmp_path)
    assert data.class_names == ("9", "10")  # numbers by size
    assert data.labels.tolist() == [1, 0]
    assert data.patients is None
    assert data.sites is None
    assert data.official_test is None


def test_one_manifest_per_site_is_a_pattern(tmp_path: Path) -> None:
    for number, site in enumerate(("mercy", "st mary")):
        manifest(tmp_path / site, [f"{i}.png,{'xy'[i % 2]},{site}{i}" for i in range(4 + number)], "path,label,patient")
    found = load(tmp_path / "*" / "manifest.csv", tmp_path)
    assert found.site_names == ("mercy", "st mary")
    assert found.sites is not None
    assert np.bincount(found.sites).tolist() == [4, 5]
    assert found.files[0] == "mercy/0.png"
    assert sites_of(settings(tmp_path / "*" / "manifest.csv", tmp_path)) == ("mercy", "st mary")
    (tmp_path / "st mary" / "manifest.csv").write_text("path,label\n0.png,x\n")
    with pytest.raises(UserError, match=r"must agree on the columns.*mercy/manifest.csv has patient; .*none of them"):
        load(tmp_path / "*" / "manifest.csv", tmp_path)


@pytest.mark.parametrize(
    ("rows", "header", "said"),
    [
        (["a.png,x"], "file,label", r"no column path; its first line names file, label: expected path,label"),
        (["a.png,x"], "path,class", r"no column label; its first line names path, class"),
        ([], "path;label", r"no column path and no column label; its first line names path;label.*commas"),
        (["a.png,x,y"], "path,label,label", r"2 columns label"),
        (["a.png,"], "path,label", r"line 2 of manifest.csv has no label"),
        (["a.png,x,"], "path,label,patient", r"line 2 of manifest.csv has no patient"),
        (["a.png"], "path,label", r"line 2 of manifest.csv has no label"),
        (["a.png,x,dev"], "path,label,split", r"line 2 .* has the split 'dev': expected train, val or test"),
        (["a.png,x,train", "b.png,x,val"], "path,label,split", r"no row with test"),
        (["a.png,x", "./a.png,x"], "path,label", r"a.png is listed twice, in line 2 .* and line 3"),
        (
            ["a.png,x,p,n", "b.png,x,p,s"],
            "path,label,patient,site",
            r"1 patient has images at more than one site \(line",
        ),
        (["a.png,x,p,train", "b.png,x,p,test"], "path,label,patient,split", r"1 patient .*more than one of train, val"),
        ([], "path,label", r"has no images"),
    ],
)
def test_what_is_wrong_is_said_and_where(rows: list[str], header: str, said: str, tmp_path: Path) -> None:
    path = manifest(tmp_path / "d", rows, header)
    with pytest.raises(UserError, match=said):
        load(path, tmp_path)


def test_an_empty_file_and_text_that_is_not_utf8_are_refused(tmp_path: Path) -> None:
    (tmp_path / "m.csv").touch()
    with pytest.raises(UserError, match="names no columns"):
        load(tmp_path / "m.csv", tmp_path)
    (tmp_path / "m.csv").write_bytes("path,label\na.png,grün\n".encode("latin-1"))
    with pytest.raises(UserError, match="not text in UTF-8"):
        load(tmp_path / "m.csv", tmp_path)
    with pytest.raises(UserError, match=r"no manifest .*nowhere.csv here or in"):
        load(tmp_path / "nowhere.csv", tmp_path)


def test_labels_that_the_setting_does_not_list_are_refused(tmp_path: Path) -> None:
    path = manifest(tmp_path / "d", ["a.png,x", "b.png,y"], "path,label")
    with pytest.raises(UserError, match="does not list: y"):
        load(path, tmp_path, class_names="x,z")
    assert load(path, tmp_path, class_names="y,x,z").class_names == ("y", "x", "z")


def test_a_file_that_does_not_exist_is_named_or_skipped(tmp_path: Path) -> None:
    path = hospital(tmp_path / "d")
    (tmp_path / "d/images/north-0-0.png").unlink()
    with pytest.raises(UserError, match=r"north-0-0.png \(line 2 of manifest.csv\) does not exist.*skip_bad"):
        load(path, tmp_path)
    assert len(load(path, tmp_path, skip_bad=True)) == 31


def test_no_message_names_a_patient(tmp_path: Path) -> None:
    rows = [f"{i}.png,x,SECRET{i % 3},{'ns'[i % 2]}" for i in range(12)]
    path = manifest(tmp_path / "d", rows, "path,label,patient,site")
    status, told, err = call("datasets", path)
    assert status == 2
    assert "3 patients have images at more than one site (line 2 of manifest.csv and line 5 of manifest.csv; " in told
    assert "SECRET" not in told + err + call("datasets", path, "--json")[1]


def test_the_commands_show_patients(tmp_path: Path) -> None:
    path = hospital(tmp_path / "d")
    status, text, _ = call("datasets", path, "--json")
    assert status == 0
    found = json.loads(text)["patients"]
    assert found["north"] == {"patients": 8, "images": [2, 2, 2], "classes": {"normal": 4, "pneumonia": 4}}
    assert "16 patients" in call("datasets", path)[1]
    status, text, _ = call("partition", "--data", path, "--json", "--set", "data.val=0.2")
    assert status == 0
    assert json.loads(text)["patients"]["north"] == {"train": 4, "val": 2, "test": 2}
    assert "patients in train" in call("partition", "--data", path)[1]


def test_a_lonely_patient_is_hinted_at(tmp_path: Path) -> None:
    rows = ["a.png,x,p1,north", "b.png,x,p2,south", "c.png,y,p2,south", "d.png,x,p3,south"]
    status, told, _ = call("datasets", manifest(tmp_path / "d", rows, "path,label,patient,site"))
    assert status == 0
    assert "hint: all images of north are of one patient" in told
    assert "hint: the class 'y' of south has one patient" in told


def test_an_image_of_two_patients_is_a_hint(tmp_path: Path) -> None:
    path = manifest(tmp_path / "d", ["a.png,x,p1", "b.png,x,p2"], "path,label,patient")
    (tmp_path / "d/b.png").write_bytes((tmp_path / "d/a.png").read_bytes())
    assert "2 patients have it" in call("datasets", path)[1]


def test_a_run_keeps_patients_by_hash_only(tmp_path: Path) -> None:
    path = hospital(tmp_path / "d")
    flags: dict[str, Any] = {"rounds": 1, "epochs": 1, "patch_size": 4, "batch": 4}
    sets = {"cache": str(tmp_path / "cache"), "data.val": 0.2}
    run = fedvit.run(data=path, out=tmp_path / "r", method="fedper", settings=sets, **flags)
    assert [client["client"] for client in run.clients] == ["north", "south"]
    split = run.split
    whose = split["patients"]
    assert len(set(whose)) == 16
    assert all(re.fullmatch("[0-9a-f]{16}", name) for name in whose)
    assert split["patient_counts"] == {site: {"train": 4, "val": 2, "test": 2} for site in ("north", "south")}
    for one, other in (("train", "test"), ("train", "val"), ("val", "test")):
        people = [{whose[n] for own in split["clients"].values() for n in own[part]} for part in (one, other)]
        assert not people[0] & people[1]
    written = [file for file in (tmp_path / "r").rglob("*") if file.is_file()]
    assert len(written) > 5
    assert not [file for file in written if b"MRN" in file.read_bytes()]
    salt = tmp_path / "cache" / SALT
    assert stat.S_IMODE(salt.stat().st_mode) == 0o600
    assert b"MRN" not in b"".join(file.read_bytes() for file in (tmp_path / "cache").rglob("*") if file.is_file())

    again = fedvit.run(data=path, out=tmp_path / "again", method="fedper", settings=sets, **flags)
    assert (again.folder / "split.json").read_bytes() == (run.folder / "split.json").read_bytes()
    salt.unlink()
    other = load(path, tmp_path)
    assert not set(other.patient_hashes) & set(whose)
    assert Run(tmp_path / "r").experiment.data.name == str(path)


def test_val_rows_are_the_validation_images(tmp_path: Path) -> None:
    parts = ("train", "train", "train", "val", "test")
    rows = [f"{i}.png,{'xy'[i % 2]},{parts[i // 2 % 5]},{'ns'[i // 2 % 3 > 0]}" for i in range(60)]
    data = load(manifest(tmp_path / "d", rows, "path,label,split,site"), tmp_path)
    assert data.official_val is not None
    for share in (0.0, 0.3):
        whole = partition_dataset(
            data, PartitionSettings(name="site", clients=2), DataSettings(val=share), batch=4, seed=0
        )
        vals = np.concatenate([part.val for part in whole.clients.values()])
        assert np.array_equal(np.sort(vals), np.flatnonzero(data.official_val))
        assert len(np.unique(np.concatenate([*(p.train for p in whole.clients.values()), vals]))) == 48


def test_the_rule_that_pools_says_that_it_does(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [f"{i}.png,{'xy'[i % 2]},{('train', 'val', 'test')[i % 3]}" for i in range(60)]
    data = load(manifest(tmp_path / "d", rows, "path,label,split"), tmp_path)
    settings_ = PartitionSettings(name="dirichlet", clients=2, alpha=9.0)
    partition_dataset(data, settings_, DataSettings(), batch=4, seed=0)
    assert "the manifest's column split is not used" in caplog.text


# Folders.


def folders(root: Path, pattern: str, count: int = 8) -> Path:
    for number in range(count):
        for site in ("north", "south"):
            picture(
                root / pattern.format(site=site, label="xy"[number % 2], p=f"{site[0]}{number // 2}", i=number), number
            )
    return root


@pytest.mark.parametrize(
    ("pattern", "rule"),
    [
        ("{site}/{label}/{p}/{i}.png", "folder"),
        ("{site}/{label}/{p}_{i}.png", "([ns][0-9]+)_"),
        ("{site}/{label}/a{p}_{i}.png", "(north|south).*a.([0-9]+)_"),
    ],
)
def test_folders_name_patients_by_folder_or_regex(pattern: str, rule: str, tmp_path: Path) -> None:
    root = folders(tmp_path / "d", pattern)
    data = load(root, tmp_path, patient=rule)
    assert data.patients is not None
    assert np.bincount(data.patients).tolist() == [2] * 8
    assert data.site_names == ("north", "south")
    assert data.class_names == ("x", "y")
    assert sites_of(settings(root, tmp_path, patient=rule)) == ("north", "south")
    status, text, _ = call("datasets", root, "--json", "--set", f"patient={rule}")
    assert status == 0
    assert json.loads(text)["patients"]["south"]["patients"] == 4


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("p[0-9]+", "has no group"),
        ("(p", "is not a regular expression"),
        ("(q[0-9]+)", r"finds no patient in 16 of 16 paths, such as north/x/0_0.png"),
        ("/([0-6])_", r"finds no patient in 2 of 16 paths"),
        (
            "/([0-9])_",
            r"8 patients have images at more than one site \(north/x/0_0.png and south/x/0_0.png; .*; and 5 more",
        ),
        ("folder", "expected class/patient/image"),
    ],
)
def test_a_rule_that_does_not_fit_the_paths_is_refused(rule: str, said: str, tmp_path: Path) -> None:
    root = tmp_path / "d"
    for number in range(8):
        for site in ("north", "south"):
            picture(root / (site if rule != "folder" else "") / "xy"[number % 2] / f"{number}_0.png", number)
    with pytest.raises(UserError, match=said):
        load(root, tmp_path, patient=rule)
    if rule not in ("p[0-9]+", "(p", "folder"):
        assert call("datasets", root, "--set", f"patient={rule}")[0] == 2


def test_a_patient_in_the_train_and_the_test_folder_is_refused(tmp_path: Path) -> None:
    for part in ("train", "test"):
        for label in "xy":
            picture(tmp_path / "d" / part / label / f"{part}_p1{label}.png", 1)
    with pytest.raises(UserError, match=r"2 patients have images in more than one of train, val and test"):
        load(tmp_path / "d", tmp_path, patient="_(p1.)")
    assert len(load(tmp_path / "d", tmp_path, patient="((test|train)_p1.)")) == 4


def test_a_manifest_without_the_column_may_use_the_setting(tmp_path: Path) -> None:
    path = manifest(tmp_path / "d", ["p1/a.png,x", "p1/b.png,y", "p2/a.png,x"], "path,label")
    for rule in ("folder", "(p[0-9])/"):
        data = load(path, tmp_path, patient=rule)
        assert data.patients is not None
        assert data.patients.tolist() == [0, 0, 1]
    with pytest.raises(UserError, match="has a column patient"):
        load(hospital(tmp_path / "e"), tmp_path, patient="folder")
    with pytest.raises(UserError, match="digits is not a folder"):
        load_dataset(DataSettings(patient="folder"), 8)
