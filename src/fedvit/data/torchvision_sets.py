"""The datasets that torchvision reads, and PCam."""

import contextlib
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedvit.core.errors import UserError
from fedvit.core.settings import DataSettings
from fedvit.data import cache, folders, medmnist
from fedvit.data.dataset import Dataset, Images, Labels, count_classes, with_channels

log = logging.getLogger(__name__)

TORCHVISION = {  # name -> torchvision's class, images, classes
    "cifar10": ("CIFAR10", 60_000, 10),
    "cifar100": ("CIFAR100", 60_000, 100),
    "mnist": ("MNIST", 70_000, 10),
    "fashion_mnist": ("FashionMNIST", 70_000, 10),
    "pcam": ("PCAM", 327_680, 2),
}
PCAM_SPLITS = {  # torchvision's name -> the name in the files, and its images
    "train": ("train", 262_144), "val": ("valid", 32_768), "test": ("test", 32_768),
}  # fmt: skip


MOST_CLASSES = 100_000  # a name is made for every number up to the largest label


def class_names(names: NDArray[Any] | None, labels: Labels, source: object) -> tuple[str, ...]:
    """Return the given names, MedMNIST's own names for one of its files, or the class numbers themselves."""
    if len(labels) == 0:
        raise UserError(f"{source} has no images")
    count = labels.shape[1] if labels.ndim == 2 else int(labels.max()) + 1
    if count > MOST_CLASSES:
        raise UserError(f"{source} has the class number {count - 1}: expected numbers below {MOST_CLASSES:,}")
    empty = np.flatnonzero(count_classes(labels, count) == 0).tolist()
    if empty:
        log.warning("%s has no images of the classes with the numbers %s", source, ", ".join(map(str, empty[:5])))
    if names is None:
        known = medmnist.CLASSES.get(medmnist.medmnist_name(Path(str(source)).stem) or "", ())
        return known if len(known) == count else tuple(str(number) for number in range(count))
    if names.ndim != 1 or len(names) < count:
        raise UserError(f"{source}: {names.size} class names for labels up to {count - 1}")
    return tuple(str(name) for name in names)


def from_torchvision(name: str, settings: DataSettings) -> Dataset:
    """Load one of torchvision's datasets from the data folder, in torchvision's layout and with its checksums."""
    import torchvision.datasets

    if settings.folder is None:
        raise UserError(f"{name} needs a data folder: give --data-dir or set FEDVIT_DATA")
    kind = getattr(torchvision.datasets, TORCHVISION[name][0])
    try:
        if name == "pcam":
            return _from_pcam(kind, settings)
        parts = [kind(settings.folder, train=train, download=settings.download) for train in (True, False)]
    except (RuntimeError, OSError, ImportError, ValueError, EOFError) as problem:
        fetch = "" if settings.download else ", or download them with --set data.download=true"
        raise UserError(
            f"{name} cannot be read from {settings.folder} ({str(problem).splitlines()[0]}): put torchvision's files "
            f"there{fetch}"
        ) from problem
    images = np.concatenate([with_channels(np.asarray(part.data), name) for part in parts])
    labels = np.concatenate([np.asarray(part.targets, dtype=np.int64) for part in parts])
    test = np.repeat([False, True], [len(part.targets) for part in parts])
    return Dataset(name, images, labels, tuple(map(str, parts[0].classes)), test)


def _from_pcam(kind: Any, settings: DataSettings) -> Dataset:
    """Load PatchCamelyon, which is too large for memory, so its images go through the cache once."""
    assert settings.folder is not None
    splits = [split for split in PCAM_SPLITS if settings.join_val or split != "val"]
    for split in splits:
        kind(settings.folder, split=split, download=settings.download)  # torchvision checks that the files exist
    import h5py

    files = [settings.folder / "pcam" / f"camelyonpatch_level_2_split_{PCAM_SPLITS[split][0]}" for split in splits]
    targets = []
    for file in files:
        with h5py.File(f"{file}_y.h5") as opened:
            targets.append(opened["y"][:, 0, 0, 0].astype(np.int64))
    starts = np.cumsum([0, *map(len, targets)])
    with contextlib.ExitStack() as stack:
        pixels = [stack.enter_context(h5py.File(f"{file}_x.h5"))["x"] for file in files]

        def image(number: int) -> Images:
            part = int(np.searchsorted(starts, number, side="right")) - 1
            return np.asarray(pixels[part][number - starts[part]], dtype=np.uint8)

        paths = [Path(f"{file}_{kind}.h5") for file in files for kind in "xy"]
        key = folders.fingerprint(paths, settings.folder)
        entry = cache.images(settings.cache_folder, key, int(starts[-1]), 96, image, skip_bad=False)
    test = np.repeat([split == "test" for split in splits], list(map(len, targets)))
    names, identity = ("no tumour", "tumour"), json.dumps(key)
    return Dataset("pcam", entry.images, np.concatenate(targets), names, test, fingerprint=identity)


TORCHVISION_FILES = {
    "cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python", "mnist": "MNIST/raw",
    "fashion_mnist": "FashionMNIST/raw", "pcam": "pcam",
}  # fmt: skip


def has_torchvision(name: str, folder: Path | None) -> bool:
    return folder is not None and (folder / TORCHVISION_FILES[name]).is_dir()
