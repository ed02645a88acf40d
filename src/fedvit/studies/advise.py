"""Advice on which method to use: look at the data, apply the rules, and probe before promising."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedvit.config.hashing import settings_hash
from fedvit.config.load import load_experiment, read_tables
from fedvit.core.errors import UserError
from fedvit.core.files import check_writable, write_json
from fedvit.core.settings import Experiment
from fedvit.data.dataset import Dataset
from fedvit.data.partition.records import Partition
from fedvit.engine.cost import cost
from fedvit.engine.loop import Round
from fedvit.engine.worker import load_data
from fedvit.studies.advise_data import Profile, probe_dataset, profile_data
from fedvit.studies.advise_probe import FINALISTS, Outcome, Probe, Rungs, next_step, plan_rungs
from fedvit.studies.advise_rules import MOMENTUM, Candidate, candidates_for, rounds_for

SLOWEST_ROUND = 60.0  # seconds that sending may take in a round
OnStart = Callable[[Candidate, int], None]  # receives the candidate, and the round up to which it is probed


@dataclass(frozen=True)
class Question:
    """What advice is asked about: an experiment without method, tune and learning rate, and the limits."""

    file: Path | None
    sets: Mapping[str, Any]
    flags: Mapping[str, Any]
    link_mbit: float = 20.0  # between a client and the server, each way
    max_minutes: float | None = None  # of the run that is recommended

    def experiment(self, candidate: Candidate, rounds: int | None = None) -> Experiment:
        """Resolve the experiment with this candidate's method, tune and rate."""
        flags = {**self.flags, "method": candidate.method, "tune": candidate.tune, "lr": candidate.lr}
        if rounds is not None:
            flags["rounds"] = rounds
        return load_experiment(self.file, {**self.sets, **self.added_sets}, flags)

    @property
    def added_sets(self) -> dict[str, Any]:
        """The settings that advice adds: momentum for SGD, unless it was set."""
        if self._sets("train.momentum"):
            return {}
        plain = load_experiment(self.file, self.sets, {**self.flags, **_NEUTRAL})
        return {"train.momentum": MOMENTUM} if plain.train.optimizer == "sgd" else {}

    @property
    def sets_rounds(self) -> bool:
        """Whether the number of rounds was given, so that advice does not choose it."""
        return self.flags.get("rounds") is not None or self._sets("train.rounds")

    def _sets(self, path: str) -> bool:
        table, key = path.split(".")
        return bool({path, key} & set(self.sets)) or key in (read_tables(self.file) if self.file else {}).get(table, {})


_NEUTRAL = {"method": "fedavg", "tune": "full", "lr": None}  # to resolve everything else
NEUTRAL = Candidate("fedavg", "full", None)


