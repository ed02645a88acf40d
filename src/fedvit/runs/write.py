"""The files of a run: rounds.jsonl while it runs, clients.csv and summary.json at the end."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedvit.config.resolve import to_toml
from fedvit.core.errors import UserError
from fedvit.core.files import make_folder, read_lines, strict_json, write_bytes, write_csv, write_json, write_text
from fedvit.core.metrics import CONFUSION
from fedvit.core.plan import Plan
from fedvit.core.settings import Experiment
from fedvit.data.dataset import Dataset, Labels, count_present
from fedvit.data.partition.groups import count_patients
from fedvit.data.partition.records import Partition
from fedvit.data.partition.split import partition_counts
from fedvit.engine.checkpoint import read_scores
from fedvit.engine.cost import split_costs
from fedvit.engine.ledger import per_client
from fedvit.engine.loop import Round, Scores, is_evaluated, view_names
from fedvit.engine.net import POOLED, Net
from fedvit.engine.private import FOLDER as PRIVACY
from fedvit.engine.private import spent
from fedvit.models.build import macs_per_example
from fedvit.runs.clinical import read_clinical, write_clinical
from fedvit.runs.doubts import doubts
from fedvit.runs.folder import LocalBaseline, Run
from fedvit.runs.kept import kept_summary
from fedvit.runs.updates import about_updates


@dataclass(frozen=True)
class Holding:
    """How much data a client has: training images, test images, and the classes among its training images."""

    train: int
    test: int
    classes: int


Roster = Mapping[str, Holding]  # by client; everything a server needs to know about their data


def open_folder(folder: Path, experiment: Experiment, description: Mapping[str, Any], *, resume: bool) -> None:
    """Write run.toml of a new run, or check that a resumed run has the same data as before; write split.json."""
    if resume:
        check_same_partition(folder, description)
    else:
        make_folder(folder)
        if (folder / "run.toml").is_file():
            raise UserError(
                f"another process has begun a run in {folder}: continue it with --resume, or give another --out"
            )
        write_text(folder / "run.toml", to_toml(experiment))
    text = json.dumps(description, allow_nan=False)  # one line, because it lists every image of every client
    write_text(folder / "split.json", f"{text}\n")


def roster_of(labels: Labels, partition: Partition) -> Roster:
    """Return how much data every client has."""
    return {
        name: Holding(len(part.train), len(part.test), count_present(labels[part.train]))
        for name, part in partition.clients.items()
    }


def class_counts(dataset: Dataset, partition: Partition) -> dict[str, dict[str, dict[str, int]]]:
    """Return the counts for split.json: client -> part -> class number -> images, without zeros."""
    counts = partition_counts(dataset, partition)
    return {
        name: {part: {str(number): n for number, n in enumerate(images) if n} for part, images in parts.items()}
        for name, parts in counts.items()
    }


def about_images(dataset: Dataset, partition: Partition) -> dict[str, Any]:
    """Return what split.json says about images besides who owns them; `files` lists their names by image number.

    So does `patients`, with a hash for each patient.
    """
    about = {"image": list(dataset.images.shape[1:]), "class_counts": class_counts(dataset, partition)}
    if dataset.patients is not None:
        about["patient_counts"] = count_patients(partition, dataset)
        about["patients"] = [dataset.patient_hashes[number] for number in dataset.patients]
    return {**about, "files": list(dataset.files)} if dataset.files else about


def check_same_partition(folder: Path, description: Mapping[str, Any]) -> None:
    """Refuse to continue a run on other images than it began with."""
    saved = folder / "split.json"
    before = json.loads(saved.read_text()) if saved.is_file() else description
    at_sites = before.get("network") and description.get("network")  # sites look after their own images
    if not at_sites and before.get("hash") != description["hash"]:
        raise UserError(
            f"the data of {folder} has changed since the run began: its images would be partitioned differently; "
            "restore the data, or give another --out"
        )


def write_clients(
    folder: Path,
    experiment: Experiment,
    roster: Roster,
    metrics: Sequence[str],
    rows: list[dict[str, Any]],
    done: Round,
    local: LocalBaseline | None,
) -> None:
    """Write the files of the newest evaluation, before the checkpoint that relies on them."""
    assert done.scores is not None
    alone = local.accuracy if local else None
    if experiment.method["name"] == "local":
        alone = {name: score["personal_accuracy"] for name, score in done.scores.items()}
    trained = rounds_trained(rows, done.scores)
    _write_clients_csv(folder / "clients.csv", roster, done.scores, trained, alone, metrics)
    _write_confusion_json(folder / "confusion.json", done.scores)
    if experiment.run.clinical:
        names = Run(folder).split["class_names"]
        write_clinical(folder, experiment, names, done.row["round"], done.scores, done.cases)


def _layers_chosen_from(net: Net) -> list[str] | None:
    """Return the layers that clients choose among, if the method lets them."""
    choice = net.plan.choice if isinstance(net.plan, Plan) else None
    return None if choice is None else list(choice.layers(net.module, net.roles)) or None


def write_summary(
    run: Run,
    experiment: Experiment,
    net: Net,
    rows: list[dict[str, Any]],
    local: LocalBaseline | None,
    unseen: dict[str, Any] | None,
    seconds: float,
    peak_mb: float,
) -> None:
    """Write summary.json, the very last file: its presence means that the run is finished."""
    views, clients, clinical = _view_summary(rows), run.clients, read_clinical(run.folder)
    private = None
    if experiment.privacy.on and isinstance(net.plan, Plan):
        names = [POOLED] if net.plan.pooled else [row["client"] for row in clients if row["rounds_trained"]]
        private = spent(experiment, net.plan, run.folder / PRIVACY, names)
    schedule = local.schedule if local else experiment.method.get("schedule")
    summary = {
        "method": experiment.method["name"],
        "tune": experiment.tune["name"],
        "label": experiment.label,
        "model": experiment.model.name,
        "data": experiment.data.name,
        "partition": experiment.partition.name,
        "clients": len(clients) or experiment.partition.clients,  # no client is listed if all keep their scores
        "cohort": experiment.train.cohort,
        "rounds": rows[-1]["round"],
        "seed": experiment.run.seed,
        "lr": experiment.train.lr,
        "views": views,
        "server_accuracy": views["server"]["mean"] if "server" in views else None,
        "never_trained": _never_trained(clients),
        "unseen": unseen,
        "gain_over_local": gain_summary(clients, schedule),
        "clinical": clinical.summary() if clinical and clinical.round == rows[-1]["round"] else None,
        "params": net.params(),
        "nbytes": nbytes_per_client(rows),
        "nbytes_run": nbytes_of_run(rows),
        "layers": _layers_chosen_from(net),
        "updates": {name: asdict(one) for name, one in about_updates(rows).items()} or None,
        "macs_per_example": macs_per_example(net.module, net.inputs.size),
        **split_costs(net, experiment.train.batch),
        "seconds": seconds,
        "peak_rss_mb": peak_mb,
        "epsilon": None if private is None else private["epsilon"],
        "kept": kept_summary(rows, experiment.run),
        "warnings": doubts(
            run,
            experiment,
            rows,
            loss_terms=net.plan.loss_terms if isinstance(net.plan, Plan) else 1,
            keeps_own=net.memory_nbytes > 0,
        ),
    }
    if private is not None:
        summary["privacy"] = private
    if summary["kept"] is not None:
        write_bytes(run.folder, "kept.csv", read_scores(run.folder / "checkpoint", summary["kept"]["round"]))
    write_json(run.folder / "summary.json", summary)


def keep_rounds(path: Path, last: int, experiment: Experiment | None = None) -> list[dict[str, Any]]:
    """Drop the lines after round `last`, which a resumed run will write again.

    A round that was evaluated only because it used to be the last loses its views when the run is extended.
    """
    rows = [row for row in read_lines(path) if row["round"] <= last]
    if experiment is not None:
        for row in rows:
            if not is_evaluated(row["round"], experiment):
                row.update(views=None, nbytes_evaluation=0)
                row.pop("failures_evaluation", None)
    write_text(path, "".join(strict_json(row) + "\n" for row in rows))
    return rows


def rounds_trained(rows: Iterable[Mapping[str, Any]], clients: Iterable[str]) -> dict[str, int]:
    """Return in how many rounds each client's data was used."""
    count: Counter[str] = Counter()
    for row in rows:
        count.update(name for name in row["cohort"] if name not in row["failed"])
    return {name: count[POOLED] or count[name] for name in clients}


