"""The folders of a study: one for its server, and one for each site, which holds no secret."""

import ipaddress
import os
import pwd
import re
import shutil
import socket
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
import torch
from jinja2 import Environment, PackageLoader, StrictUndefined

from fedvit.core.errors import UserError
from fedvit.core.files import writing
from fedvit.core.settings import Experiment
from fedvit.engine.net import make_net
from fedvit.network.flower import guard
from fedvit.network.flower.template import PROFILE, QUIET, for_sites, write_app
from fedvit.network.flower.trial import LOOPBACK, free_port
from fedvit.network.payload_check import down_of, up_of
from fedvit.network.policy import MEGABYTE, epochs_of
from fedvit.network.provision.keys import LOCAL, certificate_fingerprint, write_certificates
from fedvit.network.server import check_servable
from fedvit.network.site import Federation

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")  # names of folders, files and services
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
PLAIN_PATH = re.compile(r"[A-Za-z0-9/._+@=,~-]+")  # what systemd and nginx read without quoting
STUDY = "study.toml"  # in every folder: what it is about
PRIVILEGED = 1024  # only root may listen on ports below


@dataclass(frozen=True)
class Study:
    """What the server's and every site's folder say about a study."""

    name: str
    host: str
    port: int
    sites: tuple[str, ...]

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def read_study(folder: Path) -> Study:
    """Read what `write_study` wrote."""
    try:
        told = tomllib.loads((folder / STUDY).read_text())
        return Study(str(told["name"]), str(told["host"]), int(told["port"]), tuple(map(str, told["sites"])))
    except (OSError, KeyError, TypeError, ValueError) as problem:
        raise UserError(
            f"{folder} is not a folder that `fedvit provision` wrote: go to the server's or the site's folder, or name "
            "it with --out"
        ) from problem


def write_study(folder: Path, study: Study) -> None:
    told = {"name": study.name, "host": study.host, "port": study.port, "sites": list(study.sites)}
    (folder / STUDY).write_text(tomli_w.dumps(told))


def provision(
    experiment: Experiment, sites: Sequence[str], classes: Sequence[str], host: str, port: int, folder: Path
) -> Study:
    """Write the server's folder, and one for each site, into a new folder that names the study."""
    folder = folder.resolve()
    experiment, federation = for_sites(experiment, sites, classes)
    study = Study(folder.name, host.strip("[]"), port, federation.sites)
    _check(study, folder)
    net = make_net(experiment, len(classes), torch.device("cpu"))
    check_servable(experiment, net, federation.sites)
    report = up_of(net, down_of(net, federation.sites, federation.sites[0], 0), 1)
    with writing(folder):
        server = folder / "server"
        server.mkdir(parents=True)
        server.chmod(0o700)
        write_server(server, study, experiment, federation)
        method = str(experiment.method["name"])
        rules = {
            "experiment": experiment,
            "label": experiment.label,
            "local": "local" + experiment.label.removeprefix(method),
            "epochs": epochs_of(experiment),
            "groups": sorted(report.trees),
            "megabytes": max(1, -(-report.nbytes // MEGABYTE)),
            "sha256": federation.hash_with(experiment),
        }
        for name in federation.sites:
            write_site(folder / "sites" / name, study, name, server / "ca.crt", rules)
    return study


def _check(study: Study, folder: Path) -> None:
    """Refuse what a file name, a service or a certificate cannot hold, before anything is written."""
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty: a study's keys are made once; give a new folder with --out")
    for what, name in (("a site", name) for name in study.sites):
        if not NAME.fullmatch(name):
            raise UserError(f"expected {what} named with letters, digits, '.', '_' and '-', found {name!r}")
    if not NAME.fullmatch(study.name):
        raise UserError(f"the folder names the study: expected letters, digits, '.', '_' and '-', found {study.name!r}")
    check_path(folder)
    if not is_host(study.host):
        raise UserError(
            f"--host expects the name or IP address under which sites reach the server, found {study.host!r}"
        )


def is_host(text: str) -> bool:
    try:
        return bool(ipaddress.ip_address(text))
    except ValueError:
        return HOST.fullmatch(text) is not None


def check_path(folder: Path) -> None:
    if not PLAIN_PATH.fullmatch(str(folder)):
        raise UserError(
            f"a service cannot use the folder {folder}: expected a path of letters, digits and the characters ._+@=,~-"
        )


def write_server(folder: Path, study: Study, experiment: Experiment, federation: Federation) -> None:
    write_certificates(folder, study.name, study.host)
    write_study(folder, study)
    write_app(folder / "app", experiment, federation, str(folder / "run"))
    link = free_port()
    profile = {"address": f"{LOOPBACK}:{link}", "root-certificates": str(folder / "ca.crt")}
    for part in ("flower", "gate"):
        (folder / part).mkdir()
    told = {"superlink": {"default": PROFILE, PROFILE: profile}}
    (folder / "flower" / "config.toml").write_text(tomli_w.dumps(told))
    (folder / "nodes.json").write_text("{}\n")
    data = experiment.data.folder
    content = {
        **surroundings(folder),
        "study": study,
        "link": link,
        "signed": guard.SIGNED,
        "local": LOCAL,
        "nginx": shutil.which("nginx") or "/usr/sbin/nginx",
        "privileged": study.port < PRIVILEGED,
        "ipv6": _has_ipv6(),
        "data_dir": str(data.resolve()) if data else "",
        "fingerprint": certificate_fingerprint(folder / "ca.crt"),
    }
    fill("nginx.conf", folder / "gate" / "nginx.conf", content)
    fill("superlink.service", folder / f"fedvit-{study.name}-superlink.service", content)
    fill("gate.service", folder / f"fedvit-{study.name}-gate.service", content)
    fill("flwr.sh", folder / "flwr", content)
    (folder / "flwr").chmod(0o755)
    fill("server.md", folder / "README.md", content)


def _has_ipv6() -> bool:
    """Return whether this machine can listen on IPv6 addresses; nginx does not start if it must and cannot."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::", 0))
            return True
    except OSError:
        return False


def write_site(folder: Path, study: Study, name: str, authority: Path, rules: dict[str, Any]) -> None:
    """Write what a site gets; it holds no secret, but must arrive unchanged, so the site compares a fingerprint."""
    folder.mkdir(parents=True)
    write_study(folder, study)
    shutil.copyfile(authority, folder / "ca.crt")
    content = {"study": study, "site": name, **rules}
    fill("policy.toml", folder / "policy.toml", content)
    fill("site.md", folder / "README.md", content)


def surroundings(folder: Path) -> dict[str, Any]:
    """Return what the services of a folder need to know about this machine."""
    return {
        "folder": folder,
        "user": pwd.getpwuid(os.geteuid()).pw_name,
        "python": sys.executable,
        "path": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
        "guard": guard.__name__,
        "quiet": QUIET,
        "loopback": LOOPBACK,
    }


def fill(template: str, file: Path, content: dict[str, Any]) -> None:
    """Write a file from a template, in which every name must be known."""
    found = Environment(
        loader=PackageLoader("fedvit.network.provision"), undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True, autoescape=False,
    )  # fmt: skip
    file.write_text(found.get_template(template).render(content))
