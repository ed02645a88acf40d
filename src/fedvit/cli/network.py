"""Commands for training across machines: flower, split-server and split-client."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedvit.cli.flags import EXPERIMENT, NETWORK, clear_errors, err, given, out, takes
from fedvit.cli.run import write_report_of


@takes(*EXPERIMENT, "sets", "debug")
def flower(
    app_dir: Annotated[Path, typer.Argument(metavar="APP_DIR", help="New folder for the app.")],
    *,
    base: Annotated[Path | None, typer.Option("--from", help="Experiment file; flags override it.")] = None,
    sites: Annotated[str, typer.Option(help="Names of the sites, separated by commas.")],
    classes: Annotated[str, typer.Option(help="Class names that all sites use, separated by commas.")],
    run_dir: Annotated[
        str, typer.Option("--out", metavar="DIR", help="Folder of the run on the server's machine.")
    ] = "fedvit-run",
    **flags: Any,
) -> None:
    """Write a Flower app for real sites, each of which has its own images in a class/image folder; see docs/deploy.md."""
    with clear_errors(flags["debug"]):
        from fedvit.config.load import load_experiment, parse_sets
        from fedvit.network.flower.template import for_sites, names_of, need_flower, write_app

        need_flower()
        names, labels = names_of(sites), names_of(classes)
        given_sets = parse_sets(flags["sets"] or [])
        experiment = load_experiment(base, given_sets, given(flags), sites=tuple(names))
        experiment, federation = for_sites(experiment, names, labels)
        write_app(app_dir, experiment, federation, run_dir)
        out.print(
            f"app: {app_dir}\nsites: {', '.join(federation.sites)}\nclasses: {', '.join(federation.classes)}\n"
            f"settings_sha256: {federation.hash_with(experiment)}",
            soft_wrap=True, highlight=False,
        )  # fmt: skip


@takes(*NETWORK, "out_dir", "sets", "quiet", "debug")
def split_server(
    experiment: Annotated[
        Path, typer.Argument(metavar="EXPERIMENT.toml", help="Experiment file; the clients must use the same settings.")
    ],
    *,
    address: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address to listen on.")],
    clients: Annotated[
        str,
        typer.Option(metavar="NAME,NAME", help="Names of the clients, as in their certificates, separated by commas."),
    ],
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --out after its last finished round.")
    ] = False,
    round_timeout: Annotated[
        float, typer.Option(metavar="S", min=1, help="Drop a client from the round after this many seconds of silence.")
    ] = 600,
    min_sites: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Number of connected clients that a round needs; the first round waits for all clients for up to --round-timeout.",
        ),
    ] = 1,
    **flags: Any,
) -> None:
    """Run the server of split learning on a network; it holds the model's body and no images."""
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
    experiment: Annotated[
        Path, typer.Argument(metavar="EXPERIMENT.toml", help="Experiment file; the server must use the same settings.")
    ],
    *,
    server: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address of the server.")],
    name: Annotated[str, typer.Option(metavar="NAME", help="Name of this client, as in its certificate.")],
    state: Annotated[
        Path, typer.Option(metavar="DIR", help="Folder for what this client keeps: its head, tail and log.")
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Folder of this client's images, with one folder per class, or their manifest (default: act as client NAME of the experiment's own data and partition).",
        ),
    ] = None,
    policy: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="TOML file with what the server may ask of this client and what may leave it (default: see policy.md).",
        ),
    ] = None,
    wait: Annotated[
        float,
        typer.Option(
            metavar="S",
            min=0,
            help="Number of seconds to keep trying to reach the server, at the start and after a lost connection.",
        ),
    ] = 60,
    **flags: Any,
) -> None:
    """Run one client of split learning on a network; it holds the images and the model's head and tail."""
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

        rules = read_policy(policy) if policy else None
        SplitClient(settings, name, state, data, rules).attend(server, identity, wait=wait, said=said)
