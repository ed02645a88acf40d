"""Command that prepares a study between sites: provision."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from fedvit.cli.flags import clear_errors, out, takes
from fedvit.core.errors import UserError


@takes("sets", "debug")
def provision(
    experiment: Annotated[
        Path | None, typer.Argument(metavar="[EXPERIMENT.toml]", help="At the server: the experiment to set up.")
    ] = None,
    *,
    sites: Annotated[
        str | None, typer.Option(metavar="NAME,NAME", help="At the server: names of the sites, separated by commas.")
    ] = None,
    classes: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME",
            help="At the server: class names that all sites use, separated by commas (default: the experiment's data.class_names).",
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(metavar="HOST", help="At the server: name or IP address under which the sites reach it."),
    ] = None,
    port: Annotated[
        int, typer.Option(metavar="PORT", min=1, max=65535, help="At the server: the one port that the sites reach.")
    ] = 8443,
    register: Annotated[
        Path | None,
        typer.Option(
            metavar="NAME.pub",
            help="At the server: register the public key that a site has sent, while the SuperLink runs.",
        ),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="With --register: the site has a new key; its old one is no longer valid.")
    ] = False,
    site: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="At a site: make its key and its service, in the folder that it received."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="At a site: its images, a folder with one folder per class, or their manifest."
        ),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            envvar="FEDVIT_DATA",
            help="At a site: folder that holds the pre-trained weights (default: $FEDVIT_DATA).",
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="DIR",
            help="With an experiment: new folder for the study, named after it (default: study). Otherwise the server's or the site's folder (default: this one).",
        ),
    ] = None,
    **flags: Any,
) -> None:
    """Set up training between sites, so that only the server can start code; see docs/deploy.md."""
    with clear_errors(flags["debug"]):
        from fedvit.network.flower.template import need_flower

        need_flower()
        if [experiment, register, site].count(None) != 2:
            raise UserError(
                "expected one of three: EXPERIMENT.toml with --sites and --host at the server, --site at a site, or "
                "--register at the server"
            )
        if experiment is not None:
            _set_up(experiment, sites, classes, host, port, folder or Path("study"), flags["sets"])
        elif site is not None:
            _prepare(site, data, data_dir, folder or Path())
        elif register is not None:
            _register(register, folder or Path(), replace=replace)


def _set_up(
    file: Path,
    sites: str | None,
    classes: str | None,
    host: str | None,
    port: int,
    folder: Path,
    sets: list[str] | None,
) -> None:
    from fedvit.config.load import load_experiment, parse_sets
    from fedvit.network.flower.template import names_of
    from fedvit.network.provision.server import provision

    if not sites or not host:
        raise UserError("expected --sites NAME,NAME and --host HOST with an experiment file")
    names = names_of(sites)
    experiment = load_experiment(file, parse_sets(sets or []), {}, sites=tuple(names))
    labels = names_of(classes or experiment.data.class_names or "")
    if not labels:
        raise UserError("expected --classes NAME,NAME, or data.class_names in the experiment file")
    study = provision(experiment, names, labels, host, port, folder)
    if os.geteuid() == 0:
        _say("note: you are root, so the services would run as root; better use an account of their own")
    _say(
        f"server: {folder / 'server'}, for {study.address}\n"
        f"sites: {', '.join(str(folder / 'sites' / name) for name in study.sites)}, without secrets, to be sent to them\n"
        f"next: read {folder / 'server' / 'README.md'}"
    )


def _prepare(name: str, data: Path | None, data_dir: Path | None, folder: Path) -> None:
    from fedvit.network.provision.site import prepare_site

    done = prepare_site(folder, name, data, data_dir)
    _say(
        f"send to the server: {done.public}\n"
        f"fingerprint of your key, to be read to the server by another way: {done.fingerprint}\n"
        f"fingerprint of the server's authority, to be compared with what the server reads to you: {done.authority}\n"
        f"next: read {folder / 'policy.toml'}, then start {done.service}"
    )


def _register(file: Path, folder: Path, *, replace: bool) -> None:
    from fedvit.network.provision.register import register_site

    done = register_site(folder, file, replace=replace)
    said = "registered" if done.new else "was registered already"
    _say(
        f"site {done.site}: {said}, as node {done.node}\n"
        f"fingerprint of its key: {done.fingerprint}\n"
        "compare it with what the site reads to you; if they differ, ask for the right key and register it with --replace"
    )


def _say(text: str) -> None:
    out.print(text, soft_wrap=True, highlight=False, markup=False, emoji=False)  # :AB: is part of a fingerprint
