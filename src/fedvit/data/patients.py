"""Patients: whose image each one is, what contradicts that, and what a patient is called in the files of a run.

The names that a hospital uses stay in memory while a source is read. Everything afterwards knows patients by number,
and split.json by a hash with a secret salt, which is kept beside the decoded images.
"""

import hashlib
import os
import re
import secrets
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath

import numpy as np

from fedvit.core.errors import UserError
from fedvit.data.dataset import Labels
from fedvit.data.dicom import patients_from_headers
from fedvit.data.folders import FOLDER, HEADER, Note

SALT = "patients.salt"
NAMED = 3  # patients that one message points at


def find_patients(files: Sequence[Path], names: Sequence[str], rule: str, *, skip_bad: bool) -> tuple[str, ...]:
    """Return the patient of each file by data.patient's rule; `names` are the paths below the data."""
    if rule == HEADER:
        return patients_from_headers(files, skip_bad=skip_bad)
    return patients_from_paths(names, rule)


def patients_from_paths(names: Sequence[str], rule: str) -> tuple[str, ...]:
    """Return the patient of each path below the data: its last folder, or what the groups of a regex match in it."""
    if rule == FOLDER:
        return tuple(PurePosixPath(name).parent.name for name in names)
    try:
        pattern = re.compile(rule)
    except re.error as problem:
        raise UserError(f"data.patient={rule!r} is not a regular expression: {problem}") from problem
    if not pattern.groups:
        raise UserError(
            f"data.patient={rule!r} has no group: put the part of the path that is the patient into parentheses, as in "
            f"'(p[0-9]+)_', or use {FOLDER!r} for images in a folder per patient"
        )
    found = [pattern.search(name) for name in names]
    wrong = [name for name, match in zip(names, found, strict=True) if match is None or not any(match.groups())]
    if wrong:
        raise UserError(
            f"data.patient={rule!r} finds no patient in {len(wrong)} of {len(names)} paths, such as {wrong[0]}: the "
            "expression is searched for in the path below the data folder"
        )
    return tuple("/".join(group or "" for group in match.groups()) for match in found if match)


def contradictions(
    patients: Sequence[str], sites: Sequence[str], parts: Sequence[str], places: Callable[[int], str]
) -> list[Note]:
    """Find patients at two sites, and patients whom the source puts into two of train, val and test."""
    sites_of: dict[str, dict[str, int]] = defaultdict(dict)
    parts_of: dict[str, dict[str, int]] = defaultdict(dict)
    for number, (patient, site, part) in enumerate(zip(patients, sites, parts, strict=True)):
        sites_of[patient].setdefault(site, number)
        parts_of[patient].setdefault(part, number)
    return [
        *_split_patients(
            "patient at two sites",
            sites_of,
            places,
            "at more than one site",
            "a patient belongs to one site; if every site numbers its patients anew, put its name into their ids",
        ),
        *_split_patients(
            "patient in two parts",
            parts_of,
            places,
            "in more than one of train, val and test",
            "scores on people that were trained on are too good: move all images of a patient to one part",
        ),
    ]


def _split_patients(
    kind: str, found: dict[str, dict[str, int]], places: Callable[[int], str], where: str, why: str
) -> list[Note]:
    """Report patients with more than one value, by the places of two of their images and never by their names."""
    wrong = [" and ".join(places(n) for n in list(values.values())[:2]) for values in found.values() if len(values) > 1]
    if not wrong:
        return []
    some = "; ".join(wrong[:NAMED]) + (f"; and {len(wrong) - NAMED} more" if len(wrong) > NAMED else "")
    have = "1 patient has" if len(wrong) == 1 else f"{len(wrong)} patients have"
    return [Note(kind, tuple(wrong), f"{have} images {where} ({some}): {why}")]


def number_patients(patients: Sequence[str]) -> tuple[Labels, tuple[str, ...]]:
    """Return the number of each image's patient, in the order in which they first appear, and the names by number."""
    numbers: dict[str, int] = {}
    images = [numbers.setdefault(patient, len(numbers)) for patient in patients]
    return np.array(images, dtype=np.int64), tuple(numbers)


def hash_patients(names: Sequence[str], folder: Path) -> tuple[str, ...]:
    """Return for every patient a hash that nobody can link to a name without the salt in this folder."""
    salt = _salt_of(folder)
    return tuple(hashlib.blake2b(name.encode(), key=salt, digest_size=8).hexdigest() for name in names)


def _salt_of(folder: Path) -> bytes:
    """Return the salt of a folder, which only its owner can read; it is drawn when it is first needed."""
    path = folder / SALT
    try:
        if not path.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            handle, partial = tempfile.mkstemp(dir=folder)  # readable for its owner alone
            with os.fdopen(handle, "wb") as stream:
                stream.write(secrets.token_bytes(32))
            with suppress(FileExistsError):  # another process was faster, and its salt holds
                os.link(partial, path)
            os.unlink(partial)
        salt = path.read_bytes()
    except OSError as problem:
        raise UserError(
            f"{path}, the secret that hides patients' names, cannot be written or read ({problem.strerror}): set "
            "data.cache to a folder that can"
        ) from problem
    if len(salt) != 32:
        raise UserError(f"{path} is damaged: expected 32 bytes, found {len(salt)}; remove it")
    return salt
