"""One run from settings to files: set up, loop, checkpoint, results. The library logs and yields; it does not print."""

import json
import logging
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedvit import config, results, track
from fedvit.checkpoint import load_checkpoint, save_checkpoint
from fedvit.cost import split_costs
from fedvit.data import datasets, partition
from fedvit.data.datasets import Dataset
from fedvit.data.partition import Split
from fedvit.errors import UserError
from fedvit.ledger import Ledger
from fedvit.methods import plan_of
from fedvit.models.classifier import input_size, macs_per_example
from fedvit.ram import free_ram, peak_rss_mb, reset_peak_rss
from fedvit.rounds import Round, evaluate, federate, reached, summarize
from fedvit.server import Server
from fedvit.settings import Experiment, Own
from fedvit.split_rounds import Here, evaluate_split, federate_split
from fedvit.store import Store
from fedvit.transport import Transport
from fedvit.transport.inprocess import InProcess
from fedvit.transport.workers import Workers, number_of_workers
from fedvit.worker import Net, Worker, make_net

log = logging.getLogger(__name__)
STARTED = "started by:"  # in log.txt, before the command


@dataclass(frozen=True)
class Run:
    """A run's folder, finished or not, and what of the run came from Python."""

    folder: Path
    own: Own = field(default_factory=Own)
    dataset: Dataset | None = None

    @property
    def finished(self) -> bool:
        return (self.folder / "summary.json").is_file()

    @property
    def experiment(self) -> Experiment:
        tables = config.read(self.folder / "run.toml")
        if not torch.cuda.is_available():  # a run of elsewhere is looked at here
            tables["run"]["device"] = "cpu"
        groups = self.dataset.group_names if self.dataset else None
        return config.resolve(tables, groups, self.own)

    @property
    def summary(self) -> dict[str, Any]:
        result: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return result

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """rounds.jsonl, one dictionary a round."""
        return results.read_lines(self.folder / "rounds.jsonl")

    @property
    def timings(self) -> list[dict[str, Any]]:
        """timings.jsonl, one dictionary a round."""
        return results.read_lines(self.folder / "timings.jsonl")

    @property
    def clients(self) -> list[dict[str, Any]]:
        """clients.csv, one dictionary a client."""
        return results.read_clients(self.folder / "clients.csv")

    def model(self, client: str) -> nn.Module:
        """The client's own model after the last round, plugins included, ready to predict.

        It is the model of view `personal`: a method that fine-tunes before its test does so here, on the client's
        images. `model.description` says what goes in and what comes out.
        """
        from fedvit.opening import client_model, open_run

        return client_model(open_run(self), client)

    def server_model(self) -> nn.Module:
        """The model of view `server`, where the server's weights alone make one."""
        from fedvit.opening import open_run, server_model

        return server_model(open_run(self))


@dataclass(frozen=True)
class LocalBaseline:
    """Local's accuracy per client, for gains, and how it was scheduled."""

    accuracy: Mapping[str, float]
    schedule: str

    @staticmethod
    def of(run: Run) -> "LocalBaseline":
        accuracy = {row["client"]: row["personal_accuracy"] for row in run.clients}
        return LocalBaseline(accuracy, run.experiment.method["schedule"])


def load_data(experiment: Experiment, dataset: Dataset | None = None) -> tuple[Dataset, Split]:
    """The data set, loaded unless given, and who owns what of it."""
    data, seed = experiment.data, experiment.run.seed
    if dataset is None:
        dataset = datasets.load(data, input_size(experiment.model))
    probe = plan_of(experiment).probe
    settings, batch = experiment.partition, experiment.train.batch
    return dataset, partition.split(dataset, settings, data, batch=batch, seed=seed, probe=probe)


