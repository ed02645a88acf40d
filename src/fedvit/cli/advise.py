"""The command that recommends a method: advise."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from fedvit.cli.flags import COMMON, EXPERIMENT, clear_errors, err, given, out, print_json, takes
from fedvit.engine.processes import prepare

CHOSEN = ("method", "tune", "lr", "eval_every", "until_accuracy")  # what advice decides, or does not need

SIX = {  # the methods that most people want, and why
    "local": "every client trains alone; whatever does not beat it is not worth a network",
    "fedavg": "one model for all; good where clients have the same classes and similar images",
    "fedavg_ft": "FedAvg, then each client fine-tunes; with --tune bias the best on 100 classes, and small to send",
    "fedper": "a shared body and a personal head; simple, steady under label skew",
    "fedrep": "the same, with the head trained first; the best from random weights and on two classes",
    "fed_rod": "a shared head and a personal one; the best with many classes, also for clients that never train",
}


def six_table() -> Table:
    """Make the table of the methods to try first."""
    from fedvit.report.tables import plain_table

    table = plain_table("six to try first; `fedvit advise` chooses among them for your data")
    table.add_column("method", no_wrap=True)
    table.add_column("why")
    for name, why in SIX.items():
        table.add_row(name, why)
    return table


@takes(*(name for name in EXPERIMENT if name not in CHOSEN), *COMMON)
def advise(
    experiment: Annotated[
        Path | None,
        typer.Argument(
            metavar="[EXPERIMENT.toml]", help="Experiment file; its method, tune and learning rate are not used."
        ),
    ] = None,
    *,
    link_mbit: Annotated[
        float, typer.Option(help="Speed of the link between a client and the server, in Mbit/s each way.")
    ] = 20.0,
    max_minutes: Annotated[
        float | None,
        typer.Option(help="Longest time for the recommended run on this machine; it gets fewer rounds if need be."),
    ] = None,
    probe: Annotated[
        bool,
        typer.Option("--probe/--no-probe", help="Try the candidates for a few rounds on held-out training images."),
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the advice as JSON.")] = False,
    **flags: Any,
) -> None:
    """Recommend a method, tune and learning rate for your data, with reasons, cost and the commands to run next.

    The advice rests on how your clients differ, on our own measurements, and on a short probe of a few candidates. The
    probe trains on a part of each client's training images and scores on the rest; test images are never used. It costs
    at most a fifth of eight full runs. Run the same command again to continue after an interruption.
    """
    with clear_errors(flags["debug"], flags["quiet"]):
        prepare(flags["workers"])
        from fedvit.config.load import parse_sets
        from fedvit.report.advice import advice_parts
        from fedvit.report.progress import Progress
        from fedvit.studies.advise import Question, look, outcome_of, run_probe
        from fedvit.studies.advise_answer import answer, save_answer

        question = Question(experiment, parse_sets(flags["sets"] or []), given(flags), link_mbit, max_minutes)
        seen = look(question, flags["out_dir"], probe=probe)
        with Progress(err, seen.probe_rounds, quiet=flags["quiet"]) as progress:
            steps = run_probe(
                seen,
                lambda candidate, rounds: progress.start(f"probing {candidate.label} to round {rounds}", 0),
                flags["workers"],
            )
            for done in steps:
                progress.step(done)
        outcome = outcome_of(seen)
        said = answer(seen, outcome, flags["workers"])
        save_answer(seen, outcome, said)
        if as_json:
            print_json(said)
        elif not flags["quiet"]:
            for part in advice_parts(said):
                command = isinstance(part, str) and part.startswith("  ")  # to be copied, so it stays on one line
                out.print(part, soft_wrap=command, highlight=False)
            out.print(f"advice: {seen.folder / 'advice.json'}", soft_wrap=True, highlight=False)
