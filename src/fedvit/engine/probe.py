"""What a method computes and holds in memory, counted while one client trains and is tested on two to four images.

Every method runs its own code here, so no formula has to know that Ditto trains twice or that a frozen body is computed
only once. Numbers for other batches and clients follow, because work and memory grow evenly with the images.
"""

import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from fedvit.core.payload import Failure, Payload
from fedvit.core.server import Server
from fedvit.core.settings import Experiment
from fedvit.core.training import load_
from fedvit.data.dataset import Dataset
from fedvit.data.partition.records import ClientPartition, Partition
from fedvit.engine.client_store import ClientStore
from fedvit.engine.inprocess import InProcess
from fedvit.engine.ledger import Ledger
from fedvit.engine.loop import evaluate, train_round
from fedvit.engine.net import POOLED, Net
from fedvit.engine.split_loop import LocalClients, evaluate_split, federate_split
from fedvit.engine.transport import Task
from fedvit.engine.worker import Worker
from fedvit.models.build import macs_per_example
from fedvit.split.plan import SplitPlan

LARGE = 3e9  # multiply-adds of an image from which on fewer images are probed


@dataclass(frozen=True)
class Work:
    """What some computation needs: multiply-adds, operations and bytes of new tensors."""

    macs: float = 0.0
    ops: float = 0.0
    fresh: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.macs + other.macs, self.ops + other.ops, self.fresh + other.fresh)

    def times(self, factor: float) -> "Work":
        return Work(factor * self.macs, factor * self.ops, factor * self.fresh)

    def beyond(self, other: "Work") -> "Work":
        """Return how much more this is than another, at least nothing."""
        pairs = zip(
            (self.macs, self.ops, self.fresh),
            (other.macs, other.ops, other.fresh),
            strict=True,
        )
        return Work(*(max(0.0, mine - theirs) for mine, theirs in pairs))


@dataclass(frozen=True)
class Footprint:
    """What a client's training and evaluation need, by visit of a client, step and image."""

    train_visit: Work
    train_step: Work
    train_image: Work  # per visit, whatever the number of epochs
    train_image_epoch: Work
    train_first: Work  # more for each image, the first time it is used: frozen layers are computed once
    test_visit: Work
    test_image: Work
    test_first: Work
    train_nbytes: float  # the peak of live tensors besides the model: this much,
    train_nbytes_image: float  # and this for every image of a batch
    test_nbytes: float
    test_nbytes_image: float
    cached_nbytes: int  # activations of frozen layers that are kept per image


_known: dict[str, Footprint] = {}  # several runs in a process often differ only in their seed


def footprint_of(experiment: Experiment, net: Net, clients: Sequence[str], shape: tuple[int, ...]) -> Footprint:
    """Return the footprint of this experiment, found once for all runs of this process that have the same."""
    kept = experiment.model_dump_json(include={"model", "method", "tune", "train"})
    key = f"{kept} {experiment.run.precision} {experiment.run.device} {net.classes} {shape} {len(clients)}"
    if experiment.own.plan is not None or experiment.own.module is not None:
        return footprint(experiment, net, clients, shape)
    if key not in _known:
        _known[key] = footprint(experiment, net, clients, shape)
    return _known[key]


