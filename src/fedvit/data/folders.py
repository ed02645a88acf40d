"""Image folders: class/image, site/class/image, domain/class/image, train and test, and Tiny-ImageNet's own layout."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedvit.core.errors import UserError
from fedvit.data.dicom import SUFFIXES as DICOM

Layout = Literal["auto", "class", "domain", "site", "tiny_imagenet"]
SUFFIXES = DICOM | {".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".gif", ".ppm", ".pgm"}
FOLDER = "folder"  # as data.patient: every image lies in a folder of its patient, class/patient/image
HEADER = "dicom"  # as data.patient: the patient ID in the file's header
TRAIN, TEST, VAL = ("train", "training"), ("test", "testing"), ("val", "valid", "validation")


@dataclass(frozen=True)
class Note:
    """A finding: its kind, the files, folders or classes that it is about, and what it means."""

    kind: str
    names: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Scan:
    """What a folder or manifest contains, before any image is read."""

    files: tuple[Path, ...]
    labels: NDArray[np.int64]
    class_names: tuple[str, ...]
    official_test: NDArray[np.bool_] | None
    sites: NDArray[np.int64] | None
    site_names: tuple[str, ...]
    official_val: NDArray[np.bool_] | None = None
    patients: tuple[str, ...] | None = None  # the patient of each file, as the hospital calls them
    missing: tuple[str, ...] = ()  # what a manifest says of files that do not exist


@dataclass(frozen=True)
class _Place:
    """What a folder's path says: its class, its domain or site, and whether it belongs to train, test or val."""

    label: str
    site: str | None
    part: str | None


@dataclass(frozen=True)
class _Leaf:
    """A folder without subfolders, the parts of its path below the root, and its files."""

    folder: Path
    parts: tuple[str, ...]
    files: tuple[str, ...]


def leaves(root: Path, patient: str | None = None, *, follow: bool = False) -> list[_Leaf]:
    """Return all leaves sorted by name, skipping hidden names; an empty folder is a leaf too.

    If the last folder is the patient's, it is not among the parts, which end with the class. A link that leads out of
    the root is an error, unless `follow` (data.follow_links) is set.
    """
    found, below, top = [], 1 if patient == FOLDER else 0, os.path.realpath(root)
    for base, directories, files in os.walk(root, followlinks=True):
        directories[:] = sorted(name for name in directories if not name.startswith("."))
        for name in directories:
            _check_link(os.path.join(base, name), top, follow)
        if not directories and Path(base) != root:
            names = tuple(sorted(name for name in files if not name.startswith(".")))
            for name in names:
                _check_link(os.path.join(base, name), top, follow)
            parts = Path(base).relative_to(root).parts
            found.append(_Leaf(Path(base), parts[: len(parts) - below], names))
    return found


def _check_link(path: str, top: str, follow: bool) -> None:
    """Refuse a link that leads out of a folder, or back to a folder that contains it."""
    if not os.path.islink(path):
        return
    target, above = os.path.realpath(path), os.path.realpath(os.path.dirname(path))
    if os.path.isdir(target) and _lies_in(above, target):
        raise UserError(f"{path} is a link to a folder that contains it: remove the link")
    if not follow and not _lies_in(target, top):
        raise UserError(
            f"{path} is a link that leads out of {top}, to {target}: copy the images, or follow such links with --set "
            "data.follow_links=true"
        )


def _lies_in(path: str, folder: str) -> bool:
    return os.path.join(path, "").startswith(os.path.join(folder, ""))


def _part_of(name: str) -> str | None:
    """Return train, test or val if a folder's name says so."""
    for part, names in (("train", TRAIN), ("test", TEST), ("val", VAL)):
        if name.lower() in names:
            return part
    return None


def looks_like_images(folder: Path) -> bool:
    """Return whether any folder below holds an image."""
    try:
        some = [leaf.files[:1] for leaf in leaves(folder, follow=True)]
    except UserError:
        return False
    return any(Path(name).suffix.lower() in SUFFIXES for files in some for name in files)


def place(parts: tuple[str, ...], root: Path, layout: Layout) -> _Place:
    """Interpret a leaf's path: train or test may come first or second, then [domain or site,] class."""
    names = list(parts)
    part = None
    for position in range(min(2, len(names) - 1)):
        part = _part_of(names[position])
        if part is not None:
            names.pop(position)
            break
    if len(names) == 1 and layout in ("auto", "class"):
        return _Place(names[0], None, part)
    if len(names) == 2 and layout in ("auto", "domain", "site"):
        return _Place(names[1], names[0], part)
    if not names:
        raise UserError(f"expected class/patient/image in {root}, as data.patient={FOLDER} says, found class/image")
    wanted = {"class": "class/image", "auto": "class/image or site/class/image"}.get(layout, f"{layout}/class/image")
    raise UserError(
        f"expected {wanted} in {root}, found a folder {'/'.join(parts)}; --set data.layout=... chooses the layout"
    )


def site_names(root: Path, layout: Layout, patient: str | None = None, *, follow: bool = False) -> tuple[str, ...]:
    """Return the domains or sites below a folder; there are none if classes come first."""
    if layout in ("class", "tiny_imagenet") or is_tiny_imagenet(root):
        return ()
    return tuple(
        sorted(
            {
                g
                for leaf in leaves(root, patient, follow=follow)
                if (g := place(leaf.parts, root, layout).site) is not None
            }
        )
    )


def is_tiny_imagenet(root: Path) -> bool:
    """Return whether a folder has the files that only Tiny-ImageNet has."""
    return (root / "wnids.txt").is_file() and (root / "train").is_dir()