def run_rounds(
    experiment: Experiment,
    folder: Path,
    *,
    resume: bool = False,
    local: LocalBaseline | None = None,
    dataset: Dataset | None = None,
    workers: int | None = 1,
) -> Iterator[Round]:
    """Run the experiment in its folder, a round at a time; the files are complete when the iterator ends.

    `workers` processes share the clients' work; the result does not depend on their number. None: as many as fit.
    """
    begin = time.perf_counter()
    reset_peak_rss()
    torch.set_num_threads(experiment.run.threads)
    device = torch.device(experiment.run.devices[0])
    with run_log() as log_to, ExitStack() as stack:
        dataset, split = load_data(experiment, dataset)
        reading = time.perf_counter() - begin
        net = make_net(experiment, dataset.classes, device)
        workers = number_of_workers(workers, experiment, net, dataset, split)
        worker = Worker(experiment, net, dataset, split, device, workers + 1 if workers > 1 else 1)
        store = Store(folder / "checkpoint", in_ram=fits_in_ram(net, len(split.clients)))
        server = net.server(split.seen)
        track.check(experiment)
        # Nothing is written before all settings have proved possible.
        counts = {"image": list(dataset.images.shape[1:]), "class_counts": class_counts(dataset, split)}
        open_folder(folder, experiment, {**split.to_json(), **counts}, resume=resume)
        log_to(folder / "log.txt")
        log.info("%s %s", STARTED, started_by())
        if resume:
            server = resumed(folder, server, store)
        past = Past.of(folder, server.round, experiment)
        setup = time.perf_counter() - begin - reading

        inner = InProcess(worker, store)
        pool = stack.enter_context(Workers(inner, dataset, workers)) if workers > 1 else None
        transport: Transport = pool or inner
        test_samples = {name: len(split.clients[name].test) for name in split.seen}
        evaluate_server = worker.evaluate_server if net.one_global_model else None
        if net.plan.split is None:
            loop = federate(net.plan, server, transport, experiment, evaluate_server, test_samples)
        else:
            loop = federate_split(net, server, Here(net, inner), experiment, test_samples)
        roster = roster_of(worker.labels.numpy(), split)
        for done in recorded(
            charged(loop, "data", reading), folder, experiment, past, store, roster, worker.metrics, local
        ):
            server = done.server
            yield done
        unseen = evaluate_unseen(Run(folder), net, server, inner, split) if split.unseen else None
        peak = max(peak_rss_mb(), pool.peak_mb if pool else 0.0)
        write_summary(Run(folder), experiment, net, past.rows, local, unseen, setup + past.seconds, peak)


@dataclass(frozen=True)
class Past:
    """The rounds that are done: their lines in rounds.jsonl and timings.jsonl."""

    rows: list[dict[str, Any]]
    timings: list[dict[str, Any]]

    @staticmethod
    def of(folder: Path, round_: int, experiment: Experiment) -> "Past":
        """What a folder says of the rounds up to this one; its lines of later rounds are forgotten."""
        return Past(
            results.keep_rounds(folder / "rounds.jsonl", round_, experiment),
            results.keep_rounds(folder / "timings.jsonl", round_),
        )

    @property
    def seconds(self) -> float:
        return sum(sum(timing["seconds"].values()) for timing in self.timings)

    def is_over(self, wanted: float | None) -> bool:
        """Whether the last round has reached the accuracy that was asked for."""
        views = self.rows[-1]["views"] if self.rows else None
        return bool(views and reached(views["personal"]["mean"], wanted))


def open_folder(folder: Path, experiment: Experiment, description: Mapping[str, Any], *, resume: bool) -> None:
    """run.toml and split.json of a new run; the same data as before for one that goes on."""
    if resume:
        check_same_split(folder, description)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        results.write_text(folder / "run.toml", config.to_toml(experiment))
    text = json.dumps(description, allow_nan=False)  # one line: every image of every client is in it
    results.write_text(folder / "split.json", f"{text}\n")


def resumed(folder: Path, server: Server, store: Store) -> Server:
    """The server after the last finished round, or as it is where there is none."""
    server = replace(load_checkpoint(folder / "checkpoint", store) or server, clients=server.clients)
    log.info("resuming after round %d", server.round)
    return server


def recorded(
    loop: Iterator[Round],
    folder: Path,
    experiment: Experiment,
    past: Past,
    store: Store,
    roster: results.Roster,
    metrics: Sequence[str],
    local: LocalBaseline | None = None,
) -> Iterator[Round]:
    """The loop's rounds, each on disk before it is handed on; none where the run is over."""
    toml, last = config.to_toml(experiment), len(past.rows)
    sent = sum(map(track.sent_in, past.rows))
    with track.tracking(experiment, folder, last, sent) as show:
        for done in () if past.is_over(experiment.run.until_accuracy) else loop:
            past.rows.append(done.row)
            with done.ledger.phase("checkpoint"):
                if done.scores is not None:
                    write_clients(folder, experiment, roster, metrics, past.rows, done, local)
                results.append_line(folder / "rounds.jsonl", done.row)
                save_checkpoint(folder / "checkpoint", done.server, store)
            if (folder / "run.toml").read_text() != toml:  # the run is being extended: from here on it is another
                (folder / "summary.json").unlink(missing_ok=True)
                results.write_text(folder / "run.toml", toml)
            past.timings.append({"round": done.row["round"], "seconds": done.ledger.seconds})
            results.append_line(folder / "timings.jsonl", past.timings[-1], sync=False)
            log.info("round %d: loss %s", done.row["round"], done.row["loss"])
            show(done.row, done.ledger.seconds)
            yield done


def charged(loop: Iterator[Round], phase: str, seconds: float) -> Iterator[Round]:
    """The loop's rounds, the first with the seconds of something that came before it."""
    for done in loop:
        if seconds:
            done.ledger.seconds[phase], seconds = seconds, 0.0
        yield done


def roster_of(labels: NDArray[np.int64], split: Split) -> results.Roster:
    """How much every client has."""
    return {
        name: results.Holding(len(part.train), len(part.test), len(np.unique(labels[part.train])))
        for name, part in split.clients.items()
    }


