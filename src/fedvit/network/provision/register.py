"""Register a site's public key at the server: the site's name belongs to that key from then on."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from fedvit.core.errors import UserError, one_line
from fedvit.core.files import write_json
from fedvit.network.flower.nodes import read_nodes
from fedvit.network.flower.template import PROFILE, QUIET
from fedvit.network.provision.keys import read_public_key
from fedvit.network.provision.server import read_study

NODES = "nodes.json"


class Registered(NamedTuple):
    """A site in the server's list."""

    site: str
    fingerprint: str
    node: int
    new: bool


def register_site(folder: Path, file: Path, *, replace: bool = False) -> Registered:
    """Register a site's public key with the SuperLink, and pin the site's name to it."""
    folder = folder.resolve()
    study, nodes = read_study(folder), read_nodes(folder / NODES)
    key, name, fingerprint = read_public_key(file)
    if name not in study.sites:
        raise UserError(f"{file} is the key of {one_line(name, 60)!r}, but the sites are {', '.join(study.sites)}")
    known = nodes.get(name)
    if known and known["key"] == key:
        return Registered(name, fingerprint, known["node"], new=False)
    owner = next((other for other, node in nodes.items() if node["key"] == key), None)
    if owner is not None:
        raise UserError(f"{file} is the key of the site {owner}, so it cannot be that of {name} too")
    if known and not replace:
        raise UserError(
            f"the site {name} already has another key ({known['fingerprint']}). If the site made a new key and "
            f"confirms its fingerprint {fingerprint}, repeat this with --replace; otherwise somebody else uses its name"
        )
    with tempfile.TemporaryDirectory() as place:
        checked = Path(place) / f"{name}.pub"  # what was checked, and nothing else that the file may say
        checked.write_text(f"{key} {name}\n")
        node = int(_flwr(folder, "supernode", "register", str(checked), PROFILE, "--name", name)["node-id"])
    write_json(folder / NODES, {**nodes, name: {"node": node, "key": key, "fingerprint": fingerprint}})
    if known:
        _flwr(folder, "supernode", "unregister", str(known["node"]), PROFILE)
    return Registered(name, fingerprint, node, new=True)


def _flwr(folder: Path, *words: str) -> dict[str, Any]:
    """Return what Flower's command answers."""
    environment = {**QUIET, **os.environ, "FLWR_HOME": str(folder / "flower")}
    command = [str(Path(sys.executable).parent / "flwr"), *words, "--format", "json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        answer = {}
    if not answer.get("success"):
        told = answer.get("error-message") or done.stderr or done.stdout
        raise UserError(
            f"the SuperLink did not accept `flwr {' '.join(words[:2])}`: {one_line(told, 600)}. Is its service "
            "running, and are you the user that it runs as?"
        )
    return answer
