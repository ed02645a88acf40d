"""The probe behind advice: a few candidates for a few rounds, on training images only; the best two go on.

Every candidate runs on the same clients and cohorts, so that two of them can be compared client by client. Only clients
that have trained are counted: in a few rounds many are never sampled, which a full run makes up for.
"""

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedvit.core.errors import DivergedError
from fedvit.core.files import write_json
from fedvit.core.plan import Plan
from fedvit.core.settings import Experiment
from fedvit.data.dataset import Dataset
from fedvit.engine.loop import Round
from fedvit.methods import plan_of
from fedvit.report.statistics import LOCAL, interval
from fedvit.runs.folder import Run
from fedvit.runs.resume import start_or_resume
from fedvit.studies.advise_data import HELD_OUT
from fedvit.studies.advise_rules import Candidate

log = logging.getLogger(__name__)
ROWS, SHARE = 8, 0.2  # a probe costs at most this share of so many full runs
CAUTION = 0.9  # of that, because some cohorts have more images than others
FINALISTS = 2
FEWEST = 3  # candidates, unless even these are too many: a favourite, another one, and training alone
# In points of accuracy, from the spread of our measurements over settings:
LEAD, LEAD_OVER_LOCAL = 2.0, 5.0  # of the favourite over the other candidates, before any probe
PRIOR_SPREAD = 5.0  # how far a lead on new data is from that on other data
STOPPING_SPREAD = 10.0  # how far a lead at the very beginning is from that at the end
EARLY = 3  # before this round, a loss above that of guessing only means that training has just begun
MOST_ROUNDS = 16  # of a candidate; more would tell little more
TRAINS_TO_TEST = ("fedavg_ft",)  # methods that train every client whenever they are scored


@dataclass(frozen=True)
class Rungs:
    """How long candidates are probed: all of them up to round `first`, the finalists up to round `last`."""

    candidates: int
    first: int
    last: int
    rates: bool  # whether the best is also probed at a smaller rate


@dataclass(frozen=True)
class Probed:
    """What one candidate reached, on held-out training images of the clients that have trained."""

    label: str
    lr: float
    rounds: int
    accuracy: Mapping[str, float]  # in percent, by client; empty if training diverged
    loss: float | None  # of the last round's training; None if it is not a number
    chance: float  # the loss of guessing
    examples: float  # trained on so far, times passes
    seconds: float  # so far

    @property
    def mean(self) -> float:
        return float(np.mean(list(self.accuracy.values()))) if self.accuracy else 0.0


def plan_rungs(candidates: Sequence[Candidate], rounds: int, clients: int, cohort: int) -> Rungs | None:
    """Return the longest probe of the most candidates that its budget allows, or None if it allows none.

    The last candidates are left out while the best two would stop before half of the rounds, down to three: an order so
    early says little about the end. The budget is counted in the probe's own rounds, which leave out the images that
    are held out. Scoring a method that trains to be tested costs as much as a round of all clients.
    """
    most = CAUTION * SHARE * ROWS * rounds / (1 - HELD_OUT)
    scoring = [clients / cohort if c.method in TRAINS_TO_TEST else 0.0 for c in candidates]
    longest = [found for n in range(len(candidates), 1, -1) if (found := _longest(scoring[:n], most)) is not None]
    far = [found for found in longest if found.candidates >= FEWEST and found.last >= min(rounds / 2, MOST_ROUNDS)]
    enough = [found for found in longest if found.candidates >= FEWEST]
    return next(iter([*far, *enough[-1:], *longest]), None)


