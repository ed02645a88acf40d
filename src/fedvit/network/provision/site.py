"""A site's own part of a study: its key, its node's settings and its service, made on its own machine."""

import os
import tomllib
from pathlib import Path
from typing import NamedTuple

import tomli_w

from fedvit.core.errors import UserError
from fedvit.core.files import writing
from fedvit.data.manifest import is_manifest
from fedvit.network.flower.trial import free_port
from fedvit.network.provision.keys import certificate_fingerprint, read_public_key, write_node_key
from fedvit.network.provision.server import check_path, fill, read_study, surroundings


class Prepared(NamedTuple):
    """What a site shows after it has prepared its folder."""

    public: Path
    fingerprint: str  # of the public key
    authority: str  # the fingerprint of the server's authority
    service: Path


def prepare_site(folder: Path, name: str, data: Path | None, data_dir: Path | None) -> Prepared:
    """Make the key of a site, unless it has one, and write its node's settings and its service."""
    folder = folder.resolve()
    study = read_study(folder)
    if name not in study.sites:
        raise UserError(f"the sites of the study {study.name} are {', '.join(study.sites)}, found {name!r}")
    if not (folder / "ca.crt").is_file():
        raise UserError(f"{folder} has no ca.crt: expected the folder that the server sent to the site {name}")
    if data is None or not (data.is_dir() or (is_manifest(data) and data.is_file())):
        raise UserError(f"--data expects the site's images, a folder of class folders or a manifest, found {data}")
    check_path(folder)
    private, public = folder / f"{name}.key", folder / f"{name}.pub"
    state, service = folder / "state", folder / f"fedvit-{study.name}-{name}.service"
    with writing(folder):
        if not private.exists():
            write_node_key(private, public, name)
        for own in (state, folder / "flower"):
            own.mkdir(exist_ok=True)
            own.chmod(0o700)
        told = {"site": name, "data": os.path.abspath(data), "state": str(state), "policy": str(folder / "policy.toml")}
        if data_dir is not None:
            told["data-dir"] = str(data_dir.resolve())
        node = folder / "node.toml"
        known = tomllib.loads(node.read_text()) if node.exists() else {}
        node.write_text(tomli_w.dumps({**known, **told}))
        content = {**surroundings(folder), "study": study, "site": name, "port": free_port()}
        fill("site.service", service, content)
    _, _, fingerprint = read_public_key(public)
    return Prepared(public, fingerprint, certificate_fingerprint(folder / "ca.crt"), service)
