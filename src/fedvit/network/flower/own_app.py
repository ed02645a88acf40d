"""Recognize FedViT's own app: settings from a server, and the six lines of code that this version writes.

An app is code that a SuperNode runs. A site that runs no other app than this one gives a server no more than its policy
allows, because the code that enforces the policy is the site's own.
"""

import io
import tomllib
import zipfile
from typing import Any

from fedvit.core.errors import one_line
from fedvit.network.flower.template import CODE, app_config

LARGEST_FILE = 1_000_000  # bytes, unpacked
SETTINGS = ("fedvit_app/experiment.toml", "fedvit_app/federation.toml")  # read as data
PROJECT, LISTED = "pyproject.toml", ".info/CONTENT"


def foreign(fab: bytes) -> str | None:
    """Return what in an app, as Flower packs it, is not FedViT's own; None if nothing is."""
    try:
        with zipfile.ZipFile(io.BytesIO(fab)) as packed:
            return _foreign(packed)
    except (zipfile.BadZipFile, ValueError, OSError, EOFError, NotImplementedError, RuntimeError) as problem:
        return f"it cannot be read ({one_line(problem, 80)})"


def _foreign(packed: zipfile.ZipFile) -> str | None:
    names = packed.namelist()
    expected = {*CODE, *SETTINGS, PROJECT, LISTED}
    if len(set(names)) < len(names) or set(names) != expected:
        other = sorted(set(names) ^ expected) or ["a file twice"]
        return f"its files are others: {one_line(other[0], 60)}"
    for entry in packed.infolist():
        if entry.file_size > LARGEST_FILE:
            return f"{entry.filename} is too large"
    for name, text in CODE.items():
        if packed.read(name) != text.encode():
            return f"{name} is another"
    if _without_config(packed.read(PROJECT).decode()) != _without_config(app_config("")):
        return f"{PROJECT} is another"
    return None


def _without_config(text: str) -> dict[str, Any]:
    """Return what pyproject.toml says apart from the settings of a start, which hold no code."""
    told = tomllib.loads(text)
    try:
        del told["tool"]["flwr"]["app"]["config"]
    except (KeyError, TypeError):
        return {}
    return told
