"""Commands that show something without training: cost, methods, datasets and partition."""

import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.table import Table

from fedvit.cli.flags import EXPERIMENT, clear_errors, given, out, print_json, takes
from fedvit.core.errors import UserError

if TYPE_CHECKING:
    from fedvit.core.settings import Experiment


def catalogue(kind: Literal["methods", "tunes"]) -> list[dict[str, Any]]:
    """List each entry's name, one-sentence summary, departures from its paper, and options.

    A method's summary is the first line of its file.
    """
    from fedvit.methods import METHODS
    from fedvit.methods.tunes import TUNES

    entries = []
    for name, function in (METHODS if kind == "methods" else TUNES).items():
        text = sys.modules[function.__module__].__doc__ if kind == "methods" else function.__doc__
        parameters = inspect.signature(function).parameters
        defaults = {key: parameter.default for key, parameter in parameters.items()}
        summary = (text or "").strip().splitlines()[0]
        entries.append({"name": name, "summary": summary, "departs": departures(text or ""), "options": defaults})
    return [*entries, *outside_methods()] if kind == "methods" else entries


def departures(text: str) -> str:
    """Return what a docstring says after `Departs from the paper:`, up to the end of the paragraph, as one line."""
    return " ".join(text.partition("Departs from the paper:")[2].partition("\n\n")[0].split())


def outside_methods() -> list[dict[str, Any]]:
    """List the methods of other packages; one that cannot be used says why, and does not hide the others."""
    from fedvit.methods import METHODS, find_method, plugins

    entries = []
    for name, points in plugins.found().items():
        packages = ", ".join(plugins.package_of(point) for point in points)
        entry: dict[str, Any] = {"name": name, "summary": "", "options": {}, "package": packages}
        problem = plugins.clash(name, METHODS)
        try:
            if problem is not None:
                raise UserError(problem)
            function = find_method(name)
            text = function.__doc__ or sys.modules[function.__module__].__doc__ or ""
            options = {key: one.default for key, one in inspect.signature(function).parameters.items()}
            entry |= {"summary": f"{(text.strip().splitlines() or [''])[0]} [{packages}]", "options": options}
        except UserError as told:
            entry |= {"summary": f"error: {told}", "error": str(told)}
        entries.append(entry)
    return entries


def catalogue_tables() -> list[Table]:
    """Make the tables of methods and tunes for the terminal."""
    from fedvit.report.tables import plain_table

    tables = []
    for kind in ("methods", "tunes"):
        table = plain_table(kind)
        table.add_column(kind.removesuffix("s"), no_wrap=True)
        table.add_column("what it does")
        table.add_column("options (--set)")
        for entry in catalogue(kind):
            options = ", ".join(f"{key}={value}" for key, value in entry["options"].items())
            told = entry["summary"]
            if kind == "tunes" and not entry["departs"].startswith("nothing"):
                told = f"{told} Departs from the paper: {entry['departs']}"
            table.add_row(entry["name"], escape(told), options)
        tables.append(table)
    return tables


@takes(*EXPERIMENT, "workers", "sets", "debug")
def cost(
    experiment: Annotated[
        Path | None, typer.Argument(metavar="[EXPERIMENT.toml]", help="Experiment file; flags override it.")
    ] = None,
    *,
    classes: Annotated[int | None, typer.Option(help="Number of classes (default: those of the data).", min=1)] = None,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Measure this machine for some seconds with this model, method, tune and batch on images of noise, and keep the result for later runs.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print exact integers as JSON.")] = False,
    **flags: Any,
) -> None:
    """Show what a method sends, computes and stores, and what a run takes: minutes, memory, bytes. Trains nothing."""
    with clear_errors(flags["debug"]):
        from fedvit.cli.estimate import estimate_of, size_for
        from fedvit.config.load import load_experiment, parse_sets
        from fedvit.data.sources import is_known
        from fedvit.engine.cost import cost as costs
        from fedvit.report.tables import cost_table

        settings = load_experiment(experiment, parse_sets(flags["sets"] or []), given(flags))
        left_out = None
        try:
            size = size_for(settings)
        except UserError as problem:
            if not is_known(settings.data):
                raise
            size, left_out = None, str(problem)
        number = classes or (size.classes if size else 10)
        result = costs(settings, number)
        if size is not None:
            if calibrate:
                _measure(settings, number, size.shape, flags["workers"])
            result["run"] = estimate_of(settings, flags["workers"], number).to_json()
        else:
            result["run"] = None
        if as_json:
            print_json(result)
            return
        out.print(cost_table(result, settings.label, settings.model.name))
        if left_out is not None:
            out.print(f"left out: minutes, memory and bytes of a run, because {left_out}", soft_wrap=True)


