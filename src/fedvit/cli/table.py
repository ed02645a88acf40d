"""The command that writes tables and figures for papers."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from fedvit.cli.flags import clear_errors, err
from fedvit.core.errors import UserError


def table(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Folders of comparisons, studies or runs.")],
    *,
    form: Annotated[
        str | None,
        typer.Option(
            "--format", help="Form of the table: csv, md or latex (default: by the suffix of --out, otherwise md)."
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="File for the table, .csv, .md or .tex; a file of that name is replaced (default: print the table).",
        ),
    ] = None,
    figure: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Also draw the comparison or study to this .svg, .pdf or .png file, replacing it."
        ),
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Print the traceback of an error.")] = False,
) -> None:
    """Write the table of a comparison for a paper, with published figures where a paper has the same row.

    The figures are those of the report; rows that have not finished are left out. LaTeX tables need the package
    booktabs. A figure from a paper with other settings than yours has a footnote that names them.
    """
    with clear_errors(debug):
        from fedvit.core.files import write_text
        from fedvit.report.load import collect
        from fedvit.report.paper_tables import write_tables
        from fedvit.studies.drawing import check_figure, draw_folder, trains_nothing
        from fedvit.studies.papers import tables_of

        form = _form(form, file)
        for path in (file, figure):
            if path is not None and (path.is_dir() or not path.parent.is_dir()):
                raise UserError(f"expected a file in a folder that exists, found {path}")
        check_figure(figure, folders)
        if trains_nothing(folders):
            if figure is None or file is not None:
                raise UserError(f"{folders[0]} is a study that trains nothing, so it has only a --figure and no table")
            groups, text = [], ""
        else:
            groups = collect(folders)
            text = write_tables(tables_of(groups, folders), form)
        try:
            if figure is not None:
                draw_folder(folders, groups, figure)
                err.print(f"figure: {figure}", soft_wrap=True, highlight=False, markup=False)
            if file is not None:
                write_text(file, text)
                err.print(f"table: {file}", soft_wrap=True, highlight=False, markup=False)
        except OSError as problem:
            raise UserError(f"{problem.filename} cannot be written: {problem.strerror}") from problem
        if file is None:
            sys.stdout.write(text)


def _form(form: str | None, file: Path | None) -> str:
    """Settle the form of the table from --format and the suffix of --out, which must agree."""
    from fedvit.report.paper_tables import FORMATS

    by_suffix = {suffix: name for name, suffix in FORMATS.items()}
    if form is not None and form not in FORMATS:
        raise UserError(f"--format expects csv, md or latex, found {form!r}")
    if file is None:
        return form or "md"
    named = by_suffix.get(file.suffix)
    if named is None:
        raise UserError(f"--out expects a file that ends in .csv, .md or .tex, found {file}")
    if form is not None and form != named:
        raise UserError(f"--out {file} does not fit --format {form}: name it {file.with_suffix(FORMATS[form]).name}")
    return named