def footprint(experiment: Experiment, net: Net, clients: Sequence[str], shape: tuple[int, ...]) -> Footprint:
    """Count the work of one client on a few random images of this stored shape; the net is left as it was."""
    with tempfile.TemporaryDirectory() as folder, _left_as_it_was(net):
        probe = _Probe(experiment, net, clients, shape, Path(folder))
        images, batch = probe.images, probe.batch
        first = probe.train(batch, epochs=1)
        again = probe.train(batch, epochs=1)
        halves = probe.train(batch // 2, epochs=2)
        tested = probe.test(4)
        cached = probe.test(4)
        fewer = probe.test(2, fresh=True)
        kept = probe.worker.activations
        each = 0 if kept is None else kept.kept[:1].numel() * kept.kept.element_size()
    epoch = Work((halves.macs - again.macs) / images, 0, (halves.fresh - again.fresh) / images)
    if epoch.macs <= 0:  # the visit before did something once, such as FedALA's long first choice
        epoch = Work(halves.macs / images / 2, 0, halves.fresh / images / 2)
    step = max(0.0, (halves.ops - again.ops) * batch / 3 / images)  # 3 images / batch steps more
    return Footprint(
        train_visit=Work(ops=max(0.0, again.ops - step * images / batch)),
        train_step=Work(ops=step),
        train_image=Work(again.macs / images, 0, again.fresh / images).beyond(epoch),
        train_image_epoch=epoch.beyond(Work()),
        train_first=Work(first.macs / images, 0, first.fresh / images).beyond(
            Work(again.macs / images, 0, again.fresh / images)
        ),
        test_visit=Work(ops=cached.ops),
        test_image=Work(cached.macs / 4, 0, cached.fresh / 4),
        test_first=Work((tested.macs - cached.macs) / 4, 0, (tested.fresh - cached.fresh) / 4).beyond(Work()),
        train_nbytes=max(again.peak[True], halves.peak[True]),
        train_nbytes_image=max(0.0, (max(again.peak[False], first.peak[False]) - halves.peak[False]) / (batch // 2)),
        test_nbytes=tested.peak[True],
        test_nbytes_image=max(0.0, (tested.peak[False] - fewer.peak[False]) / 2),
        cached_nbytes=each,
    )


class _Probe:
    """One client with a handful of random images, which trains and is tested as in a run."""

    def __init__(self, experiment: Experiment, net: Net, clients: Sequence[str], shape: tuple[int, ...], folder: Path):
        norms = any(isinstance(part, torch.nn.modules.batchnorm._BatchNorm) for part in net.module.modules())
        self.images = 2 if macs_per_example(net.module, net.inputs.size) > LARGE else 4
        self.batch = self.images if norms else 2  # a single image has no variance, so its batch would be skipped
        self.rounds = max(3, experiment.train.rounds)
        update = {"rounds": self.rounds + 3, "dropout": 0.0, "cohort": 1}
        self.experiment = experiment.model_copy(
            update={
                "train": experiment.train.model_copy(update=update),
                "run": experiment.run.model_copy(
                    update={"eval_every": 0, "until_accuracy": None, "before_after": False}
                ),
            }
        )
        self.net, self.clients = net, list(clients)
        rng = np.random.default_rng(0)
        count = self.images + 8
        pixels = rng.integers(0, 256, (count, *shape), dtype=np.uint8)
        labels = (np.arange(count) % net.classes).astype(np.int64)
        dataset = Dataset("probe", pixels, labels, tuple(map(str, range(net.classes))), fingerprint="probe")
        device = next(net.module.parameters()).device
        with _quiet():
            self.worker = Worker(self.experiment, net, dataset, self.partition(4), device)
        self.transport = InProcess(self.worker, ClientStore(folder, in_ram=True))
        self.server: Server = net.server(clients)
        self.sizes = frozenset(k * weight.untyped_storage().nbytes() for weight in net.live.values() for k in (1, 2))
        self.number = 0

    def partition(self, tests: int, skip: int = 0) -> Partition:
        """Give the first client all images; methods that choose layers get two of them to choose by."""
        every = np.arange(self.images + 8)
        train, rest = every[: self.images], every[self.images :]
        chooses = not isinstance(self.net.plan, SplitPlan) and self.net.plan.choice is not None
        nothing = np.empty(0, dtype=np.int64)
        part = ClientPartition(train, rest[skip : skip + tests], nothing, train if chooses else nothing)
        return Partition({self.clients[0]: part}, part.test)

    def train(self, batch: int, epochs: int) -> "_Counter":
        """Let the client train once: the first time in the first round, and later in the last rounds of the run."""
        train = self.experiment.train.model_copy(update={"batch": batch, "epochs": epochs})
        self.worker.experiment = self.experiment.model_copy(update={"train": train})
        self.number = 1 if self.number == 0 else max(self.number + 1, self.rounds - 1)
        self.server = replace(self.server, round=self.number - 1)
        plan, experiment, counter = self.net.plan, self.worker.experiment, _Counter(self.sizes)
        if isinstance(plan, SplitPlan):
            with counter:
                loop = federate_split(self.net, self.server, LocalClients(self.net, self.transport), experiment, {})
                self.server = next(loop).server
        else:
            cohort, counted = [POOLED] if plan.pooled else self.clients[:1], _Counted(self.transport, counter)
            self.server, _, _ = train_round(plan, self.server, counted, experiment, cohort, self.number, Ledger(), {})
            counted.commit(self.number)
        return counter

    def test(self, images: int, *, fresh: bool = False) -> "_Counter":
        """Test the client on so many images, which are others than before if they are to be `fresh`."""
        self.worker.partition = self.partition(images, skip=4 if fresh else 0)
        plan, names, counter = self.net.plan, self.clients[:1], _Counter(self.sizes)
        if isinstance(plan, SplitPlan):
            with counter:
                here = LocalClients(self.net, self.transport)
                evaluate_split(self.net, self.server, here, self.worker.experiment, names, self.number)
        else:
            counted = _Counted(self.transport, counter)
            evaluate(plan, dict.fromkeys(names, self.server), counted, self.number, Ledger())
        return counter


@dataclass(frozen=True)
class _Counted:
    """A transport that counts what its clients compute; what the server does with their answers is not counted."""

    inner: InProcess
    counter: "_Counter"

    def clients(self) -> Sequence[str]:
        return self.inner.clients()

    def exchange(self, task: Task, messages: Mapping[str, Payload]) -> Iterator[tuple[str, Payload | Failure]]:
        with self.counter:
            answers = list(self.inner.exchange(task, messages))
        return iter(answers)

    def commit(self, round_: int) -> None:
        self.inner.commit(round_)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts multiply-adds, operations, and the bytes of live tensors that they make.

    Tensors as large as one of the weights are taken for copies, gradients or sums of weights, which do not grow with
    the batch; sums have 8 bytes per number. Among the few images of a probe, nothing else would tell them apart.
    """

    def __init__(self, sizes: frozenset[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes = sizes
        self.macs, self.ops, self.fresh = 0.0, 0, 0
        self.now, self.peak = [0, 0], [0, 0]  # of images, of weights
        self.live: dict[int, tuple[int, bool]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.ops += 1
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.macs += count(*args, **kwargs, out_val=result) / 2
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.see(leaf.untyped_storage(), given)
        return result

    def see(self, storage: Any, given: set[int]) -> None:
        place, size = storage._cdata, storage.nbytes()
        if place in self.live or place in given:
            return
        kind = size in self.sizes
        self.live[place] = size, kind
        self.fresh += 0 if kind else size
        self.now[kind] += size
        self.peak[kind] = max(self.peak[kind], self.now[kind])
        weakref.finalize(storage, self.forget, place)

    def forget(self, place: int) -> None:
        size, kind = self.live.pop(place, (0, False))
        self.now[kind] -= size


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep this worker's remarks out of the log: the run's own worker makes them again."""
    import logging

    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def _left_as_it_was(net: Net) -> Iterator[None]:
    """Undo everything that training does to the model."""
    module = net.module
    modes = [(part, part.training) for part in module.modules()]
    learning = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
    counts = {name: b.clone() for name, b in module.named_buffers() if not b.is_floating_point()}
    try:
        yield
    finally:
        load_(net.live, {**net.initial, **net.frozen})
        load_(dict(module.named_buffers()), counts)
        for part, mode in modes:
            part.training = mode
        for parameter, learns in learning:
            parameter.requires_grad_(learns)
            parameter.grad = None
        net.narrower.clear()
