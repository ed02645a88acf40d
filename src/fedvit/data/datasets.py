"""Sources of images. Every source becomes one `Dataset`: uint8 images of one size, labels, names."""

import contextlib
import hashlib
import json
import logging
import zipfile
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedvit import randomness
from fedvit.data import cache, folders, medmnist
from fedvit.errors import UserError, nearest
from fedvit.settings import DataSettings

log = logging.getLogger(__name__)
Labels = NDArray[np.int64]
Indices = NDArray[np.int64]
Images = NDArray[np.uint8]

TORCHVISION = {  # name -> torchvision's class, images, classes
    "cifar10": ("CIFAR10", 60_000, 10),
    "cifar100": ("CIFAR100", 60_000, 100),
    "mnist": ("MNIST", 70_000, 10),
    "fashion_mnist": ("FashionMNIST", 70_000, 10),
    "pcam": ("PCAM", 327_680, 2),
}
PCAM_SPLITS = {"train": "train", "val": "valid", "test": "test"}  # torchvision's word -> the files'
MEDMNIST = tuple(medmnist.CLASSES)


@dataclass(frozen=True)
class Dataset:
    """All images of one source, before they are split over clients."""

    name: str
    images: Images  # (samples, height, width, 1 or 3), in memory or a memory map
    labels: Labels
    class_names: tuple[str, ...]
    official_test: NDArray[np.bool_] | None = None  # where the source itself says what is test
    groups: Labels | None = None  # the domain or site of every image
    group_names: tuple[str, ...] = ()
    fingerprint: str = ""  # of the images; empty: to be taken from the array

    def __post_init__(self) -> None:
        if len(self.images) != len(self.labels):
            raise UserError(f"{self.name} has {len(self.images)} images and {len(self.labels)} labels")
        if len(self.labels) == 0:
            raise UserError(f"{self.name} has no images")

    @property
    def identity(self) -> str:
        """A hash that changes with the images or their labels."""
        source = self.fingerprint or hashlib.sha256(np.ascontiguousarray(self.images).data).hexdigest()
        return hashlib.sha256(source.encode() + self.labels.tobytes()).hexdigest()

    @property
    def classes(self) -> int:
        return len(self.class_names)

    def __len__(self) -> int:
        return len(self.labels)


def load(settings: DataSettings, size: int | None) -> Dataset:
    """The data set of these settings; folders are stored at `size` pixels unless data.size says otherwise.

    Without a size a folder's images are not read: that is enough to see who would own what.
    """
    name, path = settings.name, locate(settings)
    if name == "digits":
        whole = digits()
    elif name in TORCHVISION:
        whole = from_torchvision(name, settings)
    elif path is not None and path.is_dir():
        whole = from_folder(path, settings, None if size is None else settings.size or size)
    elif path is not None:
        whole = from_npz(path)
    else:
        raise UserError(unknown(settings))
    return whole


def locate(settings: DataSettings) -> Path | None:
    """The folder or npz file that `data.name` means: as named, or in the data folder."""
    if settings.name == "digits" or settings.name in TORCHVISION:
        return None
    for name in (settings.name, f"{settings.name}.npz"):
        path = settings.find(Path(name))
        if path.is_dir() or (path.is_file() and path.suffix == ".npz"):
            return path
    return None


def unknown(settings: DataSettings) -> str:
    """What to say of a data set that is not there."""
    where = settings.folder or "the data folder, which --data-dir or FEDVIT_DATA names"
    if settings.name in MEDMNIST:
        return (
            f"{settings.name}.npz is not in {where}; MedMNIST publishes it (medmnist.com): fetch {settings.name}.npz "
            "and put it there, nothing is downloaded by itself"
        )
    names = ["digits", *TORCHVISION, *MEDMNIST]
    return (
        f"unknown data set {settings.name!r}: not a folder, an npz file or a known name here or in {where}; "
        f"{nearest(settings.name, names)}"
    )


def groups_of(settings: DataSettings) -> tuple[str, ...]:
    """The domains or sites of a folder, without reading its images; none for any other source."""
    if settings.site is not None:
        return (settings.site,)
    path = locate(settings)
    return folders.group_names(path, settings.layout) if path is not None and path.is_dir() else ()


# Sources.


