"""What the rounds of runs tell besides the last one: the best round, when it was near, and seconds per round."""

from collections.abc import Sequence

from fedvit.runs.folder import Run
from fedvit.studies.rows import mean_of

NEAR = 0.5  # points below the best round at which PFedEdit's Table 7 may count a run as converged; it does not say
PHASES = ("train", "updates", "aggregate")  # those of a round that are the method's


def best_micro(runs: Sequence[Run], view: str) -> dict[str, float]:
    """Return the best round's accuracy over all images, and the first round near it, as means over the runs.

    The best round is chosen on test images, as PFedEdit reports it, so it is never a headline.
    """
    curves = [[(row["round"], row["views"][view]["micro"]) for row in run.rounds if row["views"]] for run in runs]
    best = [max(micro for _, micro in curve) for curve in curves]
    near = [next(r for r, micro in curve if micro >= top - NEAR) for curve, top in zip(curves, best, strict=True)]
    return {"best_micro": mean_of(best), "converged": mean_of(near)}


def seconds_per_round(runs: Sequence[Run]) -> float:
    """Return the mean seconds of training and averaging in a round after the first, in which no client merges."""
    rounds = [timing["seconds"] for run in runs for timing in run.timings[1:] or run.timings]
    return mean_of(sum(seconds.get(phase, 0.0) for phase in PHASES) for seconds in rounds)
