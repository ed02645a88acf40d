"""Cache decoded images in a memory map, so that a folder is decoded only once and may be larger than memory."""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
from numpy.typing import NDArray

from fedvit.core.errors import UserError

log = logging.getLogger(__name__)
FORMAT = 3  # increase it when the stored content changes
CHUNK = 4096


class Entry(NamedTuple):
    """A source's images, which of its files could be read, what the decoder noted, and what is wrong with the rest."""

    images: NDArray[np.uint8]
    good: NDArray[np.bool_]
    about: Any
    complaints: Sequence[str] = ()


class UnreadableError(Exception):
    """An image cannot be decoded; the message says why."""


def images(
    folder: Path,
    key: Any,
    count: int,
    size: int,
    decode: Callable[[int], NDArray[np.uint8]],
    describe: Callable[[], Any] = lambda: None,
    *,
    skip_bad: bool,
) -> Entry:
    """Return all images of a source at one size as a memory map, and decode them unless an earlier run has done so."""
    text = json.dumps([FORMAT, size, key], sort_keys=True)
    entry = folder / hashlib.sha256(text.encode()).hexdigest()[:32]
    for attempt in range(2):
        if not (entry / "meta.json").is_file():
            build(entry, count, size, decode, describe, skip_bad=skip_bad)
        try:
            meta = json.loads((entry / "meta.json").read_text())
            # Read-only and shared, so that the images may take more space than there is memory.
            told = [text for _, text in meta["complaints"]]
            found = Entry(
                np.load(entry / "images.npy", mmap_mode="r"), np.load(entry / "good.npy"), meta["about"], told
            )
            break
        except (OSError, ValueError, KeyError) as problem:
            if attempt:
                raise UserError(f"the image cache {entry} cannot be read ({problem}): remove it") from problem
            log.warning("the image cache %s is damaged (%s): decoding again", entry, problem)
            shutil.rmtree(entry, ignore_errors=True)
    if meta["complaints"] and not skip_bad:
        raise UserError(_complaint(meta["complaints"]))
    return found


def _complaint(complaints: list[Any]) -> str:
    return f"{min(complaints)[1]}; `fedvit datasets PATH` lists all bad files, and --set data.skip_bad=true skips them"


def build(
    entry: Path,
    count: int,
    size: int,
    decode: Callable[[int], NDArray[np.uint8]],
    describe: Callable[[], Any],
    *,
    skip_bad: bool,
) -> None:
    """Decode everything into a temporary folder, which gets its final name only when it is complete."""
    partial = entry.with_name(f"{entry.name}.{os.getpid()}.partial")
    try:
        _remove_leftovers(entry.parent)
        partial.mkdir(parents=True, exist_ok=True)
        log.info("decoding %d images to %d px into %s", count, size, entry)
        store = _new_map(partial / "all.npy", (count, size, size, 3))
        good = np.ones(count, dtype=np.bool_)
        complaints: list[tuple[int, str]] = []

        def one(number: int) -> None:
            try:
                store[number] = decode(number)
            except UnreadableError as problem:
                good[number] = False
                complaints.append((number, str(problem)))

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            for start in range(0, count, CHUNK):
                list(pool.map(one, range(start, min(start + CHUNK, count))))
                if complaints and not skip_bad:
                    raise UserError(_complaint(complaints))
        _pack(partial, store, good)
        np.save(partial / "good.npy", good)
        meta = {"complaints": sorted(complaints), "about": describe()}
        (partial / "meta.json").write_text(json.dumps(meta))
        if not (entry / "meta.json").is_file():  # otherwise another process was faster
            shutil.rmtree(entry, ignore_errors=True)
            partial.rename(entry)
    except OSError as problem:
        if not (entry / "meta.json").is_file():
            raise UserError(
                f"the image cache {entry.parent} cannot be written ({problem}): set data.cache to another folder"
            ) from problem
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _remove_leftovers(folder: Path) -> None:
    """Remove the unfinished entries of processes that no longer exist."""
    for path in folder.glob("*.partial"):
        owner = path.name.split(".")[-2]
        if owner.isdigit() and int(owner) != os.getpid() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(path, ignore_errors=True)


def _new_map(path: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Create a memory map and reserve its disk space, so that a full disk is an error now and not a crash later."""
    store = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=shape)
    with path.open("r+b") as stream:
        os.posix_fallocate(stream.fileno(), 0, path.stat().st_size)
    return store


def _pack(folder: Path, store: NDArray[np.uint8], good: NDArray[np.bool_]) -> None:
    """Keep only the readable images."""
    store.flush()  # type: ignore[attr-defined]
    if good.all():
        (folder / "all.npy").rename(folder / "images.npy")
        return
    packed = _new_map(folder / "images.npy", (int(good.sum()), *store.shape[1:]))
    for to, origin in enumerate(np.flatnonzero(good)):
        packed[to] = store[origin]
    packed.flush()  # type: ignore[attr-defined]
    (folder / "all.npy").unlink()
