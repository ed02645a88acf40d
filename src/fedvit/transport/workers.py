"""Several processes on one machine, each with one model for its whole life. Messages go through shared memory."""

import logging
import os
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedvit import payload
from fedvit.data.datasets import Dataset
from fedvit.data.partition import Split
from fedvit.errors import UserError
from fedvit.payload import Failure, Payload
from fedvit.processes import context_for
from fedvit.settings import Experiment
from fedvit.store import memory_from_bytes, memory_to_bytes
from fedvit.transport import Task
from fedvit.transport.inprocess import InProcess
from fedvit.worker import Worker, make_net

log = logging.getLogger(__name__)


Block = Tensor | bytes  # a tensor lies in shared memory
SMALL = 2**16  # bytes that go through the pipe itself


@dataclass(frozen=True)
class Job:
    """One client's task for a process: its message and memory."""

    task: Task
    client: str
    down: Block | None  # None: the same message as for the last client of this process
    memory: Block


@dataclass(frozen=True)
class Done:
    """What a process sends back; `problem` is a user's mistake or a traceback."""

    up: Block | None = None
    memory: Block | None = None
    problem: str | None = None
    mistake: bool = False


def share(blob: bytes) -> Block:
    """Bytes as a tensor that crosses between processes without being copied again; a few bytes stay what they are."""
    if len(blob) < SMALL:
        return blob
    shared = torch.empty(len(blob), dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
    shared.numpy()[:] = np.frombuffer(blob, dtype=np.uint8)
    return shared  # type: ignore[no-any-return]


def unshare(block: Block) -> bytes:
    return block if isinstance(block, bytes) else block.numpy().tobytes()


class Workers:
    """The transport of `--workers`: as `InProcess`, with the clients' work in other processes.

    Answers come in the order of the messages whatever the order of work, and every client's work depends on its own
    message and memory alone, so the result does not depend on the number of processes.
    """

    def __init__(self, inner: InProcess, dataset: Dataset, count: int):
        self.inner, self.count = inner, count
        worker = inner.worker
        context = context_for(worker.experiment.run.devices)
        pictures = dataset.images if isinstance(dataset.images, np.memmap) else shared_array(dataset.images)
        source = (worker.experiment, replace(dataset, images=EMPTY_IMAGE, labels=dataset.labels[:1]), worker.split)
        self.connections: list[Connection] = []
        self.processes = []
        self.home: dict[str, Connection] = {}  # where a client was last: what frozen layers make of its images is there
        self.last: tuple[Any, Block] | None = None  # the newest message
        self.holds: dict[Connection, Block] = {}  # the message that a process has
        for number in range(count):
            ours, theirs = context.Pipe()
            arguments = (
                theirs,
                *source,
                map_of(pictures),
                dataset.labels,
                device_of(worker.experiment.run.devices, number),
                count + 1,
            )
            process = context.Process(target=serve, args=arguments, name=f"fedvit-{number}", daemon=True)
            process.start()
            theirs.close()  # so that the end of a process is seen as the end of its pipe
            self.connections.append(ours)
            self.processes.append(process)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.terminate()

    def clients(self) -> Sequence[str]:
        return self.inner.clients()

    def commit(self, round_: int) -> None:
        self.inner.commit(round_)

    def exchange(self, task: Task, messages: Mapping[str, Payload]) -> Iterator[tuple[str, Payload | Failure]]:
        waiting, idle, answers = list(messages), list(self.connections), dict[str, Done | Failure]()
        running: dict[Connection, str] = {}
        begun, self.last, self.holds = 0, None, {}
        for number, name in enumerate(messages):
            while True:  # a process that is free gets its next task before an answer is looked at
                while idle and waiting and begun < number + 2 * self.count:  # few answers wait
                    near = waiting[: number + 2 * self.count - begun]  # the last place is for the one that is due
                    client = next((client for client in near if self.home.get(client) is idle[-1]), near[0])
                    waiting.remove(client)
                    begun += 1
                    self.start(idle, running, answers, task, client, messages[client])
                if name in answers:
                    break
                self.collect(idle, running, answers)
            yield name, self.opened(task, name, answers.pop(name))

    def start(
        self,
        idle: list[Connection],
        running: dict[Connection, str],
        answers: dict[str, Done | Failure],
        task: Task,
        name: str,
        down: Payload,
    ) -> None:
        """Hand a task to the last idle process."""
        if task == "train" and self.inner.fails(name, int(down.scalars["round"])):
            answers[name] = Failure("dropped out (train.dropout)")
            return
        connection = self.home[name] = idle.pop()
        message, memory = self.shared(down), share(memory_to_bytes(self.inner.store.get(name)))
        known = self.holds.get(connection) is message
        try:
            connection.send(Job(task, name, None if known else message, memory))
        except OSError as problem:
            raise RuntimeError(f"a worker process has died before client {name}") from problem
        running[connection], self.holds[connection] = name, message

    def shared(self, down: Payload) -> Block:
        """A message for other processes; the same block where the next client gets the same tensors."""
        key = tuple((group, id(tree)) for group, tree in down.trees.items()), tuple(down.scalars.items())
        if self.last is None or self.last[0] != key:
            self.last = key, share(payload.to_bytes(down))
        return self.last[1]

    def collect(
        self, idle: list[Connection], running: dict[Connection, str], answers: dict[str, Done | Failure]
    ) -> None:
        """Wait for some process and take its answer."""
        for ready in wait(list(running)):
            assert isinstance(ready, Connection)
            name = running.pop(ready)
            try:
                done: Done = ready.recv()
            except (EOFError, OSError) as problem:
                raise RuntimeError(f"the worker process of client {name} has died; was it out of memory?") from problem
            if done.problem is not None:
                raise UserError(done.problem) if done.mistake else RuntimeError(done.problem)
            answers[name] = done
            idle.append(ready)

    def opened(self, task: Task, name: str, done: Done | Failure) -> Payload | Failure:
        """A client's answer; what it remembers waits for the end of the round."""
        if isinstance(done, Failure):
            return done
        assert done.up is not None
        if task == "train":
            assert done.memory is not None
            self.inner.pending[name] = memory_from_bytes(unshare(done.memory))
        return payload.from_bytes(unshare(done.up))


EMPTY_IMAGE = np.zeros((1, 1, 1, 3), dtype=np.uint8)


def shared_array(images: np.ndarray) -> Tensor:
    """An array in memory that processes share."""
    tensor = torch.from_numpy(np.ascontiguousarray(images))
    tensor.share_memory_()  # type: ignore[no-untyped-call]
    return tensor


def map_of(images: Any) -> Any:
    """What is sent of the images: the shared tensor itself, or where the map lies."""
    if isinstance(images, np.memmap):
        return str(images.filename), images.dtype.str, images.shape, images.offset
    return images


def open_map(sent: Any) -> np.ndarray:
    if isinstance(sent, Tensor):
        return sent.numpy()
    file, kind, shape, offset = sent
    return np.memmap(file, dtype=kind, mode="r", shape=shape, offset=offset)


def device_of(devices: Sequence[str], number: int) -> str:
    """The devices in turn; `cuda` alone means every GPU."""
    if list(devices) == ["cuda"]:
        return f"cuda:{number % torch.cuda.device_count()}"
    return devices[number % len(devices)]


def serve(
    connection: Connection,
    experiment: Experiment,
    empty: Dataset,
    split: Split,
    images: Any,
    labels: Any,
    device: str,
    processes: int,
) -> None:
    """A worker process: build the model once, then play clients until the pipe is closed."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(experiment.run.threads)
    worker: Worker | None = None
    down: Payload | None = None
    with suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            job: Job = connection.recv()
            try:
                if worker is None:
                    dataset = replace(empty, images=open_map(images), labels=labels)
                    place = torch.device(device)
                    worker = Worker(
                        experiment, make_net(experiment, dataset.classes, place), dataset, split, place, processes
                    )
                if job.down is not None:
                    down = payload.from_bytes(unshare(job.down))
                assert down is not None
                done = work(worker, job, down)
            except UserError as problem:
                done = Done(problem=str(problem), mistake=True)
            except Exception:  # whatever it is, the parent must hear of it
                done = Done(problem=traceback.format_exc())
            connection.send(done)


def work(worker: Worker, job: Job, down: Payload) -> Done:
    memory = memory_from_bytes(unshare(job.memory))
    if job.task == "evaluate":
        return Done(share(payload.to_bytes(worker.evaluate(job.client, down, memory))))
    up, kept = worker.train(job.client, down, memory)
    return Done(share(payload.to_bytes(up)), share(memory_to_bytes(kept)))


def end_with_parent() -> None:
    """A parent that was killed closes no pipes that we read while we compute: wait for its end."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
