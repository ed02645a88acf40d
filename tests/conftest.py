"""Small settings that every test shares, and a transport that remembers what crossed."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fedvit.config.load import load_experiment
from fedvit.core.payload import Failure, Payload
from fedvit.core.settings import Experiment
from fedvit.engine.client_store import ClientStore
from fedvit.engine.inprocess import InProcess
from fedvit.engine.net import make_net
from fedvit.engine.worker import Worker, load_data
from fedvit.runs.execute import run_rounds

os.environ["FEDVIT_WORKERS"] = "1"  # tests run side by side already
THREADS = int(os.environ.get("FEDVIT_TEST_THREADS", "1"))  # equal bits are promised for any number, the same all over

TINY = {"patch_size": 4, "rounds": 2, "epochs": 1, "cohort": 2, "clients": 12, "batch": 32, "threads": THREADS}


def tiny(label: str = "fedavg", sets: Mapping[str, Any] | None = None, **flags: Any) -> Experiment:
    """A resolved experiment that trains in well under a second."""
    method, _, tune = label.partition("+")
    return load_experiment(None, sets, {**TINY, "method": method, "tune": tune or None, **flags})


def finish(experiment: Experiment, folder: Path, **options: Any) -> Path:
    """Run to the end."""
    for _ in run_rounds(experiment, folder, **options):
        pass
    return folder


class Recorder:
    """A transport that keeps every message of the one it wraps."""

    def __init__(self, inner: InProcess):
        self.inner = inner
        self.crossed: list[tuple[str, str, Payload]] = []

    def clients(self) -> Any:
        return self.inner.clients()

    def exchange(self, task: Any, messages: Mapping[str, Payload]) -> Iterator[tuple[str, Payload | Failure]]:
        for name, answer in self.inner.exchange(task, messages):
            self.crossed.append((task, name, messages[name]))
            if isinstance(answer, Payload):
                self.crossed.append((task, name, answer))
            yield name, answer

    def commit(self, round_: int) -> None:
        self.inner.commit(round_)


class Bench:
    """A worker, a store and a server, without files."""

    def __init__(self, experiment: Experiment, folder: Path):
        self.experiment = experiment
        dataset, self.split = load_data(experiment)
        self.net = make_net(experiment, dataset.classes, torch.device("cpu"))
        self.worker = Worker(experiment, self.net, dataset, self.split, torch.device("cpu"))
        self.store = ClientStore(folder / "checkpoint", in_ram=True)
        self.transport = InProcess(self.worker, self.store)
        self.server = self.net.server(self.split.seen)
        self.test_samples = {name: len(part.test) for name, part in self.split.clients.items()}


def same_trees(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# Equal bits are promised for the same computation: any number of workers, kill and resume, any transport. Where two
# ways of computing the same are compared, sums may round differently on another processor.


def assert_close_trees(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Equal up to rounding, a small part of one step of training."""
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        pair = [moving(name, tensor), moving(name, expected[name])]
        torch.testing.assert_close(*pair, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def moving(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without the bias of keys: no softmax shows it, its gradient is rounding, and Adam steps along that."""
    if not name.endswith("attn.qkv.bias"):
        return tensor
    query, _, value = tensor.chunk(3)
    return torch.cat([query, value])


def almost(content: Any) -> Any:
    """What equals this content, such as a run's rounds, up to the rounding of its numbers."""
    match content:
        case float():
            return pytest.approx(content, rel=1e-4, abs=1e-6)
        case dict():
            return {key: almost(value) for key, value in content.items()}
        case list():
            return [almost(value) for value in content]
    return content


@pytest.fixture(autouse=True)
def _few_threads_and_no_surprises(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(THREADS)
    for name in list(os.environ):
        if name.startswith("FEDVIT_") and name not in ("FEDVIT_DATA", "FEDVIT_WORKERS"):
            monkeypatch.delenv(name)


@pytest.fixture
def shared_data() -> Path:
    """The folder of real images and weights, where there is one."""
    folder = os.environ.get("FEDVIT_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("needs real images and weights: set FEDVIT_DATA to their folder")
    return Path(folder)
