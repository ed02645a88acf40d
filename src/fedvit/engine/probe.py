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

from fedvit.core import tree
from fedvit.core.payload import Failure, Payload
from fedvit.core.server import Server
from fedvit.core.settings import Experiment, PrivacySettings
from fedvit.data.dataset import Dataset
from fedvit.data.partition.records import ClientPartition, Partition
from fedvit.engine.client_store import ClientStore
from fedvit.engine.footprint import PER_STEP, Footprint, SplitBytes, Work, by_formula, left_as_it_was
from fedvit.engine.inprocess import InProcess
from fedvit.engine.ledger import Ledger
from fedvit.engine.loop import evaluate, train_round
from fedvit.engine.net import POOLED, Net
from fedvit.engine.split_loop import LocalClients, evaluate_split, federate_split
from fedvit.engine.transport import Task
from fedvit.engine.worker import Worker
from fedvit.models.build import macs_per_example
from fedvit.split.plan import SplitPlan

TINY_LR = 1e-8  # random images must not make the probe diverge at a rate that suits real ones
LARGE = 2e9  # multiply-adds of an image from which on a formula is used


_known: dict[str, Footprint] = {}  # several runs in a process often differ only in their seed


def footprint_of(experiment: Experiment, net: Net, clients: Sequence[str], shape: tuple[int, ...]) -> Footprint:
    """Return the footprint of this experiment, found once for all runs of this process that have the same.

    Training a large model on even a few images takes too long to be done in advance, so a formula answers instead.
    """
    macs = macs_per_example(net.module, net.inputs.size)
    if macs > LARGE:
        return by_formula(experiment, net, macs)
    kept = experiment.model_dump_json(include={"model", "method", "tune", "train"})
    run = experiment.run
    key = f"{kept} {run.precision} {run.device} {run.cache_mb} {net.classes} {shape} {len(clients)}"
    if experiment.own.plan is not None or experiment.own.module is not None:
        return footprint(experiment, net, clients, shape)
    if key not in _known:
        _known[key] = footprint(experiment, net, clients, shape)
    return _known[key]


