"""The code of FedViT's own app, six lines beside the settings, and how a site tells it from other apps.

An app is code that a SuperNode runs. A site that runs no other app than this one gives a server no more than its policy
allows, because the code that enforces the policy is the site's own.
"""

import io
import json
import tomllib
import zipfile
from importlib.metadata import version
from typing import Any

from fedvit.core.errors import one_line

APP = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fedvit-app"
version = "1.0.0"
description = "A FedViT experiment for a server and its sites"
license = "MIT"
dependencies = ["fedvit[flower]=={version}"]

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "fedvit"

[tool.flwr.app.components]
serverapp = "fedvit_app.server_app:app"
clientapp = "fedvit_app.client_app:app"

[tool.flwr.app.config]  # override any of these with `flwr run --run-config`
out = {out}  # folder of the run at the server
resume = false  # continue the run in that folder
min-sites = 0  # number of sites that a round needs; 0: all
round-timeout = 3600.0  # seconds after which a site that has not answered is left out of a round
at-once = 0  # number of sites that work at the same time; 0: all
start-timeout = 600.0  # seconds to wait for all sites before the first round
data-dir = ""  # folder of pre-trained weights at the server; default: $FEDVIT_DATA
"""
SERVER = """from pathlib import Path

from fedvit.network.flower.apps import server_app

app = server_app(Path(__file__).parent)
"""
CODE = {
    "fedvit_app/__init__.py": "",
    "fedvit_app/server_app.py": SERVER,
    "fedvit_app/client_app.py": SERVER.replace("server_app", "client_app"),
}
LARGEST_FILE = 1_000_000  # bytes, unpacked
SETTINGS = ("fedvit_app/experiment.toml", "fedvit_app/federation.toml")  # read as data
PROJECT, LISTED = "pyproject.toml", ".info/CONTENT"


def app_config(out: str) -> str:
    """Return the pyproject.toml of an app whose runs are written to the folder `out`."""
    return APP.replace("{version}", version("fedvit")).replace("{out}", json.dumps(out))


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