def _measure(experiment: "Experiment", classes: int, shape: tuple[int, ...], workers: int | None) -> None:
    """Measure this machine with as many processes as a run would use."""
    import torch

    from fedvit.cli.estimate import estimate_of
    from fedvit.engine.calibrate import calibrate
    from fedvit.engine.net import make_net

    torch.set_num_threads(experiment.run.threads)
    net = make_net(experiment, classes, torch.device(experiment.run.devices[0]))
    calibrate(experiment, net, shape, estimate_of(experiment, workers, classes).workers)


def methods(as_json: Annotated[bool, typer.Option("--json", help="Print the methods as JSON, with every option and its default.")] = False) -> None:  # fmt: skip
    """List all methods and tunes with their options, after six methods that most people want."""
    from fedvit.cli.advise import six_table
    from fedvit.cli.inspect import catalogue, catalogue_tables

    if as_json:
        print_json(catalogue("methods"))
    else:
        for table in (six_table(), *catalogue_tables()):
            out.print(table)


@takes("data_dir", "sets", "debug")
def datasets(
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="[PATH]",
            help="Check this folder, npz file or named dataset: read every image, and report what is bad.",
        ),
    ] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list or the findings as JSON.")] = False,
    **flags: Any,
) -> None:
    """List all datasets by name and show which of them you have, or check one of them.

    The check counts images by site and class and names every file that cannot be read, class names that differ only in
    case, spaces or separators, and images that are there twice. The exit status is 2 if something is bad.
    """
    with clear_errors(flags["debug"]):
        from fedvit.cli.check import data_settings, end_if_bad, show
        from fedvit.data.sources import list_datasets
        from fedvit.report.tables import datasets_table

        settings = data_settings(path, flags)
        if path is not None:
            from fedvit.data.check import check_source

            found = check_source(settings)
            if as_json:
                print_json({"name": path, **found.to_json()})
            else:
                show(out, path, found)
            end_if_bad(found, skip_bad=settings.skip_bad)
            return
        entries = list_datasets(settings)
        if as_json:
            print_json(entries)
        else:
            out.print(datasets_table(entries, settings.folder))


@takes("data", "data_dir", "samples", "partition", "clients", "batch", "seed", "sets", "debug")
def partition(
    *,
    picture: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE.png", help="Also draw clients by classes to this .png, .svg or .pdf file."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the number of images per client and class as JSON.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Read every image of a folder and report what is bad.")
    ] = True,
    **flags: Any,
) -> None:
    """Show which client would own how many images of which class, without training.

    The files of a folder are checked as by `fedvit datasets PATH`, and the exit status is 2 if something is bad.
    """
    with clear_errors(flags["debug"]):
        from fedvit.cli.check import data_settings, end_if_bad, show
        from fedvit.config.load import load_experiment, parse_sets
        from fedvit.core.files import check_writable
        from fedvit.data.check import check_files
        from fedvit.data.partition.groups import count_patients
        from fedvit.data.partition.split import partition_counts
        from fedvit.data.sources import has_files, load_dataset, locate
        from fedvit.engine.worker import load_data
        from fedvit.report.tables import split_table

        if picture is not None and (picture.suffix not in (".png", ".svg", ".pdf") or not picture.parent.is_dir()):
            raise UserError(f"--out expects a .png, .svg or .pdf file in a folder that exists, found {picture}")
        if picture is not None:
            check_writable(picture.parent)
        settings = data_settings(flags["data"], flags, others=True)
        place = locate(settings)
        found = check_files(place, settings) if check and place is not None and has_files(place) else None
        try:
            experiment = load_experiment(None, parse_sets(flags["sets"] or []), given(flags))
            dataset = load_dataset(experiment.data, None)
        except UserError:
            if found is not None and not as_json:
                show(out, settings.name, found)
            raise
        _, partition = load_data(experiment, dataset)
        counts = partition_counts(dataset, partition)
        patients = {} if dataset.patients is None else count_patients(partition, dataset)
        if picture is not None:
            from fedvit.report.plots import draw_split

            draw_split(counts, dataset.class_names, picture, f"{dataset.name}, {experiment.partition.name}")
        if as_json:
            content: dict[str, Any] = {
                "hash": partition.to_json()["hash"],
                "class_names": dataset.class_names,
                "clients": counts,
            }
            if patients:
                content["patients"] = patients
            print_json({**content, "check": found and found.to_json()})
        else:
            out.print(split_table(counts, f"{dataset.name}, {experiment.partition.name}", patients))
            if picture is not None:
                out.print(f"picture: {picture}", soft_wrap=True, highlight=False)
            if found is not None:
                show(out, settings.name, found)
        if found is not None:
            end_if_bad(found, skip_bad=settings.skip_bad)