def _write_clients_csv(
    path: Path,
    roster: Roster,
    scores: Scores,
    trained: Mapping[str, int],
    local: Mapping[str, float] | None,
    metrics: Sequence[str],
) -> None:
    """Write clients.csv, one line per client. Undefined values are empty, as are the last two columns without Local.

    `roster` has each client's training images, test images and classes.
    """
    views = view_names(scores)
    header = ["client", "train_samples", "test_samples", "classes", "rounds_trained"]
    columns = [f"{view}_{metric}" for view in views for metric in metrics]

    def lines() -> Iterator[Sequence[Any]]:
        yield [*header, *columns, "local_accuracy", "gain"]
        for name, score in scores.items():
            has = roster[name]
            alone = local.get(name) if local is not None else None
            gain = "" if alone is None else score["personal_accuracy"] - alone
            values = [score.get(column, "") for column in columns]
            counts = [has.train, has.test, has.classes, trained[name]]
            yield [name, *counts, *values, "" if alone is None else alone, gain]

    write_csv(path, lines())


def _write_confusion_json(path: Path, scores: Scores) -> None:
    """Write confusion.json: [class, predicted class, images] on the test images of every client that reports them."""
    start = f"personal_{CONFUSION}_"
    content = {}
    for name, score in scores.items():
        counts = {key.removeprefix(start): int(n) for key, n in score.items() if key.startswith(start)}
        if counts:
            content[name] = [[*map(int, cell.split("_")), n] for cell, n in counts.items()]
    write_text(path, json.dumps(content) + "\n")


