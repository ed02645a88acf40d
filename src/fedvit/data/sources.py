"""Sources of images. Every source becomes one `Dataset`: uint8 images of one size, labels and names."""

import json
import logging
import math
import zipfile
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from fedvit.core.errors import UserError, nearest
from fedvit.core.settings import MAX_PIXELS, DataSettings
from fedvit.data import cache, dicom, folders, manifest, medmnist
from fedvit.data.dataset import Dataset, checked_labels, count_classes, join_parts, with_channels
from fedvit.data.decoding import RANGE, decode, read_window
from fedvit.data.patients import contradictions, find_patients, hash_patients, number_patients
from fedvit.data.torchvision_sets import TORCHVISION, class_names, from_torchvision, has_torchvision

log = logging.getLogger(__name__)
MEDMNIST = tuple(medmnist.CLASSES)
NAMED = 20  # skipped files that a warning names


def load_dataset(settings: DataSettings, size: int | None) -> Dataset:
    """Load the dataset of these settings; files are stored at `size` pixels unless data.size says otherwise.

    Without a size no file of a folder or manifest is read, which is enough to see who would own what.
    """
    name, path = settings.name, locate(settings)
    if settings.patient is not None and (path is None or path.suffix == ".npz"):
        raise UserError(f"data.patient says whose the files of a folder are, but {name} is not a folder: leave it out")
    if name == "digits":
        whole = load_digits()
    elif name in TORCHVISION:
        whole = from_torchvision(name, settings)
    elif path is not None and has_files(path):
        whole = _from_files(path, settings, None if size is None else settings.size or size)
    elif path is not None:
        whole = from_npz(path, join_val=settings.join_val)
    else:
        raise UserError(unknown(settings))
    check_task(whole, settings)
    return whole


def check_task(dataset: Dataset, settings: DataSettings) -> None:
    """Refuse a dataset whose labels are of another kind than data.task says."""
    found = "multi" if dataset.several_labels else "single"
    if settings.task not in (None, found):
        has = "several labels" if dataset.several_labels else "one label"
        raise UserError(
            f"data.task={settings.task}, but {dataset.name} has {has} per image: leave data.task out, or give labels "
            f"of the other kind"
        )


def task_of(settings: DataSettings) -> manifest.Task | None:
    """Return whether images have one label each or several, without reading an image; None if it is unclear."""
    path = locate(settings)
    if path is None or path.is_dir():
        return None
    if manifest.is_manifest(path):
        return manifest.task_of(path)
    try:
        with zipfile.ZipFile(path) as archive, archive.open("train_labels.npy") as stream:
            major, _ = np.lib.format.read_magic(stream)
            read = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
            shape = read(stream)[0]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile):
        return None
    return "multi" if len(shape) == 2 and shape[1] > 1 else "single"


def locate(settings: DataSettings) -> Path | None:
    """Return the folder, npz file or manifest that `data.name` means: as given, or inside the data folder.

    A manifest's path may be a pattern with `*`.
    """
    if settings.name == "digits" or settings.name in TORCHVISION:
        return None
    if manifest.is_manifest(Path(settings.name)):
        given = Path(settings.name)
        places = [given] if settings.folder is None or given.is_absolute() else [given, settings.folder / given]
        return next((place for place in places if manifest.manifest_files(place)), None)
    for name in (settings.name, f"{settings.name}.npz"):
        path = settings.find(Path(name))
        if path.is_dir() or (path.is_file() and path.suffix == ".npz"):
            return path
    return None


def has_files(path: Path) -> bool:
    """Return whether a path from `locate` is a folder of images or a manifest."""
    return path.is_dir() or manifest.is_manifest(path)


def scan_files(path: Path, settings: DataSettings) -> folders.Scan:
    """Find all files of a folder or manifest, with what their places or the manifest say about each."""
    if manifest.is_manifest(path):
        return manifest.scan_manifest(path, settings)
    found = folders.scan(
        path, settings.layout, settings.class_list, settings.patient,
        join_val=settings.join_val, follow=settings.follow_links,
    )  # fmt: skip
    if settings.patient is None:
        return found
    names = [file.relative_to(path).as_posix() for file in found.files]
    whose = find_patients(found.files, names, settings.patient, skip_bad=settings.skip_bad)
    sites = [""] * len(names) if found.sites is None else [found.site_names[number] for number in found.sites]
    tests = [""] * len(names) if found.official_test is None else [str(test) for test in found.official_test]
    wrong = contradictions(whose, sites, tests, names.__getitem__)
    if wrong:
        raise UserError(wrong[0].text)
    return replace(found, patients=whose)


