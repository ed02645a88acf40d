"""Check a dataset before anything is trained: which files are bad, what is where, and what looks like a mistake."""

import hashlib
import os
import re
import stat
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from fedvit.core.errors import UserError
from fedvit.core.settings import DataSettings
from fedvit.data import dicom, folders
from fedvit.data.cache import UnreadableError
from fedvit.data.dataset import Dataset
from fedvit.data.decoding import decode
from fedvit.data.folders import Note
from fedvit.data.manifest import class_names, is_manifest, read_manifest
from fedvit.data.patients import contradictions, find_patients
from fedvit.data.sources import has_files, load_dataset, locate

NO_LABEL = "(no label)"
SHORTEST_TYPO = 6  # letters of a class name below which one different letter means nothing


@dataclass(frozen=True)
class PatientCount:
    """The patients of a site: how many, the fewest, median and most images of one, and how many each class has."""

    patients: int
    images: tuple[int, float, int]
    classes: dict[str, int]


@dataclass(frozen=True)
class Check:
    """Good images by site (an empty name if there are none) and class, what is bad, and what may be a mistake.

    An image with several labels counts for each of them.
    """

    counts: dict[str, dict[str, int]]
    images_of: dict[str, int]  # by site
    bad: tuple[Note, ...]
    hints: tuple[Note, ...]
    patients: dict[str, PatientCount] = field(default_factory=dict)  # by site, if the source says whose an image is

    @property
    def images(self) -> int:
        return sum(self.images_of.values())

    def to_json(self) -> dict[str, Any]:
        return {"images": self.images, **asdict(self)}


@dataclass(frozen=True)
class _Item:
    """One file or image: its name, and where it belongs."""

    name: str
    labels: tuple[str, ...]
    site: str
    part: str  # train, test or val, or nothing
    patient: str = ""


def check_files(path: Path, settings: DataSettings) -> Check:
    """Read every file of an image folder or manifest and return all findings at once."""
    if is_manifest(path):
        items, bad, files = _listed(path, settings)
    else:
        items, bad = _placed(path, settings)
        files = {item.name: path / item.name for item in items}
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        problems = pool.map(lambda file: _problem_with(file, settings.window, settings.max_pixels), files.values())
        found = dict(zip(files, problems, strict=True))
    bad += [Note(kind, (name,), f"{name} {text}") for name, (kind, text) in found.items() if kind]
    good = [item for item in items if not found[item.name][0]]
    wrong, hints = _judged(good, lambda item: _hash_of(files[item.name]), lambda item: files[item.name].stat().st_size)
    labels, sites = {label for item in items for label in item.labels}, {item.site for item in items}
    similar, typos = similar_names("classes", labels)
    same_sites = [Note("similar sites", note.names, note.text) for note in similar_names("sites", sites)[0]]
    patients = _count_patients(good)
    scans = [item.name for item in good if dicom.is_dicom(files[item.name])]
    if scans and not patients:
        text = f"{len(scans)} DICOM files name their patients: --set data.patient=dicom keeps their images together"
        hints.append(Note("headers", (scans[0],), text))
    findings = (*bad, *similar, *wrong), (*typos, *same_sites, *hints, *_lonely(patients))
    return Check(*_counted(good), *findings, patients)


def check_dataset(dataset: Dataset) -> Check:
    """Check a dataset in memory: counts, class names, and images that are there twice."""
    site_of = dataset.site_names if dataset.sites is not None else ("",)
    owners = dataset.sites if dataset.sites is not None else [0] * len(dataset)
    tests = dataset.official_test if dataset.official_test is not None else [None] * len(dataset)
    parts = {None: "", True: "test", False: "train"}
    items = [
        _Item(f"image {number}", labels, site_of[owner], parts[None if test is None else bool(test)])
        for number, (labels, owner, test) in enumerate(zip(_names_by_image(dataset), owners, tests, strict=True))
    ]
    numbers = {item.name: number for number, item in enumerate(items)}
    wrong, hints = _judged(items, lambda item: hashlib.sha256(dataset.images[numbers[item.name]].tobytes()).hexdigest())
    similar, typos = similar_names("classes", dataset.class_names)
    return Check(*_counted(items), (*similar, *wrong), (*typos, *hints))


def _names_by_image(dataset: Dataset) -> list[tuple[str, ...]]:
    names = dataset.class_names
    if dataset.several_labels:
        return [tuple(names[number] for number in row.nonzero()[0]) for row in dataset.labels]
    return [(names[label],) for label in dataset.labels]


