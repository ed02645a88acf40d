"""A short measurement of this machine: real clients train and are tested for a few seconds on images of noise.

The same processes, transport and worker code run as in a run. The result scales the table's seconds, and replaces its
memory; it is kept in the user's cache folder for later runs with the same model, method, tune and batch.
"""

import logging
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from fedvit.core.files import write_json
from fedvit.core.server import Server
from fedvit.core.settings import Experiment, PrivacySettings
from fedvit.data.dataset import Dataset
from fedvit.data.partition.records import ClientPartition, Partition
from fedvit.engine.client_store import ClientStore
from fedvit.engine.inprocess import InProcess
from fedvit.engine.ledger import Ledger
from fedvit.engine.loop import evaluate, train_round
from fedvit.engine.net import POOLED, Net
from fedvit.engine.pool import WorkerPool
from fedvit.engine.probe import TINY_LR, footprint_of
from fedvit.engine.rates import (
    COMMAND,
    Rates,
    calibration_file,
    calibration_key,
    known_calibrations,
    memory_mb,
    rates_by_table,
)
from fedvit.engine.split_loop import LocalClients, evaluate_split, federate_split
from fedvit.engine.system import cpu_seconds, peak_of_all_mb, reset_peak_rss
from fedvit.engine.worker import Worker
from fedvit.split.plan import SplitPlan

log = logging.getLogger(__name__)
SECONDS = 1.0  # that one measurement of a process should take, by the table
FEW, MANY = 2, 6  # steps of the two kinds of clients, which are compared


@dataclass(frozen=True)
class _Size:
    """How many images the measurement uses, so that it takes seconds: fewer than a run does with a large model."""

    batch: int
    tests: int
    repeats: int


