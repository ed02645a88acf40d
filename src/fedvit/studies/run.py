"""Running a study: its cells as experiments, one run a cell and seed, and study.json at the end.

Cells whose settings are the same share a run. Runs that are finished are not run again, and one that was cut short
continues, so a study that is killed ends with the same study.json as one that is not.
"""

import hashlib
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedvit.config.load import load_experiment
from fedvit.config.resolve import changed_settings, to_tables, versions
from fedvit.config.tables import stack_tables
from fedvit.core.errors import UserError
from fedvit.core.files import finite, write_json
from fedvit.core.settings import Experiment
from fedvit.data.sources import list_datasets, load_dataset
from fedvit.engine.cost import cost
from fedvit.engine.loop import Round
from fedvit.runs.folder import LocalBaseline, Run
from fedvit.runs.resume import start_or_resume
from fedvit.runs.write import nbytes_of_run
from fedvit.studies.cases import Case
from fedvit.studies.compare import LOCAL, Row, concerns, mean_of, run_of
from fedvit.studies.definitions import Study
from fedvit.studies.published.common import SIZES
from fedvit.studies.small import has_weights

Which = Literal["digits", "pretrained", "paper"]
PAPER_CLASSES, MEBI = 1000, 2**20  # FedPerfix counts a head of 1,000 classes, in units of 2^20
BATCHES_A_STEP = {"per_fedavg": 2}  # which FedPerfix counts; in an epoch an image still passes once


@dataclass(frozen=True)
class Cell:
    """One cell of the table: what it is, and the row of runs that fills it."""

    case: Case
    row: Row

    @property
    def name(self) -> str:
        return f"{self.case.row}, {self.case.column}" if self.case.column else self.case.row


def choose_grid(study: Study, *, paper: bool, data: str | None, folder: Path | None) -> tuple[Which, Sequence[Case]]:
    """The published grid, or the small one: on pre-trained weights where the data folder has them, else on digits."""
    if paper:
        return "paper", study.paper
    if study.pretrained is not None and data != "digits" and has_weights(folder):
        return "pretrained", study.pretrained
    return "digits", study.digits


def default_seeds(study: Study, which: Which) -> list[int]:
    """The published seed; on digits, where runs are short, often three."""
    if which == "paper":
        return [int(study.paper[0].settings["run"]["seed"])]
    return list(study.seeds) if which == "digits" else [0]


def make_cells(
    cases: Sequence[Case], seeds: Sequence[int], sets: Mapping[str, Any], flags: Mapping[str, Any]
) -> list[Cell]:
    """Every case resolved for every seed. Flags and sets lie over all of them."""
    cells: list[Cell] = []
    known: dict[str, Row] = {}
    used: set[str] = set()
    for case in cases:
        plain = load_experiment(None, {}, {**flags, "seed": seeds[0]}, base=case.settings)
        mine = {path: value for path, value in sets.items() if concerns(path, plain)}
        used |= mine.keys()
        experiments = {seed: load_experiment(None, mine, {**flags, "seed": seed}, base=case.settings) for seed in seeds}
        row = Row("/".join(slug(part) for part in (case.column, case.row) if part), experiments)
        twin = known.setdefault(row.first.model_dump_json(), row)
        cells.append(Cell(case, twin))
    unused = [path for path in sets if path not in used]
    if unused:
        raise UserError(f"--set {unused[0]}: no row has this key")
    refuse_equal_rows(cells)
    return cells


def slug(text: str) -> str:
    """Words as the name of a folder."""
    return re.sub(r"[^A-Za-z0-9.=_+-]+", "-", text.replace("%", "pc")).strip("-")


def refuse_equal_rows(cells: Sequence[Cell]) -> None:
    """A flag that sets what the study varies would make rows the same."""
    seen: dict[tuple[str, str], Cell] = {}
    for cell in cells:
        twin = seen.setdefault((cell.case.column, cell.row.label), cell)
        if twin is not cell:
            varied = changed_settings(stack_tables([twin.case.settings]), stack_tables([cell.case.settings]))
            raise UserError(
                f"with these flags {twin.name!r} and {cell.name!r} are the same run: this study varies "
                f"{', '.join(varied)}; leave out the flag that sets it"
            )


def study_folder(name: str, cells: Sequence[Cell]) -> Path:
    """One folder for all studies of the same settings, so that finished rows are found again."""
    tables = [to_tables(cell.row.first) for cell in cells]
    for table in tables:
        table["run"].pop("seed")
    digest = hashlib.sha256(json.dumps(tables, sort_keys=True, default=str).encode()).hexdigest()[:8]
    return Path("runs") / f"study-{name}-{digest}"


# Running.