def _counted(items: Sequence[_Item]) -> tuple[dict[str, dict[str, int]], dict[str, int]]:
    """Count images by site and class, and by site."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for item in items:
        counts[item.site].update(item.labels or (NO_LABEL,))
    by_class = {site: dict(sorted(classes.items())) for site, classes in sorted(counts.items())}
    return by_class, dict(sorted(Counter(item.site for item in items).items()))


def _count_patients(items: Sequence[_Item]) -> dict[str, PatientCount]:
    """Count the patients of every site, and how many images each has."""
    images: dict[str, Counter[str]] = defaultdict(Counter)
    classes: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for item in items if any(item.patient for item in items) else []:
        images[item.site][item.patient] += 1
        for label in item.labels or (NO_LABEL,):
            classes[item.site][label].add(item.patient)
    return {
        site: PatientCount(
            len(counts),
            (min(counts.values()), median(counts.values()), max(counts.values())),
            {label: len(who) for label, who in sorted(classes[site].items())},
        )
        for site, counts in sorted(images.items())
    }


def _lonely(patients: dict[str, PatientCount]) -> Iterator[Note]:
    """Point at sites and classes with one patient, who cannot be both trained on and tested with."""
    for site, found in patients.items():
        where = f" of {site}" if site else ""
        if found.patients == 1:
            yield Note("one patient", (site,), f"all images{where} are of one patient: train and test need one each")
            continue
        for label, count in found.classes.items():
            if count == 1:
                text = f"the class {label!r}{where} has one patient, who can only be trained on or tested with"
                yield Note("one patient", (site, label), text)


# Manifests and folders.


def _listed(path: Path, settings: DataSettings) -> tuple[list[_Item], list[Note], dict[str, Path]]:
    """Return every row of a manifest whose file exists, what is wrong with the manifest, and the files."""
    found = read_manifest(path, settings.site, settings.patient, skip_bad=True, task=settings.task)
    notes = [*found.notes, *found.missing]
    try:
        class_names(found, settings.class_list, path)
    except UserError as problem:
        notes.append(Note("classes", (), str(problem)))
    if not found.rows and not notes:
        notes.append(Note("manifest", (), f"{path} has no images: expected one line for each"))
    rows = {row.name: row for row in found.rows}
    items = [_Item(row.name, row.labels, row.site, row.part, row.patient) for row in rows.values()]
    return items, notes, {name: row.file for name, row in rows.items()}


def _placed(root: Path, settings: DataSettings) -> tuple[list[_Item], list[Note]]:
    """Return every file with its class, site and part, and what is wrong with the folders themselves."""
    if settings.layout == "tiny_imagenet" or (settings.layout == "auto" and folders.is_tiny_imagenet(root)):
        scan = folders.scan(root, settings.layout, (), follow=settings.follow_links)
        names = [os.path.relpath(file, root) for file in scan.files]
        return [_Item(n, (scan.class_names[y],), "", "") for n, y in zip(names, scan.labels, strict=True)], []
    found = folders.leaves(root, settings.patient, follow=settings.follow_links)
    items, bad = [], list(_misplaced(root))
    depths: dict[bool, str] = {}
    classes: dict[str, set[str]] = defaultdict(set)
    for leaf in found:
        folder = os.path.relpath(leaf.folder, root)
        try:
            where = folders.place(leaf.parts, root, settings.layout)
        except UserError as problem:
            bad.append(Note("folder", (folder,), str(problem)))
            continue
        depths.setdefault(where.site is None, folder)
        classes[where.site or ""].add(where.label)
        if not leaf.files and not settings.class_list and where.part in (None, "train"):
            bad.append(Note("empty folder", (folder,), f"{folder} is empty: remove the folder or fill it"))
        items += [_Item(f"{folder}/{n}", (where.label,), where.site or "", where.part or "") for n in leaf.files]
    if settings.patient is not None and items and not bad:
        items, wrong = _with_patients(root, items, settings.patient)
        bad += wrong
    if len(depths) > 1:
        text = f"class/image ({depths[True]}) and site/class/image ({depths[False]}) are mixed"
        bad.append(Note("folder", (depths[True], depths[False]), text))
    else:
        bad += _disagreement(classes, settings.class_list)
    if not items and not bad:
        bad.append(Note("folder", (), f"no images in {root}: expected class/image or site/class/image"))
    return items, bad


def _with_patients(root: Path, items: Sequence[_Item], rule: str) -> tuple[list[_Item], list[Note]]:
    """Add the patients that data.patient finds in the paths, and report what contradicts them."""
    names = [item.name for item in items]
    try:
        whose = find_patients([root / name for name in names], names, rule, skip_bad=True)
    except UserError as problem:
        return list(items), [Note("patient", (), str(problem))]
    test = "test" if any(item.part == "test" for item in items) else "val"  # as in folders.scan
    parts = [test if item.part == test else "" for item in items]
    wrong = contradictions(whose, [item.site for item in items], parts, names.__getitem__)
    return [replace(item, patient=who) for item, who in zip(items, whose, strict=True)], wrong


def _misplaced(root: Path) -> Iterator[Note]:
    """Report images beside folders, which nobody would ever read."""
    for base, directories, files in os.walk(root, followlinks=True):
        directories[:] = sorted(name for name in directories if not name.startswith("."))
        for name in sorted(files) if directories or Path(base) == root else []:
            if Path(name).suffix.lower() in folders.SUFFIXES and not name.startswith("."):
                place = os.path.relpath(os.path.join(base, name), root)
                yield Note("misplaced", (place,), f"{place} is not in a class folder, so it is never used")


def _disagreement(classes: dict[str, set[str]], listed: Sequence[str]) -> Iterator[Note]:
    """Report sites whose classes differ, or classes that data.class_names does not list."""
    every = set().union(*classes.values())
    if listed:
        strange = tuple(sorted(every - set(listed)))
        if strange:
            yield Note("classes", strange, f"data.class_names does not list {', '.join(strange)}")
        return
    for site, mine in sorted(classes.items()):
        if mine != every:
            lacks = ", ".join(sorted(every - mine))
            yield Note(
                "classes", (site,), f"{site} lacks {lacks}: rename folders, or list all with --set data.class_names=a,b"
            )


def check_source(settings: DataSettings) -> Check:
    """Check the folder, file or named dataset that these settings mean."""
    path = locate(settings)
    if path is not None and has_files(path):
        return check_files(path, settings)
    return check_dataset(load_dataset(settings, None))


def _problem_with(file: Path, window: str | None, most: int) -> tuple[str, str]:
    """Return the kind of a file's problem and what it is, or two empty texts."""
    try:
        about = file.stat()
        if not stat.S_ISREG(about.st_mode):
            return "not a file", "is not a regular file"
        if about.st_size == 0:
            return "empty", "is empty"
        decode(file, (8, 8), Counter(), window, most)
        return "", ""
    except OSError as problem:
        return "unreadable", f"cannot be opened: {problem.strerror}"
    except (UnreadableError, UserError) as problem:
        text = str(problem).removeprefix(f"{file} ")
        large = {
            "over data.max_pixels": "too large",
            "decompression bomb": "too large",
        }  # the second if warnings are errors
        kinds = {"is not an image": "not an image", "truncated": "truncated", **large}
        return next((kind for word, kind in kinds.items() if word in text), "unreadable"), text


