"""Commands that train: run, compare and study."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedvit.cli.also import check_also, run_local_too, start
from fedvit.cli.clinical import print_clinical
from fedvit.cli.doubts import show_doubts
from fedvit.cli.estimate import foretold, say_of_rows
from fedvit.cli.flags import COMMON, EXPERIMENT, clear_errors, err, given, out, parse_seeds, takes
from fedvit.cli.search import searched_rows
from fedvit.cli.verdict import print_verdict
from fedvit.core.errors import UserError
from fedvit.engine.processes import prepare


@takes(*EXPERIMENT, *COMMON)
def run(
    experiment: Annotated[
        Path | None, typer.Argument(metavar="[EXPERIMENT.toml]", help="Experiment file; flags override it.")
    ] = None,
    *,
    engine: Annotated[
        str,
        typer.Option(
            help="Engine: local, or flower, which runs one process per client on this machine and sends messages over Flower."
        ),
    ] = "local",
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --out after its last finished round.")
    ] = False,
    also: Annotated[
        list[str] | None,
        typer.Option(
            help="Afterwards also run Local with the same settings, in the folder local of the run, to know what every client gains; the only value is local."
        ),
    ] = None,
    **flags: Any,
) -> None:
    """Train one method and record what every client gains from it."""
    with clear_errors(flags["debug"], flags["quiet"]), foretold(show=not flags["quiet"]):
        prepare(flags["workers"] if engine == "local" else 1)
        from fedvit.config.load import parse_sets
        from fedvit.report.clinical_tables import label_table
        from fedvit.report.load import rows_in
        from fedvit.report.progress import Progress
        from fedvit.report.tables import privacy_line, summary_table, time_line
        from fedvit.runs.folder import Run
        from fedvit.runs.resume import settle
        from fedvit.runs.tracking import sent_in
        from fedvit.studies.rates import parse_rates, rates_folder
        from fedvit.studies.rows import Row

        sets = parse_sets(flags["sets"] or [])
        flags["lr"], by_search, rates = parse_rates(flags["lr"])
        settings, folder = settle(experiment, sets, given(flags), flags["out_dir"], resume=resume)
        with_local = check_also(also, settings, engine)
        if by_search:
            row = Row(settings.label, {settings.run.seed: settings})
            place = flags["out_dir"] / "search" if flags["out_dir"] else rates_folder(row, rates)
            (row,) = searched_rows([row], rates, place, workers=flags["workers"], quiet=flags["quiet"])
            flags["lr"] = row.first.train.lr
            settings, folder = settle(experiment, sets, given(flags), flags["out_dir"], resume=resume)
        steps = start(settings, folder, engine, resume=resume, workers=flags["workers"])
        total = settings.train.rounds * (2 if with_local else 1)
        with Progress(err, total, quiet=flags["quiet"]) as progress:
            past = Run(folder).rounds if resume else []
            foretells = engine == "local" and not Run(folder).finished  # the run's estimate comes first
            progress.start(settings.label, len(past), sum(map(sent_in, past)), announced=foretells)
            for done in steps:
                progress.step(done)
            rows = run_local_too(settings, folder, engine, progress, flags["workers"]) if with_local else []
        _draw_choices(folder)
        report_at = write_report_of(folder)
        if not flags["quiet"]:
            out.print(summary_table(Run(folder).summary))
            if rows:
                print_verdict(rows, folder / "sites.csv")
            if (private := privacy_line(Run(folder).summary)) is not None:
                out.print(private, soft_wrap=True, highlight=False)
            if settings.run.clinical:
                shown = rows or rows_in([folder])
                print_clinical(shown)
                own = next(row.first.clinical for row in shown if row.method == settings.method["name"])
                if settings.data.several_labels and own is not None:
                    out.print(label_table(own))
            out.print(time_line(Run(folder).summary, Run(folder).timings), soft_wrap=True, highlight=False)
            out.print(f"results: {folder}\nreport: {report_at}", soft_wrap=True, highlight=False)
            show_doubts([Run(folder)], searched=by_search)


@takes(*EXPERIMENT, *COMMON)
def compare(
    rows: Annotated[
        list[str],
        typer.Argument(metavar="ROW...", help="Rows to compare, each a METHOD, a METHOD+TUNE or an experiment file."),
    ],
    *,
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas.")] = "0,1,2",
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue rows that were interrupted, as a comparison always does.")
    ] = False,
    base: Annotated[Path | None, typer.Option("--from", help="Experiment file that all rows start from.")] = None,
    save: Annotated[
        Path | None, typer.Option(help="Also write the table, with settings and versions, to this JSON file.")
    ] = None,
    **flags: Any,
) -> None:
    """Compare methods on the same data, partition and seeds, always with Local; finished rows are not run again."""
    with clear_errors(flags["debug"], flags["quiet"]), foretold(show=False):
        import json

        prepare(flags["workers"])
        from fedvit.config.load import parse_sets
        from fedvit.report.plots import draw_comparison
        from fedvit.report.progress import Progress
        from fedvit.report.tables import comparison_table
        from fedvit.studies import compare as comparing
        from fedvit.studies.rates import parse_rates
        from fedvit.studies.rows import run_of, starter

        if flags["method"] is not None:
            raise UserError("in a comparison the rows name the methods: leave out --method")
        numbers = _seeds_of(seeds, flags["seed"])
        sets = parse_sets(flags["sets"] or [])
        asked = flags["lr"]
        flags["lr"], by_search, rates = parse_rates(asked)
        table = comparing.make_rows(rows, numbers, base, sets, given(flags))
        folder = flags["out_dir"] or comparing.comparison_folder(table, {**sets, "--lr": asked} if by_search else sets)
        if by_search:
            table = searched_rows(table, rates, folder / "search", workers=flags["workers"], quiet=flags["quiet"])
        if not flags["quiet"]:
            say_of_rows(table, folder, flags["workers"])
        total = sum(experiment.train.rounds for row in table for experiment in row.experiments.values())
        with Progress(err, total, quiet=flags["quiet"]) as progress:
            for done in comparing.compare(table, folder, starter(progress, folder), flags["workers"]):
                progress.step(done)
        asked_for, table = table, comparing.finished_rows(table, folder)
        entries = json.loads((folder / "compare.json").read_text())
        if save is not None:
            comparing.save_comparison(save, table, entries)
        first = comparing.local_row(table).first
        title = (
            f"{first.data.name}, {first.partition.clients} clients ({first.partition.name}), "
            f"{first.model.name}, {first.train.rounds} rounds, seeds {', '.join(map(str, numbers))}"
        )
        runs = {row.label: [run_of(folder, row, seed) for seed in numbers] for row in table}
        draw_comparison(runs, folder / "compare.png", title)
        for run in (run for several in runs.values() for run in several):
            _draw_choices(run.folder)
        report_at = write_report_of(folder)
        if not flags["quiet"]:
            out.print(comparison_table(entries, title, by="auroc" if first.data.several_labels else "mean"))
            shown = comparing.compared_rows(table, folder)
            print_verdict(shown, folder / "sites.csv")
            print_clinical(shown)
            out.print(
                f"results: {folder / 'compare.json'}\npicture: {folder / 'compare.png'}\nreport: {report_at}",
                soft_wrap=True,
                highlight=False,
            )
            show_doubts([run for several in runs.values() for run in several], searched=by_search)
        comparing.refuse_diverged(asked_for, folder)


def _draw_choices(folder: Path) -> None:
    """Draw choice.png next to the results if the clients of the method choose layers."""
    from fedvit.runs.folder import Run

    run = Run(folder)
    if run.summary.get("layers"):
        from fedvit.report import plots

        plots.draw_choices(run, folder / "choice.png")


def write_report_of(folder: Path) -> Path:
    """Write report.html next to the results."""
    from fedvit.report.page import write_report

    write_report([folder], folder / "report.html")
    return folder / "report.html"


def _seeds_of(text: str, single: int | None) -> list[int]:
    if single is not None:
        raise UserError("compare takes --seeds, such as --seeds 0,1,2, not --seed")
    return parse_seeds(text)


@takes(*(name for name in EXPERIMENT if name != "seed"), *COMMON)
def study(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="Study to run; without a name, all studies are listed with their cost."),
    ] = None,
    *,
    paper: Annotated[
        bool, typer.Option("--paper", help="Use the published settings, which need the papers' data and GPUs.")
    ] = False,
    every: Annotated[
        str | None,
        typer.Option(
            "--all",
            metavar="PAPER",
            help="Run all studies of fedperfix, fedpeft, pfededit or fedv in small, or with --paper at full size; runs with the same settings are run once.",
        ),
    ] = None,
    paper_all: Annotated[
        str | None, typer.Option("--paper-all", metavar="PAPER", help="The same as --all PAPER --paper.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the grid with its bytes and multiply-adds, and run nothing.")
    ] = False,
    seeds: Annotated[str | None, typer.Option(help="Seeds, separated by commas (default: the study's own).")] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="Accuracies in percent, separated by commas, for which to measure the cost of reaching them."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue rows that were interrupted, as a study always does.")
    ] = False,
    **flags: Any,
) -> None:
    """Run one of the papers' studies, a grid of runs that ends in a table, study.png and study.json.

    The small version takes minutes on two cores. It uses the embedded digits; a study of pre-trained weights uses the
    images and weights in the data folder instead, if they are there and you do not give `--data digits`. Finished rows
    are not run again. Flags and --set apply to all rows.
    """
    with clear_errors(flags["debug"], flags["quiet"]), foretold(show=False):
        if [name, every, paper_all] == [None, None, None]:
            from fedvit.studies.definitions import studies_table

            out.print(studies_table())
            return
        if (name, every, paper_all).count(None) < 2:
            raise UserError("a study, --all PAPER and --paper-all PAPER exclude each other: give one of them")
        prepare(flags["workers"])
        from fedvit.studies import run as studying
        from fedvit.studies import whole_paper
        from fedvit.studies.cells import unique_rows

        whole, place, console = every or paper_all, flags["out_dir"], {"console": err, "quiet": flags["quiet"]}
        same = {"seeds": seeds, "flags": given(flags), "sets": flags["sets"], "out": place}

        def foretell(plan: studying.Prepared) -> None:
            if not flags["quiet"] and plan.study.kind != "cost":
                say_of_rows(unique_rows(plan.cells), plan.home, flags["workers"])

        if whole is not None:
            if target is not None:
                raise UserError("--target is for a single study: give its name instead of a paper")
            plans = whole_paper.prepare_paper(whole, full=paper or paper_all is not None, **same)
            steps = whole_paper.carry_out_paper(plans, flags["workers"], before=foretell, **console)
        else:
            plan = studying.prepare_study(str(name), paper=paper, target=target, **same)
            steps = studying.carry_out(plan, flags["workers"], **console)
        if dry_run:
            out.print(whole_paper.preview_paper(whole, plans) if whole is not None else studying.preview(plan))
            return
        if whole is None:
            foretell(plan)
        for shown in steps:
            if not flags["quiet"]:
                out.print(shown, soft_wrap=isinstance(shown, str), highlight=False)
