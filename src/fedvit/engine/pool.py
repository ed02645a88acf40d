"""Worker processes on one machine, each with one model for its whole life. Messages go through shared memory."""

import logging
import os
import signal
import threading
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import torch

from fedvit.core import payload
from fedvit.core.errors import DivergedError, UserError
from fedvit.core.payload import Failure, Payload
from fedvit.core.settings import Experiment
from fedvit.data.dataset import Dataset
from fedvit.data.partition.records import Partition
from fedvit.engine.client_store import memory_from_bytes, memory_to_bytes
from fedvit.engine.inprocess import DROPPED, InProcess
from fedvit.engine.net import make_net
from fedvit.engine.pool_size import EMPTY_IMAGE
from fedvit.engine.processes import context_for
from fedvit.engine.shared_memory import SharedBuffers, SharedMessage, map_of, open_map, shared_array
from fedvit.engine.transport import Task
from fedvit.engine.worker import Worker

log = logging.getLogger(__name__)
WAITING = 2**28  # bytes of answers that may wait for a client whose turn comes earlier,
AHEAD = 16  # and the number of them per process
DEADLY = 2  # processes that may die with the same client's work before the run stops


@dataclass(frozen=True)
class Job:
    """One client's task for a process, with its message and memory."""

    task: Task
    client: str
    down: SharedMessage | None  # None if this process got the same message for its last client
    memory: SharedMessage


@dataclass(frozen=True)
class _Done:
    """The result that a process sends back; `problem` is a message or a traceback."""

    up: SharedMessage | None = None
    memory: SharedMessage | None = None
    problem: str | None = None
    kind: Literal["mistake", "divergence", "bug"] = "bug"


@dataclass(frozen=True)
class Answer:
    """A client's answer as bytes, kept until its turn comes."""

    up: bytes
    kept: bytes | None


