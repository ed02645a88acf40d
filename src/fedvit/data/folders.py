"""Image folders: class/image, site/class/image, domain/class/image, train and test, Tiny-ImageNet's own layout."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedvit.data.cache import UnreadableError
from fedvit.errors import UserError

Layout = Literal["auto", "class", "domain", "site", "tiny_imagenet"]
SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".gif", ".ppm", ".pgm"))
TRAIN, TEST, VAL = ("train", "training"), ("test", "testing"), ("val", "valid", "validation")


@dataclass(frozen=True)
class Scan:
    """What lies in a folder, before any image is read."""

    files: tuple[Path, ...]
    labels: NDArray[np.int64]
    class_names: tuple[str, ...]
    official_test: NDArray[np.bool_] | None
    groups: NDArray[np.int64] | None
    group_names: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """Where a folder stands: its class, its domain or site, and whether the source calls it test."""

    label: str
    group: str | None
    part: str | None


def subfolders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def image_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_file() and not p.name.startswith("."))


def part_of(name: str) -> str | None:
    """train, test or val, if this is what a folder's name says."""
    for part, names in (("train", TRAIN), ("test", TEST), ("val", VAL)):
        if name.lower() in names:
            return part
    return None


def looks_like_images(folder: Path) -> bool:
    """Whether some image lies two or three levels down; looks at a few files only."""
    level = [folder]
    for _ in range(3):
        level = [child for parent in level[:3] for child in subfolders(parent)[:3]]
        if any(p.suffix.lower() in SUFFIXES for parent in level for p in image_files(parent)[:3]):
            return True
    return False


def leaves(root: Path) -> list[tuple[Path, tuple[str, ...]]]:
    """The folders without subfolders, with their path's parts; an empty one is a leaf too."""
    found = []
    for base, directories, _ in os.walk(root):
        directories[:] = sorted(name for name in directories if not name.startswith("."))
        if not directories and Path(base) != root:
            found.append((Path(base), Path(base).relative_to(root).parts))
    return found


def place(parts: tuple[str, ...], root: Path, layout: Layout) -> Place:
    """Read a leaf's path: train or test may stand first or second, then [domain or site,] class."""
    names = list(parts)
    part = None
    for position in range(min(2, len(names) - 1)):
        part = part_of(names[position])
        if part is not None:
            names.pop(position)
            break
    if len(names) == 1 and layout in ("auto", "class"):
        return Place(names[0], None, part)
    if len(names) == 2 and layout in ("auto", "domain", "site"):
        return Place(names[1], names[0], part)
    wanted = {"class": "class/image", "auto": "class/image or site/class/image"}.get(layout, f"{layout}/class/image")
    raise UserError(f"expected {wanted} in {root}, found a folder {'/'.join(parts)}; --set data.layout= decides")


def group_names(root: Path, layout: Layout) -> tuple[str, ...]:
    """The domains or sites below a folder; none where classes come first."""
    if layout in ("class", "tiny_imagenet") or is_tiny_imagenet(root):
        return ()
    groups: dict[str, None] = {}
    for top in subfolders(root):
        inner = subfolders(top)
        if part_of(top.name) is not None:
            groups.update({group.name: None for group in inner if subfolders(group)})
        elif inner:
            groups[top.name] = None
    return tuple(sorted(groups))


def is_tiny_imagenet(root: Path) -> bool:
    return (root / "wnids.txt").is_file() and (root / "train").is_dir()


