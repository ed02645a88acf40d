"""The answer of advice: what is recommended, what it costs, why, how sure that is, and the commands to run next."""

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w
import torch

from fedvit.config.load import FLAGS
from fedvit.core.files import write_json, write_text
from fedvit.core.settings import Experiment
from fedvit.engine.cost import cost
from fedvit.engine.estimate import Estimate, estimate_run
from fedvit.engine.net import make_net
from fedvit.engine.pool_size import number_of_workers
from fedvit.engine.system import cores, free_ram
from fedvit.report.statistics import LOCAL, interval
from fedvit.studies.advise import Look
from fedvit.studies.advise_probe import (
    ROWS,
    SHARE,
    Outcome,
    Probed,
    clearly_better,
    difference,
    expected_examples,
    learns,
)
from fedvit.studies.advise_rules import Candidate, evidence_for, reasons_for

SEEDS = "0,1,2"


def answer(seen: Look, outcome: Outcome, workers: int | None = 1) -> dict[str, Any]:
    """Put together everything that advice says, as plain values."""
    chosen = outcome.chosen
    full = seen.experiment(chosen)
    before = _estimate(seen, full, workers)
    rounds, minutes = _within_limit(seen, _minutes(seen, outcome, full) or before.minutes)
    each = sum(cost(full, seen.profile.classes)["nbytes"].values())
    on_link = each * 8 / (seen.question.link_mbit * 1e6)
    rows = _rows(seen, outcome)
    rivals = _rivals(seen, outcome)
    return {
        "data": seen.profile.to_json(),
        "machine": {
            "cores": cores(),
            "free_ram_mb": round(free_ram() / 1e6),
            "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        },
        "link_mbit": seen.question.link_mbit,
        "recommendation": {
            "label": chosen.label,
            "method": chosen.method,
            "tune": chosen.tune,
            "lr": chosen.lr,
            "optimizer": full.train.optimizer,
            "momentum": full.train.momentum,
            "rounds": rounds,
            "cohort": seen.cohort,
            "minutes": minutes,
            "how": "probe" if outcome.last else before.how,
            "memory_mb": before.memory_mb,
            "workers": before.workers,
            "nbytes_per_client_round": each,
            "nbytes": each * seen.cohort * rounds,
            "link_seconds_per_round": on_link,
        },
        "reasons": reasons_for(seen.profile, chosen),
        "evidence": [entry.to_json() for entry in evidence_for(seen.profile)],
        "probe": _probe_part(seen, outcome, rows),
        "verdict": verdict(seen, outcome),
        "doubts": _doubts(seen, outcome, rounds),
        "commands": {"run": run_command(seen, chosen, rounds), "compare": compare_command(seen, rivals, rounds)},
    }


def save_answer(seen: Look, outcome: Outcome, said: Mapping[str, Any]) -> None:
    """Write advice.json, and the row files that the command for comparing names."""
    for candidate in _rivals(seen, outcome):
        tables = {
            "method": {"name": candidate.method},
            "tune": {"name": candidate.tune},
            "train": {"lr": candidate.lr},
        }
        path = _row_file(seen, candidate)
        path.parent.mkdir(exist_ok=True)
        write_text(path, tomli_w.dumps(tables))
    write_json(seen.folder / "advice.json", said)


def _rivals(seen: Look, outcome: Outcome) -> list[Candidate]:
    """Return the rows worth comparing in full: the chosen one, the best other one, and Local."""
    others = [c for c in seen.candidates if c.label not in (outcome.chosen.label, LOCAL)]
    others.sort(key=lambda c: -outcome.last[c.key].mean if c.key in outcome.last else 0.0)
    alone = [c for c in seen.candidates if c.method == LOCAL and outcome.chosen.method != LOCAL]
    return [outcome.chosen, *others[:1], *alone]


# Cost.


def _estimate(seen: Look, full: Experiment, workers: int | None) -> Estimate:
    """Estimate the recommended run from its settings and data."""
    dataset, partition = seen.whole
    net = make_net(full, dataset.classes, torch.device(full.run.devices[0]))
    return estimate_run(full, net, dataset, partition, number_of_workers(workers, full, net, dataset, partition))


def _minutes(seen: Look, outcome: Outcome, full: Experiment) -> float | None:
    """Return the minutes of the recommended run at the pace of the probe, if there was one."""
    measured = outcome.last.get(outcome.chosen.key)
    if measured is None or not measured.examples:
        return None
    return (
        measured.seconds / measured.examples * expected_examples(full, seen.profile.images, seen.profile.clients) / 60
    )


def _within_limit(seen: Look, minutes: float) -> tuple[int, float]:
    """Return the rounds and minutes of the recommended run, with fewer rounds if it would take too long."""
    limit = seen.question.max_minutes
    if limit is None or minutes <= limit:
        return seen.rounds, minutes
    rounds = max(1, math.floor(seen.rounds * limit / minutes))
    return rounds, minutes * rounds / seen.rounds


def _probe_part(seen: Look, outcome: Outcome, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Describe the probe: its table and its cost, beside that of eight full runs."""
    if seen.rungs is None:
        return None
    spent = sum(found.examples for found in outcome.last.values())
    full = [expected_examples(seen.experiment(c), seen.profile.images, seen.profile.clients) for c in seen.candidates]
    return {
        "clients": len(next(iter(outcome.first.values())).accuracy),
        "val_images": int(seen.data.official_test.sum()) if seen.data.official_test is not None else 0,
        "rows": list(rows),
        "examples": spent,
        "seconds": sum(found.seconds for found in outcome.last.values()),
        "share_of_eight_runs": spent / (ROWS * sum(full) / len(full)),
        "most_share": SHARE,
    }


def _rows(seen: Look, outcome: Outcome) -> list[dict[str, Any]]:
    """Return the table of the probe, best first within each rung: accuracy, and the difference from the chosen one."""
    rows = []
    for key, found in outcome.last.items():
        chosen = _comparable(outcome, found)
        lead = difference(found, chosen) if chosen is not None and found is not chosen else []
        rows.append(
            {
                "label": found.label,
                "lr": found.lr,
                "rounds": found.rounds,
                "val": found.mean,
                "difference": sum(lead) / len(lead) if lead else None,
                "interval": interval(lead) if lead else None,
                "loss": found.loss,
                "chosen": key == outcome.chosen.key,
            }
        )
    return sorted(rows, key=lambda row: (-row["rounds"], -row["val"]))


def _comparable(outcome: Outcome, found: Probed) -> Probed | None:
    """Return the chosen candidate's score after as many rounds as another was probed."""
    for scores in (outcome.last, outcome.first):
        mine = scores.get(outcome.chosen.key)
        if mine is not None and mine.rounds == found.rounds:
            return mine
    return None


# Words.


def verdict(seen: Look, outcome: Outcome) -> str:
    """Say whether to federate at all, as far as the probe can tell."""
    chosen = outcome.chosen
    if chosen.method == LOCAL:
        return (
            "Training alone was better than federating in the probe, beyond doubt: we advise against federating here."
        )
    alone = next((found for found in outcome.last.values() if found.label == LOCAL), None)
    mine = None if alone is None else _comparable(outcome, alone)
    if alone is None or mine is None:
        return (
            "Nothing was probed, so this rests on measurements on other data: compare with Local before you rely on it."
        )
    lead = difference(mine, alone)
    found = interval(lead)
    points, rounds = sum(lead) / len(lead), f"{alone.rounds} round{'s' * (alone.rounds != 1)}"
    where = "below" if points < 0 else "above"
    words = f"{chosen.label} was {abs(points):.1f} points {where} training alone after {rounds} of the probe"
    words += f" (95 % interval {found[0]:+.1f} to {found[1]:+.1f}, {len(lead)} clients)" if found else ""
    if clearly_better(mine, alone):
        return f"{words}: federating helps."
    if clearly_better(alone, mine):
        return f"{words}: training alone is better so far, and more rounds may or may not change that; compare both."
    return f"{words}: the probe cannot tell it from training alone, which may be as good and needs no network."


def _doubts(seen: Look, outcome: Outcome, rounds: int) -> list[str]:
    """Name what speaks against relying on this advice."""
    profile, found = seen.profile, []
    missed = (1 - seen.cohort / profile.clients) ** rounds * profile.clients
    if missed >= 0.5:
        found.append(
            f"with {seen.cohort} of {profile.clients} clients in each round, about {missed:.0f} never train: "
            "raise --rounds or --cohort"
        )
    if rounds < seen.rounds:
        found.append(
            f"--max-minutes allows {rounds} of the {seen.rounds} rounds that we would use; accuracy may suffer"
        )
    if seen.rungs is None:
        found.append("no probe was run: the recommendation rests on other data only")
    else:
        chosen = outcome.last[outcome.chosen.key]
        if not learns(chosen):
            found.append(
                f"{chosen.label} did not learn at {chosen.lr:g} in the probe: try smaller rates before anything else"
            )
        level = [
            row["label"] for row in _rows(seen, outcome)
            if not row["chosen"] and row["label"] != chosen.label and row["interval"] and row["interval"][1] > 0
        ]  # fmt: skip
        if level:
            found.append(
                f"the probe, with few images and rounds, cannot tell {chosen.label} from "
                f"{', '.join(dict.fromkeys(level))}: the choice between them rests on measurements on other data"
            )
    if seen.too_large:
        link = f"{seen.question.link_mbit:g} Mbit/s"
        found.append(f"not considered, because a round sends too much for {link}: {', '.join(seen.too_large)}")
    if profile.smallest < 20:
        found.append(f"the smallest client has {profile.smallest} training images: its own figure will be noise")
    return found


# Commands.


def run_command(seen: Look, chosen: Candidate, rounds: int) -> str:
    """Return the command that runs the recommendation."""
    words = ["fedvit", "run", *([str(seen.question.file)] if seen.question.file else [])]
    words += ["--method", chosen.method, "--tune", chosen.tune, "--lr", f"{chosen.lr:g}"]
    return shlex.join([*words, *_shared_words(seen, rounds)])


def compare_command(seen: Look, rivals: Sequence[Candidate], rounds: int) -> str:
    """Return the command that compares the recommendation with the best other row and Local, each at its own rate."""
    words = ["fedvit", "compare", *(str(_row_file(seen, candidate)) for candidate in rivals)]
    words += ["--from", str(seen.question.file)] if seen.question.file else []
    return shlex.join([*words, *_shared_words(seen, rounds, seeds=True), "--seeds", SEEDS])


def _shared_words(seen: Look, rounds: int, *, seeds: bool = False) -> list[str]:
    words = []
    for flag in FLAGS:
        value = rounds if flag == "rounds" else seen.question.flags.get(flag)
        if value is None or flag in ("method", "tune", "lr") or (flag == "seed" and seeds):
            continue
        name = f"--{flag.replace('_', '-')}"
        words += [name] if value is True else [name, str(value)]
    for path, value in {**seen.question.sets, **seen.question.added_sets}.items():
        words += ["--set", f"{path}={str(value).lower() if isinstance(value, bool) else value}"]
    return words


def _row_file(seen: Look, candidate: Candidate) -> Path:
    return seen.folder / "rows" / f"{candidate.label}.toml"
