"""One run from settings to files: setup, loop, checkpoints, results. The library logs and yields; it never prints."""

import logging
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

import torch

from fedvit.config.resolve import to_toml
from fedvit.core.errors import DivergedError, UserError
from fedvit.core.files import append_line, write_text
from fedvit.core.plan import Plan
from fedvit.core.server import Server
from fedvit.core.settings import Experiment
from fedvit.core.training import all_finite
from fedvit.data.dataset import Dataset
from fedvit.data.partition.records import Partition
from fedvit.engine.aggregate import check_aggregate
from fedvit.engine.checkpoint import load_checkpoint, save_checkpoint
from fedvit.engine.client_store import ClientStore
from fedvit.engine.estimate import log_estimate
from fedvit.engine.inprocess import DROPPED, InProcess
from fedvit.engine.ledger import Ledger
from fedvit.engine.loop import NOT_AGGREGATED, WITHHELD, Round, evaluate, federate, summarize
from fedvit.engine.net import Net, make_net
from fedvit.engine.pool import WorkerPool
from fedvit.engine.pool_size import number_of_workers
from fedvit.engine.private import private_folder
from fedvit.engine.split_loop import LocalClients, evaluate_split, federate_split
from fedvit.engine.system import free_ram, peak_of_all_mb, reset_peak_rss
from fedvit.engine.transport import Transport
from fedvit.engine.worker import Worker, load_data
from fedvit.runs.caution import warn_of_batch
from fedvit.runs.doubts import AUTO, search_command
from fedvit.runs.folder import STARTED, LocalBaseline, Run
from fedvit.runs.kept import check_validation, is_over, rounds_to_retain
from fedvit.runs.lock import only_run
from fedvit.runs.tracking import check_tracker, sent_in, track_run
from fedvit.runs.write import (
    Roster,
    about_images,
    keep_rounds,
    open_folder,
    roster_of,
    write_clients,
    write_summary,
    write_unseen_csv,
)

log = logging.getLogger(__name__)
STALLED = 3  # rounds in a row without a client that trains, after which a run stops
AFTER_THE_TABLE = {"after_the_table": True}  # commands show such lines below their table, not amid progress


def run_rounds(
    experiment: Experiment,
    folder: Path,
    *,
    resume: bool = False,
    local: LocalBaseline | None = None,
    dataset: Dataset | None = None,
    workers: int | None = 1,
) -> Iterator[Round]:
    """Run the experiment in its folder, one round at a time; the files are complete when the iterator ends.

    `workers` processes share the clients' work; the result does not depend on their number. None means as many as fit.
    """
    begin = time.perf_counter()
    reset_peak_rss()
    torch.set_num_threads(experiment.run.threads)
    device = torch.device(experiment.run.devices[0])
    with run_log() as log_to, ExitStack() as stack:
        dataset, partition = load_data(experiment, dataset)
        reading = time.perf_counter() - begin
        check_validation(experiment, partition)
        net = make_net(experiment, dataset.classes, device)
        check_aggregate(experiment, net, partition.seen)
        warn_of_batch(experiment, net, partition, dataset.images.shape[1:])
        workers = number_of_workers(workers, experiment, net, dataset, partition)
        accounts = private_folder(experiment, net, partition, folder)
        processes = workers + 1 if workers > 1 else 1
        worker = Worker(experiment, net, dataset, partition, device, processes, accounts)
        worker.check_budget()
        store = ClientStore(folder / "checkpoint", in_ram=_fits_in_ram(net, len(partition.clients)))
        description = {**partition.to_json(), **about_images(dataset, partition)}
        check_tracker(experiment)
        stack.enter_context(only_run(folder))
        run = begin_run(
            experiment, folder, net, store, partition.seen, description, log_to, resume=resume, since=begin + reading
        )
        log_estimate(experiment, net, dataset, partition, workers, run.server.round)
        inner = InProcess(worker, store)
        transport: Transport = inner
        if workers > 1:
            transport = stack.enter_context(WorkerPool(inner, dataset, workers))
        test_samples = {name: len(partition.clients[name].test) for name in partition.seen}
        evaluate_server = worker.evaluate_server if net.one_global_model else None
        if isinstance(net.plan, Plan):
            loop = federate(net.plan, run.server, transport, experiment, evaluate_server, test_samples)
        else:
            loop = federate_split(net, run.server, LocalClients(net, inner), experiment, test_samples)
        roster = roster_of(worker.labels.numpy(), partition)
        server = run.server
        for done in run.record(_charge(loop, "data", reading), roster, worker.metrics, local):
            server = done.server
            yield done
        unseen = _evaluate_unseen(Run(folder), net, server, inner, partition) if partition.unseen else None
        run.finish(local, unseen)


