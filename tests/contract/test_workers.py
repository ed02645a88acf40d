"""Several processes: the same bytes as one, and none is left behind."""

import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from fedvit.errors import UserError
from fedvit.experiment import load_data
from fedvit.payload import Payload
from fedvit.transport.workers import SMALL, Job, Room, Workers
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
    ours, theirs = Room(), Room()
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
    with Workers(bench.transport, dataset, 1) as workers:
        answers = [name for name, _ in workers.exchange("train", down)]
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
    with Workers(bench.transport, dataset, 1) as workers:
        found = dict(workers.exchange("evaluate", {**same, "3": other}))
    others = [job.client == "3" for job in sent]
    assert [job.down is None for job in sent] == [False, *(a == b for a, b in pairwise(others))]
    assert found == dict(bench.transport.exchange("evaluate", {**same, "3": other}))


def test_a_workers_mistake_is_the_users_and_its_death_is_told(tmp_path: Path) -> None:
    bench = Bench(tiny("fedavg", {"optimizer": "sgd"}, lr=1e30), tmp_path)
    dataset, _ = load_data(bench.experiment)
    down = {name: Payload({"shared": bench.net.shared}, {"round": 1}) for name in ("0", "1")}
    with Workers(bench.transport, dataset, 2) as workers, pytest.raises(UserError, match="smaller --lr"):
        list(workers.exchange("train", down))
    with Workers(bench.transport, dataset, 1) as workers:
        workers.processes[0].kill()
        workers.processes[0].join()
        with pytest.raises(RuntimeError, match="died"):
            list(workers.exchange("evaluate", down))
    assert torch.equal(bench.net.live["head.bias"].detach(), bench.net.initial["head.bias"])


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "fedvit",
        "run",
        "--rounds",
        "1000",
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
        time.sleep(0.2)
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
