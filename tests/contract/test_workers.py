"""Several processes: the same bytes as one, and none is left behind."""

import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fedvit.cli.main import app
from fedvit.core.errors import UserError
from fedvit.core.payload import Payload, to_bytes
from fedvit.core.settings import Experiment
from fedvit.engine import pool_size, processes, system
from fedvit.engine.net import make_net
from fedvit.engine.pool import Job, WorkerPool
from fedvit.engine.pool_size import number_of_workers, training_nbytes
from fedvit.engine.shared_memory import SMALL, SharedBuffer
from fedvit.engine.system import cores
from fedvit.engine.worker import load_data
from tests.conftest import Bench, finish, tiny
from tests.contract.test_every_plan import weights

# One of each kind: roles and plugin, server memory, a merge that learns and a mask, widths, floats in memory, a cache.
KINDS = ["fedperfix+bias", "scaffold", "pfededit", "heterofl", "apfl", "fedper+head"]


@pytest.mark.parametrize("label", KINDS)
def test_two_workers_give_the_bytes_of_one(label: str, tmp_path: Path) -> None:
    experiment = tiny(label, {"train.dropout": 0.2}, cohort=4, rounds=3)
    one, two = (finish(experiment, tmp_path / str(count), workers=count) for count in (1, 2))
    for name in ("rounds.jsonl", "clients.csv", "confusion.json", "split.json", "run.toml"):
        assert (one / name).read_bytes() == (two / name).read_bytes(), name
    assert weights(one) == weights(two)


def test_bytes_survive_shared_memory() -> None:
    ours, theirs = SharedBuffer(), SharedBuffer()
    for size, new in ((1000, False), (SMALL, True), (SMALL, False), (2 * SMALL, True), (SMALL + 1, False)):
        blob = os.urandom(size)
        parcel = ours.put(blob)
        assert theirs.take(parcel) == blob
        assert (parcel.room is not None) == new, "shared memory is handed over once"
        assert (parcel.few is None) == (size >= SMALL), "large messages are not pickled"