@dataclass(frozen=True)
class FinishedRounds:
    """The finished rounds: their lines in rounds.jsonl and timings.jsonl."""

    rows: list[dict[str, Any]]
    timings: list[dict[str, Any]]

    @staticmethod
    def of(folder: Path, round_: int, experiment: Experiment) -> "FinishedRounds":
        """Read the rounds up to this one from a folder; its lines of later rounds are dropped."""
        return FinishedRounds(
            keep_rounds(folder / "rounds.jsonl", round_, experiment),
            keep_rounds(folder / "timings.jsonl", round_),
        )

    @property
    def seconds(self) -> float:
        return sum(sum(timing["seconds"].values()) for timing in self.timings)


@dataclass(frozen=True)
class RunInProgress:
    """A run in progress in its folder, on any transport: every round is on disk before the next one begins."""

    experiment: Experiment
    folder: Path
    net: Net
    store: ClientStore
    server: Server  # after the last finished round
    past: FinishedRounds
    setup: float  # seconds

    def record(
        self,
        loop: Iterator[Round],
        roster: Roster,
        metrics: Sequence[str],
        local: LocalBaseline | None = None,
    ) -> Iterator[Round]:
        """Yield the loop's rounds, each after it is written to disk, until the run is over."""
        experiment, folder, past = self.experiment, self.folder, self.past
        toml, last = to_toml(experiment), len(past.rows)
        sent = sum(map(sent_in, past.rows))
        with track_run(experiment, folder, last, sent) as show:
            for done in () if is_over(past.rows, experiment.run) else loop:
                check_progress([*past.rows, done.row], experiment.train.rounds)
                check_continuable(done.server)
                past.rows.append(done.row)
                with done.ledger.phase("checkpoint"):
                    if done.scores is not None:
                        write_clients(folder, experiment, roster, metrics, past.rows, done, local)
                    append_line(folder / "rounds.jsonl", done.row)
                    retain = rounds_to_retain(past.rows, experiment.run)
                    scores = (folder / "clients.csv").read_bytes() if retain and done.scores is not None else None
                    save_checkpoint(folder / "checkpoint", done.server, self.store, retain=retain, scores=scores)
                if (folder / "run.toml").read_text() != toml:  # the run is being extended: its settings change here
                    (folder / "summary.json").unlink(missing_ok=True)
                    write_text(folder / "run.toml", toml)
                past.timings.append({"round": done.row["round"], "seconds": done.ledger.seconds})
                append_line(folder / "timings.jsonl", past.timings[-1], sync=False)
                log.info("round %d: loss %s", done.row["round"], done.row["loss"])
                show(done.row, done.ledger.seconds)
                yield done
                if is_over(past.rows, experiment.run):
                    return

    def finish(self, local: LocalBaseline | None = None, unseen: dict[str, Any] | None = None) -> None:
        """Write summary.json; its memory is that of this process and all that it started, which still exist."""
        absent = [text for row in self.past.rows for text in row.get("failures_evaluation", {}).values()]
        if not any(row["views"] for row in self.past.rows) and set(absent) != {WITHHELD}:
            raise UserError(
                f"no client could be evaluated, so {self.folder} has no result; its log and rounds.jsonl say why. With "
                "more --rounds, --resume continues it"
            )
        peak, seconds = peak_of_all_mb(), self.setup + self.past.seconds
        write_summary(Run(self.folder), self.experiment, self.net, self.past.rows, local, unseen, seconds, peak)
        found = Run(self.folder).summary["warnings"]
        for doubt in found:
            log.warning("%s: %s", self.experiment.label, doubt, extra=AFTER_THE_TABLE)
        if any(AUTO in doubt for doubt in found):
            log.warning("%s", search_command(self.folder), extra=AFTER_THE_TABLE)


def check_progress(rows: Sequence[Mapping[str, Any]], rounds: int) -> None:
    """Stop a run in which no client trains any more, before this round is written, so that --resume repeats it."""
    last = rows[-min(STALLED, rounds) :]
    if len(last) < min(STALLED, rounds) or not all(_all_failed(row) for row in last):
        return
    told = [rows[-1].get(NOT_AGGREGATED), *(f"{name} {text}" for name, text in rows[-1].get("failures", {}).items())]
    reasons = "; ".join(text for text in told if text)
    raise UserError(
        f"no client has trained in {len(last)} rounds, most recently because: {reasons}. The run is saved up to round "
        f"{rows[-1]['round'] - 1}; correct the cause, then continue it with --resume"
    )