def _hash_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# The same image twice, and names that are almost the same.


def _judged(
    items: Sequence[_Item], digest: Callable[[_Item], str], size: Callable[[_Item], int] = lambda item: 0
) -> tuple[list[Note], list[Note]]:
    """Find identical images; only those of the same size are compared. One with two labels is bad, others are hints."""
    by_size = defaultdict(list)
    for item in items:
        by_size[size(item)].append(item)
    same = defaultdict(list)
    for number, group in by_size.items():
        for item in group if len(group) > 1 else []:
            same[number, digest(item)].append(item)
    bad, hints = [], []
    for group in (group for group in same.values() if len(group) > 1):
        names = tuple(item.name for item in group)
        labels = {frozenset(item.labels) for item in group}
        sites, parts, who = ({getattr(item, key) for item in group} for key in ("site", "part", "patient"))
        told = f"the same image is at {', '.join(names)}"
        if len(labels) > 1:
            several = any(len(own) != 1 for own in labels)
            different = "different labels" if several else f"{len(labels)} labels"
            bad.append(Note("two labels", names, f"{told}: it has {different}"))
        elif len(sites) > 1:
            hints.append(Note("two sites", names, f"{told}: {len(sites)} sites have it"))
        elif len(who) > 1:
            hints.append(Note("two patients", names, f"{told}: {len(who)} patients have it"))
        elif len(parts) > 1:
            hints.append(Note("train and test", names, f"{told}: it is trained on and tested with"))
        else:
            hints.append(Note("twice", names, told))
    return bad, hints


def similar_names(what: str, names: Iterable[str]) -> tuple[list[Note], list[Note]]:
    """Find names that differ only in case, spaces or separators, and as hints those that differ in one letter."""
    by_key = defaultdict(list)
    for name in sorted(set(names)):
        by_key[_plain(name)].append(name)
    same = [
        Note(f"similar {what}", tuple(group), f"the {what} {_quoted(group)} differ only in case, spaces or separators")
        for group in by_key.values()
        if len(group) > 1
    ]
    pairs = [
        (by_key[a][0], by_key[b][0])
        for a, b in combinations(sorted(by_key), 2)
        if abs(len(a) - len(b)) <= 1 and _one_letter_apart(a, b)
    ]
    hints = [Note("typo", pair, f"the {what} {_quoted(pair)} differ in one letter") for pair in pairs]
    return same, hints


def _quoted(names: Iterable[str]) -> str:
    return " and ".join(repr(name) for name in names)


def _plain(name: str) -> str:
    return re.sub(r"[\s_\-]+", " ", unicodedata.normalize("NFKC", name).casefold()).strip()


def _one_letter_apart(a: str, b: str) -> bool:
    """Return whether b is the plural of a, or both are long and one letter was added, left out or mistyped."""
    short, long = sorted((a, b), key=len)
    if len(short) >= 3 and long == f"{short}s":
        return True
    if len(long) < SHORTEST_TYPO:
        return False
    start = next((i for i, (x, y) in enumerate(zip(short, long, strict=False)) if x != y), len(short))
    rest = short[start + (len(short) == len(long)) :]
    letters = long[start] + (short[start : start + 1] if len(short) == len(long) else "")
    return rest == long[start + 1 :] and letters.isalpha()
