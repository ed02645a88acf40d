"""The commands. torch is imported only inside them, so that help is quick."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedvit.errors import UserError
from fedvit.processes import ending_at_once, prepare

app = typer.Typer(
    name="fedvit",
    help="Fine-tune one vision transformer over data that cannot leave its owners, and give every owner its own model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
out = Console(width=None if sys.stdout.isatty() else 120)  # nothing is cut in a file or a pipe
err = Console(stderr=True)


class Flags:
    """The flags that every training command has; each stands for one key of the experiment."""

    method: Annotated[
        str | None, typer.Option(help="Who keeps which weights: see `fedvit methods` (default: fedavg).")
    ] = None
    tune: Annotated[str | None, typer.Option(help="What is trained: full, head, bias, adapter, prompt, prefix, lora, or layer groups joined by commas (default: full).")] = None  # fmt: skip
    data: Annotated[
        str | None,
        typer.Option(help="A name (see `fedvit datasets`), an npz file or a folder of images (default: digits)."),
    ] = None
    data_dir: Annotated[Path | None, typer.Option(help="Folder of data and weights (default: $FEDVIT_DATA).")] = None
    samples: Annotated[int | None, typer.Option(help="Keep so many images only, the same number of every class.")] = None  # fmt: skip
    partition: Annotated[str | None, typer.Option(help="Split over clients: iid, dirichlet, dirichlet_train, pathological, dh, domain, site (default: site for folders of sites, else dirichlet).")] = None  # fmt: skip
    model: Annotated[
        str | None,
        typer.Option(
            help="A timm ViT or DeiT, resnet18, resnet50, resnet50_gn, shufflenet_v2_x0_5 (default: vit_micro)."
        ),
    ] = None
    image_size: Annotated[int | None, typer.Option(help="Side of the images in pixels (default: the model's own).")] = (
        None
    )
    patch_size: Annotated[int | None, typer.Option(help="Side of a patch in pixels (default: the model's own).")] = None
    weights: Annotated[Path | None, typer.Option(help="Pre-trained weights, a .safetensors file.")] = None
    pretrained: Annotated[bool | None, typer.Option("--pretrained", help="Pre-trained weights from timm's hub.")] = None
    clients: Annotated[int | None, typer.Option(help="Number of clients (default: the sites, else 24).")] = None
    cohort: Annotated[int | None, typer.Option(help="Clients sampled per round (default: all, at most 8).")] = None
    rounds: Annotated[int | None, typer.Option(help="Rounds (default: 16).")] = None
    epochs: Annotated[int | None, typer.Option(help="Local epochs per round (default: 2).")] = None
    batch: Annotated[int | None, typer.Option(help="Images per step (default: 32).")] = None
    lr: Annotated[float | None, typer.Option(help="Learning rate (default: the tune's published one).")] = None
    seed: Annotated[int | None, typer.Option(help="Seed of split, weights, sampling and order (default: 0).")] = None
    eval_every: Annotated[int | None, typer.Option(help="Evaluate every R rounds; 0: after the last only (default: 1 up to 100 clients, else 0).")] = None  # fmt: skip
    until_accuracy: Annotated[float | None, typer.Option(help="Stop when the mean personal accuracy reaches X percent.")] = None  # fmt: skip
    threads: Annotated[int | None, typer.Option(help="CPU threads; part of the result, since it changes float sums (default: 1).")] = None  # fmt: skip
    precision: Annotated[str | None, typer.Option(help="fp32 or bf16 (default: fp32).")] = None
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:0, cuda:0,1 ... (default: auto).")] = None


class Common:
    """The flags of every command that trains, beside the experiment's."""

    out_dir: Annotated[Path | None, typer.Option("--out", help="Folder for the results (default: a name under runs/).")] = None  # fmt: skip
    workers: Annotated[int | None, typer.Option(envvar="FEDVIT_WORKERS", help="Processes that share the clients' work; the result is the same for any number (default: as many as cores, memory and the clients of a round allow).", min=1)] = None  # fmt: skip
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress and no table.")] = False
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False
    sets: Annotated[list[str] | None, typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Any other setting; repeatable.")] = None  # fmt: skip


class Network:
    """The certificates of a connection."""

    cert: Annotated[Path | None, typer.Option(metavar="FILE", help="This side's certificate, a PEM file.")] = None
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="The key of --cert, a PEM file.")] = None
    ca: Annotated[Path | None, typer.Option(metavar="FILE", help="The certificate of the authority that signs the other side's.")] = None  # fmt: skip
    insecure: Annotated[bool, typer.Option("--insecure", help="No certificates; only for trials on this machine's own addresses.")] = False  # fmt: skip


