"""What a user should doubt about a run: learning that failed, at which clients, and what to do about it.

A doubt is one sentence for the terminal, the log and the report. It is found in the run's own files, so a run over a
network has the same doubts. Scores on test images appear in some sentences, but nothing is chosen by them.
"""

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedvit.core.losses import chance_loss
from fedvit.core.settings import FOCAL_GAMMA, Experiment
from fedvit.runs.folder import Run

AUTO = "--lr auto"  # a sentence with this in it is about the learning rate
_MOST_NAMES = 4  # clients that one sentence names
_EARLY = 3  # before this round, a loss near chance only means that training has just begun
_SLIGHTLY, _FAR = 1.02, 1.5  # factors of chance
_FALL = 10.0  # points that the mean accuracy must lose before it counts as a fall
_CLEAR = 2.0  # standard errors
_MOSTLY = 95.0  # percent: a client whose images are almost all of one class is right to answer it
_FEWEST = 5  # test images of a client about which a sentence can say anything

Rows = Sequence[Mapping[str, Any]]  # of rounds.jsonl


def doubts(run: Run, experiment: Experiment, rows: Rows, *, loss_terms: int, keeps_own: bool) -> list[str]:
    """Return every doubt about a finished run, the gravest first.

    `loss_terms` is the plan's, and `keeps_own` tells whether clients keep something of their own.
    """
    split, clients = run.split, run.clients
    train, names = experiment.train, split.get("class_names", ())
    gamma = FOCAL_GAMMA if train.focal_gamma is None else train.focal_gamma
    several = experiment.data.several_labels
    chance = loss_terms * chance_loss(train.loss, gamma, len(names), several_labels=several)
    found = [
        _loss_above_chance(rows, chance, experiment),
        _diverging(rows, chance, experiment),
        _falling(rows, clients, split, experiment),
        _one_answer(run.confusion, names),
        "" if several else _below_the_most_frequent_class(clients, split),
        _never_sampled(clients) if keeps_own else "",
    ]
    return [doubt for doubt in found if doubt]


def search_command(folder: Path) -> str:
    """Return the command that repeats a run at a learning rate found by search."""
    again = ["fedvit", "run", str(folder / "run.toml"), "--lr", "auto", "--out", f"{folder}-auto"]
    return f"to repeat the run at a rate found on validation images: {shlex.join(again)}"


def with_auto_rate(arguments: Sequence[str]) -> str:
    """Return a command like this one that searches for its rates, and that writes to another folder."""
    kept: list[str] = []
    skip = False
    for number, word in enumerate(arguments):
        flag, equals, value = word.partition("=")
        if skip:
            skip = False
        elif flag == "--lr":
            skip = not equals
        elif flag == "--out":
            kept += ["--out", f"{value if equals else arguments[number + 1]}-auto"]
            skip = not equals
        elif flag != "--resume":
            kept.append(word)
    return shlex.join(["fedvit", *kept, "--lr", "auto"])


def _loss_above_chance(rows: Rows, chance: float, experiment: Experiment) -> str:
    last = next((row for row in reversed(rows) if row["loss"] is not None), None)
    if last is None or last["loss"] <= chance * (_SLIGHTLY if last["round"] >= _EARLY else _FAR):
        return ""
    worst = sorted(last.get("losses", {}).items(), key=lambda item: -item[1])
    named = _listed([f"{_client(name)} ({loss:.2f})" for name, loss in worst])
    return (
        f"the training loss of round {last['round']} is {last['loss']:.2f}, above chance: guessing evenly gives "
        f"{chance:.2f}. Highest: {named}. {_blame_the_rate(experiment)}"
    )


def _diverging(rows: Rows, chance: float, experiment: Experiment) -> str:
    """Name clients whose own loss is above chance and rose since the round before."""
    history: dict[str, list[float]] = {}
    for row in rows:
        for name, loss in row.get("losses", {}).items():
            history.setdefault(name, []).append(loss)
    rising = {
        name: (losses[-2], losses[-1])
        for name, losses in history.items()
        if len(losses) > 1 and losses[-1] > max(_FAR * losses[-2], _SLIGHTLY * chance)
    }
    if not rising:
        return ""
    worst = sorted(rising, key=lambda name: -rising[name][1])
    named = _listed([f"{_client(name)} from {rising[name][0]:.2f} to {rising[name][1]:.2f}" for name in worst])
    return f"training diverges: the loss rose at {named} (chance is {chance:.2f}). {_blame_the_rate(experiment)}"