def digits() -> Dataset:
    """1,797 handwritten digits of 8 x 8, embedded in scikit-learn: nothing is downloaded."""
    pixels, labels = digits_from_file() or digits_from_sklearn()
    grey = np.round(pixels * (255 / 16)).astype(np.uint8)
    return Dataset("digits", grey.reshape(-1, 8, 8, 1), labels.astype(np.int64), tuple("0123456789"))


def digits_from_file() -> tuple[np.ndarray, np.ndarray] | None:
    """Read where scikit-learn keeps them: importing it takes a second."""
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


def from_npz(path: Path) -> Dataset:
    """MedMNIST's layout: train_images, train_labels, test_*; val_* joins train; class_names is optional."""
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except (OSError, ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile, zlib.error) as problem:
        raise UserError(f"{path} cannot be read as npz without pickles: {problem}") from problem
    needed = ("train_images", "train_labels", "test_images", "test_labels")
    missing = [key for key in needed if key not in arrays]
    if missing:
        raise UserError(f"{path} lacks {', '.join(missing)}; it has {', '.join(sorted(arrays)) or 'nothing'}")
    parts = [part for part in ("train", "val", "test") if f"{part}_images" in arrays]
    images, labels, tests = [], [], []
    for part in parts:
        if f"{part}_labels" not in arrays:
            raise UserError(f"{path} has {part}_images but no {part}_labels")
        images.append(with_channels(arrays.pop(f"{part}_images"), path))
        labels.append(flat_labels(arrays[f"{part}_labels"], path))
        if len(images[-1]) != len(labels[-1]):
            raise UserError(f"{path}: {part}_images and {part}_labels have different lengths")
        tests.append(np.full(len(labels[-1]), part == "test"))
    numbers = np.concatenate(labels)
    names = class_names(arrays.get("class_names"), numbers, path)
    return Dataset(path.stem, joined(images, path), numbers, names, np.concatenate(tests))


def joined(parts: Sequence[Images], source: object) -> Images:
    """Parts of one size as one array; where grey and colour are mixed, all become colour."""
    sizes = sorted({part.shape[1:3] for part in parts})
    if len(sizes) > 1:
        raise UserError(f"{source}: images of different sizes, {sizes}: resize them to one")
    if len({part.shape[3] for part in parts}) > 1:
        log.warning("%s mixes grey and colour images: all become colour", source)
        parts = [np.broadcast_to(part, (*part.shape[:3], 3)) for part in parts]
    return np.concatenate(parts)


def with_channels(images: NDArray[Any], source: object) -> Images:
    """Grey or colour uint8 images as (samples, height, width, channels)."""
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or images.shape[3] not in (1, 3) or 0 in images.shape[1:3] or images.dtype != np.uint8:
        raise UserError(
            f"{source}: expected uint8 images of shape (samples, height, width) or (samples, height, width, 1 or 3), "
            f"found {images.dtype} {images.shape}"
        )
    return images


def flat_labels(labels: NDArray[Any], source: object) -> Labels:
    """One whole number an image; MedMNIST stores them as a column."""
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer) or (len(labels) and labels.min() < 0):
        raise UserError(f"{source}: expected one class number from 0 an image, found {labels.dtype} {labels.shape}")
    return labels.astype(np.int64)


def wants_auroc(settings: DataSettings, classes: int) -> bool:
    """Whether AUROC is measured beside accuracy: as told, else for two classes and for MedMNIST's sets."""
    if settings.auroc is not None:
        return settings.auroc
    return classes == 2 or medmnist.medmnist_name(Path(settings.name).stem) is not None


def class_names(names: NDArray[Any] | None, labels: Labels, source: object) -> tuple[str, ...]:
    """The names that are given, MedMNIST's own for a file of that name, or the numbers themselves."""
    if len(labels) == 0:
        raise UserError(f"{source} has no images")
    count = int(labels.max()) + 1
    empty = sorted(set(range(count)) - set(labels.tolist()))
    if empty:
        log.warning("%s has no image of the classes numbered %s", source, ", ".join(map(str, empty[:5])))
    if names is None:
        known = medmnist.CLASSES.get(medmnist.medmnist_name(Path(str(source)).stem) or "", ())
        return known if len(known) == count else tuple(str(number) for number in range(count))
    if names.ndim != 1 or len(names) < count:
        raise UserError(f"{source}: {names.size} class names for labels up to {count - 1}")
    return tuple(str(name) for name in names)


