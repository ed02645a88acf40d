"""The command search, and the search for learning rates that `run` and `compare` start with `--lr`."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from fedvit.cli.estimate import estimate_of
from fedvit.cli.flags import COMMON, EXPERIMENT, clear_errors, err, given, out, parse_seeds, takes
from fedvit.core.errors import UserError
from fedvit.engine.processes import prepare

if TYPE_CHECKING:
    from fedvit.engine.loop import Round
    from fedvit.report.progress import Progress
    from fedvit.studies.rates import Rates
    from fedvit.studies.rows import OnStart, Row

T = TypeVar("T")
_NOT_HERE = ("seed", "lr", "method", "eval_every", "until_accuracy")  # the rows and the search decide these


@takes(*(name for name in EXPERIMENT if name not in _NOT_HERE), *COMMON)
def search(
    rows: Annotated[
        list[str],
        typer.Argument(
            metavar="ROW...", help="Rows to search for, each a METHOD, a METHOD+TUNE or an experiment file."
        ),
    ],
    *,
    over: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TABLE.KEY=A,B,C",
            help="Setting to vary and its values; you can repeat this option (default: learning rates around each row's own).",
        ),
    ] = None,
    halving: Annotated[
        bool,
        typer.Option(
            "--halving",
            help="Train all values for a quarter of the rounds, the best half for half of them, and the best quarter to the end.",
        ),
    ] = False,
    seeds: Annotated[str, typer.Option(help="Seeds, separated by commas; a value counts by its mean over them.")] = "0",
    base: Annotated[Path | None, typer.Option("--from", help="Experiment file that all rows start from.")] = None,
    save: Annotated[Path | None, typer.Option(help="Also write the result to this JSON file.")] = None,
    **flags: Any,
) -> None:
    """Search for the best value of any setting, on validation images only.

    A fifth of each client's training images is held out, or as much as data.val says. The cost is printed before the
    search begins. If it is interrupted, give the same command again to continue.
    """
    with clear_errors(flags["debug"], flags["quiet"]):
        prepare(flags["workers"])
        from fedvit.config.load import parse_sets
        from fedvit.report.progress import Progress
        from fedvit.report.search_tables import found_lines, search_table
        from fedvit.studies.search import parse_over, save_search
        from fedvit.studies.search_rows import prepare_searches, run_searches, search_folder

        searches = prepare_searches(
            rows,
            parse_over(over or []),
            halving=halving,
            seeds=parse_seeds(seeds),
            base=base,
            sets=parse_sets(flags["sets"] or []),
            flags=given(flags),
        )
        folder = flags["out_dir"] or search_folder(searches)
        total = sum(one.rounds for one in searches)
        plans = dict.fromkeys(one.schedule.words(one.candidates) for one in searches)
        about = _about([(one.row, one.rounds) for one in searches], flags["workers"])
        many = f"{len(searches)} row{'s' * (len(searches) != 1)}"
        _say(f"search for {many} ({'; '.join(plans)}): {total} rounds in all{about}", flags["quiet"])
        with Progress(err, total, quiet=flags["quiet"]) as progress:
            found = _followed(progress, run_searches(searches, folder, _starter(progress), flags["workers"]))
        save_search(folder / "search.json", found)
        if save is not None:
            save_search(save, found)
        if not flags["quiet"]:
            told = [one.to_json() for one in found]
            out.print(search_table(told, several_labels=searches[0].row.first.data.several_labels))
            out.print("\n".join(found_lines(told)), soft_wrap=True, highlight=False, markup=False)
            out.print(f"results: {folder / 'search.json'}", soft_wrap=True, highlight=False)


def searched_rows(
    rows: "Sequence[Row]", rates: "Rates", folder: Path, *, workers: int | None, quiet: bool
) -> "list[Row]":
    """Search a learning rate for every row in `folder`, show what was found, and return the rows at those rates."""
    from fedvit.report.progress import Progress
    from fedvit.report.search_tables import found_lines
    from fedvit.studies.rates import planned_rounds, search_rates, words_of_search

    each = [(row, planned_rounds(row, rates)) for row in rows]
    total = sum(rounds for _, rounds in each)
    cost = f"{total} rounds{_about(each, workers)}"
    _say(f"searching a learning rate on validation images for {words_of_search(rows, rates)}: {cost}", quiet)
    with Progress(err, total, quiet=quiet) as progress:
        steps = search_rates(rows, rates, folder, on_start=_starter(progress), workers=workers)
        chosen = _followed(progress, steps)
    for line in found_lines([row.search for row in chosen if row.search is not None]):
        _say(line, quiet)
    return chosen


def _about(searches: "Sequence[tuple[Row, int]]", workers: int | None) -> str:
    """Say how long so many rounds of these rows take; nothing if it cannot be told, since the run will say why."""
    from fedvit.engine.estimate import minutes_in_words

    try:
        minutes = sum(
            estimate_of(row.first, workers).minutes * rounds / row.first.train.rounds for row, rounds in searches
        )
    except UserError:
        return ""
    return f", about {minutes_in_words(minutes)}"


def _starter(progress: "Progress") -> "OnStart":
    """Return what tells the progress display that a candidate trains; earlier stages have been counted."""
    return lambda row, seed, done: progress.start(f"{row.label}, seed {seed}", 0, announced=True)


@dataclass(frozen=True)
class _SeenRound:
    """A round as a search shows it: with the accuracy on validation images, and none on test images."""

    row: dict[str, Any]
    seconds: dict[str, float]


def _followed(progress: "Progress", steps: "Generator[Round, None, T]") -> T:
    """Run the steps to their end, show each round, and return their result."""
    while True:
        try:
            done = next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        views = done.row["views"]
        held_out = {"personal": {"mean": views["personal"]["val"]}} if views and "val" in views["personal"] else None
        progress.step(_SeenRound({**done.row, "views": held_out}, done.seconds))


def _say(line: str, quiet: bool) -> None:
    if not quiet:
        err.print(line, soft_wrap=True, highlight=False, markup=False)
