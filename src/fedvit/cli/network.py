"""The commands for training between machines: flower, split-server and split-client."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedvit.cli.flags import EXPERIMENT, NETWORK, clear_errors, err, given, out, takes
from fedvit.cli.run import write_report_of


@takes(*EXPERIMENT, "sets", "debug")
def flower(
    app_dir: Annotated[Path, typer.Argument(metavar="APP_DIR", help="A new folder for the app.")],
    *,
    base: Annotated[Path | None, typer.Option("--from", help="An experiment file; flags win over it.")] = None,
    sites: Annotated[str, typer.Option(help="The sites' names, joined by commas.")],
    classes: Annotated[str, typer.Option(help="The class names that all sites use, joined by commas.")],
    run_dir: Annotated[
        str, typer.Option("--out", metavar="DIR", help="The run's folder on the server's machine.")
    ] = "fedvit-run",
    **flags: Any,
) -> None:
    """Write a Flower app for real sites, each with a folder of class/image of its own; see docs/deploy.md."""
    with clear_errors(flags["debug"]):
        from fedvit.config.load import load_experiment, parse_sets
        from fedvit.network.flower.template import for_sites, names_of, need_flower, write_app

        need_flower()
        names, labels = names_of(sites), names_of(classes)
        given_sets = parse_sets(flags["sets"] or [])
        experiment = load_experiment(base, given_sets, given(flags), groups=tuple(names))
        experiment, federation = for_sites(experiment, names, labels)
        write_app(app_dir, experiment, federation, run_dir)
        out.print(
            f"app: {app_dir}\nsites: {', '.join(federation.sites)}\nclasses: {', '.join(federation.classes)}",
            soft_wrap=True, highlight=False,
        )  # fmt: skip


@takes(*NETWORK, "out_dir", "sets", "quiet", "debug")
def split_server(
    experiment: Annotated[Path, typer.Argument(metavar="EXPERIMENT.toml", help="Settings; the clients have the same.")],
    *,
    address: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where to listen.")],
    clients: Annotated[str, typer.Option(metavar="NAME,NAME", help="The clients' names, as in their certificates.")],
    resume: Annotated[bool, typer.Option("--resume", help="Continue after the last finished round of --out.")] = False,
    round_timeout: Annotated[
        float, typer.Option(metavar="S", min=1, help="Drop a client from a round that is silent for so many seconds.")
    ] = 600,
    min_sites: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="A round waits for so many clients; the first for all, at most --round-timeout."
        ),
    ] = 1,
    **flags: Any,
) -> None:
    """Split learning on a network: the server's side, which has the body and no images."""
    with clear_errors(flags["debug"], flags["quiet"]):
        from fedvit.config.load import parse_sets
        from fedvit.network.grpc.identity import identity_of
        from fedvit.network.grpc.server import serve_split
        from fedvit.report.progress import Progress
        from fedvit.report.tables import summary_table, time_line
        from fedvit.runs.folder import Run
        from fedvit.runs.resume import settle, standing
        from fedvit.runs.tracking import sent_in

        identity = identity_of(address, *(flags[name] for name in NETWORK[:3]), insecure=flags["insecure"])
        names = [name.strip() for name in clients.split(",")]
        sets = parse_sets(flags["sets"] or [])
        wanted = {"clients": len(names)}
        settings, folder = settle(experiment, sets, wanted, flags["out_dir"], resume=resume)
        found = standing(settings, folder, resume=resume)

        def said(line: str) -> None:
            if not flags["quiet"]:
                err.print(line, soft_wrap=True, highlight=False, markup=False)

        if found != "finished":
            steps = serve_split(
                settings,
                folder,
                address,
                identity,
                names,
                resume=found == "begun",
                patience=round_timeout,
                least=min(min_sites, len(names)),
                said=said,
            )
            with Progress(err, settings.train.rounds, quiet=flags["quiet"]) as progress:
                past = Run(folder).rounds if resume else []
                progress.start(settings.label, len(past), sum(map(sent_in, past)))
                for done in steps:
                    progress.step(done)
        report_at = write_report_of(folder)
        if not flags["quiet"]:
            out.print(summary_table(Run(folder).summary))
            out.print(time_line(Run(folder).summary, Run(folder).timings), soft_wrap=True, highlight=False)
            out.print(f"results: {folder}\nreport: {report_at}", soft_wrap=True, highlight=False)


@takes(*NETWORK, "sets", "quiet", "debug")
def split_client(
    experiment: Annotated[Path, typer.Argument(metavar="EXPERIMENT.toml", help="Settings; the server has the same.")],
    *,
    server: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the server listens.")],
    name: Annotated[str, typer.Option(metavar="NAME", help="This client's name, as in its certificate.")],
    state: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for what this client keeps: its head, tail and log.")
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="This client's images, a folder of class folders (default: play client NAME of the experiment's own data and partition).",
        ),
    ] = None,
    policy: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="TOML file with what may leave (default: all that the method sends)."),
    ] = None,
    wait: Annotated[
        float,
        typer.Option(
            metavar="S",
            min=0,
            help="Look so many seconds for a server that is not there, at the start and after a break.",
        ),
    ] = 60,
    **flags: Any,
) -> None:
    """Split learning on a network: one client's side, which has the images, the head and the tail."""
    with clear_errors(flags["debug"], flags["quiet"]):
        from fedvit.config.load import load_experiment, parse_sets
        from fedvit.network.grpc.client import SplitClient
        from fedvit.network.grpc.identity import identity_of
        from fedvit.network.policy import read_policy

        identity = identity_of(server, *(flags[name] for name in NETWORK[:3]), insecure=flags["insecure"])
        settings = load_experiment(experiment, parse_sets(flags["sets"] or []), {})

        def said(line: str) -> None:
            if not flags["quiet"]:
                err.print(line, soft_wrap=True, highlight=False, markup=False)

        SplitClient(settings, name, state, data, read_policy(policy)).attend(server, identity, wait=wait, said=said)