def from_torchvision(name: str, settings: DataSettings) -> Dataset:
    """A data set of torchvision's in the data folder, in torchvision's own layout; checksums are torchvision's."""
    import torchvision.datasets

    if settings.folder is None:
        raise UserError(f"{name} needs a data folder: give --data-dir or set FEDVIT_DATA")
    kind = getattr(torchvision.datasets, TORCHVISION[name][0])
    try:
        if name == "pcam":
            return from_pcam(kind, settings)
        parts = [kind(settings.folder, train=train, download=settings.download) for train in (True, False)]
    except (RuntimeError, OSError, ImportError, ValueError, EOFError) as problem:
        fetch = "" if settings.download else ", or fetch them with --set data.download=true"
        raise UserError(
            f"{name} cannot be read from {settings.folder} ({str(problem).splitlines()[0]}): put torchvision's files "
            f"there{fetch}"
        ) from problem
    images = np.concatenate([with_channels(np.asarray(part.data), name) for part in parts])
    labels = np.concatenate([np.asarray(part.targets, dtype=np.int64) for part in parts])
    test = np.repeat([False, True], [len(part.targets) for part in parts])
    return Dataset(name, images, labels, tuple(map(str, parts[0].classes)), test)


def from_pcam(kind: Any, settings: DataSettings) -> Dataset:
    """PatchCamelyon: too large for memory, so its images go through the cache once; val joins train."""
    assert settings.folder is not None
    for split in PCAM_SPLITS:
        kind(settings.folder, split=split, download=settings.download)  # torchvision checks that the files are there
    import h5py

    files = [settings.folder / "pcam" / f"camelyonpatch_level_2_split_{name}" for name in PCAM_SPLITS.values()]
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
    test = np.repeat([split == "test" for split in PCAM_SPLITS], list(map(len, targets)))
    names, identity = ("no tumour", "tumour"), json.dumps(key)
    return Dataset("pcam", entry.images, np.concatenate(targets), names, test, fingerprint=identity)


def from_folder(root: Path, settings: DataSettings, size: int | None) -> Dataset:
    """Image folders of any layout, decoded once into the cache; without a size they are only looked at."""
    found = folders.scan(root, settings.layout, settings.class_list)
    count = len(found.files)
    key = folders.fingerprint(found.files, root)
    if size is None:
        entry = cache.Entry(np.broadcast_to(np.zeros((), np.uint8), (count, 1, 1, 3)), np.ones(count, np.bool_), {})
    else:
        modes: Counter[str] = Counter()
        entry = cache.images(
            settings.cache_folder,
            key,
            count,
            size,
            lambda number: folders.decode(found.files[number], (size, size), modes),
            lambda: dict(modes),
            skip_bad=settings.skip_bad,
        )
    good, kinds = entry.good, entry.about
    if len(kinds) == 2:
        log.warning("%s mixes %d grey and %d colour images: all become colour", root, kinds["grey"], kinds["colour"])
    if not good.all():
        log.warning("%d of %d files in %s could not be read and are left out", (~good).sum(), count, root)
    groups, owners = found.groups, found.group_names
    if settings.site is not None:
        if groups is not None:
            raise UserError(f"{root} has sites {', '.join(owners)} in it: the folder of {settings.site} is class/image")
        groups, owners = np.zeros(count, dtype=np.int64), (settings.site,)
    labels = found.labels[good]
    for label, name in enumerate(found.class_names):
        number = int((labels == label).sum())
        if number == 0 and not settings.class_list:
            raise UserError(f"the class {name!r} in {root} has no image that can be read")
        if number == 1:
            log.warning("the class %r in %s has one image: it can be trained on or tested, not both", name, root)
    return Dataset(
        root.name,
        entry.images,
        labels,
        found.class_names,
        None if found.official_test is None else found.official_test[good],
        None if groups is None else groups[good],
        owners,
        json.dumps(key),
    )


