"""Decoded images in a memory map, so that a folder is decoded once and may be larger than memory."""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedvit.errors import UserError

log = logging.getLogger(__name__)
FORMAT = 1  # raise it when what is stored changes


class UnreadableError(Exception):
    """One image that cannot be decoded, and why."""


def images(
    folder: Path,
    key: Any,
    count: int,
    size: int,
    decode: Callable[[int], NDArray[np.uint8]],
    *,
    skip_bad: bool,
) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """All images of a source at one size as a memory map, and which of them could be read."""
    text = json.dumps([FORMAT, size, key], sort_keys=True)
    entry = folder / hashlib.sha256(text.encode()).hexdigest()[:32]
    if not (entry / "good.npy").is_file():
        build(entry, count, size, decode, skip_bad=skip_bad)
    good = np.load(entry / "good.npy")
    if not good.all() and not skip_bad:
        raise UserError(first_complaint(entry))
    # Copy on write: torch wants writable memory, and nobody writes.
    return np.load(entry / "images.npy", mmap_mode="c"), good


def build(entry: Path, count: int, size: int, decode: Callable[[int], NDArray[np.uint8]], *, skip_bad: bool) -> None:
    """Decode everything into a folder of its own, which gets its name only when it is whole."""
    partial = entry.with_name(f"{entry.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        log.info("decoding %d images to %d px into %s", count, size, entry)
        store = np.lib.format.open_memmap(partial / "all.npy", mode="w+", dtype=np.uint8, shape=(count, size, size, 3))
        good = np.ones(count, dtype=np.bool_)
        complaints = []

        def one(number: int) -> None:
            try:
                store[number] = decode(number)
            except UnreadableError as problem:
                good[number] = False
                complaints.append((number, str(problem)))

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            for _ in pool.map(one, range(count)):
                if complaints and not skip_bad:
                    pool.shutdown(cancel_futures=True)
                    raise UserError(f"{min(complaints)[1]}; --set data.skip_bad=true leaves such files out")
        pack(partial, store, good)
        (partial / "complaints.json").write_text(json.dumps(sorted(complaints)))
        np.save(partial / "good.npy", good)
        if entry.exists():  # an earlier attempt that was not finished
            shutil.rmtree(entry)
        partial.rename(entry)
    except OSError as problem:
        raise UserError(f"the image cache {entry.parent} cannot be written ({problem}): set data.cache") from problem
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def pack(folder: Path, store: NDArray[np.uint8], good: NDArray[np.bool_]) -> None:
    """Keep the readable images only."""
    store.flush()  # type: ignore[attr-defined]
    if good.all():
        (folder / "all.npy").rename(folder / "images.npy")
        return
    shape = (int(good.sum()), *store.shape[1:])
    packed = np.lib.format.open_memmap(folder / "images.npy", mode="w+", dtype=np.uint8, shape=shape)
    for to, origin in enumerate(np.flatnonzero(good)):
        packed[to] = store[origin]
    packed.flush()
    (folder / "all.npy").unlink()


def first_complaint(entry: Path) -> str:
    complaints = json.loads((entry / "complaints.json").read_text())
    return f"{complaints[0][1]}; --set data.skip_bad=true leaves such files out"
