"""Clinical scores below the table of a run or comparison, and the command that tests two runs image by image."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedvit.cli.flags import clear_errors, out, print_json, takes
from fedvit.core.errors import UserError

if TYPE_CHECKING:
    from fedvit.report.statistics import Row


def print_clinical(rows: "Sequence[Row]") -> None:
    """Print the clinical scores of a run, or of the first seed of every row, and the tests against Local."""
    from fedvit.report.clinical_tables import client_table, clinical_tables, paired_table, rows_table
    from fedvit.report.paired import EVERYONE, against_local
    from fedvit.report.statistics import LOCAL

    found = [(row.label, row.method, row.first.clinical) for row in rows if row.first.clinical is not None]
    if not found:
        return
    others = [own for _, method, own in found if method != LOCAL] or [own for _, _, own in found]
    if len(found) == 1:
        parts = clinical_tables(others[0])
    else:
        out.print(rows_table([(label, own) for label, _, own in found]))
        parts = client_table(others[0]) if len(others) == 1 else iter(())
    for part in parts:
        out.print(part, highlight=False)
    every = [record for row in rows for record in row.records]
    tested = [
        (f"{row.label}, seed {record.seed}" if len(row.records) > 1 else row.label, *against_local(record, every))
        for row in rows
        for record in row.records
    ]
    tests = {name: [one for one in own if one.client == EVERYONE] for name, own, _ in tested if own}
    if tests:
        out.print(paired_table("against Local on the same test images", tests, ("this", "Local")))
    elif len(rows) > 1:
        for why in dict.fromkeys(why for _, _, why in tested if why):
            out.print(f"not tested against Local: {why}", highlight=False, markup=False)
    out.print()


@takes("debug")
def paired_tests(
    first: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, or one that a site keeps of a run.")],
    second: Annotated[Path, typer.Argument(metavar="OTHER", help="Folder of another run on the same images.")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print the tests as JSON.")] = False,
    **flags: Any,
) -> None:
    """Test whether two runs do equally well on the same test images: DeLong's test and McNemar's, by patient.

    Both runs need run.clinical=true and run.predictions=true. Over a network, every site can compare its own images:
    the folders are those under runs/ in its state folder.
    """
    with clear_errors(flags["debug"]):
        from fedvit.report.clinical_tables import paired_table
        from fedvit.report.load import read_record
        from fedvit.report.paired import paired_tests as run_tests
        from fedvit.report.paired import why_untested

        for folder in (first, second):
            if not (folder / "run.toml").is_file():
                raise UserError(f"{folder} is not a run: expected a folder with run.toml in it")
        one, other = read_record(first), read_record(second)
        why = why_untested(one, other)
        if why:
            raise UserError(f"{first} and {second} cannot be compared image by image: {why}")
        found = run_tests(one, other)
        if as_json:
            print_json([test.to_json() for test in found])
        else:
            out.print(paired_table("the same test images under both runs", {one.label: found}))