def scan(
    root: Path,
    layout: Layout,
    class_list: Sequence[str],
    patient: str | None = None,
    *,
    join_val: bool = True,
    follow: bool = False,
) -> Scan:
    """Find every image file with its class, site and part; validation images that no test needs may be left out."""
    if layout == "tiny_imagenet" or (layout == "auto" and is_tiny_imagenet(root)):
        return _scan_tiny_imagenet(root, follow=follow)
    placed = [
        (leaf.folder, place(leaf.parts, root, layout), [leaf.folder / name for name in leaf.files])
        for leaf in leaves(root, patient, follow=follow)
    ]
    if not placed:
        raise UserError(f"no image folders in {root}: expected class/image or site/class/image")
    if len({where.site is None for _, where, _ in placed}) > 1:
        plain = next(folder for folder, where, _ in placed if where.site is None)
        deep = next(folder for folder, where, _ in placed if where.site is not None)
        raise UserError(f"{root} mixes class/image ({plain.name}) and site/class/image ({deep.relative_to(root)})")
    names = _agreed_classes(root, [(where, files) for _, where, files in placed], class_list)
    sites = tuple(sorted({where.site for _, where, _ in placed if where.site is not None}))
    parts = {where.part for _, where, _ in placed}
    test_part = "test" if "test" in parts else "val" if "val" in parts and "train" in parts else None
    files, labels, tests, owners = [], [], [], []
    for _, where, members in placed:
        if where.part == "val" != test_part and not join_val:
            continue
        for file in members:
            files.append(file)
            labels.append(names.index(where.label))
            tests.append(where.part == test_part)
            owners.append(sites.index(where.site) if where.site is not None else 0)
    return Scan(
        tuple(files),
        np.array(labels, dtype=np.int64),
        names,
        np.array(tests, dtype=np.bool_) if test_part else None,
        np.array(owners, dtype=np.int64) if sites else None,
        sites,
    )


def _agreed_classes(
    root: Path, placed: Sequence[tuple[_Place, list[Path]]], class_list: Sequence[str]
) -> tuple[str, ...]:
    """Return the class names of all sites, which must agree unless `data.class_names` lists them."""
    by_site: dict[str | None, set[str]] = {}
    for where, files in placed:
        by_site.setdefault(where.site, set()).add(where.label)
        if not files and not class_list and where.part in (None, "train"):
            owner = f" of {where.site}" if where.site else ""
            raise UserError(f"the class {where.label!r}{owner} in {root} is empty: remove the folder or fill it")
    every = set().union(*by_site.values())
    if class_list:
        strange = sorted(every - set(class_list))
        if strange:
            raise UserError(f"{root} has classes that data.class_names does not list: {', '.join(strange)}")
        return tuple(class_list)
    for site, mine in by_site.items():
        if mine != every:
            raise UserError(
                f"the sites in {root} have different class names: {site} lacks {', '.join(sorted(every - mine))}; "
                "rename the folders, or list all classes with --set data.class_names=a,b,c"
            )
    return tuple(sorted(every))


def _scan_tiny_imagenet(root: Path, *, follow: bool) -> Scan:
    """Find train/WNID/images/* and, as test set, val/images/* with val_annotations.txt, or val/WNID/*."""
    if not is_tiny_imagenet(root):
        raise UserError(f"{root} does not have Tiny-ImageNet's layout: expected wnids.txt, train/ and val/")
    ids = (root / "wnids.txt").read_text().split()
    numbers = {name: label for label, name in enumerate(ids)}
    words = {}
    if (root / "words.txt").is_file():
        words = dict(line.split("\t", 1) for line in (root / "words.txt").read_text().splitlines() if "\t" in line)
    files: list[Path] = []
    labels: list[int] = []
    tests: list[bool] = []
    for part in ("train", "val"):
        for leaf in leaves(root / part, follow=follow) if (root / part).is_dir() else []:
            if leaf.parts[0] in numbers:
                chosen = [leaf.folder / name for name in leaf.files if Path(name).suffix.lower() in SUFFIXES]
                files += chosen
                labels += [numbers[leaf.parts[0]]] * len(chosen)
                tests += [part == "val"] * len(chosen)
    for image, name in _annotations(root / "val" / "val_annotations.txt") if not any(tests) else []:
        if name not in numbers:
            raise UserError(f"{root}/val/val_annotations.txt names the class {name!r}, which wnids.txt does not list")
        files.append(root / "val" / "images" / Path(image).name)
        _check_link(str(files[-1]), os.path.realpath(root), follow)
        labels.append(numbers[name])
        tests.append(True)
    missing = [name for label, name in enumerate(ids) if label not in labels]
    if missing:
        raise UserError(f"{root} has no images of {', '.join(missing[:5])}, which wnids.txt lists")
    names = tuple(words.get(name, name).split(",")[0] for name in ids)
    return Scan(tuple(files), np.array(labels, dtype=np.int64), names, np.array(tests), None, ())


def _annotations(path: Path) -> list[tuple[str, str]]:
    """Return the file and class of each validation image."""
    if not path.is_file():
        raise UserError(f"no {path}: Tiny-ImageNet's test images need this file, or folders val/WNID")
    fields = [line.split("\t") for line in path.read_text().splitlines() if line.strip()]
    return [(field[0], field[1]) for field in fields if len(field) > 1]


def fingerprint(files: Sequence[Path], root: Path) -> list[tuple[str, int, int, int]]:
    """Return the folder, and the name, size and times of every file, which form the key of the cache."""
    rows = [(str(root.resolve()), 0, 0, 0)]
    above = os.path.join(root, "")  # strings are several times faster than Path objects here
    below = len(above)
    for path in map(os.fspath, files):
        try:
            stat = os.stat(path)
        except OSError as problem:
            raise UserError(f"{path} cannot be opened: {problem.strerror}") from problem
        name = path[below:] if path.startswith(above) else path
        rows.append((name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    return rows
