"""Write files completely or not at all: atomic writes, strict JSON, safe CSV and lines that survive a kill."""

import csv
import errno
import hashlib
import io
import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, TypedDict

from fedvit.core.errors import UserError


def strict_json(content: Any, indent: int | None = None) -> str:
    """Encode JSON that every reader accepts: a number that is not finite becomes null."""
    return json.dumps(finite(content), indent=indent, allow_nan=False)


def finite(content: Any) -> Any:
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {key: finite(value) for key, value in content.items()}
    return [finite(value) for value in content] if isinstance(content, list | tuple) else content


def append_line(path: Path, row: Mapping[str, Any], *, sync: bool = True) -> None:
    """Append one JSON object as a line, on disk before the checkpoint that relies on it; `sync=False` if none does."""
    with writing(path), path.open("a") as stream:
        stream.write(strict_json(row) + "\n")
        if sync:
            stream.flush()
            os.fsync(stream.fileno())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read all complete lines and ignore a line that a kill cut short."""
    rows = []
    if path.is_file():
        for line in path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
    return rows


def write_json(path: Path, content: Any) -> None:
    write_text(path, strict_json(content, indent=2) + "\n")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a partial file and rename it when the block ends, so that readers see the old file or the new one."""
    partial = path.with_name(path.name + ".partial")
    try:
        with writing(path):
            yield partial
            partial.replace(path)
    finally:
        with suppress(OSError):
            partial.unlink()


def write_text(path: Path, text: str, *, errors: str | None = None) -> None:
    """Write a text file atomically."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8", errors=errors)


# A disk that is full, read-only or not ours is the user's to repair.

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
DISK = (*FULL, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EIO)


def cannot_write(path: object, problem: OSError) -> UserError:
    """Return the error for a file or folder that cannot be written: what failed, why, and what to do."""
    if problem.errno in FULL:
        advice = "free some space there, then repeat the command, with --resume to continue a run"
    else:
        advice = "choose another place, or change its permissions"
    return UserError(f"{path} cannot be written ({problem.strerror or problem}): {advice}")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Report a failure to write this file as a user's mistake, without a traceback."""
    try:
        yield
    except OSError as problem:
        raise cannot_write(path, problem) from problem


def make_folder(folder: Path) -> None:
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)


def make_private(folder: Path) -> None:
    """Make a folder that only its owner can open, whatever it was before."""
    with writing(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)


@contextmanager
def private_files() -> Iterator[None]:
    """Create all files and folders of this block with permissions for their owner only."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def check_writable(folder: Path) -> None:
    """Raise an error if no file can be created in this folder, which need not exist yet; call it before long work."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    with writing(folder), tempfile.TemporaryFile(dir=place) as stream:
        stream.write(b"0")
        stream.flush()


FORMULAS = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet calculates a text that begins with one of these


def csv_line(cells: Sequence[Any]) -> str:
    """Return one line of a CSV file that a spreadsheet may open: no text in it is taken for a formula."""
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow([no_formula(cell) for cell in cells])
    return line.getvalue()


def write_csv(path: Path, lines: Iterable[Sequence[Any]]) -> int:
    """Write lines as they arrive, the header first, and return how many follow it; the file appears at the end."""
    count = -1
    with replacing(path) as partial, _open_csv(partial) as stream:
        for cells in lines:
            stream.write(csv_line(cells))
            count += 1
    return count


def _open_csv(path: Path) -> TextIO:
    """Open a file for writing; names of files that are not UTF-8 keep their bytes."""
    return path.open("w", newline="", encoding="utf-8", errors="surrogateescape")


def no_formula(cell: Any) -> Any:
    """Put an apostrophe before a text that a spreadsheet would calculate; numbers stay numbers.

    So that `as_written` can tell them apart, a text that already begins with such an apostrophe gets one more.
    """
    if isinstance(cell, int | float):
        return cell
    text = str(cell)
    return f"'{text}" if text.lstrip("'").startswith(FORMULAS) else text


def as_written(cell: str) -> str:
    """Return the text that `no_formula` was given."""
    return cell[1:] if cell.startswith("'") and cell.lstrip("'").startswith(FORMULAS) else cell


class Version(TypedDict):
    """One file of a checkpoint, and the hash that proves it complete."""

    file: str  # relative to the checkpoint's folder
    sha256: str


def write_bytes(folder: Path, file: str, blob: bytes) -> Version:
    """Write a file atomically, and wait until it is on disk."""
    path = folder / file
    make_folder(path.parent)
    with replacing(path) as partial, partial.open("wb") as stream:
        stream.write(blob)
        stream.flush()
        os.fsync(stream.fileno())
    return {"file": file, "sha256": hashlib.sha256(blob).hexdigest()}


def read_json(path: Path, otherwise: Any) -> Any:
    try:
        return json.loads(path.read_text()) if path.is_file() else otherwise
    except ValueError as problem:
        raise UserError(f"{path} cannot be read ({problem}): is it damaged?") from problem
