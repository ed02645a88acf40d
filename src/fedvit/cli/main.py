"""The `fedvit` command with all its subcommands, which import torch only when they run, so that help is fast."""

from typing import Annotated

import typer

from fedvit import __version__
from fedvit.cli.advise import advise
from fedvit.cli.clinical import paired_tests
from fedvit.cli.export import evaluate, export, predict
from fedvit.cli.inspect import cost, datasets, methods, partition
from fedvit.cli.network import flower, split_client, split_server
from fedvit.cli.provision import provision
from fedvit.cli.report import report
from fedvit.cli.run import compare, run, study
from fedvit.cli.search import search
from fedvit.cli.table import table
from fedvit.engine.processes import end_at_once

app = typer.Typer(
    name="fedvit",
    help="Fine-tune one vision transformer over data that cannot leave its owners, and give every owner its own model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    run, compare, search, advise, report, table, cost, methods, datasets, partition, study, provision, flower, export,
    predict, evaluate, paired_tests, split_server, split_client,
):  # fmt: skip
    app.command(command.__name__.replace("_", "-"))(command)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedvit {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and end.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Take the options that come before any command."""


def main() -> None:
    """Run the `fedvit` command."""
    with end_at_once():
        app()


if __name__ == "__main__":
    main()