def check_question(question: Question) -> None:
    """Refuse settings that advice chooses itself, and limits that make no sense."""
    for path in question.sets:
        if path.split(".")[0] in ("method", "tune") or path in ("train.lr", "lr"):
            raise UserError(
                f"advise chooses the method, the tune and the learning rate: leave out --set {path}; "
                "`fedvit compare` compares what you name"
            )
        if path in ("run.finetune", "finetune"):
            raise UserError(
                f"advise compares methods as they are, and some fine-tune already: leave out --set {path}, "
                "and add it to the command that advise prints"
            )
    for flag, value in (("--link-mbit", question.link_mbit), ("--max-minutes", question.max_minutes)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UserError(f"{flag} expects a number above 0, found {value:g}")


@dataclass(frozen=True)
class Look:
    """What advice knows before it probes."""

    question: Question
    profile: Profile
    candidates: Sequence[Candidate]  # the favourite first
    rounds: int
    cohort: int
    folder: Path
    whole: tuple[Dataset, Partition]
    data: Dataset  # of the probe: training images only
    rungs: Rungs | None  # None: there is no probe
    too_large: Sequence[str] = ()  # candidates that were left out because they send too much for the link

    def experiment(self, candidate: Candidate) -> Experiment:
        """Return the full run of a candidate."""
        return self.question.experiment(candidate, self.rounds)

    @property
    def probe(self) -> Probe:
        return Probe(self.folder / "probe", self.data, self.experiment)

    @property
    def probe_rounds(self) -> int:
        """How many rounds a probe from its start runs, over all candidates."""
        if self.rungs is None:
            return 0
        count, first, last = self.rungs.candidates, self.rungs.first, self.rungs.last
        return count * first + min(FINALISTS, count) * (last - first) + self.rungs.rates * last


def look(question: Question, out: Path | None, *, probe: bool = True, dataset: Dataset | None = None) -> Look:
    """Describe the data, and choose the candidates and the length of the probe by rule; nothing is trained."""
    check_question(question)
    plain = question.experiment(NEUTRAL)
    if plain.data.several_labels:
        raise UserError(
            f"the images of {plain.data.name} may have several labels, and the rules and evidence of advise are about "
            "images with one label; compare a few methods yourself with `fedvit compare fedavg fedper fedavg+head`"
        )
    dataset, partition = load_data(plain, dataset)
    profile = profile_data(plain, dataset, partition)
    cohort = plain.train.cohort
    assert cohort is not None
    rounds = plain.train.rounds if question.sets_rounds else rounds_for(profile, cohort)
    candidates = [replace(c, lr=question.experiment(c).train.lr) for c in candidates_for(profile, plain.train, rounds)]
    candidates, too_large = _that_fit_the_link(question, candidates, profile.classes)
    data = probe_dataset(dataset, partition, plain.run.seed)
    sites = len(data.site_names)
    rungs = plan_rungs(candidates, rounds, sites, min(cohort, sites)) if probe else None
    folder = out or Path("runs") / f"advise-{Path(plain.data.name).stem}-{_digest(question, rounds)[:8]}"
    seen = Look(question, profile, candidates, rounds, cohort, folder, (dataset, partition), data, rungs, too_large)
    _check_folder(seen)
    return seen


def _that_fit_the_link(
    question: Question, candidates: Sequence[Candidate], classes: int
) -> tuple[list[Candidate], list[str]]:
    """Leave out candidates that send too much in a round for the link; the favourite stays in any case."""
    kept, left_out = list(candidates[:1]), []
    for candidate in candidates[1:]:
        sent = cost(question.experiment(candidate), classes)["nbytes"]
        if (sent["down"] + sent["up"]) * 8 / (question.link_mbit * 1e6) <= SLOWEST_ROUND:
            kept.append(candidate)
        else:
            left_out.append(candidate.label)
    return kept, left_out


def _digest(question: Question, rounds: int) -> str:
    """Hash the settings that a probe depends on."""
    return settings_hash(question.experiment(NEUTRAL, rounds), more=question.link_mbit)


def _check_folder(seen: Look) -> None:
    """Refuse a folder that holds something else, before anything is trained; note these settings in a new one."""
    note = seen.folder / "question.json"
    mine = {"settings_sha256": _digest(seen.question, seen.rounds)}
    if note.is_file():
        if json.loads(note.read_text()) != mine:
            raise UserError(f"{seen.folder} holds advice on other settings: give another --out")
        return
    if seen.folder.exists() and (not seen.folder.is_dir() or any(seen.folder.iterdir())):
        raise UserError(f"{seen.folder} is not empty and does not hold advice: give another --out")
    check_writable(seen.folder)
    seen.folder.mkdir(parents=True, exist_ok=True)
    write_json(note, mine)


def run_probe(seen: Look, on_start: OnStart = lambda *_: None, workers: int | None = 1) -> Iterator[Round]:
    """Probe the candidates; what is done already is not done again."""
    while seen.rungs is not None:
        step = next_step(seen.probe, seen.candidates, seen.rungs, seen.rounds)
        if isinstance(step, Outcome):
            return
        on_start(*step)
        yield from seen.probe.run(*step, workers)


def outcome_of(seen: Look) -> Outcome:
    """Return what the finished probe found; without a probe, the favourite."""
    if seen.rungs is None:
        return Outcome(seen.candidates[0], {}, {})
    found = next_step(seen.probe, seen.candidates, seen.rungs, seen.rounds)
    assert isinstance(found, Outcome)
    return found
