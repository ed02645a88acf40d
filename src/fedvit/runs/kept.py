"""The round whose models a run keeps, and when it stops early: chosen on validation images, never on test images."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedvit.core.errors import UserError
from fedvit.core.settings import Experiment, RunSettings
from fedvit.data.partition.records import Partition

Rows = Sequence[Mapping[str, Any]]  # of rounds.jsonl


def best_round(rows: Rows) -> int | None:
    """Return the round with the highest mean validation accuracy of the clients' own models, the first of equals.

    A round in which some client could not be evaluated has the mean of other clients, so it comes after all others.
    """
    scored = _scored(rows)
    if not scored:
        return None
    best = max(scored, key=lambda row: (not row.get("failures_evaluation"), row["views"]["personal"]["val"]))
    return int(best["round"])


def is_over(rows: Rows, run: RunSettings) -> bool:
    """Return whether the last round has reached the requested accuracy, or patience has run out."""
    views = rows[-1]["views"] if rows else None
    mean = views["personal"]["mean"] if views else None
    if run.until_accuracy is not None and mean is not None and mean >= run.until_accuracy:
        return True
    best = best_round(rows) if run.patience is not None else None
    return best is not None and sum(row["round"] > best for row in _scored(rows)) >= (run.patience or 0)


def rounds_to_retain(rows: Rows, run: RunSettings) -> set[int]:
    """Return the best round as of each generation of the checkpoint: a damaged one may cost the newest round."""
    return {best for best in (best_round(rows), best_round(rows[:-1])) if best is not None and run.keep == "best"}


def kept_summary(rows: Rows, run: RunSettings) -> dict[str, Any] | None:
    """Return what summary.json says about the kept round, unless that is the last one by rule."""
    best = best_round(rows) if run.keep == "best" else None
    row = next((row for row in rows if row["round"] == best), None)
    if row is None:
        return None
    return {"rule": run.keep, "round": best, "val": row["views"]["personal"]["val"], "views": row["views"]}


def check_validation(experiment: Experiment, partition: Partition | None) -> None:
    """Refuse to choose a round without validation images; `partition` is None if only the sites know theirs."""
    run = experiment.run
    setting = "run.keep=best" if run.keep == "best" else f"run.patience={run.patience}"
    if run.keep == "last" and run.patience is None:
        return
    if partition is None:
        found = experiment.data.val > 0
    else:
        found = any(len(partition.clients[name].val) for name in partition.seen)
    if not found:
        raise UserError(
            f"{setting} chooses on validation images, and the clients have none: hold some of their training images "
            "out with --set data.val=0.2"
        )


def refuse_over_network(experiment: Experiment) -> None:
    """Refuse to keep the best round where sites keep their own parts, of the last two rounds only."""
    if experiment.run.keep == "best":
        raise UserError(
            "run.keep=best works in one process only (--engine local): between sites, each site keeps what is its own, "
            "of its last two rounds, and does not learn which round was the best; leave it out, or use run.patience"
        )


def _scored(rows: Rows) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["views"] and "val" in row["views"]["personal"]]
