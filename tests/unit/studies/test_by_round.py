"""What is read off the rounds of a run besides the last one."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from fedvit.studies.by_round import best_micro, seconds_per_round
from fedvit.studies.measure import _reached


@dataclass
class Rounds:
    """The part of a run that is read."""

    rounds: list[dict[str, Any]] = field(default_factory=list)
    timings: list[dict[str, Any]] = field(default_factory=list)


def of(*accuracies: float | None) -> Any:
    """A run whose mean over clients is 10 points below the accuracy over images; None: no test in that round."""
    views = [None if a is None else {"personal": {"micro": a, "mean": a - 10}} for a in accuracies]
    return Rounds([{"round": number, "views": view} for number, view in enumerate(views, start=1)])


def test_convergence_is_the_first_round_within_half_a_point_of_the_best() -> None:
    assert best_micro([of(50.0, None, 59.4, 59.5, 60.0, 58.0)], "personal") == {"best_micro": 60.0, "converged": 4.0}
    both = [of(50.0, 60.0), of(80.0, 70.0)]
    assert best_micro(both, "personal") == {"best_micro": 70.0, "converged": 1.5}


def test_pfededits_targets_are_reached_by_the_accuracy_over_images() -> None:
    rows = of(50.0, 60.0, 70.0).rounds
    assert _reached(rows, "personal", 60.0, "micro") == rows[:2]
    assert _reached(rows, "personal", 60.0, "mean") == rows
    assert _reached(rows, "personal", 70.0, "mean") is None


def test_seconds_are_those_of_training_and_averaging_after_the_first_round() -> None:
    phases = [{"train": 9.0, "data": 5.0}, {"train": 2.0, "aggregate": 0.5, "evaluate": 7.0}, {"train": 3.5}]
    run: Any = Rounds(timings=[{"round": n, "seconds": seconds} for n, seconds in enumerate(phases, start=1)])
    assert seconds_per_round([run]) == pytest.approx(3.0)
    run.timings = run.timings[:1]
    assert seconds_per_round([run]) == 9.0