def footprint(experiment: Experiment, net: Net, clients: Sequence[str], shape: tuple[int, ...]) -> Footprint:
    """Count the work of one client on a few random images of this stored shape; the net is left as it was."""
    with tempfile.TemporaryDirectory() as folder, left_as_it_was(net):
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
    step = (halves.ops - again.ops) * batch / 3 / images  # 3 images / batch steps more
    if step <= 0:
        step = halves.ops / 8 * batch / images
    made, holds = _per_image(again, halves, step, batch // 2)
    whole, twice = again.macs / images, halves.macs / images
    epoch = twice - whole if twice > whole else twice / 2  # FedALA's first choice is longer than all later ones
    once = max(0.0, whole - epoch)
    extra = Work((first.macs - again.macs) / images, 0, (first.fresh[-1] - again.fresh[-1]) / images)
    untested = Work((tested.macs - cached.macs) / 4, 0, (tested.fresh[-1] - cached.fresh[-1]) / 4)
    more = max(0.0, (tested.peak - fewer.peak) / 2)
    return Footprint(
        train_visit=Work(ops=max(0.0, again.ops - step * images / batch)),
        train_step=Work(ops=step, fresh=PER_STEP * tree.nbytes(net.initial)),
        train_image=Work(once, 0, made * once),
        train_image_epoch=Work(epoch, 0, made * epoch),
        train_first=extra.at_least_nothing(),
        test_visit=Work(ops=cached.ops),
        test_image=Work(cached.macs / 4, 0, cached.fresh[-1] / 4),
        test_first=untested.at_least_nothing(),
        train_nbytes=halves.peak,
        train_nbytes_image=holds,
        test_nbytes=max(0.0, fewer.peak - 2 * more),
        test_nbytes_image=more,
        cached_nbytes=each,
        split=SplitBytes(
            _line(again.sent[0], halves.sent[0], images, 2 * images),
            _line(again.sent[1], halves.sent[1], images, 2 * images),
            _line(fewer.sent[0], tested.sent[0], 2, 4),
        )
        if isinstance(net.plan, SplitPlan)
        else None,
    )


def _line(few: float, many: float, images: int, more: int) -> tuple[float, float]:
    """Return what is there without images, and what every image adds."""
    each = (many - few) / (more - images)
    return few - images * each, each


class _Probe:
    """One client with a handful of random images, which trains and is tested as in a run."""

    def __init__(self, experiment: Experiment, net: Net, clients: Sequence[str], shape: tuple[int, ...], folder: Path):
        norms = any(isinstance(part, torch.nn.modules.batchnorm._BatchNorm) for part in net.module.modules())
        self.images = 4
        self.batch = self.images if norms else 2  # a single image has no variance, so its batch would be skipped
        self.rounds = max(3, experiment.train.rounds)
        update = {"rounds": self.rounds + 3, "dropout": 0.0, "cohort": 1, "lr": TINY_LR}
        self.experiment = experiment.model_copy(
            update={
                "privacy": PrivacySettings(),  # the estimate leaves out what privacy adds
                "train": experiment.train.model_copy(update=update),
                "run": experiment.run.model_copy(
                    update={"eval_every": 0, "until_accuracy": None, "before_after": False, "clinical": False}
                ),
            }
        )
        self.net = net = net.not_fine_tuned
        self.clients = list(clients)
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
        plan, experiment, counter = self.net.plan, self.worker.experiment, _Counter()
        if isinstance(plan, SplitPlan):
            with counter:
                loop = federate_split(self.net, self.server, LocalClients(self.net, self.transport), experiment, {})
                done = next(loop)
            self.server, counter.sent = done.server, (done.row["nbytes_down"], done.row["nbytes_up"])
        else:
            cohort, counted = [POOLED] if plan.pooled else self.clients[:1], _Counted(self.transport, counter)
            self.server, _, _ = train_round(plan, self.server, counted, experiment, cohort, self.number, Ledger(), {})
            counted.commit(self.number)
        return counter

    def test(self, images: int, *, fresh: bool = False) -> "_Counter":
        """Test the client on so many images, which are others than before if they are to be `fresh`."""
        self.worker.partition = self.partition(images, skip=4 if fresh else 0)
        plan, names, counter = self.net.plan, self.clients[:1], _Counter()
        if isinstance(plan, SplitPlan):
            with counter:
                here = LocalClients(self.net, self.transport)
                _, nbytes = evaluate_split(self.net, self.server, here, self.worker.experiment, names, self.number)
            counter.sent = nbytes, 0
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
    """Counts multiply-adds, operations, and the bytes of the tensors that they make, after each operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.sent = 0, 0  # bytes of split learning to a client and from it
        self.names: list[Any] = []
        self.macs_after: list[float] = [0.0]
        self.fresh: list[int] = [0]  # bytes of all tensors made so far
        self.held: list[int] = [0]  # bytes of those that are still alive
        self.live: dict[int, int] = {}

    @property
    def ops(self) -> int:
        return len(self.names)

    @property
    def macs(self) -> float:
        return self.macs_after[-1]

    @property
    def peak(self) -> int:
        return max(self.held)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        count = flop_registry.get(func._overloadpacket)
        macs = count(*args, **kwargs, out_val=result) / 2 if count is not None else 0.0
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        fresh = sum(self.see(leaf.untyped_storage(), given) for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        self.names.append(func)
        self.macs_after.append(self.macs + macs)
        self.fresh.append(self.fresh[-1] + fresh)
        self.held.append(self.now)
        return result

    def see(self, storage: Any, given: set[int]) -> int:
        """Return the bytes of a storage that nobody has seen yet, and watch when it is freed."""
        place, size = storage._cdata, int(storage.nbytes())
        if place in self.live or place in given:
            return 0
        self.live[place] = size
        self.now += size
        weakref.finalize(storage, self.forget, place)
        return size

    def forget(self, place: int) -> None:
        self.now -= self.live.pop(place, 0)


def _per_image(larger: _Counter, smaller: _Counter, step: float, images: int) -> tuple[float, float]:
    """Return the bytes that images make per multiply-add, and those that one more image of a batch holds at most.

    Both visits do the same operations until the first ends its steps, with batches that differ by so many images: what
    differs between them belongs to the images, and the rest to the weights. Where they part sooner, as with methods
    that choose or draw, the first step after their first difference is compared.
    """
    ends = min(larger.ops, smaller.ops)
    names = zip(larger.names, smaller.names, strict=False)
    window = range(next((at for at, (a, b) in enumerate(names) if a is not b), ends) + 1)
    if 3 * larger.macs_after[window[-1]] < larger.macs:
        begin = next((at for at in range(ends) if larger.held[at] != smaller.held[at]), 0)
        window = range(begin, min(ends, begin + max(1, round(step))) + 1)
    holds = max(larger.held[at] - smaller.held[at] for at in window)
    macs = larger.macs_after[window[-1]] - smaller.macs_after[window[-1]]
    made = larger.fresh[window[-1]] - smaller.fresh[window[-1]]
    return (max(0, made) / macs if macs > 0 else 0.0), max(0, holds) / images


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
