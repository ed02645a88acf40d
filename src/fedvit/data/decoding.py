"""How a file becomes an image of 8 bits: PNG, JPEG and whatever else PIL reads, and DICOM."""

import re
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedvit.core.errors import UserError
from fedvit.core.settings import MAX_PIXELS
from fedvit.data import dicom
from fedvit.data.cache import UnreadableError

LARGE = 10_000_000  # pixels; larger images are decoded one at a time, so that memory holds one of them per process
_ONE_LARGE = threading.Lock()
warnings.filterwarnings("ignore", "Image size .* could be decompression bomb")  # it is an error here
RANGE = "range"  # as data.window: from the smallest to the largest grey level of each image
DARK = 4096  # 16-bit levels below it fill only 12 bits
Bytes = NDArray[np.uint8]


def decode(
    file: Path, size: tuple[int, int], modes: Counter[str], window: str | None = None, most: int = MAX_PIXELS
) -> Bytes:
    """Decode an image, squash it to size (width, height), convert it to 8-bit color, and count its mode in `modes`.

    `window` is data.window: how grey levels of more than 8 bits become 8 bits. `most` is data.max_pixels.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        if file.exists() and not file.is_file():  # opening a pipe would wait for ever
            raise UnreadableError(f"{file} is not a regular file")
        if dicom.is_dicom(file):
            colour, mode = _from_dicom(file, window, most)
            modes["dicom"] += 1
        else:
            colour, mode = _from_pil(file, window, modes, most)
        image = Image.fromarray(colour)
        if image.size != size:
            image = image.resize(size, Image.Resampling.BILINEAR)
        modes[mode] += 1
        return np.asarray(image.convert("RGB"), dtype=np.uint8)
    except (UnreadableError, UserError):
        raise
    except Image.DecompressionBombError as problem:
        raise UnreadableError(f"{file} has too many pixels, which PIL does not read: shrink it") from problem
    except MemoryError as problem:
        raise UnreadableError(
            f"{file} does not fit in memory: shrink it, or set a smaller data.max_pixels"
        ) from problem
    except UnidentifiedImageError as problem:
        raise UnreadableError(f"{file} is not an image") from problem
    except Exception as problem:  # whatever a decoder raises, the file is at fault
        if isinstance(problem, OSError) and problem.errno is not None:
            raise UserError(f"{file} cannot be opened: {problem.strerror}") from problem
        raise UnreadableError(f"{file} cannot be read: {problem}") from problem


def too_many(file: Path, width: int, height: int, most: int) -> UnreadableError:
    """Return the error for an image whose header claims more pixels than data.max_pixels."""
    return UnreadableError(
        f"{file} has {width} x {height} pixels, over data.max_pixels={most}: shrink it, or set a larger limit if there "
        "is memory for it"
    )


@contextmanager
def _in_turn(pixels: int) -> Iterator[None]:
    """Wait until no other thread holds a large image, if this is one."""
    with _ONE_LARGE if pixels > LARGE else nullcontext():
        yield


def _from_pil(file: Path, window: str | None, modes: Counter[str], most: int) -> tuple[Bytes, str]:
    from PIL import Image

    with Image.open(file) as image, _in_turn(image.size[0] * image.size[1]):
        width, height = image.size
        if width * height == 0:
            raise UnreadableError(f"{file} has a size of {width} x {height}")
        if width * height > most:
            raise too_many(file, width, height, most)
        if image.mode == "F" or image.mode.startswith("I"):  # PIL would clip at 255 instead of scaling
            levels = np.asarray(image)
            if window is None:
                _check_sixteen_bits(levels, file)
                modes["dark"] += int(levels.max() < DARK)
            return to_bytes(levels, window, file), "grey"
        mode = "grey" if image.mode in ("1", "L", "LA") else "colour"
        return np.asarray(image.convert("RGB")), mode


def _check_sixteen_bits(levels: NDArray[Any], file: Path) -> None:
    """Refuse grey levels of which nobody knows what is black and what is white."""
    how = "say which gray levels are shown: --set data.window=CENTRE,WIDTH, or data.window=range for each image"
    if levels.dtype.kind == "f":
        raise UnreadableError(f"{file} has float pixels of unknown range: {how}'s own")
    if levels.min() < 0 or levels.max() > 65535:
        raise UnreadableError(f"{file} has grey levels from {levels.min()} to {levels.max()}, not 16 bits: {how}'s own")


def _from_dicom(file: Path, window: str | None, most: int) -> tuple[Bytes, str]:
    """Read a DICOM file with the window that is set, else its own lookup table or window, else its own range."""
    frame = dicom.read_frame(file, most)
    if frame.pixels.ndim == 3:
        return frame.pixels, "colour"
    if window is None and frame.lut is not None:
        levels, bits = frame.lut
        grey = _eight_bits(levels / (2**bits - 1))
    elif window is None and frame.window is not None:
        grey = _eight_bits(apply_window(frame.pixels, *frame.window))
    else:
        grey = to_bytes(frame.pixels, window or RANGE, file)
    return 255 - grey if frame.inverted else grey, "grey"


def to_bytes(levels: NDArray[Any], window: str | None, file: Path) -> Bytes:
    """Scale grey levels to 8 bits: 16 bits by a division, a window linearly, or from the smallest to the largest."""
    if window is None:
        return (levels // 257).astype(np.uint8)
    if not np.isfinite(levels).all():
        raise UnreadableError(f"{file} has pixels that are not finite numbers")
    if window == RANGE:
        low, high = float(levels.min()), float(levels.max())
        return _eight_bits((levels - low) / max(high - low, 1e-9))
    return _eight_bits(apply_window(levels, *read_window(window), "LINEAR_EXACT"))


def read_window(text: str) -> tuple[float, float]:
    """Return centre and width of a window that is written as two numbers."""
    number = r"\s*([-+]?\d+(?:\.\d+)?)\s*"
    found = re.fullmatch(f"{number},{number}", text)
    centre, width = map(float, found.groups()) if found else (0.0, 0.0)
    if not width > 0:
        raise UserError(
            f"data.window={text!r}: expected the centre and the width of the gray levels that are shown, such as "
            f"40,400, or {RANGE}"
        )
    return centre, width


def apply_window(levels: NDArray[Any], centre: float, width: float, function: str) -> NDArray[np.float64]:
    """Map grey levels to 0..1 as DICOM defines it (PS3.3, C.11.2.1.2 and C.11.2.1.3)."""
    x = levels.astype(np.float64)
    if function == "SIGMOID":
        return 1 / (1 + np.exp(-4 * (x - centre) / width))
    if function == "LINEAR_EXACT":
        return (x - centre) / width + 0.5
    return (x - (centre - 0.5)) / max(width - 1, 1e-9) + 0.5


def _eight_bits(shares: NDArray[np.float64]) -> Bytes:
    return np.round(shares.clip(0, 1) * 255).astype(np.uint8)