def from_clients(clients: Mapping[str, Any], names: Sequence[str] | None = None) -> Dataset:
    """Each client's (images, labels) arrays, or a torch Dataset of (image, label), from Python."""
    if not clients:
        raise UserError("expected a client's data by name, found no client")
    pairs = {name: arrays_of(f"client {name}", data) for name, data in clients.items()}
    for name, (pixels, numbers) in pairs.items():
        if len(pixels) != len(numbers) or not len(numbers):
            raise UserError(f"client {name} has {len(pixels)} images and {len(numbers)} labels")
    labels = np.concatenate([labels for _, labels in pairs.values()])
    groups = np.repeat(np.arange(len(pairs)), [len(labels) for _, labels in pairs.values()])
    given = None if names is None else np.asarray(names)
    return Dataset(
        "python",
        joined([images for images, _ in pairs.values()], "the clients' data"),
        labels,
        class_names(given, labels, "class_names"),
        groups=groups,
        group_names=tuple(map(str, clients)),
    )


def from_arrays(data: Any, names: Sequence[str] | None = None) -> Dataset:
    """One (images, labels) pair, or one torch Dataset of (image, label), from Python, to be divided over clients."""
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise UserError(
            "data should be a name, a folder, each client's data by name, one (images, labels) pair, or a torch "
            f"Dataset with a length; found {type(data).__name__}"
        )
    images, labels = arrays_of("data", data)
    given = None if names is None else np.asarray(names)
    return Dataset("python", images, labels, class_names(given, labels, "class_names"))


def arrays_of(name: str, data: Any) -> tuple[Images, Labels]:
    if isinstance(data, tuple) and len(data) == 2:
        images, labels = data
    else:
        items = [data[i] for i in range(len(data))]
        images, labels = np.stack([np.asarray(item[0]) for item in items]), [int(item[1]) for item in items]
    images, labels = np.asarray(images), np.asarray(labels)
    if images.ndim == 4 and images.shape[1] in (1, 3) and images.shape[3] not in (1, 3):
        images = images.transpose(0, 2, 3, 1)  # torch's channels first
    if images.dtype.kind == "f":
        if images.size and (images.min() < 0 or images.max() > 1):
            raise UserError(f"{name}: float images must lie in 0..1, found {images.min():g}..{images.max():g}")
        images = np.round(images * 255).astype(np.uint8)
    return with_channels(images, name), flat_labels(labels, name)


# Scarcity.


def keep_samples(dataset: Dataset, wanted: int, seed: int, *, train_only: bool) -> Indices:
    """The indices of so many images, the same number of every class as far as there are enough.

    Under a rule with an official test set only training images are dropped; a pooled rule counts all of them.
    """
    spared = dataset.official_test if train_only and dataset.official_test is not None else None
    pool = np.arange(len(dataset)) if spared is None else np.flatnonzero(~spared)
    if wanted > len(pool):
        raise UserError(f"--samples {wanted} of {len(pool)} images: ask for fewer, or leave it out")
    generator = randomness.numpy_generator(seed, "samples")
    shuffled = generator.permutation(pool)
    order = np.argsort(dataset.labels[shuffled], kind="stable")
    by_class = dataset.labels[shuffled][order]
    rank = np.empty(len(pool), dtype=np.int64)  # the how-manieth of its class each image is
    rank[order] = np.arange(len(pool)) - np.searchsorted(by_class, by_class)
    tie = generator.permutation(dataset.classes)[dataset.labels[shuffled]]
    chosen = shuffled[np.lexsort((tie, rank))[:wanted]]
    return np.sort(chosen if spared is None else np.concatenate([chosen, np.flatnonzero(spared)]))


def only(dataset: Dataset, kept: Indices) -> Dataset:
    """The labels of these images, for dividing them; their pixels stay where they are."""
    return replace(
        dataset,
        images=np.broadcast_to(np.zeros((), np.uint8), (len(kept), 1, 1, 1)),
        labels=dataset.labels[kept],
        official_test=None if dataset.official_test is None else dataset.official_test[kept],
        groups=None if dataset.groups is None else dataset.groups[kept],
    )


def catalogue(settings: DataSettings) -> list[dict[str, Any]]:
    """Every data set by name, what it holds, and whether it is here."""
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
                kind = "folders by domain or site" if folders.group_names(path, "auto") else "folders by class"
                entries.append({"name": path.name, "kind": kind, "images": None, "classes": None, "present": True})
    return entries


TORCHVISION_FILES = {
    "cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python", "mnist": "MNIST/raw",
    "fashion_mnist": "FashionMNIST/raw", "pcam": "pcam",
}  # fmt: skip


def has_torchvision(name: str, folder: Path | None) -> bool:
    return folder is not None and (folder / TORCHVISION_FILES[name]).is_dir()
