"""DICOM and 16-bit images: what they show, whose they are, and that nothing of a header goes anywhere."""

import json
import logging
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from typer.testing import CliRunner

import fedvit
from fedvit.cli.main import app
from fedvit.core.errors import UserError
from fedvit.core.settings import DataSettings
from fedvit.data.cache import UnreadableError
from fedvit.data.decoding import apply_window, decode
from fedvit.data.sources import load_dataset

pydicom = pytest.importorskip("pydicom")
from pydicom.dataset import Dataset as Header  # noqa: E402
from pydicom.dataset import FileMetaDataset  # noqa: E402
from pydicom.pixels import apply_windowing  # noqa: E402
from pydicom.uid import UID, ExplicitVRLittleEndian, JPEG2000Lossless, JPEGLossless, RLELossless  # noqa: E402

SECRET = "Doe^Jane"


def dicom(
    path: Path,
    pixels: NDArray[Any],
    *,
    patient: str = "MRN0001",
    kind: str = "MONOCHROME2",
    bits: int = 12,
    compress: UID | None = None,
    **more: Any,
) -> Path:
    """Write a DICOM file with these stored pixels."""
    header = Header()
    header.file_meta = FileMetaDataset()
    header.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    header.file_meta.MediaStorageSOPClassUID = UID("1.2.840.10008.5.1.4.1.1.1.1")
    header.file_meta.MediaStorageSOPInstanceUID = UID("1.2.3.4")
    header.PatientID, header.PatientName, header.PatientBirthDate = patient, SECRET, "19700101"
    header.PhotometricInterpretation = kind
    header.Rows, header.Columns = pixels.shape[:2] if pixels.shape[-1] == 3 else pixels.shape[-2:]
    header.SamplesPerPixel = 3 if pixels.shape[-1] == 3 else 1
    if header.SamplesPerPixel == 3:
        header.PlanarConfiguration = 0
    header.BitsAllocated = 8 * pixels.dtype.itemsize
    header.BitsStored, header.HighBit = bits, bits - 1
    header.PixelRepresentation = int(pixels.dtype.kind == "i")
    for key, value in more.items():
        setattr(header, key, value)
    header.PixelData = pixels.tobytes()
    header["PixelData"].VR = "OW" if header.BitsAllocated > 8 else "OB"
    if compress is not None:
        header.compress(compress, generate_instance_uid=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    header.save_as(path, enforce_file_format=True)
    return path


def shown(file: Path, window: str | None = None, side: int = 8) -> NDArray[np.uint8]:
    """The grey levels that FedViT sees, at the file's own size."""
    colour = decode(file, (side, side), Counter(), window)
    assert colour.shape == (side, side, 3)
    assert (colour == colour[..., :1]).all()
    return colour[..., 0]


def ramp(low: int, high: int, kind: Any = np.uint16) -> NDArray[Any]:
    return np.linspace(low, high, 64).round().astype(kind).reshape(8, 8)


def scaled(levels: NDArray[Any], low: float, high: float) -> NDArray[np.uint8]:
    return np.round(((levels.astype(float) - low) / (high - low)).clip(0, 1) * 255).astype(np.uint8)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "d" / "x.dcm"


def test_twelve_bits_without_a_window_go_from_their_smallest_to_their_largest(file: Path) -> None:
    levels = ramp(100, 3000)
    assert np.array_equal(shown(dicom(file, levels)), scaled(levels, 100, 3000))


def test_slope_and_intercept_come_before_the_window_of_the_file(file: Path) -> None:
    stored = ramp(-800, 900, np.int16)
    dicom(file, stored, bits=16, RescaleSlope=2, RescaleIntercept=-24, WindowCenter=40, WindowWidth=400)
    units = stored.astype(float) * 2 - 24
    expected = np.round(((units - 39.5) / 399 + 0.5).clip(0, 1) * 255).astype(np.uint8)
    assert np.array_equal(shown(file), expected)
    assert np.array_equal(shown(file, "40,400"), scaled(units, -160, 240))
    assert np.array_equal(shown(file, "range"), scaled(units, units.min(), units.max()))


@pytest.mark.parametrize("function", ["LINEAR", "LINEAR_EXACT", "SIGMOID"])
@pytest.mark.parametrize("slope", [1.0, 0.5])
def test_windows_are_those_of_pydicom(function: str, slope: float, file: Path) -> None:
    levels = ramp(0, 4095)
    more = {"WindowCenter": 900, "WindowWidth": 1200, "VOILUTFunction": function}
    header = pydicom.dcmread(dicom(file, levels, RescaleSlope=slope, RescaleIntercept=-10, **more))
    units = levels * slope - 10
    theirs = apply_windowing(units, header)
    low, high = -10, 4095 * slope - 10  # pydicom spreads the window over the range of the stored bits
    ours = apply_window(units, 900, 1200, function).clip(0, 1)
    assert np.allclose(ours, (theirs - low) / (high - low), atol=1e-9)


def test_the_first_of_several_windows_counts(file: Path) -> None:
    levels = ramp(0, 4095)
    dicom(file, levels, WindowCenter=[1000, 50], WindowWidth=[2000, 60])
    assert np.array_equal(shown(file), np.round(((levels - 999.5) / 1999 + 0.5).clip(0, 1) * 255).astype(np.uint8))


def test_a_lookup_table_of_the_file_comes_before_its_window(file: Path) -> None:
    levels = ramp(0, 255)
    table = Header()
    table.LUTDescriptor, table.LUTData = [256, 0, 10], (1023 - 4 * np.arange(256, dtype=np.uint16)).tobytes()
    dicom(file, levels, bits=8, VOILUTSequence=[table], WindowCenter=5, WindowWidth=5)
    assert np.array_equal(shown(file), np.round((1023 - 4 * levels) / 1023 * 255).astype(np.uint8))


def test_monochrome1_is_inverted(file: Path) -> None:
    levels = ramp(0, 4000)
    assert np.array_equal(shown(dicom(file, levels, kind="MONOCHROME1")), 255 - scaled(levels, 0, 4000))
    dicom(file, levels, kind="MONOCHROME1", WindowCenter=2000, WindowWidth=1000)
    assert shown(file)[0, 0] == 255
    assert shown(file, "2000,1000")[0, 0] == 255


@pytest.mark.parametrize("syntax", [JPEG2000Lossless, RLELossless])
def test_compressed_files_are_read(syntax: UID, file: Path) -> None:
    if syntax == JPEG2000Lossless:
        pytest.importorskip("openjpeg")
    levels = np.kron(ramp(100, 3000), np.ones((8, 8), np.uint16))  # JPEG 2000 wants more than 8 x 8 pixels
    dicom(file, levels, compress=syntax)
    assert pydicom.dcmread(file).file_meta.TransferSyntaxUID == syntax
    assert np.array_equal(shown(file, side=64), scaled(levels, 100, 3000))


def test_colours_are_read(file: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    assert np.array_equal(decode(dicom(file, pixels, kind="RGB", bits=8), (8, 8), Counter()), pixels)
    grey = np.repeat(np.arange(64, dtype=np.uint8).reshape(8, 8, 1), 3, axis=2)
    grey[..., 1:] = 128
    assert np.array_equal(shown(dicom(file, grey, kind="YBR_FULL", bits=8)), grey[..., 0])
    tables = {
        f"{name}PaletteColorLookupTable{what}": value
        for name, shift in (("Red", 0), ("Green", 1), ("Blue", 2))
        for what, value in (
            ("Descriptor", [64, 0, 16]),
            ("Data", (np.arange(64, dtype=np.uint16) * 256 + shift * 4096).tobytes()),
        )
    }
    index = np.arange(64, dtype=np.uint8).reshape(8, 8)
    found = decode(dicom(file, index, kind="PALETTE COLOR", bits=8, **tables), (8, 8), Counter())
    assert np.array_equal(found, np.stack([index, index + 16, index + 32], axis=2))


def test_a_file_without_a_suffix_is_known_by_its_mark(tmp_path: Path) -> None:
    levels = ramp(0, 4000)
    assert np.array_equal(shown(dicom(tmp_path / "IM0001", levels)), scaled(levels, 0, 4000))


def test_files_without_a_suffix_are_trained_on_hinted_at_and_predicted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = hospital(tmp_path / "d", patients=4)
    for file in sorted(root.rglob("*.dcm")):
        file.rename(file.with_suffix(""))
    (root / "north" / "normal" / "README").write_text("no image, and not taken for one in predictions")
    sets = {"cache": str(tmp_path / "cache"), "skip_bad": True}
    run = fedvit.run(
        data=root, out=tmp_path / "r", method="local", settings=sets, rounds=1, epochs=1, patch_size=4, batch=4
    )
    assert "--set data.patient=dicom keeps the images of a patient together" in caplog.text
    assert len(list(fedvit.predict(run.model("north"), [root / "north" / "normal"]))) == 4
    (root / "north" / "normal" / "README").unlink()
    told = CliRunner().invoke(app, ["datasets", str(root)])
    assert "hint: 16 DICOM files name their patients" in told.stdout


@pytest.mark.attack
def test_what_cannot_be_read_says_why_and_quotes_no_header(file: Path, tmp_path: Path) -> None:
    def refused(said: str) -> None:
        with pytest.raises(UnreadableError, match=said) as caught:
            shown(file)
        assert SECRET not in str(caught.value)
        assert "MRN" not in str(caught.value)
        assert caught.value.__cause__ is None  # a traceback in a log would show what pydicom quotes

    whole = dicom(file, ramp(0, 4000)).read_bytes()
    file.write_bytes(whole[:-40])
    refused(r"x.dcm is damaged: it cannot be read as DICOM")
    file.write_bytes(whole[:200])
    refused("is damaged|has no picture")
    file.write_bytes(b"hello")
    refused("is damaged")
    dicom(file, np.zeros((3, 8, 8), np.uint16), NumberOfFrames=3)
    refused("has 3 frames: .*as files of their own")
    dicom(file, ramp(0, 9), kind="HSV")
    refused("unknown kind HSV")
    dicom(file, ramp(0, 9), Rows=60000, Columns=60000)
    refused("over data.max_pixels=89478485")
    dicom(file, ramp(0, 9), Rows=0)
    refused("is damaged|no picture")
    header = pydicom.dcmread(dicom(file, ramp(0, 9)))
    del header.PixelData
    header.save_as(file)
    refused("has no picture")
    header.PixelData = pydicom.encaps.encapsulate([b"\xff\xd8\xff\xd9"])
    header["PixelData"].VR = "OB"
    header["PixelData"].is_undefined_length = True
    header.file_meta.TransferSyntaxUID = JPEGLossless
    header.save_as(file)
    refused("no decoder here: .*pylibjpeg-libjpeg .GPL.|is damaged")


def test_without_pydicom_the_extra_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dicom(file, ramp(0, 9))
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(UserError, match=r"pip install 'fedvit\[dicom\]'"):
        shown(file)


# 16 bits in other files.


def sixteen(path: Path, levels: NDArray[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(levels).save(path)
    return path


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_sixteen_bit_files_follow_the_setting(suffix: str, tmp_path: Path) -> None:
    levels = ramp(500, 3500)
    path = sixteen(tmp_path / f"x.{suffix}", levels)
    assert np.array_equal(shown(path), (levels // 257).astype(np.uint8))
    assert np.array_equal(shown(path, "2000,2000"), scaled(levels, 1000, 3000))
    assert np.array_equal(shown(path, "range"), scaled(levels, 500, 3500))
    assert np.array_equal(shown(sixteen(tmp_path / "flat.png", ramp(7, 7)), "range"), np.zeros((8, 8)))


@pytest.mark.parametrize("levels", [ramp(-1000, 3000, np.int32), ramp(0, 70000, np.int32), ramp(0, 9, np.float32)])
def test_levels_outside_sixteen_bits_are_refused_and_never_clipped_in_silence(levels: Any, tmp_path: Path) -> None:
    path = sixteen(tmp_path / "x.tif", levels)
    with pytest.raises(UnreadableError, match=r"data.window=CENTRE,WIDTH"):
        shown(path)
    assert np.array_equal(shown(path, "range"), scaled(levels.astype(float), levels.min(), levels.max()))


@pytest.mark.parametrize("window", ["40", "40,0", "40,-5", "a,b", "nan,1", "40,400,2"])
def test_a_window_that_is_none_is_refused(window: str, tmp_path: Path) -> None:
    sixteen(tmp_path / "d" / "a" / "x.png", ramp(0, 9))
    with pytest.raises(UserError, match="expected the centre and the width"):
        load_dataset(DataSettings(name=str(tmp_path / "d"), cache=tmp_path / "c", window=window), 8)


def test_another_window_does_not_reuse_old_pixels(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(4):
        sixteen(tmp_path / "d" / "ab"[number % 2] / f"{number}.png", ramp(0, 2000 + number))

    def load(window: str | None) -> Any:
        return load_dataset(DataSettings(name=str(tmp_path / "d"), cache=tmp_path / "c", window=window), 8)

    plain = load(None)
    assert "4 16-bit images in" in caplog.text
    assert "--set data.window=range" in caplog.text
    windows = [load(window) for window in ("range", "500,1000")]
    assert plain.images.max() == 7
    assert [int(one.images.min(axis=(1, 2, 3)).max()) for one in windows] == [0, 0]
    assert all(one.images.max() == 255 for one in windows)
    assert not np.array_equal(windows[0].images, windows[1].images)
    assert len({one.identity for one in (plain, *windows)}) == 3
    assert np.array_equal(load(None).images, plain.images)


# Patients in headers.


def hospital(root: Path, patients: int = 8) -> Path:
    """Two sites of DICOM files, two of every patient, bright if they are ill."""
    for number in range(patients * 2):
        site, label = ("north", "south")[number % 2], ("normal", "pneumonia")[number // 2 % 2]
        for take in range(2):
            rng = np.random.default_rng([number, take])
            levels = (rng.integers(0, 1000, (8, 8)) + 2000 * (label == "pneumonia")).astype(np.uint16)
            name = root / site / label / f"{number}-{take}.dcm"
            dicom(name, levels, patient=f"MRN-{number:05d}", WindowCenter=1500, WindowWidth=3000)
    return root


def test_a_run_on_dicom_files_keeps_patients_together_and_nothing_of_their_headers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = hospital(tmp_path / "d")
    sets = {"data.patient": "dicom", "cache": str(tmp_path / "cache"), "data.val": 0.2}
    with caplog.at_level(logging.DEBUG):
        run = fedvit.run(
            data=root, out=tmp_path / "r", method="fedper", settings=sets, rounds=1, epochs=1, patch_size=4, batch=4
        )
    whose = run.split["patients"]
    assert len(set(whose)) == 16
    for own in run.split["clients"].values():
        people = [{whose[n] for n in own[part]} for part in ("train", "val", "test")]
        assert not people[0] & people[1] | people[0] & people[2] | people[1] & people[2]
    blobs = [file.read_bytes() for place in ("r", "cache") for file in (tmp_path / place).rglob("*") if file.is_file()]
    assert not [blob for blob in blobs if b"MRN-0" in blob or SECRET.encode() in blob or b"19700101" in blob]
    assert "MRN-0" not in caplog.text
    assert SECRET not in caplog.text

    result = CliRunner().invoke(app, ["datasets", str(root), "--json", "--set", "patient=dicom"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["patients"]["north"]["patients"] == 8
    found = fedvit.predict(run.model("north"), [root / "north" / "normal" / "0-0.dcm"])
    assert len(list(found)) == 1


def test_the_window_of_a_run_is_that_of_its_predictions(tmp_path: Path) -> None:
    for number in range(16):
        sixteen(tmp_path / "d" / "ns"[number % 2] / "ab"[number // 2 % 2] / f"{number}.png", ramp(0, 1000 + number))
    sets = {"window": "500,1000", "cache": str(tmp_path / "cache")}
    run = fedvit.run(
        data=tmp_path / "d", out=tmp_path / "r", method="fedper", settings=sets, rounds=1, epochs=1, patch_size=4
    )
    description: Any = run.model("n").description
    assert description.reading.window == "500,1000"


def test_patients_of_headers_that_are_missing_or_empty(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = hospital(tmp_path / "d", patients=4)

    def load(**more: Any) -> Any:
        return load_dataset(DataSettings(name=str(root), cache=tmp_path / "c", **more), 8)

    load()
    assert "--set data.patient=dicom keeps the images of a patient together" in caplog.text
    told = CliRunner().invoke(app, ["datasets", str(root)])
    assert told.exit_code == 0
    assert "hint: 16 DICOM files name their patients" in told.stdout
    bad = root / "north" / "normal" / "bad.dcm"
    bad.write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"bad.dcm cannot be read as DICOM, so data.patient=dicom.*skip_bad"):
        load(patient="dicom")
    assert len(set(load(patient="dicom", skip_bad=True).patients)) == 8
    dicom(bad, ramp(0, 9), patient="")
    with pytest.raises(UserError, match=r"1 of 17 files have no patient ID in their header, such as .*bad.dcm"):
        load(patient="dicom")
    dicom(bad, ramp(0, 9), patient="MRN-00001")
    with pytest.raises(UserError, match=r"1 patient has images at more than one site") as caught:
        load(patient="dicom")
    assert "MRN" not in str(caught.value)


def test_a_manifest_of_dicom_files_may_leave_patients_to_the_headers(tmp_path: Path) -> None:
    root = hospital(tmp_path / "d", patients=4)
    files = sorted(root.rglob("*.dcm"))
    lines = [f"{file.relative_to(root)},{file.parent.name}" for file in files]
    (root / "manifest.csv").write_text("\n".join(["path,label", *lines]))
    data = load_dataset(DataSettings(name=str(root / "manifest.csv"), cache=tmp_path / "c", patient="dicom"), 8)
    assert len(set(data.patients.tolist())) == 8  # type: ignore[union-attr]


def test_a_pipe_among_the_files_does_not_hold_up_the_search_for_patients(tmp_path: Path) -> None:
    from fedvit.data.dicom import patients_from_headers

    os.mkfifo(tmp_path / "scan.dcm")
    late = threading.Timer(20, lambda: os.close(os.open(tmp_path / "scan.dcm", os.O_WRONLY)))  # so that a failure ends
    late.start()
    begin = time.monotonic()
    with pytest.raises(UserError, match="finds no patient in it"):
        patients_from_headers([tmp_path / "scan.dcm"], skip_bad=False)
    late.cancel()
    assert time.monotonic() - begin < 15