EXPERIMENT = tuple(Flags.__annotations__)
NETWORK = tuple(Network.__annotations__)
COMMON = tuple(Common.__annotations__)


def takes(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command these flags as keyword arguments; each is written once, above."""
    groups = {name: group for group in (Flags, Common, Network) for name in group.__annotations__}

    def extend(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
        more = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=getattr(groups[name], name),
                annotation=groups[name].__annotations__[name],
            )
            for name in names
        ]
        command.__signature__ = inspect.Signature([*own, *more])  # type: ignore[attr-defined]
        return command

    return extend


def given(values: dict[str, Any]) -> dict[str, Any]:
    """The experiment's flags among a command's arguments."""
    return {name: values[name] for name in Flags.__annotations__ if name in values}


@contextmanager
def clear_errors(debug: bool = False, quiet: bool = False) -> Iterator[None]:
    """A user's mistake: one message on standard error, status 2. Warnings are shown there too, unless quiet."""
    import logging

    shown = logging.StreamHandler()
    shown.setLevel(logging.ERROR if quiet else logging.WARNING)
    shown.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    package = logging.getLogger("fedvit")
    package.addHandler(shown)
    try:
        yield
    except UserError as problem:
        if debug:
            import traceback

            traceback.print_exc()
        err.print(f"[bold red]error:[/] {escaped(str(problem))}", soft_wrap=True, highlight=False)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        err.print("interrupted; --resume continues after the last finished round")
        raise typer.Exit(1) from None
    finally:
        package.removeHandler(shown)


def escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


@app.command()
@takes(*EXPERIMENT, *COMMON)
def run(
    experiment: Annotated[
        Path | None, typer.Argument(metavar="[EXPERIMENT.toml]", help="Settings; flags win over them.")
    ] = None,
    *,
    engine: Annotated[
        str, typer.Option(help="local, or flower: one process a client on this machine, with messages over Flower.")
    ] = "local",
    resume: Annotated[bool, typer.Option("--resume", help="Continue after the last finished round of --out.")] = False,
    **flags: Any,
) -> None:
    """Train one method and write what every client gained from it."""
    with clear_errors(flags["debug"], flags["quiet"]):
        prepare(flags["workers"] if engine == "local" else 1)
        from fedvit import config, running
        from fedvit.experiment import Run
        from fedvit.report.progress import Progress
        from fedvit.report.tables import summary_table, time_line
        from fedvit.track import sent_in

        sets = config.parse_sets(flags["sets"] or [])
        settings, folder = running.settle(experiment, sets, given(flags), flags["out_dir"], resume=resume)
        if engine not in ("local", "flower"):
            raise UserError(f"--engine expects local or flower, found {engine!r}")
        steps = running.start_or_resume(settings, folder, resume=resume, workers=flags["workers"], engine=engine)
        with Progress(err, settings.train.rounds, quiet=flags["quiet"]) as progress:
            past = Run(folder).rounds if resume else []
            progress.start(settings.label, len(past), sum(map(sent_in, past)))
            for done in steps:
                progress.step(done)
        draw_choices(folder)
        report_at = write_report_of(folder)
        if not flags["quiet"]:
            out.print(summary_table(Run(folder).summary))
            out.print(time_line(Run(folder).summary, Run(folder).timings), soft_wrap=True, highlight=False)
            out.print(f"results: {folder}\nreport: {report_at}", soft_wrap=True, highlight=False)


@app.command()
@takes(*EXPERIMENT, *COMMON)
def compare(
    rows: Annotated[list[str], typer.Argument(metavar="ROW...", help="METHOD, METHOD+TUNE or an experiment file.")],
    *,
    seeds: Annotated[str, typer.Option(help="Seeds, joined by commas.")] = "0,1,2",
    resume: Annotated[
        bool, typer.Option("--resume", help="What a comparison always does: continue rows that were cut short.")
    ] = False,
    base: Annotated[Path | None, typer.Option("--from", help="An experiment file under all rows.")] = None,
    save: Annotated[
        Path | None, typer.Option(help="Also write the table, with settings and versions, to this JSON file.")
    ] = None,
    **flags: Any,
) -> None:
    """Compare rows on the same data, split and seeds; Local is always among them. Finished rows are not run again."""
    with clear_errors(flags["debug"], flags["quiet"]):
        import json

        prepare(flags["workers"])
        from fedvit import compare as comparing
        from fedvit import config
        from fedvit.report.plots import draw_comparison
        from fedvit.report.progress import Progress
        from fedvit.report.tables import comparison_table
        from fedvit.track import sent_in

        if flags["method"] is not None:
            raise UserError("in a comparison the rows name the methods: leave --method out")
        numbers = parse_seeds(seeds, flags["seed"])
        sets = config.parse_sets(flags["sets"] or [])
        table = comparing.make_rows(rows, numbers, base, sets, given(flags))
        folder = flags["out_dir"] or comparing.default_folder(table, sets)
        total = sum(experiment.train.rounds for row in table for experiment in row.experiments.values())
        with Progress(err, total, quiet=flags["quiet"]) as progress:
            steps = comparing.compare(
                table,
                folder,
                lambda row, seed, done: progress.start(
                    f"{row.label}, seed {seed}", done, sum(map(sent_in, comparing.run_of(folder, row, seed).rounds))
                ),
                flags["workers"],
            )
            for done in steps:
                progress.step(done)
        entries = json.loads((folder / "compare.json").read_text())
        if save is not None:
            comparing.save(save, table, entries)
        first = comparing.local_row(table).first
        title = (
            f"{first.data.name}, {first.partition.clients} clients ({first.partition.name}), "
            f"{first.model.name}, {first.train.rounds} rounds, seeds {', '.join(map(str, numbers))}"
        )
        runs = {row.label: [comparing.run_of(folder, row, seed) for seed in numbers] for row in table}
        draw_comparison(runs, folder / "compare.png", title)
        for run in (run for several in runs.values() for run in several):
            draw_choices(run.folder)
        report_at = write_report_of(folder)
        if not flags["quiet"]:
            out.print(comparison_table(entries, title))
            out.print(
                f"results: {folder / 'compare.json'}\npicture: {folder / 'compare.png'}\nreport: {report_at}",
                soft_wrap=True,
                highlight=False,
            )


def draw_choices(folder: Path) -> None:
    """choice.png beside the results of a method whose clients choose layers."""
    from fedvit.experiment import Run

    run = Run(folder)
    if run.summary.get("layers"):
        from fedvit.report import plots

        plots.draw_choices(run, folder / "choice.png")


def write_report_of(folder: Path) -> Path:
    """report.html beside the results."""
    from fedvit.report.page import write_report

    write_report([folder], folder / "report.html")
    return folder / "report.html"


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of runs or comparisons.")],
    *,
    file: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE.html",
            help="Where to write the page (default: report.html in DIR; of several, here).",
        ),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(
            help="Show the rounds and bytes until this accuracy in percent (default: three on the way).", min=0, max=100
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No table.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """One HTML page of runs and comparisons, finished or not: tables, figures, settings, commands."""
    with clear_errors(debug, quiet):
        from fedvit.report.page import write_report
        from fedvit.report.tables import report_table

        file = file or (folders[0] / "report.html" if len(folders) == 1 else Path("report.html"))
        groups = write_report(folders, file, target)
        if not quiet:
            for rows in groups:
                out.print(report_table(rows))
        out.print(f"report: {file}", soft_wrap=True, highlight=False)


def parse_seeds(text: str, single: int | None) -> list[int]:
    if single is not None:
        raise UserError("compare takes --seeds, such as --seeds 0,1,2, not --seed")
    try:
        return list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError as problem:
        raise UserError(f"--seeds expects whole numbers joined by commas, found {text!r}") from problem


@app.command()
@takes("method", "tune", "model", "image_size", "patch_size", "batch", "sets", "debug")
def cost(
    *,
    classes: Annotated[int, typer.Option(help="Number of classes.", min=1)] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Exact integers as JSON.")] = False,
    **flags: Any,
) -> None:
    """What a method sends, computes and keeps; trains nothing."""
    with clear_errors(flags["debug"]):
        from fedvit import config
        from fedvit.cost import cost as costs
        from fedvit.report.tables import cost_table

        experiment = config.load(None, config.parse_sets(flags["sets"] or []), given(flags))
        result = costs(experiment, classes)
        if as_json:
            print_json(result)
        else:
            out.print(cost_table(result, experiment.label, experiment.model.name))


@app.command()
def methods(as_json: Annotated[bool, typer.Option("--json", help="As JSON, with every option and its default.")] = False) -> None:  # fmt: skip
    """All methods and tunes, with their options."""
    from fedvit.catalogue import catalogue, catalogue_tables

    if as_json:
        print_json(catalogue("methods"))
    else:
        for table in catalogue_tables():
            out.print(table)


@app.command()
@takes("data_dir")
def datasets(*, as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False, **flags: Any) -> None:
    """All data sets by name, and which of them are here."""
    with clear_errors():
        from fedvit.data.datasets import catalogue
        from fedvit.report.tables import datasets_table
        from fedvit.settings import DataSettings

        settings = DataSettings(dir=flags["data_dir"])
        entries = catalogue(settings)
        if as_json:
            print_json(entries)
        else:
            out.print(datasets_table(entries, settings.folder))


@app.command()
@takes("data", "data_dir", "samples", "partition", "clients", "batch", "seed", "sets", "debug")
def partition(
    *,
    picture: Annotated[Path | None, typer.Option("--out", metavar="FILE.png", help="Draw clients by classes.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Images per client and class, as JSON.")] = False,
    **flags: Any,
) -> None:
    """Who would own what: a split's table, picture or JSON; trains nothing."""
    with clear_errors(flags["debug"]):
        from fedvit import config
        from fedvit.data import datasets
        from fedvit.data.partition import split_counts
        from fedvit.experiment import load_data
        from fedvit.report.tables import split_table

        if picture is not None and (picture.suffix not in (".png", ".svg", ".pdf") or not picture.parent.is_dir()):
            raise UserError(f"--out expects a .png, .svg or .pdf file in a folder that exists, found {picture}")
        experiment = config.load(None, config.parse_sets(flags["sets"] or []), given(flags))
        dataset = datasets.load(experiment.data, None)
        _, split = load_data(experiment, dataset)
        counts = split_counts(dataset, split)
        if picture is not None:
            from fedvit.report.plots import draw_split

            draw_split(counts, dataset.class_names, picture, f"{dataset.name}, {experiment.partition.name}")
        if as_json:
            print_json({"hash": split.to_json()["hash"], "class_names": dataset.class_names, "clients": counts})
        else:
            out.print(split_table(counts, f"{dataset.name}, {experiment.partition.name}"))
            if picture is not None:
                out.print(f"picture: {picture}", soft_wrap=True, highlight=False)


@app.command()
@takes(*(name for name in EXPERIMENT if name != "seed"), *COMMON)
def study(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A study; without one they are listed, with their cost.")
    ] = None,
    *,
    paper: Annotated[
        bool, typer.Option("--paper", help="The published settings, which need their data and GPUs.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the grid, its bytes and multiply-adds; run nothing.")
    ] = False,
    seeds: Annotated[str | None, typer.Option(help="Seeds, joined by commas (default: the study's).")] = None,
    target: Annotated[
        str | None, typer.Option(help="Accuracies in percent, joined by commas, whose cost is asked for.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="What a study always does: continue rows that were cut short.")
    ] = False,
    **flags: Any,
) -> None:
    """Run one of the papers' studies: a grid of runs that ends in a table, study.png and study.json.

    The small form takes minutes on two cores: on the embedded digits or, for studies of pre-trained weights, on the
    images and weights of the data folder where it has them (`--data digits`: not on those). Finished rows are not run
    again. Flags and --set hold for all rows.
    """
    with clear_errors(flags["debug"], flags["quiet"]):
        if name is None:
            from fedvit.studies.listing import studies_table

            out.print(studies_table())
            return
        prepare(flags["workers"])
        from fedvit.studies import command

        plan = command.prepare(name, paper=paper, seeds=seeds, target=target, flags=given(flags), sets=flags["sets"])
        if dry_run:
            out.print(command.preview(plan))
            return
        for shown in command.carry_out(plan, flags["out_dir"], flags["workers"], err, quiet=flags["quiet"]):
            if not flags["quiet"]:
                out.print(shown, soft_wrap=isinstance(shown, str), highlight=False)


@app.command()
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
        from fedvit import config
        from fedvit.flower_app import for_sites, names_of, need_flower, write_app

        need_flower()
        names, labels = names_of(sites), names_of(classes)
        given_sets = config.parse_sets(flags["sets"] or [])
        experiment = config.load(base, given_sets, given(flags), groups=tuple(names))
        experiment, federation = for_sites(experiment, names, labels)
        write_app(app_dir, experiment, federation, run_dir)
        out.print(
            f"app: {app_dir}\nsites: {', '.join(federation.sites)}\nclasses: {', '.join(federation.classes)}",
            soft_wrap=True, highlight=False,
        )  # fmt: skip


@app.command()
@takes("debug")
def export(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    *,
    client: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="This client's own model; repeatable.")
    ] = None,
    server: Annotated[bool, typer.Option("--server", help="The server's model, where the method has one.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Every client's model, and the server's.")] = False,
    form: Annotated[str, typer.Option("--format", help="timm (safetensors) or onnx (needs fedvit[onnx]).")] = "timm",
    out_dir: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for the files, or one file's name.")],
    **flags: Any,
) -> None:
    """Write models to take home; every file is checked against the run's own model."""
    with clear_errors(flags["debug"]):
        import fedvit
        from fedvit.exporting import export as exported
        from fedvit.report.tables import exported_line

        if form not in ("timm", "onnx"):
            raise UserError(f"--format expects timm or onnx, found {form!r}")
        run = fedvit.load_run(folder)
        wanted = {"clients": client or [], "server": server, "everything": everything}
        for one in exported(run, **wanted, form=form, out=out_dir):  # type: ignore[arg-type]
            out.print(exported_line(one.name, one.path, one.description), soft_wrap=True, highlight=False, markup=False)


