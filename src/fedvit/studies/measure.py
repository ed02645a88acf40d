"""The figures of a study: what finished runs reached and sent, what methods cost, and estimates in advance."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedvit.config.load import parse_value
from fedvit.config.resolve import to_tables
from fedvit.core.errors import UserError
from fedvit.core.settings import Experiment
from fedvit.data.partition.split import POOLED_RULES
from fedvit.data.size import DataSize, size_of
from fedvit.engine.cost import cost
from fedvit.models.build import input_size
from fedvit.report.statistics import Unit, by_unit, count_hurt
from fedvit.runs.folder import Run
from fedvit.runs.write import nbytes_of_run
from fedvit.studies.cells import Cell, local_of
from fedvit.studies.published.common import SIZES
from fedvit.studies.published.fedperfix import BATCHES_PER_STEP, COUNTED_CLASSES
from fedvit.studies.rows import Row, mean_of, run_of
from fedvit.studies.search import best_of, edge

MEBI = 2**20  # the papers' million

# After the runs.


def figures(cell: Cell, rows: Sequence[Row], folder: Path, view: str) -> dict[str, Any]:
    """Average the results of a cell's runs, over clients and then over seeds; `rows` are those of the study.

    A run that is shared with another study may know its gains over Local when this study has no Local to measure them
    against: such gains are left out, so that a study's figures do not depend on what ran before.
    """
    seeds = list(cell.row.experiments)
    if not all(run_of(folder, cell.row, seed).finished for seed in seeds):
        return {"diverged": True, "view": view, "lr": cell.row.first.train.lr, "accuracy": None, "val": None}
    summaries = [run_of(folder, cell.row, seed).summary for seed in seeds]
    first = summaries[0]
    shown = view if all(view in summary["views"] for summary in summaries) else "personal"
    views = [summary["views"][shown] for summary in summaries]
    known = all(summary["gain_over_local"] for summary in summaries)
    known = known and all(cell.row.is_local or local_of(rows, cell.row, seed) for seed in seeds)
    gains = _unit_gains(cell, folder, first["partition"]) if known else {}
    held_out = [summary["views"]["personal"].get("val") for summary in summaries]
    return {
        "view": shown,
        "accuracy": mean_of(v["mean"] for v in views),
        "std": None if views[0]["std"] is None else mean_of(v["std"] for v in views),
        "seed_std": float(np.std([v["mean"] for v in views])) if len(seeds) > 1 else None,
        "micro": mean_of(v["micro"] for v in views),
        "by_seed": [v["mean"] for v in views],
        "best_round": mean_of(v["best_round"] for v in views),
        "val": None if None in held_out else mean_of(held_out),
        "gain_over_local": mean_of(gains.values()) if gains else None,
        "hurt": count_hurt(gains) if gains else None,
        "lr": first["lr"],
        "rounds": first["rounds"],
        "params": first["params"],
        "nbytes": first["nbytes"],
        "nbytes_run": first["nbytes_run"],
        "macs_per_example": first["macs_per_example"],
        "to_target": [_to_target([run_of(folder, cell.row, s) for s in seeds], shown, t) for t in cell.case.targets],
    }


def _unit_gains(cell: Cell, folder: Path, partition: str) -> dict[Unit, float]:
    """Return every unit's gain over Local, from clients.csv of every seed."""
    runs = {seed: run_of(folder, cell.row, seed) for seed in cell.row.experiments}
    return by_unit({seed: {row["client"]: row["gain"] for row in run.clients} for seed, run in runs.items()}, partition)


def gains(cell: Cell, folder: Path) -> list[float]:
    """List what every client gains over Local, from the smallest gain to the largest; a client counts once a seed."""
    if cell.row.is_local:
        return []
    runs = [run_of(folder, cell.row, seed) for seed in cell.row.experiments]
    return sorted(row["gain"] for run in runs for row in run.clients if row["gain"] is not None)


def _to_target(runs: Sequence[Run], view: str, target: float) -> dict[str, Any]:
    """Measure the rounds and bytes that it takes to reach an accuracy; None unless every seed reaches it."""
    found = [_reached(run.rounds, view, target) for run in runs]
    rounds = [None if rows is None else rows[-1]["round"] for rows in found]
    sent = [None if rows is None else nbytes_of_run(rows) for rows in found]
    both = [None if s is None else s["down"] + s["up"] for s in sent]
    return {
        "target": target,
        "rounds": None if None in rounds else mean_of(r for r in rounds if r is not None),
        "nbytes": None if None in both else mean_of(b for b in both if b is not None),
        "paper_mb": None if None in sent else mean_of(s["down"] for s in sent if s is not None) / MEBI,  # one direction
        "rounds_by_seed": rounds,
    }


def _reached(rows: Sequence[dict[str, Any]], view: str, target: float) -> Sequence[dict[str, Any]] | None:
    """Return the rounds up to the first one that reaches the target."""
    for number, row in enumerate(rows):
        if row["views"] and row["views"][view]["mean"] >= target:
            return rows[: number + 1]
    return None