def run_study(
    cells: Sequence[Cell],
    folder: Path,
    on_start: Callable[[Row, int, int], None] = lambda *_: None,
    workers: int | None = 1,
) -> Iterator[Round]:
    """Run what is not finished, seed by seed, Local before the rows that are measured against it."""
    rows = unique_rows(cells)
    for seed in rows[0].experiments:
        for row in sorted(rows, key=lambda row: not is_local(row)):
            run = run_of(folder, row, seed)
            alone = None if is_local(row) else local_of(rows, row, seed)
            local = LocalBaseline.of(run_of(folder, alone, seed)) if alone else None
            steps = start_or_resume(row.experiments[seed], run.folder, resume=True, local=local, workers=workers)
            on_start(row, seed, len(run.rounds))
            yield from steps


def unique_rows(cells: Sequence[Cell]) -> list[Row]:
    return list({cell.row.label: cell.row for cell in cells}.values())


def is_local(row: Row) -> bool:
    return bool(row.first.method["name"] == LOCAL)


def local_of(rows: Sequence[Row], row: Row, seed: int) -> Row | None:
    """Local on the same images of the same clients, with the same model."""

    def place(other: Row) -> tuple[Any, ...]:
        e = other.experiments[seed]
        return e.data, e.partition, e.model, e.train.batch, e.train.rounds, e.train.cohort

    return next((other for other in rows if is_local(other) and place(other) == place(row)), None)


# Measuring.


def figures(cell: Cell, folder: Path, view: str) -> dict[str, Any]:
    """What came out of a cell's runs: over clients, then over seeds."""
    seeds = list(cell.row.experiments)
    summaries = [run_of(folder, cell.row, seed).summary for seed in seeds]
    shown = view if all(view in summary["views"] for summary in summaries) else "personal"
    views = [summary["views"][shown] for summary in summaries]
    gains = [summary["gain_over_local"] for summary in summaries]
    held_out = [summary["views"]["personal"].get("val") for summary in summaries]
    first = summaries[0]
    return {
        "view": shown,
        "accuracy": mean_of(v["mean"] for v in views),
        "std": None if views[0]["std"] is None else mean_of(v["std"] for v in views),
        "seed_std": float(np.std([v["mean"] for v in views])) if len(seeds) > 1 else None,
        "micro": mean_of(v["micro"] for v in views),
        "by_seed": [v["mean"] for v in views],
        "best_round": mean_of(v["best_round"] for v in views),
        "val": None if None in held_out else mean_of(held_out),
        "gain_over_local": None if None in gains else mean_of(gain["mean"] for gain in gains),
        "hurt": None if None in gains else mean_of(gain["hurt"] for gain in gains),
        "lr": first["lr"],
        "rounds": first["rounds"],
        "params": first["params"],
        "nbytes": first["nbytes"],
        "nbytes_run": first["nbytes_run"],
        "macs_per_example": first["macs_per_example"],
        "to_target": [to_target([run_of(folder, cell.row, s) for s in seeds], shown, t) for t in cell.case.targets],
    }


def to_target(runs: Sequence[Run], view: str, target: float) -> dict[str, Any]:
    """The first evaluated round that reaches an accuracy, and all bytes sent by then; None unless every seed does."""
    found = [reached(run.rounds, view, target) for run in runs]
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


def reached(rows: Sequence[dict[str, Any]], view: str, target: float) -> Sequence[dict[str, Any]] | None:
    """The rounds up to the first that reaches the target."""
    for number, row in enumerate(rows):
        if row["views"] and row["views"][view]["mean"] >= target:
            return rows[: number + 1]
    return None