def write_unseen_csv(path: Path, partition: Partition, scores: Scores, metrics: Sequence[str]) -> None:
    """Write unseen.csv: the clients that never trained, by view."""
    columns = [f"{view}_{metric}" for view in view_names(scores) for metric in metrics]

    def lines() -> Iterator[Sequence[Any]]:
        yield ["client", "train_samples", "test_samples", *columns]
        for name, score in scores.items():
            part = partition.clients[name]
            yield [name, len(part.train), len(part.test), *(score.get(column, "") for column in columns)]

    write_csv(path, lines())


def _view_summary(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return every view after the last round, and its best round, which papers like to report: never the headline."""
    evaluated = [row for row in rows if row["views"] is not None]
    views = {}
    for name, last in evaluated[-1]["views"].items() if evaluated else ():
        had = [row for row in evaluated if row["views"].get(name, {}).get("mean") is not None]
        best = max(had or evaluated[-1:], key=lambda row: row["views"][name]["mean"])
        views[name] = {**last, "best_round": best["views"][name]["mean"], "best_round_number": best["round"]}
    return views


def gain_summary(clients: Iterable[Mapping[str, Any]], schedule: str | None) -> dict[str, Any] | None:
    """Return the mean gain over Local, the number of clients hurt, and Local's schedule, from rows of clients.csv."""
    gains = [client["gain"] for client in clients if client["gain"] is not None]
    if not gains:
        return None
    return {"mean": sum(gains) / len(gains), "hurt": sum(gain < 0 for gain in gains), "schedule": schedule}


def nbytes_per_client(rows: Iterable[Mapping[str, Any]]) -> dict[str, int | float | None]:
    """Return the tensor bytes per sampled client and round, by direction."""
    kept = list(rows)
    return {way: per_client([row[f"nbytes_{way}"] for row in kept]) for way in ("down", "up")}


def nbytes_of_run(rows: Iterable[Mapping[str, Any]]) -> dict[str, int | float]:
    """Return the bytes of everything that was sent in the whole run. Within one process there is no framing."""
    kept = list(rows)
    return {
        "down": sum(row["nbytes_down"] * len(row["cohort"]) for row in kept),
        "up": sum((row["nbytes_up"] or 0) * (len(row["cohort"]) - len(row["failed"])) for row in kept),
        "evaluation": sum(row["nbytes_evaluation"] for row in kept),
        "framing": 0,
    }


def _never_trained(clients: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Count the clients that were never sampled and average their scores, with weights that they never trained."""
    scores = [client["personal_accuracy"] for client in clients if client["rounds_trained"] == 0]
    return {"clients": len(scores), "mean": sum(scores) / len(scores) if scores else None}