def _falling(rows: Rows, clients: Rows, split: Mapping[str, Any], experiment: Experiment) -> str:
    """Tell that accuracy has fallen: on validation images if the run holds some out, and otherwise only by a lot."""
    scored = [(row["round"], row["views"]["personal"]) for row in rows if row["views"]]
    if len(scored) < 2:
        return ""
    held_out = all("val" in view for _, view in scored)
    points = [(number, view["val" if held_out else "mean"]) for number, view in scored]
    (best_round, best), (last_round, last) = max(points, key=lambda point: point[1]), points[-1]
    enough = _FALL
    if held_out:
        images = sum(len(part.get("val", ())) for part in split.get("clients", {}).values())
        enough = _CLEAR * 100 * math.sqrt(2 * best / 100 * (1 - best / 100) / max(images, 1))
    if best - last <= max(enough, 1.0):
        return ""
    where = "on validation images" if held_out else "on test images"
    score = "AUROC of the labels" if held_out and experiment.data.several_labels else "accuracy"
    return (
        f"the mean {score} {where} fell from {best:.1f} % in round {best_round} to {last:.1f} % in round "
        f"{last_round}. {_blame_the_rate(experiment)}"
    )


def _one_answer(confusion: Mapping[str, Sequence[Sequence[int]]], names: Sequence[str]) -> str:
    """Name clients whose model answers one class to every image, though their images are of several."""
    found = []
    for client, cells in confusion.items():
        answers = {predicted for _, predicted, _ in cells}
        images = sum(n for _, _, n in cells)
        right = sum(n for true, predicted, n in cells if true == predicted)
        if len(answers) == 1 and images >= _FEWEST and 100 * right < _MOSTLY * images:
            answer = answers.pop()
            name = names[answer] if answer < len(names) else str(answer)
            found.append(f"{_client(client)} ({name!r} to all {images} images, {right} of them rightly)")
    if not found:
        return ""
    return (
        f"one answer to everything at {_listed(found)}: this accuracy says how frequent a class is, not what the model "
        f"has learned. Read the balanced accuracy, train for more rounds, or try another rate with {AUTO}."
    )


def _below_the_most_frequent_class(clients: Rows, split: Mapping[str, Any]) -> str:
    """Name clients whose model is clearly worse than always answering the class they train on most often."""
    found = []
    for row in clients:
        counts = split.get("class_counts", {}).get(row["client"], {})
        images, accuracy = row["test_samples"], row["personal_accuracy"]
        if not counts.get("train") or images < _FEWEST or row["rounds_trained"] == 0:
            continue
        frequent = max(counts["train"], key=lambda number: (counts["train"][number], number))
        share = 100 * counts.get("test", {}).get(frequent, 0) / images
        error = 100 * math.sqrt(share / 100 * (1 - share / 100) / images)
        if share - accuracy > max(_FALL, _CLEAR * error):
            found.append((share - accuracy, f"{_client(row['client'])} ({accuracy:.1f} % instead of {share:.1f} %)"))
    if not found:
        return ""
    named = _listed([words for _, words in sorted(found, key=lambda item: (-item[0], item[1]))])
    return (
        f"worse than always answering the most frequent class: {named}. The model has not learned these clients' "
        f"images: train for more rounds, ask `fedvit advise` for another method, or try {AUTO}."
    )


def _never_sampled(clients: Rows) -> str:
    never = [_client(row["client"]) for row in clients if row["rounds_trained"] == 0]
    if not never:
        return ""
    have = "has" if len(never) == 1 else "have"
    return (
        f"{_listed(never)} {have} never been sampled, so what is personal there is untrained: "
        "use more --rounds or a larger --cohort."
    )


def _blame_the_rate(experiment: Experiment) -> str:
    return f"The learning rate {experiment.train.lr:g} is probably too large here: search for one with {AUTO}."


def _client(name: str) -> str:
    return f"client {name}" if name.isdigit() else name


def _listed(words: Sequence[str]) -> str:
    """Join words into a list, cut after a few."""
    more = len(words) - _MOST_NAMES
    return ", ".join(words[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