def unknown(settings: DataSettings) -> str:
    """Return the error message for a dataset that is not there."""
    where = settings.folder or "the data folder, which --data-dir or FEDVIT_DATA sets"
    if manifest.is_manifest(Path(settings.name)):
        return f"no manifest {settings.name} here or in {where}: expected a CSV file with the columns path and label"
    if settings.name in MEDMNIST:
        return (
            f"{settings.name}.npz is not in {where}; MedMNIST publishes it (medmnist.com): download "
            f"{settings.name}.npz and put it there; fedvit does not download it for you"
        )
    names = ["digits", *TORCHVISION, *MEDMNIST]
    return (
        f"unknown dataset {settings.name!r}: not a folder, an npz file or a known name here or in {where}; "
        f"{nearest(settings.name, names)}"
    )


def is_known(settings: DataSettings) -> bool:
    """Return whether this names a dataset that exists, here or elsewhere."""
    return settings.name in ("digits", *TORCHVISION, *MEDMNIST) or locate(settings) is not None


def sites_of(settings: DataSettings) -> tuple[str, ...]:
    """Return the domains or sites of a folder without reading its images; any other source has none."""
    if settings.site is not None:
        return (settings.site,)
    path = locate(settings)
    if path is not None and manifest.is_manifest(path):
        return manifest.site_names(path)
    if path is None or not path.is_dir():
        return ()
    return folders.site_names(path, settings.layout, settings.patient, follow=settings.follow_links)


# Sources.


def load_digits() -> Dataset:
    """Load the 1,797 handwritten digits of 8 x 8 pixels that come with scikit-learn; nothing is downloaded."""
    pixels, labels = digits_from_file() or digits_from_sklearn()
    grey = np.round(pixels * (255 / 16)).astype(np.uint8)
    return Dataset("digits", grey.reshape(-1, 8, 8, 1), labels.astype(np.int64), tuple("0123456789"))


def digits_from_file() -> tuple[np.ndarray, np.ndarray] | None:
    """Read the digits from scikit-learn's own file, because importing scikit-learn takes a second."""
    package = find_spec("sklearn")
    file = Path(package.origin).parent / "datasets/data/digits.csv.gz" if package and package.origin else None
    if file is None or not file.is_file():
        return None
    table = np.loadtxt(file, delimiter=",")
    return table[:, :-1], table[:, -1]


def digits_from_sklearn() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    found = load_digits()
    return found.data, found.target


def from_npz(path: Path, *, join_val: bool = True) -> Dataset:
    """Load MedMNIST's npz layout: train_images, train_labels, test_*, and optionally class_names and val_*.

    Validation images join the training images, or are left out.
    """
    try:
        _check_claims(path)
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except MemoryError as problem:
        raise UserError(
            f"{path} does not fit in memory: keep fewer images in it, or use a folder of images"
        ) from problem
    except Exception as problem:  # zipfile, zlib, numpy and its tokenizer each have errors of their own
        raise UserError(f"{path} cannot be read as npz without pickles: {problem}") from problem
    needed = ("train_images", "train_labels", "test_images", "test_labels")
    missing = [key for key in needed if key not in arrays]
    if missing:
        raise UserError(f"{path} lacks {', '.join(missing)}; it has {', '.join(sorted(arrays)) or 'nothing'}")
    parts = [part for part in ("train", "val", "test") if f"{part}_images" in arrays and (join_val or part != "val")]
    images, labels, tests = [], [], []
    for part in parts:
        if f"{part}_labels" not in arrays:
            raise UserError(f"{path} has {part}_images but no {part}_labels")
        images.append(with_channels(arrays.pop(f"{part}_images"), path))
        labels.append(checked_labels(arrays[f"{part}_labels"], path))
        if len(images[-1]) != len(labels[-1]):
            raise UserError(f"{path}: {part}_images and {part}_labels have different lengths")
        tests.append(np.full(len(labels[-1]), part == "test"))
    if len({part.shape[1:] for part in labels}) > 1:
        told = ", ".join(f"{part}_labels {one.shape}" for part, one in zip(parts, labels, strict=True))
        raise UserError(f"{path}: expected one class number per image or the same labels in every part, found {told}")
    numbers = np.concatenate(labels)
    names = class_names(arrays.get("class_names"), numbers, path)
    return Dataset(path.stem, join_parts(images, path), numbers, names, np.concatenate(tests))


def _check_claims(path: Path) -> None:
    """Raise an error for arrays that claim more numbers than the file has, or than fit in memory."""
    free = psutil.virtual_memory().available
    with zipfile.ZipFile(path) as archive:
        for member in (one for one in archive.infolist() if one.filename.endswith(".npy")):
            with archive.open(member) as stream:
                major, _ = np.lib.format.read_magic(stream)
                if major > 2:  # numpy writes it only for field names that are not Latin
                    continue
                header = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
                shape, _, kind = header(stream)
            claimed = 0 if kind.hasobject else math.prod(shape) * kind.itemsize
            if claimed > member.file_size:
                raise ValueError(f"{member.filename} claims the shape {shape}, but has only {member.file_size:,} bytes")
            if claimed > free:
                raise MemoryError