def overheard(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The jobs that go to processes from now on."""
    sent, send = list[Job](), Connection.send

    def listen(self: Connection, content: object) -> None:
        if isinstance(content, Job):
            sent.append(content)
        send(self, content)

    monkeypatch.setattr(Connection, "send", listen)
    return sent


def test_the_longest_work_begins_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = overheard(monkeypatch)
    bench = Bench(tiny("fedavg", cohort=4), tmp_path)
    dataset, split = load_data(bench.experiment)
    down = {name: Payload({"shared": bench.net.shared}, {"round": 1}) for name in split.seen}
    with WorkerPool(bench.transport, dataset, 1) as pool:
        answers = [name for name, _ in pool.exchange("train", down)]
    images = [len(split.clients[job.client].train) for job in sent]
    assert images == sorted(images, reverse=True)
    assert len(set(images)) > 1
    assert answers == list(split.seen), "answers keep their order"


def test_a_process_gets_equal_messages_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = overheard(monkeypatch)
    bench = Bench(tiny("fedavg", cohort=4), tmp_path)
    dataset, _ = load_data(bench.experiment)
    tree = bench.net.shared
    same = {name: Payload({"shared": tree}, {"round": 1}) for name in ("0", "1", "2")}
    other = Payload({"shared": {name: tensor + 1 for name, tensor in tree.items()}}, {"round": 1})
    with WorkerPool(bench.transport, dataset, 1) as pool:
        found = dict(pool.exchange("evaluate", {**same, "3": other}))
    others = [job.client == "3" for job in sent]
    assert [job.down is None for job in sent] == [False, *(a == b for a, b in pairwise(others))]
    assert found == dict(bench.transport.exchange("evaluate", {**same, "3": other}))


def test_a_workers_mistake_is_the_users_and_the_death_of_the_last_is_told(tmp_path: Path) -> None:
    bench = Bench(tiny("fedavg", {"optimizer": "sgd"}, lr=1e30), tmp_path)
    dataset, _ = load_data(bench.experiment)
    down = {name: Payload({"shared": bench.net.shared}, {"round": 1}) for name in ("0", "1")}
    with WorkerPool(bench.transport, dataset, 2) as pool, pytest.raises(UserError, match="smaller --lr"):
        list(pool.exchange("train", down))
    with WorkerPool(bench.transport, dataset, 1) as pool:
        pool.processes[0].kill()
        pool.processes[0].join()
        said = r"the worker process of client \d died \(killed by the system, probably .* ran out\), and it was"
        with pytest.raises(UserError, match=said):
            list(pool.exchange("evaluate", down))
    assert torch.equal(bench.net.live["head.bias"].detach(), bench.net.initial["head.bias"])


@pytest.mark.parametrize("begun", [False, True])
def test_the_others_go_on_when_the_system_ends_a_process(
    begun: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tiny("fedper", cohort=4), tmp_path)
    dataset, split = load_data(bench.experiment)
    down = {name: Payload({"shared": bench.net.shared}, {"round": 1}) for name in split.seen[:6]}
    expected = dict(bench.transport.exchange("train", down))
    with WorkerPool(bench.transport, dataset, 2) as pool:
        answers = pool.exchange("train", down)
        found = dict([next(answers)]) if begun else {}
        pool.processes[0].kill()
        found |= dict(answers)
        again = dict(pool.exchange("train", down))
        assert [process.is_alive() for process in pool.processes] == [True]
    assert list(found) == list(again) == list(down)
    for name, answer in expected.items():
        for other in (found[name], again[name]):
            assert isinstance(answer, Payload)
            assert isinstance(other, Payload)
            assert to_bytes(answer) == to_bytes(other)
    assert "its work begins again, with 1 of 2 processes left" in caplog.text


def test_work_that_ends_every_process_stops_the_run_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a client with too many images for the memory."""
    bench = Bench(tiny("fedper", cohort=4), tmp_path)
    dataset, split = load_data(bench.experiment)
    down = {name: Payload({"shared": bench.net.shared}, {"round": 1}) for name in split.seen[:6]}
    deadly, send = split.seen[3], Connection.send
    with WorkerPool(bench.transport, dataset, 3) as pool:

        def end(self: Connection, content: object) -> None:
            send(self, content)
            if isinstance(content, Job) and content.client == deadly:
                pool.processes[pool.connections.index(self)].kill()

        monkeypatch.setattr(Connection, "send", end)
        with pytest.raises(UserError, match=rf"process of client {deadly} died .*continue it with --resume and fewer"):
            list(pool.exchange("train", down))
        assert len(pool.processes) == 1


def test_as_many_processes_as_cores_clients_and_memory_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(label: str = "fedavg", wanted: int | None = None, sets: Any = None, **flags: Any) -> int:
        experiment = tiny(label, sets, **{"threads": 1, **flags})
        dataset, split = load_data(experiment)
        return number_of_workers(wanted, experiment, make_net(experiment, 10, torch.device("cpu")), dataset, split)

    def here(cores: int = 4, ram: int = 10**12, shared: int | None = 10**12) -> None:
        monkeypatch.setattr(pool_size, "cores", lambda: cores)
        monkeypatch.setattr(pool_size, "free_ram", lambda: ram)
        monkeypatch.setattr(pool_size, "free_shared_memory", lambda: shared)

    here()
    assert [found(cohort=n) for n in (1, 3, 12)] == [1, 3, 4]
    assert [found(cohort=12, threads=n) for n in (2, 3, 8)] == [2, 1, 1]
    assert found("local", sets={"method.schedule": "every_round"}, cohort=1) == 4, "everybody trains in every round"
    assert [found(label) for label in ("fedv", "centralized")] == [1, 1]
    assert found(wanted=9) == 9
    here(shared=None)
    assert found(cohort=12) == 4
    experiment = tiny()
    dataset, split = load_data(tiny(cohort=12, threads=1))
    net = make_net(experiment, 10, torch.device("cpu"))
    one = training_nbytes(tiny(cohort=12, threads=1), net, split.seen, dataset.images.shape[1:])
    here(ram=2 * 3 * one + dataset.images.nbytes)
    assert found(cohort=12) == 3
    here(ram=0)
    assert found(cohort=12) == 1
    here(shared=10**6)
    assert found(cohort=12) == 1
    with pytest.raises(UserError, match=r"2 worker processes need .* MB of shared memory, found 1 MB .*--shm-size"):
        found(wanted=2)


def test_gpus_have_a_process_each_as_far_as_clients_and_memory_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = tiny(cohort=3)
    dataset, split = load_data(experiment)
    net = make_net(experiment, 10, torch.device("cpu"))

    def found(device: str, wanted: int | None = None) -> int:
        other = experiment.model_copy(update={"run": experiment.run.model_copy(update={"device": device})})
        return number_of_workers(wanted, other, net, dataset, split)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(pool_size, "free_shared_memory", lambda: 10**12)
    assert [found("cuda"), found("cuda:0"), found("cuda:0,1"), found("cuda", 5)] == [3, 1, 2, 5]
    monkeypatch.setattr(pool_size, "free_shared_memory", lambda: 10**6)
    assert found("cuda") == 1
    with pytest.raises(UserError, match="--shm-size"):
        found("cuda:0,1")


def training_at(experiment: Experiment) -> int:
    net = make_net(experiment, 10, torch.device("cpu"))
    return training_nbytes(experiment, net, ["0", "1"], (8, 8, 1))


def test_what_is_frozen_needs_no_memory_for_a_backward_pass() -> None:
    full, head = (training_at(tiny(label, batch=512)) for label in ("fedavg", "fedavg+head"))
    assert head < full / 4


def test_a_containers_limits_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "CONTAINER", tmp_path)
    assert system.cores() == len(os.sched_getaffinity(0))
    limits = {"cpu.max": "100000 100000", "memory.max": "5000", "memory.current": "3000", "memory.stat": "anon 1\ninactive_file 500"}  # fmt: skip  # noqa: E501
    for name, text in limits.items():
        (tmp_path / name).write_text(f"{text}\n")
    assert (system.cores(), system.free_ram()) == (1, 2500)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert system.cores() == len(os.sched_getaffinity(0))
    assert system.free_ram() > 10**6


