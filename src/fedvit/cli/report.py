"""The command that writes a report."""

from pathlib import Path
from typing import Annotated

import typer

from fedvit.cli.flags import clear_errors, out


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of runs or comparisons.")],
    *,
    file: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE.html",
            help="File for the page (default: report.html in DIR, or in the current folder if you give several).",
        ),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(
            help="Show the rounds and bytes that it takes to reach this accuracy in percent (default: up to three accuracies on the way to the best).",
            min=0,
            max=100,
        ),
    ] = None,
    view: Annotated[
        str | None,
        typer.Option(
            help="Whose accuracy a target is: personal or server (default: personal; for a study, the view that it is about)."
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no table.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")] = False,
) -> None:
    """Write one HTML page about runs and comparisons, finished or not: tables, figures, settings and commands."""
    with clear_errors(debug, quiet):
        from fedvit.report.page import write_report
        from fedvit.report.tables import report_table
        from fedvit.report.verdict import headline

        file = file or (folders[0] / "report.html" if len(folders) == 1 else Path("report.html"))
        groups = write_report(folders, file, target, view)
        if not quiet:
            for rows in groups:
                out.print(report_table(rows))
                out.print(headline(rows), highlight=False, markup=False)
        out.print(f"report: {file}", soft_wrap=True, highlight=False)
