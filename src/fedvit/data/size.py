"""How many images and classes a dataset has, found without reading a single image."""

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedvit.core.errors import UserError
from fedvit.core.settings import DataSettings
from fedvit.data import medmnist
from fedvit.data.sources import has_files, locate, scan_files, unknown
from fedvit.data.torchvision_sets import PCAM_SPLITS, TORCHVISION

PIXELS = {"cifar10": 32, "cifar100": 32, "mnist": 28, "fashion_mnist": 28, "pcam": 96}
OFFICIAL_TESTS = {"pcam": PCAM_SPLITS["test"][1]}  # the other sets of torchvision have 10,000 test images


@dataclass(frozen=True)
class DataSize:
    """The size of a dataset: images, how many of them are an official test set, classes, and one image's shape."""

    images: int
    classes: int
    tests: int = 0
    shape: tuple[int, ...] = (32, 32, 3)
    sites: tuple[int, ...] = ()  # images of each site or domain


def size_of(settings: DataSettings, pixels: int) -> DataSize:
    """Return the size of the dataset of these settings; `pixels` is the size at which a folder would be stored."""
    name, path = settings.name, locate(settings)
    if name == "digits":
        return DataSize(1797, 10, shape=(8, 8, 1))
    if name in TORCHVISION:
        _, images, classes = TORCHVISION[name]
        if name == "pcam" and not settings.join_val:
            images -= PCAM_SPLITS["val"][1]
        shape = (PIXELS[name], PIXELS[name], 1 if "mnist" in name else 3)
        return DataSize(images, classes, OFFICIAL_TESTS.get(name, 10_000), shape)
    if path is not None and has_files(path):
        return _size_of_files(path, settings, settings.size or pixels)
    if path is not None:
        return _size_of_npz(path, join_val=settings.join_val)
    raise UserError(unknown(settings))


def _size_of_files(path: Path, settings: DataSettings, pixels: int) -> DataSize:
    found = scan_files(path, settings)
    tests = 0 if found.official_test is None else int(found.official_test.sum())
    sites = () if found.sites is None else tuple(np.bincount(found.sites, minlength=len(found.site_names)).tolist())
    return DataSize(len(found.files), len(found.class_names), tests, (pixels, pixels, 3), sites)


def _size_of_npz(path: Path, *, join_val: bool) -> DataSize:
    """Read the headers of an npz file and its labels, which are small."""
    try:
        with zipfile.ZipFile(path) as archive:
            shapes = {name.removesuffix(".npy"): _shape(archive, name) for name in archive.namelist()}
        with np.load(path, allow_pickle=False) as file:
            labels = [file[key] for key in file.files if key.endswith("_labels")]
    except Exception as problem:  # zipfile, zlib, numpy and its tokenizer each have errors of their own
        raise UserError(f"{path} cannot be read as npz without pickles: {problem}") from problem
    parts = [key for key in shapes if key.endswith("_images") and (join_val or key != "val_images")]
    images = {key: shapes[key] for key in parts}
    if not images or not labels:
        raise UserError(f"{path} lacks train_images and train_labels; it has {', '.join(sorted(shapes)) or 'nothing'}")
    several = max(part.shape[1] if part.ndim == 2 else 1 for part in labels)
    classes = several if several > 1 else 1 + max(int(part.max()) for part in labels if part.size)
    return _size_of_arrays(path, images, classes)


def _size_of_arrays(path: Path, images: Mapping[str, tuple[int, ...]], classes: int) -> DataSize:
    known = medmnist.CLASSES.get(medmnist.medmnist_name(path.stem) or "", ())
    tests = images.get("test_images", (0,))[0]
    shape = next(iter(images.values()))[1:]
    total = sum(one[0] for one in images.values())
    return DataSize(total, max(classes, len(known)), tests, shape if len(shape) == 3 else (*shape, 1))


def _shape(archive: zipfile.ZipFile, name: str) -> tuple[int, ...]:
    """Return the shape of one array of an npz file, from its header."""
    with archive.open(name) as stream:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape: tuple[int, ...] = read(stream)[0]
    return shape