def _from_files(path: Path, settings: DataSettings, size: int | None) -> Dataset:
    """Load image folders or a manifest, decoded once into the cache; without a size, no image is read."""
    if settings.window not in (None, RANGE):
        read_window(settings.window)
    found = scan_files(path, settings)
    root = manifest.folder_of(path) if manifest.is_manifest(path) else path
    count = len(found.files)
    if found.missing:
        log.warning("%d files do not exist and are skipped, such as %s", len(found.missing), found.missing[0])
    names = folders.fingerprint(found.files, root)
    key: Any = names if settings.window is None else [settings.window, names]
    if settings.max_pixels != MAX_PIXELS:  # which files are skipped depends on it
        key = [settings.max_pixels, key]
    if size is None:
        entry = cache.Entry(np.broadcast_to(np.zeros((), np.uint8), (count, 1, 1, 3)), np.ones(count, np.bool_), {})
    else:
        modes: Counter[str] = Counter()
        entry = cache.images(
            settings.cache_folder,
            key,
            count,
            size,
            lambda number: decode(found.files[number], (size, size), modes, settings.window, settings.max_pixels),
            lambda: dict(modes),
            skip_bad=settings.skip_bad,
        )
    good, kinds = entry.good, entry.about
    if kinds.get("dark"):
        log.warning(
            "%d 16-bit images in %s use less than 12 bits and look nearly black: --set data.window=%s stretches each "
            "to its own range", kinds["dark"], root, RANGE,
        )  # fmt: skip
    by_suffix = (file.suffix.lower() in dicom.SUFFIXES for file in found.files)
    if found.patients is None and (kinds.get("dicom") or any(by_suffix)):
        log.warning(
            "DICOM files name their patients: --set data.patient=%s keeps the images of a patient together",
            folders.HEADER,
        )
    if kinds.get("grey") and kinds.get("colour"):
        log.warning("%s mixes %d gray and %d color images: all become color", root, kinds["grey"], kinds["colour"])
    if not good.all():
        told, more = entry.complaints[:NAMED], len(entry.complaints) - NAMED
        rest = f"; and {more} more, listed in log.txt" if more > 0 else ""
        log.warning(
            "%d of %d files in %s could not be read and are skipped: %s%s",
            (~good).sum(),
            count,
            root,
            "; ".join(told),
            rest,
        )
        for text in entry.complaints[NAMED:]:
            log.info("skipped: %s", text)
    sites, owners = found.sites, found.site_names
    if settings.site is not None:
        if sites is not None and owners != (settings.site,):
            raise UserError(
                f"{root} has the sites {', '.join(owners)}: the folder of {settings.site} must be class/image"
            )
        sites, owners = np.zeros(count, dtype=np.int64), (settings.site,)
    labels = found.labels[good]
    patients, hashes = None, tuple[str, ...]()
    if found.patients is not None:
        patients, whose = number_patients([who for who, is_good in zip(found.patients, good, strict=True) if is_good])
        hashes = () if size is None else hash_patients(whose, settings.cache_folder)
    totals = count_classes(labels, len(found.class_names)).tolist()
    for name, number in zip(found.class_names, totals, strict=True):
        if number == 0 and labels.ndim == 2:
            log.warning("no image in %s has the label %r", root, name)
        elif number == 0 and not settings.class_list:
            raise UserError(f"the class {name!r} in {root} has no image that can be read")
        if number == 1:
            log.warning("the class %r in %s has one image, which can only be used to train or to test", name, root)
    return Dataset(
        root.name if path.is_dir() else path.stem,
        entry.images,
        labels,
        found.class_names,
        None if found.official_test is None else found.official_test[good],
        None if sites is None else sites[good],
        owners,
        json.dumps(key),
        tuple(name for (name, *_), is_good in zip(names[1:], good, strict=True) if is_good),
        None if found.official_val is None else found.official_val[good],
        patients,
        hashes,
    )


def list_datasets(settings: DataSettings) -> list[dict[str, Any]]:
    """Return every dataset by name, with what it holds and whether it is available here."""
    folder = settings.folder
    entries = [{"name": "digits", "kind": "embedded", "images": 1797, "classes": 10, "present": True}]
    for name, (kind, images, classes) in TORCHVISION.items():
        entry = {"name": name, "kind": f"torchvision.{kind}", "images": images, "classes": classes}
        entries.append({**entry, "present": has_torchvision(name, folder)})
    here = {path.stem: path for path in sorted(folder.glob("*.npz"))} if folder and folder.is_dir() else {}
    for name in dict.fromkeys([*MEDMNIST, *here]):
        kind = "MedMNIST npz" if name in MEDMNIST else "npz"
        entries.append({"name": name, "kind": kind, "images": None, "classes": None, "present": name in here})
    if folder and folder.is_dir():
        for path in sorted(folder.iterdir()):
            if path.is_dir() and folders.looks_like_images(path):
                kind = (
                    "folders by domain or site" if folders.site_names(path, "auto", follow=True) else "folders by class"
                )
                entries.append({"name": path.name, "kind": kind, "images": None, "classes": None, "present": True})
    return entries