def _longest(scoring: Sequence[float], most: float) -> Rungs | None:
    """Return the longest probe of all these candidates in `most` rounds, given the rounds that scoring each costs."""
    tests = sorted(scoring, reverse=True)
    count, go_on = len(tests), min(FINALISTS, len(tests))
    fits = []
    for first in range(1, MOST_ROUNDS // 2 + 1):
        for last in range(max(2, 2 * first - 1), min(MOST_ROUNDS, 3 * first) + 1):
            spent = count * first + sum(tests) + go_on * (last - first) + sum(tests[:go_on])
            if spent <= most:
                fits.append(Rungs(count, first, last, rates=spent + last + tests[0] <= most))
    return max(fits, key=lambda rungs: (rungs.last, rungs.rates, rungs.first), default=None)


def probe_experiment(experiment: Experiment, data: Dataset, rounds: int) -> Experiment:
    """Return a candidate's experiment on the data of a probe, scored after its last round only."""
    clients = len(data.site_names)
    settings = {"name": "python", "samples": None, "val": 0.0, "unseen": 0, "auroc": False, "site": None}
    assert experiment.train.cohort is not None
    return experiment.model_copy(
        update={
            "data": experiment.data.model_copy(update=settings),
            "partition": experiment.partition.model_copy(
                update={"name": "site", "clients": clients, "min_samples": None}
            ),
            "train": experiment.train.model_copy(
                update={"rounds": rounds, "cohort": min(experiment.train.cohort, clients), "schedule": "constant"}
            ),
            "run": experiment.run.model_copy(
                update={
                    "eval_every": 0,
                    "until_accuracy": None,
                    "keep": "last",
                    "patience": None,
                    "track": None,
                    "before_after": False,
                    "clinical": False,
                }
            ),
        }
    )


@dataclass(frozen=True)
class Probe:
    """A probe in its folder, which remembers every score, so that it continues after an interruption."""

    folder: Path
    data: Dataset
    experiment_of: Callable[[Candidate], Experiment]

    @property
    def notes(self) -> Path:
        return self.folder / "probe.json"

    def run(self, candidate: Candidate, rounds: int, workers: int | None) -> Iterator[Round]:
        """Train a candidate up to this round, and note its score."""
        experiment = probe_experiment(self.experiment_of(candidate), self.data, rounds)
        folder = self.folder / f"{candidate.label}-lr{candidate.lr:g}"
        try:
            yield from start_or_resume(experiment, folder, resume=True, dataset=self.data, workers=workers)
        except DivergedError as problem:
            log.info("%s at %g diverged: %s", candidate.label, candidate.lr, problem)
        found = _read(Run(folder), candidate, experiment, self.data.classes, self.noted(candidate))
        write_json(self.notes, [*self._entries(), asdict(found)])

    def noted(self, candidate: Candidate) -> list[Probed]:
        """Return the scores of a candidate so far, one for every rung."""
        mine = (candidate.label, candidate.lr)
        return [Probed(**entry) for entry in self._entries() if (entry["label"], entry["lr"]) == mine]

    def score(self, candidate: Candidate, rounds: int) -> Probed | None:
        """Return what a candidate reached in this round, if it has been probed that far."""
        return next((found for found in self.noted(candidate) if found.rounds == rounds), None)

    def _entries(self) -> list[dict[str, Any]]:
        return json.loads(self.notes.read_text()) if self.notes.is_file() else []


def _read(run: Run, candidate: Candidate, experiment: Experiment, classes: int, before: Sequence[Probed]) -> Probed:
    """Read a candidate's score from its run; earlier rungs count with what they trained on to be scored."""
    assert candidate.lr is not None
    done = run.finished and len(run.rounds) == experiment.train.rounds  # if not, training diverged
    trained, tested = examples_trained(run, experiment)
    return Probed(
        candidate.label,
        candidate.lr,
        experiment.train.rounds,
        {row["client"]: row["personal_accuracy"] for row in run.clients if row["rounds_trained"]} if done else {},
        run.rounds[-1]["loss"] if done else None,
        _plan(experiment).loss_terms * math.log(classes),
        trained + tested * (len(before) + 1),
        sum(sum(timing["seconds"].values()) for timing in run.timings),
    )


def examples_trained(run: Run, experiment: Experiment) -> tuple[float, float]:
    """Count the images that a run trained on, times epochs and passes: in its rounds, and for one scoring."""
    sizes = {name: len(part["train"]) for name, part in run.split["clients"].items()}
    cohorts = sum(sizes[name] for row in run.rounds for name in row["cohort"])
    return cohorts * _passes(experiment), sum(sizes.values()) * _passes_to_test(experiment)


def expected_examples(experiment: Experiment, images: int, clients: int) -> float:
    """Return the same in advance, for a full run that is scored once."""
    train = experiment.train
    assert train.cohort is not None
    each_round = images / clients * train.cohort
    return train.rounds * each_round * _passes(experiment) + images * _passes_to_test(experiment)


def _passes(experiment: Experiment) -> float:
    """Return how often a client passes over its images in a round."""
    return float(_plan(experiment).passes(experiment.train.epochs)) * experiment.train.epochs


def _plan(experiment: Experiment) -> Plan:
    plan = plan_of(experiment)
    assert isinstance(plan, Plan)
    return plan


def _passes_to_test(experiment: Experiment) -> float:
    return float(experiment.train.epochs) if experiment.method["name"] in TRAINS_TO_TEST else 0.0


# Decisions.


def difference(a: Probed, b: Probed) -> list[float]:
    """Return how much better every client does with the first of two."""
    return [a.accuracy[name] - b.accuracy[name] for name in a.accuracy if name in b.accuracy]


def clearly_better(a: Probed, b: Probed) -> bool:
    """Tell whether the 95 % interval of the paired difference lies above zero."""
    found = interval(difference(a, b))
    return found is not None and found[0] > 0


def believed_lead(a: Probed, b: Probed, prior: float, rounds: int) -> float:
    """Return by how many points we believe that one candidate beats another after all `rounds`.

    What other data say, `prior`, counts as much as a measurement with a standard error of PRIOR_SPREAD points. The
    probe's error has two parts: that of its few clients and images, and that of stopping early, which is the larger
    the fewer of the rounds it ran.
    """
    lead = difference(a, b)
    if len(lead) < 2:
        return prior
    by_chance = float(np.var(lead, ddof=1)) / len(lead)
    by_stopping = (STOPPING_SPREAD * max(0.0, 1 - a.rounds / rounds)) ** 2
    weight = PRIOR_SPREAD**2 / (PRIOR_SPREAD**2 + by_chance + by_stopping)
    return prior + weight * (float(np.mean(lead)) - prior)


def learns(found: Probed) -> bool:
    """Tell whether training went well: the loss is a number and, after the first rounds, not above that of guessing."""
    return found.loss is not None and (found.rounds < EARLY or found.loss <= 1.05 * found.chance)


def choose(candidates: Sequence[Candidate], found: Mapping[str, Probed], rounds: int) -> Candidate:
    """Keep the first candidate unless it does not learn, or we believe that another one ends above it."""
    sound = [c for c in candidates if learns(found[c.key])] or list(candidates)
    favourite = found[sound[0].key]
    leads = {c.key: believed_lead(found[c.key], favourite, _prior(c), rounds) for c in sound[1:]}
    best = max(sound[1:], key=lambda c: leads[c.key], default=sound[0])
    return best if leads.get(best.key, 0.0) > 0 else sound[0]


def _prior(rival: Candidate) -> float:
    return 0.0 if rival.level else -LEAD_OVER_LOCAL if rival.method == LOCAL else -LEAD


def finalists(candidates: Sequence[Candidate], found: Mapping[str, Probed]) -> list[Candidate]:
    """Return who goes on: the favourite, unless it does not learn, and the best of the others.

    Training alone does not: it leads in early rounds, and would take the place of one that gets better later.
    """
    sound = [c for c in candidates if learns(found[c.key])] or list(candidates)
    others = sorted((c for c in sound[1:] if c.method != LOCAL), key=lambda c: -found[c.key].mean)
    return [sound[0], *others[: FINALISTS - 1]]


def slower(candidate: Candidate) -> Candidate:
    """Return the same candidate at a third of its rate, to one significant digit."""
    assert candidate.lr is not None
    return replace(candidate, lr=float(f"{candidate.lr / 3:.0e}"), level=False)


# The order of a probe.


@dataclass(frozen=True)
class Outcome:
    """What a probe found: the chosen candidate, everybody's last score, and the scores of the first rung."""

    chosen: Candidate
    last: Mapping[str, Probed]
    first: Mapping[str, Probed]


def next_step(
    probe: Probe, candidates: Sequence[Candidate], rungs: Rungs, rounds: int
) -> tuple[Candidate, int] | Outcome:
    """Return which candidate to probe next, up to which round; or the outcome, if all is done.

    `rounds` are those of a full run.
    """
    wanted = [(c, rungs.first) for c in candidates[: rungs.candidates]]
    first = _scores(probe, wanted)
    if len(first) < len(wanted):
        return wanted[len(first)]
    going_on = finalists(candidates[: rungs.candidates], first)
    wanted = [(c, rungs.last) for c in going_on]
    late = _scores(probe, wanted)
    if len(late) < len(wanted):
        return wanted[len(late)]
    chosen = choose(going_on, late, rounds)
    if rungs.rates or not learns(late[chosen.key]):
        gentle = slower(chosen)
        score = probe.score(gentle, rungs.last)
        if score is None:
            return gentle, rungs.last
        late[gentle.key] = score
        chosen = choose([chosen, gentle], late, rounds)
    alone = [c for c in candidates if c.method == LOCAL and c.key in first]
    if chosen.key in first:  # both stopped after as many rounds
        chosen = choose([chosen, *alone], first, rounds)
    return Outcome(chosen, {**first, **late}, first)


def _scores(probe: Probe, wanted: Sequence[tuple[Candidate, int]]) -> dict[str, Probed]:
    """Return the scores that are there, up to the first that is missing."""
    found = {}
    for candidate, rounds in wanted:
        score = probe.score(candidate, rounds)
        if score is None:
            break
        found[candidate.key] = score
    return found