def scan(root: Path, layout: Layout, class_list: Sequence[str]) -> Scan:
    """Every image file with its class, group and part."""
    if layout == "tiny_imagenet" or (layout == "auto" and is_tiny_imagenet(root)):
        return scan_tiny_imagenet(root)
    placed = [(folder, place(parts, root, layout), image_files(folder)) for folder, parts in leaves(root)]
    if not placed:
        raise UserError(f"no image folders in {root}: expected class/image or site/class/image")
    if len({where.group is None for _, where, _ in placed}) > 1:
        plain = next(folder for folder, where, _ in placed if where.group is None)
        deep = next(folder for folder, where, _ in placed if where.group is not None)
        raise UserError(f"{root} mixes class/image ({plain.name}) and site/class/image ({deep.relative_to(root)})")
    names = agreed_classes(root, [(where, files) for _, where, files in placed], class_list)
    groups = tuple(sorted({where.group for _, where, _ in placed if where.group is not None}))
    parts = {where.part for _, where, _ in placed}
    test_part = "test" if "test" in parts else "val" if "val" in parts and "train" in parts else None
    files, labels, tests, owners = [], [], [], []
    for _, where, members in placed:
        for file in members:
            files.append(file)
            labels.append(names.index(where.label))
            tests.append(where.part == test_part)
            owners.append(groups.index(where.group) if where.group is not None else 0)
    return Scan(
        tuple(files),
        np.array(labels, dtype=np.int64),
        names,
        np.array(tests, dtype=np.bool_) if test_part else None,
        np.array(owners, dtype=np.int64) if groups else None,
        groups,
    )


def agreed_classes(
    root: Path, placed: Sequence[tuple[Place, list[Path]]], class_list: Sequence[str]
) -> tuple[str, ...]:
    """The class names of all sites, which must agree unless `data.class_names` lists them."""
    by_group: dict[str | None, set[str]] = {}
    for where, files in placed:
        by_group.setdefault(where.group, set()).add(where.label)
        if not files and not class_list and where.part in (None, "train"):
            site = f" of {where.group}" if where.group else ""
            raise UserError(f"the class {where.label!r}{site} in {root} is empty: remove the folder or fill it")
    every = set().union(*by_group.values())
    if class_list:
        strange = sorted(every - set(class_list))
        if strange:
            raise UserError(f"{root} has classes that data.class_names does not list: {', '.join(strange)}")
        return tuple(class_list)
    for group, mine in by_group.items():
        if mine != every:
            raise UserError(
                f"the sites in {root} have different class names: {group} lacks {', '.join(sorted(every - mine))}; "
                "rename the folders, or list all classes with --set data.class_names=a,b,c"
            )
    return tuple(sorted(every))


def scan_tiny_imagenet(root: Path) -> Scan:
    """train/WNID/images/*, and val/images/* with val_annotations.txt as the test set."""
    ids = (root / "wnids.txt").read_text().split()
    words = {}
    if (root / "words.txt").is_file():
        words = dict(line.split("\t", 1) for line in (root / "words.txt").read_text().splitlines() if "\t" in line)
    files, labels, tests = [], [], []
    for label, name in enumerate(ids):
        for file in image_files(root / "train" / name / "images"):
            files.append(file)
            labels.append(label)
            tests.append(False)
    numbers = {name: label for label, name in enumerate(ids)}
    for line in (root / "val" / "val_annotations.txt").read_text().splitlines():
        image, name = line.split("\t")[:2]
        files.append(root / "val" / "images" / image)
        labels.append(numbers[name])
        tests.append(True)
    names = tuple(words.get(name, name).split(",")[0] for name in ids)
    return Scan(tuple(files), np.array(labels), names, np.array(tests), None, ())


def fingerprint(files: Sequence[Path], root: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of every file: what the cache is keyed by, wherever the folder lies."""
    return [(str(file.relative_to(root)), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]


def decode(file: Path, size: int, modes: Counter[str]) -> NDArray[np.uint8]:
    """An image squashed to size x size, in colour; grey ones are converted, 16 bits become 8. Counts modes."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(file) as opened:
            image: Image.Image = opened
            if 0 in image.size:
                raise UnreadableError(f"{file} has a size of {image.size[0]} x {image.size[1]}")
            modes["grey" if image.mode in ("1", "L", "LA") or image.mode.startswith("I") else "colour"] += 1
            if image.mode.startswith("I"):  # PIL would cut 16-bit values off at 255 instead of scaling them
                image = Image.fromarray((np.asarray(image, dtype=np.int64).clip(0, 65535) // 257).astype(np.uint8))
            colour = image.convert("RGB")
        if colour.size != (size, size):
            colour = colour.resize((size, size), Image.Resampling.BILINEAR)
        return np.asarray(colour, dtype=np.uint8)
    except UnidentifiedImageError as problem:
        raise UnreadableError(f"{file} is not an image") from problem
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as problem:
        raise UnreadableError(f"{file} cannot be read: {problem}") from problem