class WorkerPool:
    """The transport of `--workers`: like `InProcess`, but the clients' work is done in other processes.

    Answers come in the order of the messages, whatever the order of work, and each client's work depends only on its
    own message and memory, so the result does not depend on the number of processes. If a process dies, because the
    system ended it for its memory, the others continue, and its client's work begins again.
    """

    def __init__(self, inner: InProcess, dataset: Dataset, count: int):
        self.inner, self.count = inner, count
        log.info("%d processes share the clients' work", count)
        worker = inner.worker
        context = context_for(worker.experiment.run.devices)
        pictures = dataset.images if isinstance(dataset.images, np.memmap) else shared_array(dataset.images)
        source = (worker.experiment, replace(dataset, images=EMPTY_IMAGE, labels=dataset.labels[:1]), worker.partition)
        self.connections: list[Connection] = []
        self.processes = []
        self.deaths: Counter[str] = Counter()  # of processes, by the client that they worked on
        self.rooms: dict[Connection, SharedBuffers] = {}
        self.home: dict[str, Connection] = {}  # where a client last ran: that process has its activations cached
        self.last: tuple[Any, bytes] | None = None  # the newest message
        self.holds: dict[Connection, bytes] = {}  # the message that each process has
        for number in range(count):
            ours, theirs = context.Pipe()
            arguments = (
                theirs,
                *source,
                map_of(pictures),
                dataset.labels,
                device_of(worker.experiment.run.devices, number),
                count + 1,
                worker.private.folder if worker.private is not None else None,
            )
            process = context.Process(target=_serve_tasks, args=arguments, name=f"fedvit-{number}", daemon=True)
            process.start()
            theirs.close()  # so that the end of a process ends its pipe
            self.connections.append(ours)
            self.rooms[ours] = SharedBuffers()
            self.processes.append(process)

    def __enter__(self) -> "WorkerPool":
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
        waiting, idle, answers = list(messages), list(self.connections), dict[str, Answer | Failure]()
        running: dict[Connection, str] = {}
        begun, self.last, self.holds = 0, None, {}
        largest = max((message.nbytes for message in messages.values()), default=0)
        few = self.count * max(2, min(AHEAD, WAITING // max(1, largest * self.count)))
        for number, name in enumerate(messages):
            while True:  # a free process gets its next task before any answer is looked at
                while idle and waiting and begun < number + few:  # limit the answers that wait
                    near = waiting[: number + few - begun]  # the last slot is for the client whose answer is due
                    client = max(near, key=lambda name: (self.home.get(name) is idle[-1], self.images(task, name)))
                    waiting.remove(client)
                    begun += 1
                    if not self.start(idle, running, answers, task, client, messages[client]):
                        waiting.insert(0, client)
                        begun -= 1
                if name in answers:
                    break
                lost = self.collect(idle, running, answers)
                waiting[:0] = lost
                begun -= len(lost)
            yield name, self.opened(name, answers.pop(name))

    def images(self, task: Task, client: str) -> int:
        """Estimate a client's work by its images: the largest clients go first, so that all processes end together."""
        part = self.inner.worker.part(client)
        return len(part.train if task == "train" else part.test)

    def start(
        self,
        idle: list[Connection],
        running: dict[Connection, str],
        answers: dict[str, Answer | Failure],
        task: Task,
        name: str,
        down: Payload,
    ) -> bool:
        """Give a task to the last idle process; return False if that process has died."""
        if task == "train" and self.inner.fails(name, int(down.scalars["round"])):
            answers[name] = Failure(DROPPED)
            return True
        connection = idle.pop()
        if self.inner.worker.activations is not None:
            self.home[name] = connection
        message, rooms = self.message(down), self.rooms[connection]
        known = self.holds.get(connection) is message
        memory = rooms.memory.put(memory_to_bytes(self.inner.store.get(name)))
        try:
            connection.send(Job(task, name, None if known else rooms.down.put(message), memory))
        except OSError:
            self.go_on_without(connection, name)
            return False
        running[connection], self.holds[connection] = name, message
        return True

    def message(self, down: Payload) -> bytes:
        """Serialize a message for other processes; the bytes are reused if the next client gets the same tensors."""
        key = tuple((group, id(tree)) for group, tree in down.trees.items()), tuple(down.scalars.items())
        if self.last is None or self.last[0] != key:
            self.last = key, payload.to_bytes(down)
        return self.last[1]

    def collect(
        self, idle: list[Connection], running: dict[Connection, str], answers: dict[str, Answer | Failure]
    ) -> list[str]:
        """Wait for any process and take its answer; return the clients whose processes have died."""
        lost = []
        for ready in wait(list(running)):
            assert isinstance(ready, Connection)
            name = running.pop(ready)
            try:
                done: _Done = ready.recv()
            except (EOFError, OSError):
                self.go_on_without(ready, name)
                lost.append(name)
                continue
            if done.problem is not None:
                kinds = {"mistake": UserError, "divergence": DivergedError, "bug": RuntimeError}
                raise kinds[done.kind](done.problem)
            assert done.up is not None
            rooms = self.rooms[ready]
            kept = None if done.memory is None else rooms.kept.take(done.memory)
            answers[name] = Answer(rooms.up.take(done.up), kept)
            idle.append(ready)
        return lost

    def go_on_without(self, connection: Connection, name: str) -> None:
        """Give up a process that died with a client's work; raise UserError if it was the last, or not the first."""
        number = self.connections.index(connection)
        process = self.processes.pop(number)
        self.connections.pop(number)
        connection.close()
        self.rooms.pop(connection)
        self.holds.pop(connection, None)
        self.home = {client: place for client, place in self.home.items() if place is not connection}
        process.join(5)
        self.deaths[name] += 1
        how = f"the worker process of client {name} died ({ending(process.exitcode)})"
        if not self.connections or self.deaths[name] >= DEADLY:
            raise UserError(
                f"{how}{'' if self.connections else ', and it was the last one'}. The run is saved up to the previous "
                "round: continue it with --resume and fewer --workers"
            )
        log.warning("%s; its work begins again, with %d of %d processes left", how, len(self.connections), self.count)

    def opened(self, name: str, answer: Answer | Failure) -> Payload | Failure:
        """Return a client's answer; its new memory stays pending until the end of the round."""
        if isinstance(answer, Failure):
            return answer
        if answer.kept is not None:
            self.inner.pending[name] = memory_from_bytes(answer.kept)
        return payload.from_bytes(answer.up)


def ending(code: int | None) -> str:
    """Say how a process ended: its status, or the signal that ended it."""
    if code == -signal.SIGKILL:
        return "killed by the system, probably because memory ran out"
    if code is None or code >= 0:
        return f"with status {code}"
    return f"by signal {-code}"


def device_of(devices: Sequence[str], number: int) -> str:
    """Return the device of a process, taking the devices in turn; `cuda` alone means every GPU."""
    if list(devices) == ["cuda"]:
        return f"cuda:{number % torch.cuda.device_count()}"
    return devices[number % len(devices)]


def _serve_tasks(
    connection: Connection,
    experiment: Experiment,
    empty: Dataset,
    partition: Partition,
    images: Any,
    labels: Any,
    device: str,
    processes: int,
    accounts: Path | None,
) -> None:
    """Run a worker process: build the model once, then act as clients until the pipe is closed."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(experiment.run.threads)
    worker: Worker | None = None
    down: Payload | None = None
    rooms = SharedBuffers()
    with suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            job: Job = connection.recv()
            try:
                if worker is None:
                    dataset = replace(empty, images=open_map(images), labels=labels)
                    place = torch.device(device)
                    net = make_net(experiment, dataset.classes, place)
                    worker = Worker(experiment, net, dataset, partition, place, processes, accounts)
                if job.down is not None:
                    down = payload.from_bytes(rooms.down.take(job.down))
                assert down is not None
                done = work(worker, rooms, job, down)
            except DivergedError as problem:
                done = _Done(problem=str(problem), kind="divergence")
            except UserError as problem:
                done = _Done(problem=str(problem), kind="mistake")
            except Exception:  # the parent must learn of any error
                done = _Done(problem=traceback.format_exc())
            connection.send(done)


def work(worker: Worker, rooms: SharedBuffers, job: Job, down: Payload) -> _Done:
    memory = memory_from_bytes(rooms.memory.take(job.memory))
    if job.task == "evaluate":
        return _Done(rooms.up.put(payload.to_bytes(worker.evaluate_here(job.client, down, memory))))
    up, kept = worker.train(job.client, down, memory)
    return _Done(rooms.up.put(payload.to_bytes(up)), rooms.kept.put(memory_to_bytes(kept)))


def _end_with_parent() -> None:
    """Exit when the parent is killed: while this process computes, it would not notice a closed pipe."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