def test_where_no_socket_can_be_made_each_worker_is_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise OSError("AF_UNIX path too long")

    monkeypatch.setattr("multiprocessing.forkserver.ensure_running", fails)
    assert processes.context_for(["cpu"]).get_start_method() == "spawn"
    monkeypatch.setattr("multiprocessing.forkserver.ensure_running", lambda: None)
    assert processes.context_for(["cpu"]).get_start_method() == "forkserver"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_words_that_cannot_be_written_are_no_success() -> None:
    command = [
        sys.executable,
        "-c",
        "from fedvit.engine.processes import end_at_once\nwith end_at_once(): print('words')",
    ]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.DEVNULL, env=environment)
    assert ended.returncode == 120
    assert subprocess.run(command, stdout=subprocess.DEVNULL, env=environment).returncode == 0


def test_the_memory_of_training_is_near_what_it_takes() -> None:
    """What autograd keeps of a batch is counted by another way: every storage that a hook sees, in training mode."""
    net = make_net(tiny(), 10, torch.device("cpu"))
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = net.module.train()(torch.zeros(64, 3, net.inputs.size, net.inputs.size))
    taken = sum(kept.values()) - sum(t.nbytes for t in net.live.values() if t.data_ptr() in kept)
    assert logits.requires_grad
    more = training_at(tiny(batch=1064)) - training_at(tiny(batch=1000))
    assert taken < more < 1.5 * taken, "what the backward pass makes on its way comes on top"


def test_a_command_uses_all_cores_and_writes_what_one_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDVIT_WORKERS")
    files = {}
    for workers_ in ("1", None):
        out = tmp_path / str(workers_)
        flags = ["--rounds", "1", "--cohort", "4", "--epochs", "1", *(["--workers", workers_] if workers_ else [])]
        assert CliRunner().invoke(app, ["run", *flags, "--out", str(out)]).exit_code == 0
        files[workers_] = (out / "rounds.jsonl").read_bytes(), (out / "clients.csv").read_bytes()
        shared = f"{min(4, cores())} processes share" in (out / "log.txt").read_text()
        assert shared == (workers_ is None and cores() > 1)
    assert files["1"] == files[None]


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "fedvit",
        "run",
        "--rounds",
        "1000",
        "--patch-size",
        "4",
        "--epochs",
        "1",
        "--cohort",
        "2",
        "--workers",
        "2",
        "--out",
        str(tmp_path / "r"),
    ]
    parent = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (tmp_path / "r" / "rounds.jsonl").is_file() or not (tmp_path / "r" / "rounds.jsonl").read_text():
        assert parent.poll() is None
        assert time.monotonic() < deadline, "no round in two minutes"
        time.sleep(0.05)
    workers = descendants(parent.pid)
    assert len(workers) >= 4, "the two, the process they are forked from, and that of Python which tidies up"
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.2)


def descendants(pid: int) -> list[int]:
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [each for child in children for each in descendants(child)]
