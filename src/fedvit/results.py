"""The files of a run: rounds.jsonl while it goes on, clients.csv and summary.json at the end."""

import csv
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedvit.data.partition import Split
from fedvit.evaluation import CONFUSION
from fedvit.ledger import per_client
from fedvit.rounds import Scores, is_evaluated, view_names
from fedvit.settings import Experiment
from fedvit.worker import POOLED


def strict_json(content: Any, indent: int | None = None) -> str:
    """JSON that every reader takes: what is not a finite number becomes null."""
    return json.dumps(finite(content), indent=indent, allow_nan=False)


def finite(content: Any) -> Any:
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {key: finite(value) for key, value in content.items()}
    return [finite(value) for value in content] if isinstance(content, list | tuple) else content


def append_line(path: Path, row: Mapping[str, Any], *, sync: bool = True) -> None:
    """One JSON object a line, on disk before the checkpoint that counts on it; `sync=False` where none does."""
    with path.open("a") as stream:
        stream.write(strict_json(row) + "\n")
        if sync:
            stream.flush()
            os.fsync(stream.fileno())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines; a line that a kill cut short is not one."""
    rows = []
    if path.is_file():
        for line in path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
    return rows


def keep_rounds(path: Path, last: int, experiment: Experiment | None = None) -> list[dict[str, Any]]:
    """Forget the lines after round `last`, which a resumed run will write again.

    A round that was evaluated only because it used to be the last loses its views when the run is extended.
    """
    rows = [row for row in read_lines(path) if row["round"] <= last]
    if experiment is not None:
        for row in rows:
            if not is_evaluated(row["round"], experiment):
                row.update(views=None, nbytes_evaluation=0)
    write_text(path, "".join(strict_json(row) + "\n" for row in rows))
    return rows


def rounds_trained(rows: Iterable[Mapping[str, Any]], clients: Iterable[str]) -> dict[str, int]:
    """In how many rounds each client's data was used."""
    count: Counter[str] = Counter()
    for row in rows:
        count.update(name for name in row["cohort"] if name not in row["failed"])
    return {name: count[POOLED] or count[name] for name in clients}


@dataclass(frozen=True)
class Holding:
    """How much a client has: images to train and to test on, and how many classes among the first."""

    train: int
    test: int
    classes: int


Roster = Mapping[str, Holding]  # by client; all that a server needs to know of their data


def write_clients(
    path: Path,
    roster: Roster,
    scores: Scores,
    trained: Mapping[str, int],
    local: Mapping[str, float] | None,
    metrics: Sequence[str],
) -> None:
    """clients.csv: one line a client; what is undefined is empty, and so are the last two columns without Local.

    `counts` are a client's training images, test images and classes.
    """
    views = view_names(scores)
    header = ["client", "train_samples", "test_samples", "classes", "rounds_trained"]
    columns = [f"{view}_{metric}" for view in views for metric in metrics]
    partial = path.with_suffix(".partial")
    with partial.open("w", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow([*header, *columns, "local_accuracy", "gain"])
        for name, score in scores.items():
            has = roster[name]
            alone = local.get(name) if local is not None else None
            gain = "" if alone is None else score["personal_accuracy"] - alone
            values = [score.get(column, "") for column in columns]
            counts = [has.train, has.test, has.classes, trained[name]]
            writer.writerow([name, *counts, *values, "" if alone is None else alone, gain])
    partial.replace(path)


def write_confusion(path: Path, scores: Scores) -> None:
    """confusion.json: [class, predicted class, images] of every client that tells, on its own test images."""
    start = f"personal_{CONFUSION}_"
    content = {}
    for name, score in scores.items():
        counts = {key.removeprefix(start): int(n) for key, n in score.items() if key.startswith(start)}
        if counts:
            content[name] = [[*map(int, cell.split("_")), n] for cell, n in counts.items()]
    write_text(path, json.dumps(content) + "\n")


def write_unseen(path: Path, split: Split, scores: Scores, metrics: Sequence[str]) -> None:
    """unseen.csv: the clients that never trained, by view."""
    columns = [f"{view}_{metric}" for view in view_names(scores) for metric in metrics]
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["client", "train_samples", "test_samples", *columns])
        for name, score in scores.items():
            part = split.clients[name]
            writer.writerow([name, len(part.train), len(part.test), *(score.get(column, "") for column in columns)])


def read_clients(path: Path) -> list[dict[str, Any]]:
    """clients.csv with numbers as numbers and empty cells as None."""
    with path.open(newline="") as stream:
        return [
            {key: value if key == "client" else number(value) for key, value in row.items()}
            for row in csv.DictReader(stream)
        ]


def number(text: str) -> int | float | None:
    if not text:
        return None
    return int(text) if text.lstrip("-").isdigit() else float(text)


def view_summary(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Every view after the last round, and the best round beside it: the papers' habit, never the headline."""
    evaluated = [row for row in rows if row["views"] is not None]
    views = {}
    for name, last in evaluated[-1]["views"].items():
        had = [row for row in evaluated if row["views"].get(name, {}).get("mean") is not None]
        best = max(had or evaluated[-1:], key=lambda row: row["views"][name]["mean"])
        views[name] = {**last, "best_round": best["views"][name]["mean"], "best_round_number": best["round"]}
    return views


def gain_summary(clients: Iterable[Mapping[str, Any]], schedule: str | None) -> dict[str, Any] | None:
    """Mean gain over Local, how many clients it hurt, and how Local was scheduled; from the rows of clients.csv."""
    gains = [client["gain"] for client in clients]
    if not gains or gains[0] is None:
        return None
    return {"mean": sum(gains) / len(gains), "hurt": sum(gain < 0 for gain in gains), "schedule": schedule}


def nbytes_per_client(rows: Iterable[Mapping[str, Any]]) -> dict[str, int | float | None]:
    """Tensor bytes of one sampled client in one round, by direction."""
    kept = list(rows)
    return {way: per_client([row[f"nbytes_{way}"] for row in kept]) for way in ("down", "up")}


def nbytes_of_run(rows: Iterable[Mapping[str, Any]]) -> dict[str, int | float]:
    """Everything that crossed in the whole run. Inside one process nothing is framed."""
    kept = list(rows)
    return {
        "down": sum(row["nbytes_down"] * len(row["cohort"]) for row in kept),
        "up": sum((row["nbytes_up"] or 0) * (len(row["cohort"]) - len(row["failed"])) for row in kept),
        "evaluation": sum(row["nbytes_evaluation"] for row in kept),
        "framing": 0,
    }


def never_trained(clients: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """How many clients were never sampled, and how they do: they are scored with weights they never trained."""
    scores = [client["personal_accuracy"] for client in clients if client["rounds_trained"] == 0]
    return {"clients": len(scores), "mean": sum(scores) / len(scores) if scores else None}


def write_json(path: Path, content: Any) -> None:
    write_text(path, strict_json(content, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file so that it is there whole or as it was."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.replace(path)