def check_continuable(server: Server) -> None:
    """End the run before it saves weights with which no client could go on, so that the last checkpoint stays good."""
    if not all(map(all_finite, (server.shared, *server.memory.values()))):
        raise DivergedError(
            f"the server's weights became infinite, not a number or far too large in round {server.round}. The run is "
            f"saved up to round {server.round - 1}; try a smaller learning rate (train.lr, or the method's own)"
        )


def _all_failed(row: Mapping[str, Any]) -> bool:
    """Return whether no report of a round counted, and not only because train.dropout made clients fail."""
    reasons = [text for name, text in row.get("failures", {}).items() if text != DROPPED]
    if NOT_AGGREGATED in row:
        return bool(reasons) or not row["failed"]
    return bool(reasons) and len(row["failed"]) == len(row["cohort"])


def begin_run(
    experiment: Experiment,
    folder: Path,
    net: Net,
    store: ClientStore,
    clients: Sequence[str],
    description: Mapping[str, Any],
    log_to: Callable[[Path], None],
    *,
    resume: bool,
    since: float,
    started_by: str | None = None,
) -> RunInProgress:
    """Begin a run in a new folder, or continue the one in it. All settings have been checked by now."""
    server = net.server(clients)
    check_tracker(experiment)
    open_folder(folder, experiment, description, resume=resume)
    log_to(folder / "log.txt")
    log.info("%s %s", STARTED, started_by or starting_command())
    if resume:
        server = replace(load_checkpoint(folder / "checkpoint", store) or server, clients=server.clients)
        log.info("resuming after round %d", server.round)
    past = FinishedRounds.of(folder, server.round, experiment)
    return RunInProgress(experiment, folder, net, store, server, past, time.perf_counter() - since)


def _charge(loop: Iterator[Round], phase: str, seconds: float) -> Iterator[Round]:
    """Yield the loop's rounds, charging the first with the seconds of a phase that came before it."""
    for done in loop:
        if seconds:
            done.ledger.seconds[phase], seconds = seconds, 0.0
        yield done


def starting_command() -> str:
    """Return the command line of this process, or a note that it is another program."""
    ours = Path(sys.argv[0]).name in ("fedvit", "__main__.py")
    return shlex.join(["fedvit", *sys.argv[1:]]) if ours else "a Python program"


def _fits_in_ram(net: Net, clients: int) -> bool:
    """Return whether client memory stays in RAM: all of it may take at most a quarter of what is free."""
    needed = clients * net.memory_nbytes
    if needed <= free_ram() / 4:
        return True
    log.warning("client memory may need %.1f GB, over a quarter of the free RAM: it is kept on disk", needed / 1e9)
    return False


def _evaluate_unseen(run: Run, net: Net, server: Server, transport: InProcess, partition: Partition) -> dict[str, Any]:
    """Score clients that never trained, as they are and fine-tuned; write unseen.csv and return every view."""
    if isinstance(net.plan, Plan):
        scores = evaluate(net.plan, dict.fromkeys(partition.unseen, server), transport, server.round, Ledger())
    else:
        here, experiment = LocalClients(net, transport), transport.worker.experiment
        scores, _ = evaluate_split(net, server, here, experiment, partition.unseen, server.round)
    write_unseen_csv(run.folder / "unseen.csv", partition, scores, transport.worker.metrics)
    return summarize(scores, {name: len(partition.clients[name].test) for name in partition.unseen})


@contextmanager
def run_log() -> Iterator[Callable[[Path], None]]:
    """Collect the package's log; call the yielded function with the file to write, once there is a folder for it."""
    package = logging.getLogger("fedvit")
    buffer = MemoryHandler(capacity=10_000, flushLevel=logging.CRITICAL + 1)
    package.addHandler(buffer)
    package.setLevel(logging.INFO)
    files: list[logging.Handler] = []

    def log_to(path: Path) -> None:
        file = logging.FileHandler(path)
        # On a full disk, the next checkpoint ends the run with a message; a traceback for each line would hide it.
        file.handleError = lambda record: None  # type: ignore[method-assign]
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        files.append(file)
        buffer.setTarget(file)
        buffer.flush()
        buffer.capacity = 1  # from now on, every line is written at once

    try:
        yield log_to
    finally:
        package.removeHandler(buffer)
        buffer.close()
        for file in files:
            file.close()
