"""A folder's dirt is reported by name and all at once, and no file can hang or fill the machine."""

import io
import json
import os
import shutil
import struct
import zipfile
import zlib
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from fedvit.cli.main import app
from fedvit.core.errors import UserError
from fedvit.core.settings import DataSettings
from fedvit.data.check import check_files, similar_names
from fedvit.data.sources import from_npz, load_dataset


def call(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr.replace("\n", " ")


def image(path: Path, seed: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(path)
    return path


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    """Two sites with two classes of six images each."""
    root = tmp_path / "sites"
    for number, place in enumerate(
        f"{s}/{c}/{i}.png" for s in ("mercy", "north") for c in ("ill", "well") for i in range(6)
    ):
        image(root / place, number)
    return root


def dirty(root: Path) -> dict[str, str]:
    """Spoil a folder in every way; return the kind of each bad file."""
    (root / "mercy/ill/empty.png").touch()
    (root / "mercy/ill/notes.txt").write_text("not an image")
    whole = (root / "north/well/0.png").read_bytes()
    (root / "north/well/cut.png").write_bytes(whole[: len(whole) // 2])
    os.mkfifo(root / "north/ill/pipe.png")
    (root / "north/ill/huge.png").write_bytes(huge_png())
    image(root / "north/stray.png", 98)
    image(root / "alone.png", 99)
    return {
        "mercy/ill/empty.png": "empty",
        "mercy/ill/notes.txt": "not an image",
        "north/well/cut.png": "truncated",
        "north/ill/pipe.png": "not a file",
        "north/ill/huge.png": "too large",
        "north/stray.png": "misplaced",
        "alone.png": "misplaced",
    }


@cache
def huge_png(side: int = 9_600) -> bytes:
    """Return a small file that decodes to 92 million pixels of 16 bits."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    pack = zlib.compressobj(1)
    row = b"\0" * (1 + 2 * side)
    pixels = b"".join(pack.compress(row) for _ in range(side)) + pack.flush()
    header = struct.pack(">IIBBBBB", side, side, 16, 0, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def test_every_bad_file_is_named_at_once(clean: Path) -> None:
    expected = dirty(clean)
    found = check_files(clean, DataSettings())
    assert {note.names[0]: note.kind for note in found.bad} == expected
    assert found.counts == {"mercy": {"ill": 6, "well": 6}, "north": {"ill": 6, "well": 6}}
    assert found.hints == ()


@pytest.mark.parametrize("command", [["datasets"], ["partition", "--set", "partition.min_samples=2", "--data"]])
def test_the_commands_name_what_is_bad_and_end_with_status_2(clean: Path, command: list[str]) -> None:
    expected = dirty(clean)
    status, shown, message = call(*command, clean)
    assert status == 2
    assert "7 findings are bad" in message
    for name in expected:
        assert f"bad: {name}" in shown
    assert "mercy" in shown
    status, shown, _ = call(*command, clean, "--json")
    assert status == 2
    content = json.loads(shown)
    content = content.get("check", content)
    assert {note["names"][0]: note["kind"] for note in content["bad"]} == expected
    assert content["images"] == 24


def test_a_clean_folder_has_status_0_and_counts_by_site_and_class(clean: Path) -> None:
    status, shown, message = call("datasets", clean)
    assert (status, message) == (0, "")
    rows = [line.split() for line in shown.splitlines()]
    assert ["site", "images", "ill", "well"] in rows
    assert ["north", "12", "6", "6"] in rows
    assert call("partition", "--data", clean)[0] == 0


def test_wrong_folders_are_all_named(tmp_path: Path) -> None:
    root = tmp_path / "sites"
    for number, place in enumerate(["a/ill", "a/well", "b/ill", "c/ill/deeper/still"]):
        image(root / place / "0.png", number)
    (root / "a/empty").mkdir()
    status, shown, message = call("datasets", root)
    assert status == 2
    text = shown.replace("\n", " ")
    assert "a/empty is empty" in text
    assert "found a folder c/ill/deeper/still" in text
    assert "b lacks empty, well" in text
    assert "3 findings are bad" in message


@pytest.mark.parametrize("pair", [("Normal", "normal"), ("pneumonia ", "pneumonia"), ("Class-1", "class_1")])
def test_classes_that_differ_only_in_spelling_are_bad(pair: tuple[str, str], tmp_path: Path) -> None:
    for number, name in enumerate((*pair, "other")):
        image(tmp_path / "data" / name / "0.png", number)
    (note,) = check_files(tmp_path / "data", DataSettings()).bad
    assert (note.kind, set(note.names)) == ("similar classes", set(pair))
    assert call("datasets", tmp_path / "data")[0] == 2


def test_one_letter_is_a_hint_and_numbers_are_not() -> None:
    for pair in (("tumor", "tumors"), ("glaucoma", "glaucome"), ("cat", "cats"), ("melanoma", "melanom")):
        same, hints = similar_names("classes", pair)
        assert same == []
        assert [set(note.names) for note in hints] == [set(pair)], pair
    for names in (
        ["class_1", "class_2", "class_10"],
        ["0", "1", "10"],
        ["cat", "car"],
        ["1-1", "11"],
        ["left", "right"],
    ):
        assert similar_names("classes", names) == ([], []), names


def test_the_same_image_with_two_labels_is_bad_and_elsewhere_a_hint(clean: Path) -> None:
    shutil.copy(clean / "mercy/ill/0.png", clean / "mercy/well/same.png")
    shutil.copy(clean / "mercy/ill/1.png", clean / "north/ill/same.png")
    shutil.copy(clean / "north/well/1.png", clean / "north/well/same.png")
    found = check_files(clean, DataSettings())
    assert [(note.kind, note.names) for note in found.bad] == [
        ("two labels", ("mercy/ill/0.png", "mercy/well/same.png"))
    ]
    assert {note.kind: note.names for note in found.hints} == {
        "two sites": ("mercy/ill/1.png", "north/ill/same.png"),
        "twice": ("north/well/1.png", "north/well/same.png"),
    }


def test_hints_alone_have_status_0(clean: Path) -> None:
    shutil.copy(clean / "north/well/1.png", clean / "north/well/same.png")
    status, shown, _ = call("datasets", clean)
    assert status == 0
    assert "hint: the same image is at north/well/1.png, north/well/same.png" in shown


def test_files_and_names_are_checked_too(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (4, 8, 8), dtype=np.uint8)
    images[3] = images[0]
    labels = np.array([0, 1, 0, 1])
    np.savez(tmp_path / "x.npz", train_images=images[:2], train_labels=labels[:2], test_images=images[2:],
             test_labels=labels[2:], class_names=np.array(["Ill", "ill"]))  # fmt: skip
    status, shown, _ = call("datasets", tmp_path / "x.npz", "--json")
    assert status == 2
    assert {note["kind"] for note in json.loads(shown)["bad"]} == {"similar classes", "two labels"}
    assert call("datasets", "digits")[0] == 0
    assert "unknown dataset" in call("datasets", "nothing")[2]


def test_skipped_files_are_named_in_the_terminal(clean: Path, tmp_path: Path) -> None:
    (clean / "mercy/ill/notes.txt").write_text("not an image")
    (clean / "north/ill/empty.png").touch()
    flags = [
        "--patch-size",
        4,
        "--rounds",
        1,
        "--epochs",
        1,
        "--set",
        "data.skip_bad=true",
        "--set",
        f"data.cache={tmp_path / 'c'}",
    ]
    for folder in ("first", "again"):  # the second run reads the cache
        status, _, message = call("run", "--data", clean, *flags, "--out", tmp_path / folder)
        assert status == 0, message
        assert "mercy/ill/notes.txt is not an image" in message
        assert "north/ill/empty.png is not an image" in message
    status, _, message = call(
        "run", "--data", clean, *flags[:6], "--set", f"data.cache={tmp_path / 'd'}", "--out", tmp_path / "r"
    )
    assert status == 2
    assert "fedvit datasets" in message


def test_many_skipped_files_are_counted_and_listed_in_the_log(clean: Path, tmp_path: Path) -> None:
    for number in range(25):
        (clean / f"mercy/ill/notes{number:02d}.txt").write_text("not an image")
    flags = [
        "--patch-size",
        4,
        "--rounds",
        1,
        "--epochs",
        1,
        "--set",
        "data.skip_bad=true",
        "--set",
        f"data.cache={tmp_path / 'c'}",
    ]
    _, _, message = call("run", "--data", clean, *flags, "--out", tmp_path / "r")
    assert message.count("is not an image") == 20
    assert "and 5 more" in message
    assert (tmp_path / "r" / "log.txt").read_text().count("is not an image") == 25


@pytest.mark.attack
def test_a_pipe_and_a_huge_image_do_not_stop_a_run_that_skips_bad_files(clean: Path, tmp_path: Path) -> None:
    os.mkfifo(clean / "north/ill/pipe.png")
    (clean / "north/ill/huge.png").write_bytes(huge_png())
    settings = DataSettings(name=str(clean), cache=tmp_path / "c", skip_bad=True)
    assert len(load_dataset(settings, 8)) == 24


@pytest.mark.attack
def test_an_npz_that_claims_more_than_it_has_is_a_message(tmp_path: Path) -> None:
    path = tmp_path / "claims.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for part in ("train", "test"):
            stream = io.BytesIO()
            np.lib.format.write_array_header_1_0(
                stream, {"descr": "|u1", "fortran_order": False, "shape": (10**13, 8, 8)}
            )
            archive.writestr(f"{part}_images.npy", stream.getvalue() + b"\0" * 64)
            stream = io.BytesIO()
            np.lib.format.write_array(stream, np.zeros(1, np.int64))
            archive.writestr(f"{part}_labels.npy", stream.getvalue())
    with pytest.raises(UserError, match="claims the shape"):
        load_dataset(DataSettings(name=str(path)), None)


@pytest.mark.attack
def test_an_npz_whose_labels_claim_many_classes_is_a_message(tmp_path: Path) -> None:
    images, labels = np.zeros((2, 2, 2, 3), np.uint8), np.array([0, 2**60])
    np.savez(tmp_path / "a.npz", train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    with pytest.raises(UserError, match="has the class number 1152921504606846976: expected numbers below 100,000"):
        from_npz(tmp_path / "a.npz")