def chosen(cells: Sequence[Cell], found: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Choose the best row of every column on validation images, and give the test accuracy of only that row."""
    columns: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for cell, figure in zip(cells, found, strict=True):
        columns.setdefault(cell.case.column, []).append((cell.case.row, figure))
    best: dict[str, dict[str, Any]] = {}
    for column, rows in columns.items():
        place = best_of([figure["val"] for _, figure in rows])
        if place is not None:
            name, figure = rows[place]
            values = [parse_value(row) for row, _ in rows]
            best[column] = {
                "row": name,
                "val": figure["val"],
                "accuracy": figure["accuracy"],
                "at_edge": edge(values, values[place]) or None,
            }
    return best


def overall(cells: Sequence[Cell], found: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Average the accuracy over the columns, for rows that occur in all of them."""
    columns = {cell.case.column for cell in cells}
    by_row: dict[str, list[float]] = {}
    for cell, figure in zip(cells, found, strict=True):
        by_row.setdefault(cell.case.row, []).append(figure["accuracy"])
    return {row: mean_of(values) for row, values in by_row.items() if len(values) == len(columns)}


# Without any run.


def resources(cell: Cell) -> dict[str, Any]:
    """Count what a row stores, computes and sends, exactly for this dataset and in FedPerfix's units.

    Storage counts the model and every copy of it that a client keeps. Training counts one step, per image of FedAvg's
    batch. Communication counts one direction.
    """
    exact = cost(cell.row.first, _size_of(cell.row.first).classes)
    passes = exact["training_passes"] * BATCHES_PER_STEP.get(cell.row.first.method["name"], 1)
    paper = cost(cell.row.first, COUNTED_CLASSES)
    return {
        **exact,
        "storage": _storage(exact),
        "communication": exact["params"]["shared"],
        "training_passes": passes,
        "training_macs_per_example": round(exact["macs_per_example"] * passes),
        "paper_units": {"storage": _storage(paper) / MEBI, "communication": paper["params"]["shared"] / MEBI},
    }


def _storage(found: Mapping[str, Any]) -> int:
    """Count the numbers that a client stores: the model, and what it keeps besides its own part of it."""
    return int(found["params"]["total"] + found["memory_nbytes"] // 4 - found["params"]["personal"])


def _size_of(experiment: Experiment) -> DataSize:
    """Count the images and classes of a dataset, which need not be on this machine if a paper uses it."""
    try:
        return size_of(experiment.data, input_size(experiment.model))
    except UserError:
        if experiment.data.name not in SIZES:
            raise
        return DataSize(*SIZES[experiment.data.name])


def estimates(cells: Sequence[Cell], costs: dict[str, dict[str, Any]] | None = None) -> Iterator[dict[str, Any]]:
    """Estimate the bytes sent and the multiply-adds of training per cell, over all seeds.

    Cells that share a run count once. The estimate assumes that all clients have the same size and that a training step
    costs three forward passes. `costs` keeps what was counted for the cells of other studies.
    """
    sizes: dict[str, DataSize] = {}
    costs = {} if costs is None else costs
    seen: set[str] = set()
    for cell in cells:
        e = cell.row.first
        if e.data.name not in sizes:
            sizes[e.data.name] = _size_of(e)
        size = sizes[e.data.name]
        bare = e.model_copy(update={"model": e.model.model_copy(update={"weights": None, "pretrained": False})})
        key = json.dumps([to_tables(bare)[t] for t in ("model", "method", "tune")] + [size.classes, e.train.batch])
        if key not in costs:
            costs[key] = cost(bare, size.classes)
        again = cell.row.label in seen
        seen.add(cell.row.label)
        yield {"shares_run": again, **_estimate(e, costs[key], size, 0 if again else len(cell.row.experiments))}


def _training_images(e: Experiment, size: DataSize) -> float:
    """Count the images that all clients together train on."""
    known_tests = size.tests and e.partition.name not in POOLED_RULES
    here = size.images - size.tests if known_tests else size.images
    kept = min(e.data.samples or here, here)
    return kept * (1 - e.data.val) * (1 if known_tests else 1 - e.data.test)


def _estimate(e: Experiment, found: Mapping[str, Any], size: DataSize, seeds: int) -> dict[str, Any]:
    """Estimate the bytes and multiply-adds of one cell."""
    assert e.partition.clients is not None
    assert e.train.cohort is not None
    each = _training_images(e, size) / e.partition.clients
    turns = e.train.rounds * e.train.cohort * seeds
    sent = found["nbytes"]["down"] + found["nbytes"]["up"]
    steps = -(-each // e.train.batch) * e.train.epochs if "step_nbytes" in found else 1
    passes = 3 * each * e.train.epochs * found["training_passes"]
    return {
        "params": found["params"],
        "nbytes": round(turns * sent * steps),
        "macs": round(turns * passes * found["macs_per_example"]),
    }