@app.command()
@takes("debug")
def predict(
    source: Annotated[Path, typer.Argument(metavar="MODEL", help="An exported model, or the folder of a run.")],
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Image files, and folders of them.")],
    *,
    client: Annotated[str | None, typer.Option(metavar="NAME", help="Of a run: whose model.")] = None,
    server: Annotated[bool, typer.Option("--server", help="Of a run: the server's model.")] = False,
    top: Annotated[int, typer.Option(help="How many classes to name, likeliest first.", min=1)] = 1,
    table: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write a CSV instead of printing.")
    ] = None,
    **flags: Any,
) -> None:
    """Class names and probabilities for images. Files that cannot be read are named and passed over; status 2 then."""
    with clear_errors(flags["debug"]):
        from fedvit.predicting import model_of, predict_to

        unreadable = predict_to(out, model_of(source, client, server=server), images, top, table)
        if unreadable:
            raise UserError(f"{len(unreadable)} files could not be read: " + "; ".join(unreadable))


@app.command("split-server")
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
        from fedvit import config, running
        from fedvit.experiment import Run
        from fedvit.report.progress import Progress
        from fedvit.report.tables import summary_table, time_line
        from fedvit.split_server import serve
        from fedvit.track import sent_in
        from fedvit.transport.channel import identity_of

        identity = identity_of(address, *(flags[name] for name in NETWORK[:3]), insecure=flags["insecure"])
        names = [name.strip() for name in clients.split(",")]
        sets = config.parse_sets(flags["sets"] or [])
        wanted = {"clients": len(names)}
        settings, folder = running.settle(experiment, sets, wanted, flags["out_dir"], resume=resume)
        found = running.standing(settings, folder, resume=resume)

        def said(line: str) -> None:
            if not flags["quiet"]:
                err.print(line, soft_wrap=True, highlight=False, markup=False)

        if found != "finished":
            steps = serve(
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


@app.command("split-client")
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
        from fedvit import config
        from fedvit.policy import read_policy
        from fedvit.split_client import SplitClient
        from fedvit.transport.channel import identity_of

        identity = identity_of(server, *(flags[name] for name in NETWORK[:3]), insecure=flags["insecure"])
        settings = config.load(experiment, config.parse_sets(flags["sets"] or []), {})

        def said(line: str) -> None:
            if not flags["quiet"]:
                err.print(line, soft_wrap=True, highlight=False, markup=False)

        SplitClient(settings, name, state, data, read_policy(policy)).attend(server, identity, wait=wait, said=said)


def print_json(content: Any) -> None:
    import json

    sys.stdout.write(json.dumps(content) + "\n")


def main() -> None:
    """The entry point of the `fedvit` command."""
    with ending_at_once():
        app()


if __name__ == "__main__":
    main()