def chosen(cells: Sequence[Cell], found: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The best row of every column on validation images, with the test accuracy of that row and of no other."""
    best: dict[str, dict[str, Any]] = {}
    for cell, figure in zip(cells, found, strict=True):
        val, column = figure["val"], cell.case.column
        if val is not None and (column not in best or val > best[column]["val"]):
            best[column] = {"row": cell.case.row, "val": val, "accuracy": figure["accuracy"]}
    return best


def overall(cells: Sequence[Cell], found: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean over columns, for rows that all columns have."""
    columns = {cell.case.column for cell in cells}
    by_row: dict[str, list[float]] = {}
    for cell, figure in zip(cells, found, strict=True):
        by_row.setdefault(cell.case.row, []).append(figure["accuracy"])
    return {row: mean_of(values) for row, values in by_row.items() if len(values) == len(columns)}


def resources(cell: Cell) -> dict[str, Any]:
    """What a row stores, computes and sends: exact for this data, and as FedPerfix counts it.

    Storage is the model and the copies that a client keeps of it; training is that of a step, per image of FedAvg's
    batch; communication is one direction.
    """
    exact = cost(cell.row.first, size_of(cell.row.first)[1])
    passes = exact["training_passes"] * BATCHES_A_STEP.get(cell.row.first.method["name"], 1)
    paper = cost(cell.row.first, PAPER_CLASSES)
    return {
        **exact,
        "storage": storage(exact),
        "communication": exact["params"]["shared"],
        "training_passes": passes,
        "training_macs_per_example": round(exact["macs_per_example"] * passes),
        "paper_units": {"storage": storage(paper) / MEBI, "communication": paper["params"]["shared"] / MEBI},
    }


def storage(found: Mapping[str, Any]) -> int:
    """Numbers a client needs room for: the model, and what it keeps beside its own part of it."""
    return int(found["params"]["total"] + found["memory_nbytes"] // 4 - found["params"]["personal"])


# Before anything runs.


def size_of(experiment: Experiment) -> tuple[int, int]:
    """Images and classes of the data, from what is known of it or from the data itself."""
    name = experiment.data.name
    known = {entry["name"]: entry for entry in list_datasets(experiment.data)}.get(name)
    if known is not None and known["classes"] is not None:
        return int(known["images"]), int(known["classes"])
    if name in SIZES:
        return SIZES[name]
    whole = load_dataset(experiment.data, None)
    return len(whole), whole.classes


def estimates(cells: Sequence[Cell]) -> Iterator[dict[str, Any]]:
    """Bytes that will cross and multiply-adds of training, per cell, over all seeds; cells that share a run count once.

    Clients are taken to be of one size; a step of training is three forward passes.
    """
    sizes: dict[str, tuple[int, int]] = {}
    costs: dict[str, dict[str, Any]] = {}
    seen: set[str] = set()
    for cell in cells:
        e = cell.row.first
        images, classes = sizes.setdefault(e.data.name, size_of(e)) if e.data.name not in sizes else sizes[e.data.name]
        bare = e.model_copy(update={"model": e.model.model_copy(update={"weights": None, "pretrained": False})})
        key = json.dumps([to_tables(bare)[t] for t in ("model", "method", "tune")] + [classes, e.train.batch])
        if key not in costs:
            costs[key] = cost(bare, classes)
        found, again = costs[key], cell.row.label in seen
        seen.add(cell.row.label)
        yield {"shares_run": again, **estimate(e, found, images, 0 if again else len(cell.row.experiments))}


def estimate(e: Experiment, found: Mapping[str, Any], images: int, seeds: int) -> dict[str, Any]:
    """One cell's bytes and multiply-adds."""
    assert e.partition.clients is not None
    assert e.train.cohort is not None
    held = (1 - e.data.test) * (1 - e.data.val) * min(e.data.samples or images, images)
    each = held / e.partition.clients  # images a client trains on
    turns = e.train.rounds * e.train.cohort * seeds
    sent = found["nbytes"]["down"] + found["nbytes"]["up"]
    steps = -(-each // e.train.batch) * e.train.epochs if "step_nbytes" in found else 1
    passes = 3 * each * e.train.epochs * found["training_passes"]
    return {
        "params": found["params"],
        "nbytes": round(turns * sent * steps),
        "macs": round(turns * passes * found["macs_per_example"]),
    }


# Writing.


def save_study(
    name: str, study: Study, which: Which, cells: Sequence[Cell], found: Sequence[Mapping[str, Any]], folder: Path
) -> dict[str, Any]:
    """study.json: rows, settings, figures and versions; the same bytes for the same study."""
    tables = [to_tables(cell.row.first) for cell in cells]
    common = {
        f"{table}.{key}": value
        for table, content in tables[0].items()
        for key, value in content.items()
        if key != "seed" and all(t.get(table, {}).get(key) == value for t in tables)
    }
    rows = []
    for cell, own, figure in zip(cells, tables, found, strict=True):
        flat = {f"{table}.{key}": value for table, content in own.items() for key, value in content.items()}
        rows.append(
            {
                "row": cell.case.row,
                "column": cell.case.column,
                "runs": cell.row.label,
                "published": cell.case.published or None,
                "settings": {k: v for k, v in flat.items() if k not in common and k != "run.seed"},
                "figures": figure,
            }
        )
    content: dict[str, Any] = {
        "study": name,
        "asks": study.asks,
        "source": study.source,
        "grid": which,
        "kind": study.kind,
        "command": shlex.join(["fedvit", *sys.argv[1:]]),
        "seeds": list(cells[0].row.experiments),
        "settings": common,  # of all rows; a row lists where it differs
        "versions": versions(),
        "rows": rows,
    }
    if study.kind == "choose":
        content["chosen"] = chosen(cells, found)
        content["chosen_by"] = (
            "the mean over clients of the accuracy on held-out validation images, after the last round"
        )
    if study.kind == "target":
        content["targets"] = "fixed before the study, in the study or by --target; measured on test images by round"
    if study.overall:
        content["overall"] = overall(cells, found)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "study.json", content)
    if study.kind != "cost":
        runs = {(row.label, seed): run_of(folder, row, seed) for row in unique_rows(cells) for seed in row.experiments}
        seconds = {f"{label}/seed{seed}": run.summary["seconds"] for (label, seed), run in runs.items()}
        write_json(folder / "timings.json", {"seconds": seconds, "total": sum(seconds.values())})
    return finite(content)  # type: ignore[no-any-return]
