"""The `fedvit` command with all its subcommands, which import torch only when they run, so that help is fast."""

import typer

from fedvit.cli.advise import advise
from fedvit.cli.export import export, predict
from fedvit.cli.inspect import cost, datasets, methods, partition
from fedvit.cli.network import flower, split_client, split_server
from fedvit.cli.report import report
from fedvit.cli.run import compare, run, study
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
    run, compare, advise, report, cost, methods, datasets, partition, study, flower, export, predict, split_server, split_client,
):  # fmt: skip
    app.command(command.__name__.replace("_", "-"))(command)


def main() -> None:
    """Run the `fedvit` command."""
    with end_at_once():
        app()


if __name__ == "__main__":
    main()