def calibrate(experiment: Experiment, net: Net, shape: tuple[int, ...], workers: int) -> Rates:
    """Measure how fast this experiment's clients work here, and keep the result for later runs."""
    before = min(time.process_time(), 10 * COMMAND)  # what the command has spent on starting, if it is one
    clients = [str(number) for number in range(max(2, experiment.partition.clients or 2))]
    net, found = net.not_fine_tuned, footprint_of(experiment, net, clients, shape)
    table = rates_by_table(experiment, net, found, workers)
    reset_peak_rss()
    size = _size(experiment, table)
    with ExitStack() as stack:
        bench = _Bench(experiment, net, shape, workers, size, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        if workers > 1:
            bench.pool = stack.enter_context(WorkerPool(bench.inner, bench.dataset, workers))
        measured = replace(_scaled(bench, table), command=before)
        peak = peak_of_all_mb()
    images = bench.dataset.images.nbytes
    cached = len(bench.dataset) if found.cached_nbytes else 0
    plain = memory_mb(bench.experiment, net, found, measured, workers, len(bench.names), images, cached, size.tests)
    measured = replace(measured, main_mb=measured.main_mb + peak - plain, how="measured")
    _keep(experiment, net, workers, measured)
    return measured


def _size(experiment: Experiment, table: Rates) -> _Size:
    """Choose the batch, the number of test images and the repeats for a measurement of seconds."""
    image = table.train_image_epoch + table.train_image + table.train_first
    batch = max(2, min(experiment.train.batch, int(2 * SECONDS / FEW / image)))
    step = batch * image + table.train_step
    tests = max(2, min(256, int(SECONDS / (table.test_image + table.test_first))))
    return _Size(batch, tests, max(1, min(20, int(SECONDS / (FEW * step + table.train_visit)))))


class _Bench:
    """A small federation on noise: every process gets one client of few and one of many steps."""

    def __init__(
        self, experiment: Experiment, net: Net, shape: tuple[int, ...], workers: int, size: _Size, folder: Path
    ):
        self.rounds = experiment.train.rounds
        train = experiment.train.model_copy(
            update={"batch": size.batch, "epochs": 1, "lr": TINY_LR, "dropout": 0.0, "rounds": self.rounds + 1000}
        )
        update = {"eval_every": 0, "until_accuracy": None, "before_after": False, "clinical": False, "finetune": 0}
        run = experiment.run.model_copy(update=update)
        self.experiment = experiment.model_copy(update={"train": train, "run": run, "privacy": PrivacySettings()})
        self.net, self.size, self.workers = net, size, workers
        self.dataset, self.partition = _noise(net.classes, shape, workers, size, chooses=_chooses(net))
        device = torch.device(experiment.run.devices[0])
        worker = Worker(self.experiment, net, self.dataset, self.partition, device, workers + 1 if workers > 1 else 1)
        self.inner = InProcess(worker, ClientStore(folder, in_ram=True))
        self.pool: WorkerPool | None = None
        self.names = list(self.partition.clients)
        self.server: Server = net.server(self.names)
        self.number = 0
        self.by_clock = device.type != "cpu" or experiment.run.threads > 1

    def group(self, kind: str) -> list[str]:
        return [name for name in self.names if name.startswith(kind)]

    def train(self, kind: str) -> float:
        """Let one client of this kind train in every process; return the seconds of one of them."""
        self.number = 1 if self.number == 0 else max(self.number + 1, self.rounds)
        self.server = replace(self.server, round=self.number - 1)
        names, plan = self.group(kind), self.net.plan
        begin = self.clock()
        if isinstance(plan, SplitPlan):
            train = self.experiment.train.model_copy(update={"cohort": len(self.names)})
            experiment = self.experiment.model_copy(update={"train": train})
            self.inner.worker.partition = replace(self.partition, unseen=tuple(set(self.names) - set(names)))
            loop = federate_split(self.net, self.server, LocalClients(self.net, self.inner), experiment, {})
            self.server = next(loop).server
        else:
            cohort = [POOLED] if plan.pooled else names
            if plan.pooled:
                self.inner.worker.partition = replace(self.partition, unseen=tuple(set(self.names) - set(names)))
            transport = self.pool or self.inner
            self.server, _, _ = train_round(
                plan, self.server, transport, self.experiment, cohort, self.number, Ledger(), {}
            )
            transport.commit(self.number)
        return self.clock() - begin

    def test(self, kind: str) -> float:
        """Test one client of this kind in every process; return the seconds of one of them."""
        names, plan = self.group(kind), self.net.plan
        begin = self.clock()
        if isinstance(plan, SplitPlan):
            here = LocalClients(self.net, self.inner)
            evaluate_split(self.net, self.server, here, self.experiment, names, self.number)
        else:
            evaluate(plan, dict.fromkeys(names, self.server), self.pool or self.inner, self.number, Ledger())
        return self.clock() - begin

    def clock(self) -> float:
        """Return seconds: of computing, which other programs hardly disturb, or by the clock where that says little."""
        if self.by_clock:
            return time.perf_counter()
        workers = [process.pid for process in self.pool.processes] if self.pool else []
        spent = [cpu_seconds(pid) for pid in workers if pid is not None]
        return time.process_time() + (sum(spent) / len(spent) if spent else 0.0)


def _chooses(net: Net) -> bool:
    return not isinstance(net.plan, SplitPlan) and net.plan.choice is not None


def _noise(
    classes: int, shape: tuple[int, ...], workers: int, size: _Size, *, chooses: bool
) -> tuple[Dataset, Partition]:
    """Make images of noise for two clients per process, one with few images and one with many."""
    clients, end = {}, 0
    for kind, steps, tests in (("few", FEW, max(1, size.tests // 4)), ("many", MANY, size.tests)):
        for number in range(workers):
            train = np.arange(end, end + steps * size.batch)
            test = np.arange(train[-1] + 1, train[-1] + 1 + tests)
            end = int(test[-1]) + 1
            nothing = np.empty(0, dtype=np.int64)
            clients[f"{kind}{number}"] = ClientPartition(train, test, nothing, train if chooses else nothing)
    pixels = np.random.default_rng(0).integers(0, 256, (end, *shape), dtype=np.uint8)
    labels = np.arange(end) % classes
    dataset = Dataset("noise", pixels, labels, tuple(map(str, range(classes))), fingerprint="noise")
    return dataset, Partition(clients, np.concatenate([part.test for part in clients.values()]))


def _scaled(bench: _Bench, table: Rates) -> Rates:
    """Return the table's rates, scaled to what was measured."""
    size, batch = bench.size, bench.size.batch
    begin = bench.clock()
    bench.train("few")
    ready = bench.clock() - begin  # the processes build their models first
    first_many = bench.train("many")
    few = min(bench.train("few") for _ in range(size.repeats))
    many = min(bench.train("many") for _ in range(max(1, size.repeats // 2)))
    first_test = bench.test("many")
    few_test = min(bench.test("few") for _ in range(1 + size.repeats))
    many_test = min(bench.test("many") for _ in range(size.repeats))
    images = (MANY - FEW) * batch
    step = (MANY - FEW) * table.train_step
    training = _ratio(many - few, step + images * (table.train_image + table.train_image_epoch))
    few_work = FEW * (table.train_step + batch * (table.train_image + table.train_image_epoch))
    few_tests = max(1, size.tests // 4)
    testing = _ratio(many_test - few_test, (size.tests - few_tests) * table.test_image)
    first = _ratio(first_many - many, MANY * batch * table.train_first)
    fill = first * FEW * batch * table.train_first
    return replace(
        table,
        start=max(0.0, ready - few - fill),
        train_visit=max(0.0, few - training * few_work),
        train_step=training * table.train_step,
        train_image=training * table.train_image,
        train_image_epoch=training * table.train_image_epoch,
        train_first=first * table.train_first,
        test_visit=max(0.0, few_test - testing * few_tests * table.test_image),
        test_image=testing * table.test_image,
        test_first=_ratio(first_test - many_test, size.tests * table.test_first) * table.test_first,
    )


def _ratio(measured: float, expected: float) -> float:
    """Return how many times longer something took than expected, or 1 if it is too short to tell."""
    return measured / expected if expected > 0 and measured > 0 else 1.0


def _keep(experiment: Experiment, net: Net, workers: int, rates: Rates) -> None:
    """Add the result to those in the user's cache folder."""
    file = calibration_file(experiment)
    kept = known_calibrations(file)
    kept[calibration_key(experiment, net.classes, workers)] = asdict(rates)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, kept)
    except OSError as problem:
        log.warning("the measurement cannot be kept in %s: %s", file, problem.strerror)