def class_counts(dataset: Dataset, split: Split) -> dict[str, dict[str, dict[str, int]]]:
    """For split.json: client -> part -> class number -> images, without zeros."""
    counts = partition.split_counts(dataset, split)
    return {
        name: {part: {str(number): n for number, n in enumerate(images) if n} for part, images in parts.items()}
        for name, parts in counts.items()
    }


def started_by() -> str:
    """The command line of this process, or that it was another program."""
    ours = Path(sys.argv[0]).name in ("fedvit", "__main__.py")
    return shlex.join(["fedvit", *sys.argv[1:]]) if ours else "a Python program"


def check_same_split(folder: Path, description: Mapping[str, Any]) -> None:
    """A run continues on the images it began with."""
    saved = folder / "split.json"
    before = json.loads(saved.read_text()) if saved.is_file() else description
    at_sites = before.get("network") and description.get("network")  # who look after their images themselves
    if not at_sites and before.get("hash") != description["hash"]:
        raise UserError(
            f"the data of {folder} has changed since the run began: its images would be split differently; "
            "restore the data, or give another --out"
        )


def fits_in_ram(net: Net, clients: int) -> bool:
    """Client memory stays in RAM while all of it would take less than a quarter of what is free."""
    needed = clients * net.memory_nbytes
    if needed <= free_ram() / 4:
        return True
    log.warning("client memory may need %.1f GB, over a quarter of free RAM: it is kept on disk", needed / 1e9)
    return False


def evaluate_unseen(run: Run, net: Net, server: Server, transport: InProcess, split: Split) -> dict[str, Any]:
    """Clients that never trained: as they are, and after one local training; unseen.csv and one line each view."""
    if net.plan.split is None:
        scores = evaluate(net.plan, dict.fromkeys(split.unseen, server), transport, server.round, Ledger())
    else:
        here, experiment = Here(net, transport), transport.worker.experiment
        scores, _ = evaluate_split(net, server, here, experiment, split.unseen, server.round)
    results.write_unseen(run.folder / "unseen.csv", split, scores, transport.worker.metrics)
    return summarize(scores, {name: len(split.clients[name].test) for name in split.unseen})


def write_clients(
    folder: Path,
    experiment: Experiment,
    roster: results.Roster,
    metrics: Sequence[str],
    rows: list[dict[str, Any]],
    done: Round,
    local: LocalBaseline | None,
) -> None:
    """clients.csv and confusion.json of the newest evaluation, there before the checkpoint that counts on them."""
    assert done.scores is not None
    alone = local.accuracy if local else None
    if experiment.method["name"] == "local":
        alone = {name: score["personal_accuracy"] for name, score in done.scores.items()}
    trained = results.rounds_trained(rows, done.scores)
    results.write_clients(folder / "clients.csv", roster, done.scores, trained, alone, metrics)
    results.write_confusion(folder / "confusion.json", done.scores)


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
    """summary.json, the very last file: its presence means finished."""
    views, clients = results.view_summary(rows), run.clients
    schedule = local.schedule if local else experiment.method.get("schedule")
    summary = {
        "method": experiment.method["name"],
        "tune": experiment.tune["name"],
        "label": experiment.label,
        "model": experiment.model.name,
        "data": experiment.data.name,
        "partition": experiment.partition.name,
        "clients": len(clients),
        "cohort": experiment.train.cohort,
        "rounds": rows[-1]["round"],
        "seed": experiment.run.seed,
        "lr": experiment.train.lr,
        "views": views,
        "server_accuracy": views["server"]["mean"] if "server" in views else None,
        "never_trained": results.never_trained(clients),
        "unseen": unseen,
        "gain_over_local": results.gain_summary(clients, schedule),
        "params": net.params(),
        "nbytes": results.nbytes_per_client(rows),
        "nbytes_run": results.nbytes_of_run(rows),
        "layers": list(net.plan.candidates(net.module, net.roles)) or None,
        "macs_per_example": macs_per_example(net.module, net.inputs.size),
        **split_costs(net, experiment.train.batch),
        "seconds": seconds,
        "peak_rss_mb": peak_mb,
        "epsilon": None,
    }
    results.write_json(run.folder / "summary.json", summary)


@contextmanager
def run_log() -> Iterator[Callable[[Path], None]]:
    """Collect the package's log; the function it gives names the file, once there is a folder for it."""
    package = logging.getLogger("fedvit")
    buffer = MemoryHandler(capacity=10_000, flushLevel=logging.CRITICAL + 1)
    package.addHandler(buffer)
    package.setLevel(logging.INFO)
    files: list[logging.Handler] = []

    def log_to(path: Path) -> None:
        file = logging.FileHandler(path)
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        files.append(file)
        buffer.setTarget(file)
        buffer.flush()
        buffer.capacity = 1  # from now on every line is written at once

    try:
        yield log_to
    finally:
        package.removeHandler(buffer)
        buffer.close()
        for file in files:
            file.close()
