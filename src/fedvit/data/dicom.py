"""DICOM files: grey levels in the unit of their scale, windowed to 8 bits, and the patient in their header.

pydicom is imported when the first file is read. Its own messages may quote a header, so they go nowhere.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedvit.core.errors import UserError
from fedvit.data.cache import UnreadableError

SUFFIXES = frozenset((".dcm", ".dicom"))
PREAMBLE, MAGIC = 128, b"DICM"
GREY, COLOUR = ("MONOCHROME1", "MONOCHROME2"), ("RGB", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT")


class Frame(NamedTuple):
    """The picture of a file: grey levels in their unit, 8-bit grey levels, or 8-bit colours (height, width, 3)."""

    pixels: NDArray[Any]
    inverted: bool = False  # the smallest level is white
    window: tuple[float, float, str] | None = None  # the file's own: centre, width and function
    lut: tuple[NDArray[np.float64], int] | None = None  # the file's own lookup of the levels, and its number of bits


def is_dicom(file: Path) -> bool:
    """Return whether a file is in DICOM format: by its suffix, or by the mark that every such file has."""
    if file.suffix.lower() in SUFFIXES:
        return True
    with file.open("rb") as stream:
        return stream.read(PREAMBLE + len(MAGIC))[PREAMBLE:] == MAGIC


def read_frame(file: Path, most_pixels: int) -> Frame:
    """Read the one picture of a DICOM file; raise UnreadableError with a message that quotes nothing from the file."""
    pydicom = _pydicom()
    try:
        header = pydicom.dcmread(file, defer_size=2**20)
        if "PixelData" not in header:
            raise UnreadableError(f"{file} has no picture")
        frames, height, width = int(header.get("NumberOfFrames") or 1), int(header.Rows), int(header.Columns)
        if frames > 1:
            raise UnreadableError(
                f"{file} has {frames} frames: FedViT reads one picture from a file, so save the frames that you want "
                "as files of their own"
            )
        if height * width > most_pixels:
            raise UnreadableError(
                f"{file} has {width} x {height} pixels, over data.max_pixels={most_pixels}: shrink it, or set a larger "
                "limit if there is memory for it"
            )
        kind = str(header.PhotometricInterpretation)
        pixels = _decoded(pydicom, header, file)
        if kind in GREY:
            return _grey(pydicom, header, pixels, inverted=kind == "MONOCHROME1")
        if kind == "PALETTE COLOR":
            pixels = pydicom.pixels.apply_color_lut(pixels, header)[..., :3]
        elif kind not in COLOUR:
            raise UnreadableError(f"{file} has colours of the unknown kind {kind}")
        return Frame((pixels >> 8).astype(np.uint8) if pixels.dtype == np.uint16 else pixels.astype(np.uint8))
    except (UnreadableError, UserError):
        raise
    except OSError as problem:
        if problem.errno is None:
            raise UnreadableError(f"{file} is damaged: it cannot be read as DICOM") from None
        raise UserError(f"{file} cannot be opened: {problem.strerror}") from problem
    except Exception as problem:  # whatever a decoder raises, the file is at fault; its text may quote the header
        raise UnreadableError(f"{file} is damaged: it cannot be read as DICOM ({type(problem).__name__})") from None


def _decoded(pydicom: Any, header: Any, file: Path) -> NDArray[Any]:
    """Return the stored pixels; YBR colours become RGB."""
    syntax = header.file_meta.TransferSyntaxUID
    if syntax.is_encapsulated and not pydicom.pixels.get_decoder(syntax).is_available:
        raise UnreadableError(
            f"{file} is compressed as {syntax.name}, for which there is no decoder here: fedvit[dicom] reads JPEG "
            "2000, RLE and plain JPEG, and pylibjpeg-libjpeg (GPL) other kinds of JPEG; or save it uncompressed"
        )
    pixels: NDArray[Any] = header.pixel_array
    return pixels


def _grey(pydicom: Any, header: Any, stored: NDArray[Any], *, inverted: bool) -> Frame:
    """Apply the rescale slope and intercept, and find the file's own window or lookup table."""
    levels = pydicom.pixels.apply_modality_lut(stored, header)
    if "VOILUTSequence" in header and len(header.VOILUTSequence):
        bits = int(header.VOILUTSequence[0].LUTDescriptor[2])
        looked_up = pydicom.pixels.apply_voi(np.rint(levels).astype(np.int64), header, index=0)
        return Frame(levels, inverted, lut=(looked_up.astype(np.float64), bits))
    centre, width = header.get("WindowCenter"), header.get("WindowWidth")
    if centre in (None, "") or width in (None, ""):
        return Frame(levels, inverted)
    first = [float(value[0] if hasattr(value, "__getitem__") else value) for value in (centre, width)]
    return Frame(levels, inverted, (*first, str(header.get("VOILUTFunction") or "LINEAR")))  # type: ignore[arg-type]


def patients_from_headers(files: Sequence[Path], *, skip_bad: bool) -> tuple[str, ...]:
    """Return the patient ID in the header of every file; with `skip_bad`, a file without a header is of nobody."""
    pydicom = _pydicom()
    found: list[str] = []
    empty: list[Path] = []
    for number, file in enumerate(files):
        try:
            if not file.is_file():  # opening a pipe would wait for ever
                raise UnreadableError(f"{file} is not a regular file")
            header = pydicom.dcmread(file, stop_before_pixels=True, specific_tags=["PatientID"])
        except Exception:  # its text may quote the header
            if not skip_bad:
                raise UserError(
                    f"{file} cannot be read as DICOM, so data.patient=dicom finds no patient in it: `fedvit datasets` "
                    "lists all bad files, and --set data.skip_bad=true skips them"
                ) from None
            found.append(f"unreadable {number}")
            continue
        found.append(str(header.get("PatientID") or "").strip())
        if not found[-1]:
            empty.append(file)
    if empty:
        raise UserError(
            f"{len(empty)} of {len(files)} files have no patient ID in their header, such as {empty[0]}: name "
            "patients in a manifest, or by their paths with data.patient"
        )
    return tuple(found)


def _pydicom() -> Any:
    try:
        import pydicom
        import pydicom.pixels
    except ImportError as problem:
        raise UserError("DICOM files need pydicom: pip install 'fedvit[dicom]'") from problem
    logging.getLogger("pydicom").setLevel(logging.CRITICAL)
    pydicom.config.settings.reading_validation_mode = pydicom.config.IGNORE  # its warnings quote headers
    return pydicom
