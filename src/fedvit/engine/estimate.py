"""What a run will take, said before it begins: minutes, bytes, and the memory of all processes together."""

import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch

from fedvit.core.batches import EVALUATION_BATCH
from fedvit.core.errors import UserError
from fedvit.core.finetune import finetune_epochs
from fedvit.core.plan import Plan
from fedvit.core.settings import Experiment
from fedvit.data.dataset import Dataset, wants_auroc
from fedvit.data.partition.records import ClientPartition, Partition
from fedvit.engine.loop import choose, is_evaluated, sample_cohort
from fedvit.engine.net import POOLED, Net, make_net
from fedvit.engine.pool_size import number_of_workers
from fedvit.engine.probe import footprint_of
from fedvit.engine.rates import Rates, memory_mb, rates_for
from fedvit.engine.system import cores
from fedvit.engine.traffic import Traffic, traffic_of
from fedvit.engine.worker import load_data
from fedvit.split.plan import SplitPlan

log = logging.getLogger(__name__)
SIMULATED = 400  # rounds that are gone through one by one; longer runs are taken to go on like these
SHAPE = (32, 32, 3)  # of a stored image, if nobody knows it


@dataclass(frozen=True)
class Estimate:
    """What a run will take.

    Attributes:
        minutes: From the start of the command to its end.
        nbytes: Everything that is sent, in both directions and for evaluation.
        memory_mb: The peak of all processes together, in MB of 10^6 bytes.
        workers: The number of processes that share the clients' work.
        how: Whether the time rests on a table, or on a measurement on this machine.
        traffic: The bytes by direction.
        once: Those of the minutes that a command takes once, however many runs it makes.
    """

    minutes: float
    nbytes: int
    memory_mb: float
    workers: int
    how: Literal["table", "measured"]
    traffic: Traffic
    once: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the fields as `fedvit cost --json` has them."""
        ways = {f"nbytes_{way}": size for way, size in asdict(self.traffic).items()}
        whole = {"minutes": round(self.minutes, 4), "nbytes": self.nbytes, "memory_mb": round(self.memory_mb, 1)}
        return {**whole, "workers": self.workers, "how": self.how, **ways}


def estimate(
    experiment: Experiment,
    images: int,
    classes: int,
    workers: int | None = None,
    *,
    tests: int = 0,
    shape: tuple[int, ...] = SHAPE,
    sites: Sequence[int] = (),
) -> Estimate:
    """Estimate a run on a dataset of so many images and classes, without reading any of them.

    `tests` of the images are an official test set, `shape` is that of a stored image, and `sites` has the number of
    images of each site. As many processes as a run would use share the work, unless `workers` says how many.
    """
    net = make_net(experiment, classes, torch.device(experiment.run.devices[0]))
    dataset = stand_in(experiment, images, classes, tests, shape, sites)
    partition = _likely_partition(experiment, dataset)
    count = number_of_workers(workers, experiment, net, dataset, partition)
    return estimate_run(experiment, net, dataset, partition, count)


def estimate_run(
    experiment: Experiment, net: Net, dataset: Dataset, partition: Partition, workers: int, after: int = 0
) -> Estimate:
    """Estimate the rounds after round `after` of a run whose data is known."""
    shape = tuple(dataset.images.shape[1:])
    found = footprint_of(experiment, net, tuple(partition.seen), shape)
    rates = rates_for(experiment, net, found, workers)
    course = _Course(experiment, net, partition, workers, after, rates)
    sent = traffic_of(experiment, net, found, course.cohorts, course.evaluations, partition)
    in_memory = 0 if isinstance(dataset.images, np.memmap) else dataset.images.nbytes
    memory = memory_mb(experiment, net, found, rates, workers, len(partition.clients), in_memory, course.cached_images)
    minutes = (rates.command + course.seconds) / 60
    return Estimate(minutes, sent.total, memory, workers, rates.how, sent, rates.command / 60)


@dataclass(frozen=True)
class _Course:
    """The course of a run: who trains in which round, who is tested when, and how long that takes."""

    experiment: Experiment
    net: Net
    partition: Partition
    workers: int
    after: int
    rates: Rates

    @cached_property
    def rounds(self) -> range:
        return range(self.after + 1, self.experiment.train.rounds + 1)

    @cached_property
    def cohorts(self) -> list[list[str]]:
        """Who trains in each round; long runs are represented by their first rounds."""
        plan, clients = self.net.plan, self.partition.seen
        rounds = self.rounds[:SIMULATED]
        if isinstance(plan, Plan):
            return [choose(plan, clients, self.experiment, number) for number in rounds]
        return [sample_cohort(clients, self.experiment, number) for number in rounds]

    @cached_property
    def evaluations(self) -> int:
        return sum(is_evaluated(number, self.experiment) for number in self.rounds)

    @cached_property
    def finetune_epochs(self) -> int:
        plan = self.net.plan
        return finetune_epochs(plan, self.experiment.train.epochs) if isinstance(plan, Plan) else 0

    @cached_property
    def cached_images(self) -> int:
        """How many images pass the frozen layers of one process or another."""
        trained = {name for cohort in self.cohorts for name in cohort}
        if self.finetune_epochs and self.evaluations:
            trained |= set(self.partition.seen)
        parts = [self.part(name) for name in trained]
        tested = [self.partition.clients[name] for name in self.partition.seen]
        return sum(len(part.train) + len(part.val) for part in parts) + sum(len(part.test) for part in tested)

    def part(self, name: str) -> ClientPartition:
        if name != POOLED:
            return self.partition.clients[name]
        parts = [self.partition.clients[client] for client in self.partition.seen]
        return ClientPartition(np.concatenate([part.train for part in parts]), self.partition.global_test, parts[0].val)

    def finetune_seconds(self, name: str) -> float:
        """Return the seconds of the training before a test, which is FedAvg's whatever the method's own is."""
        if not self.finetune_epochs:
            return 0.0
        train, rates, images = self.experiment.train, self.rates, len(self.partition.clients[name].train)
        epoch = math.ceil(images / train.batch) * rates.train_step + images * rates.train_image_epoch
        return rates.train_visit + self.finetune_epochs * epoch / self.net.federated.passes(train.epochs)

    def train_seconds(self, name: str, *, first: bool) -> float:
        part, train, rates = self.part(name), self.experiment.train, self.rates
        images = len(part.train)
        steps = train.epochs * math.ceil(images / train.batch)
        by_choice = len(part.probe) if len(part.probe) else images
        seconds = rates.train_visit + steps * rates.train_step + by_choice * rates.train_image
        return seconds + images * (train.epochs * rates.train_image_epoch + first * rates.train_first)

    def test_seconds(self, images: int, *, first: bool) -> float:
        rates = self.rates
        batches = math.ceil(images / EVALUATION_BATCH)
        return batches * rates.test_visit + images * (rates.test_image + first * rates.test_first)

    @property
    def seconds(self) -> float:
        """Add up all rounds, as the processes share them."""
        known: set[str] = set()
        training = 0.0
        for cohort in self.cohorts:
            training += self.shared([self.train_seconds(name, first=name not in known) for name in cohort])
            known.update(cohort)
        training *= len(self.rounds) / max(1, len(self.cohorts))
        return self.rates.start + training + len(self.rounds) * self.rates.round + self.testing()

    def testing(self) -> float:
        """Return the seconds of all evaluations, and of the server's own model where it is tested separately."""
        parts = [self.partition.clients[name] for name in self.partition.seen]
        training = [self.finetune_seconds(name) for name in self.partition.seen]
        tests = [(len(part.test) + len(part.val), before) for part, before in zip(parts, training, strict=True)]
        first = self.shared([before + self.test_seconds(images, first=True) for images, before in tests])
        again = self.shared([before + self.test_seconds(images, first=False) for images, before in tests])
        if self.server_is_tested:
            whole = len(self.partition.global_test)
            first += self.test_seconds(whole, first=True)
            again += self.test_seconds(whole, first=False)
        return first + max(0, self.evaluations - 1) * again if self.evaluations else 0.0

    @property
    def server_is_tested(self) -> bool:
        """Whether the server's model is tested on the global test set, rather than scored by what clients found."""
        net, experiment = self.net, self.experiment
        if isinstance(net.plan, SplitPlan) or not net.one_global_model:
            return False
        tests = sum(len(self.partition.clients[name].test) for name in self.partition.seen)
        same = tests == len(self.partition.global_test) and not wants_auroc(experiment.data, net.classes)
        free = same and experiment.run.evaluate == "after" and net.clients_test_the_servers(self.partition.seen)
        return not free

    def shared(self, tasks: Sequence[float]) -> float:
        """Return when the last process ends, if each takes the largest task left as soon as it is free."""
        at_once = max(1, min(self.workers, cores() // self.experiment.run.threads))
        if len(tasks) > 64 * at_once:
            return max(sum(tasks) / at_once, max(tasks))
        ends = [0.0] * at_once
        for task in sorted(tasks, reverse=True):
            ends[ends.index(min(ends))] += task
        return max(ends)


def stand_in(
    experiment: Experiment, images: int, classes: int, tests: int, shape: tuple[int, ...], sites: Sequence[int] = ()
) -> Dataset:
    """Return a dataset of this size that takes no memory, with as many images of every class."""
    labels = np.arange(images) % classes
    official = np.arange(images) >= images - tests if tests else None
    pixels = np.broadcast_to(np.zeros((), np.uint8), (images, *shape))
    owners = np.repeat(np.arange(len(sites)), sites) if sites else None
    names = tuple(map(str, range(classes)))
    site_names = tuple(map(str, range(len(sites))))
    return Dataset(experiment.data.name, pixels, labels, names, official, owners, site_names, fingerprint="stand-in")


def _likely_partition(experiment: Experiment, dataset: Dataset) -> Partition:
    """Partition the stand-in by the rule of the settings, or into equal parts where that needs to know more."""
    try:
        return load_data(experiment, dataset)[1]
    except UserError:
        if experiment.data.samples is not None and experiment.data.samples > len(dataset):
            raise
    count = experiment.partition.clients or 1
    used = min(experiment.data.samples or len(dataset), len(dataset))
    parts = np.array_split(np.arange(used), count)
    none = np.empty(0, dtype=np.int64)
    cut = 1 - experiment.data.test
    clients = {
        str(number): ClientPartition(part[: math.ceil(len(part) * cut)], part[math.ceil(len(part) * cut) :], none)
        for number, part in enumerate(parts)
    }
    return Partition(clients, np.concatenate([part.test for part in clients.values()]))


def log_estimate(
    experiment: Experiment, net: Net, dataset: Dataset, partition: Partition, workers: int, after: int
) -> None:
    """Log what the rest of a run will take, if a command listens: it takes a moment to find out."""
    if log.handlers and after < experiment.train.rounds:
        found = estimate_run(experiment, net, dataset, partition, workers, after)
        most = "at most " if (experiment.run.until_accuracy or experiment.run.patience) is not None else ""
        log.info("%s: %s%s", experiment.label, most, say(found))


def say(found: Estimate) -> str:
    """Say an estimate in one line."""
    source = "measured on this machine" if found.how == "measured" else "by a table; fedvit cost --calibrate measures"
    processes = "1 process" if found.workers == 1 else f"{found.workers} worker processes"
    size = f"{found.nbytes / 1e6:,.1f} MB" if found.nbytes < 1e9 else f"{found.nbytes / 1e9:,.1f} GB"
    return (
        f"about {minutes_in_words(found.minutes)} and {found.memory_mb:,.0f} MB of memory with {processes}, "
        f"{size} sent ({source})"
    )


def minutes_in_words(minutes: float) -> str:
    if minutes < 1:
        return f"{max(1, round(60 * minutes))} seconds"
    if minutes < 90:
        return f"{minutes:.1f} minutes" if minutes < 10 else f"{minutes:.0f} minutes"
    return f"{minutes / 60:.1f} hours"


def total(found: Sequence[Estimate]) -> Estimate:
    """Return what several runs of one command, one after another, take together."""
    most = max(found, key=lambda one: one.memory_mb)
    how: Literal["table", "measured"] = "measured" if all(one.how == "measured" for one in found) else "table"
    return replace(
        most,
        minutes=sum(one.minutes - one.once for one in found) + most.once,
        nbytes=sum(one.nbytes for one in found),
        how=how,
        traffic=Traffic(*(sum(getattr(one.traffic, way) for one in found) for way in ("down", "up", "evaluation"))),
    )
