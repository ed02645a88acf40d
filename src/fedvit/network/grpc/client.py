"""A split learning client on a network: its images, its head and tail, and the folder that holds its state."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedvit.config.hashing import agreed_hash
from fedvit.core import tree
from fedvit.core.client import Memory
from fedvit.core.errors import PublicError, UserError, nearest, one_line
from fedvit.core.files import make_private, private_files
from fedvit.core.metrics import view_scores
from fedvit.core.payload import Payload
from fedvit.core.settings import Experiment
from fedvit.data.dataset import Dataset, count_present
from fedvit.data.partition.records import Partition
from fedvit.engine.net import Net, make_net
from fedvit.engine.worker import Worker, load_data
from fedvit.models.cuts import Parts
from fedvit.network.boundary import LONGEST_RUN
from fedvit.network.grpc.channel import Connection, GarbageError, LateError, LostError, TakenError, why_no_connection
from fedvit.network.grpc.checks import AnswerError, Checks
from fedvit.network.grpc.identity import Identity
from fedvit.network.handshake import common
from fedvit.network.policy import TRIAL, Policy, PolicyError, described
from fedvit.network.site import own_experiment
from fedvit.network.site_state import SiteState
from fedvit.runs.clinical import write_clinical
from fedvit.runs.execute import run_log, starting_command
from fedvit.runs.folder import STARTED
from fedvit.split.client import ClientSide
from fedvit.split.messages import GIVEN_UP, Channel, Message
from fedvit.split.plan import SplitPlan

log = logging.getLogger(__name__)
PAUSE = 0.5  # seconds between attempts to reach the server


class SplitClient:
    """One client with its images. It works on the server's tasks until the run is finished."""

    def __init__(
        self,
        experiment: Experiment,
        name: str,
        state: Path,
        folder: Path | None = None,
        policy: Policy | None = None,
    ):
        torch.set_num_threads(experiment.run.threads)
        self.experiment, self.name, self.folder = experiment, name, state
        self.policy = policy or (Policy() if folder else TRIAL)
        self.explained = described(self.policy) if folder and policy is None else None
        make_private(state)
        with private_files():
            dataset, split = site_data(experiment, name, folder, state) if folder else load_data(experiment)
        if name not in split.clients:
            raise UserError(f"the experiment's data has no client {name!r}; {nearest(name, split.clients)}")
        device = torch.device(experiment.run.devices[0])
        self.net: Net = make_net(experiment, dataset.classes, device)
        if not isinstance(self.net.plan, SplitPlan):
            raise UserError(f"{experiment.method['name']} is not a split learning method: its clients run under Flower")
        self.worker = Worker(experiment, self.net, dataset, split, device)
        self.split, self.parts = self.net.split, Parts(self.net.module, self.net.split.cut)
        for parameter in self.net.module.parameters():
            parameter.requires_grad_(False)  # trainable weights are passed at every call
        self.checks = Checks(self.net, experiment.train.batch)
        part, self.class_names = split.clients[name], dataset.class_names
        self.hello: dict[str, Any] = {
            "name": name,
            "train": len(part.train),
            "test": len(part.test),
            "classes_here": count_present(dataset.labels[part.train]),
            "common": common(experiment, self.net, dataset.class_names),
        }
        self.state = SiteState(state)

    def attend(
        self, address: str, identity: Identity | None, *, wait: float = 60.0, said: Callable[[str], None] = log.info
    ) -> None:
        """Work for the server until it says that the run is finished; reconnect if the connection is lost."""
        make_private(self.folder)
        with private_files(), run_log() as log_to:
            log_to(self.folder / "log.txt")
            log.info("%s %s", STARTED, starting_command())
            if self.explained:
                log.warning("%s", self.explained)
            seen, connected = time.monotonic(), False
            while True:
                connection = Connection(address, identity)
                try:
                    if self.work(connection, said):
                        said("the run is finished")
                        return
                    seen, connected = time.monotonic(), True
                except TakenError as problem:  # perhaps by us, until the server notices that our connection broke
                    if not connected or time.monotonic() - seen > wait:
                        raise
                    log.info("%s; trying again", problem)
                except LostError:
                    reason, may_help = why_no_connection(address, identity)
                    if not may_help or time.monotonic() - seen > wait:
                        raise UserError(reason) from None
                    log.info("%s; trying again", reason)
                finally:
                    connection.close()
                time.sleep(PAUSE)

    def check_policy(self) -> None:
        """Refuse, before anything is sent, a run whose messages the policy forbids."""
        self.policy.allow(self.experiment, agreed_hash(self.experiment))
        self.policy.allow_images(self.hello["train"])
        for payload in self.checks.largest(self.hello["train"], self.hello["test"]):
            self.policy.check(payload)

    def work(self, connection: Connection, said: Callable[[str], None]) -> bool:
        """Do the tasks of one connection; return True if the run is finished, and False if the connection broke."""
        try:
            self.check_policy()
        except PublicError as refused:
            log.error("refused: %s", refused)
            connection.decline(self.name, str(refused))
            raise UserError(f"{self.name} does not take part: {refused}") from refused
        try:
            welcome, tasks = connection.attend(self.hello)
        except (LateError, GarbageError) as refused:
            raise UserError(f"the server at {connection.address} says: {refused}") from refused
        run = one_line(welcome["run"], LONGEST_RUN)
        log.info("connected to %s, run %s", connection.address, run)
        said(f"connected to {connection.address} as {self.name}")
        try:
            for task in tasks:
                if task.kind == "finished":
                    return True
                try:
                    self.do(connection, run, task)
                except LateError as problem:
                    log.warning("round %d: dropped from %s: %s", task.round, task.kind, problem)
                except GarbageError as problem:
                    log.error("round %d: the server rejected our message: %s", task.round, problem)
                except PolicyError as problem:
                    log.error("round %d: refused: %s", task.round, problem)
                    self.give_up(connection, task)
                except AnswerError as problem:
                    log.error("round %d: cannot use the server's message: %s", task.round, problem)
                    self.give_up(connection, task)
        except LostError as problem:
            log.warning("the connection to %s broke: %s", connection.address, problem)
        return False

    def give_up(self, connection: Connection, task: Message) -> None:
        """Tell the server not to wait for this task, because it will not be finished; our state is unchanged."""
        try:
            connection.send("done", Message(task.round, self.name, 0, GIVEN_UP).to_bytes())
        except (LateError, GarbageError) as problem:
            log.info("round %d: %s", task.round, problem)

    def do(self, connection: Connection, run: str, task: Message) -> None:
        """Do one task and report its end. The new state is on disk before the server relies on it."""
        if task.kind not in ("train", "receive", "evaluate"):
            raise UserError(f"the server sent a task {task.kind[:40]!r} that this version does not know")
        self.checks.check_task(task)
        self.policy.allow_round(task.round)
        after = int(task.payload.scalars["continues"])
        memory = self.recalled(run, after)
        log.info("round %d: %s", task.round, task.kind)
        door = _CheckedChannel(connection, self.policy, self.checks)
        match task.kind:
            case "train":
                found: Mapping[str, float] = self.policy.report(Payload(scalars=self.train(door, task, memory))).scalars
                self.state.put(run, task.round, memory, after=after)
            case "receive":
                own = memory["personal"]
                assert isinstance(own, dict)
                memory["personal"] = tree.overlay(own, task.payload.trees["average"])
                self.state.put(run, task.round, memory, after=after)
                found = {}
            case _:
                found = self.policy.release(Payload(scalars=self.evaluate(door, task, memory))).scalars
        connection.send("done", replace(task, payload=Payload(scalars=found)).to_bytes())

    def recalled(self, run: str, after: int) -> Memory:
        """Return the state that the server continues from; raise UserError if it is missing."""
        try:
            return self.state.get(run, after)
        except PublicError as problem:
            raise UserError(
                f"the server continues from our state of round {after} of run {run}, but {self.folder} does not have "
                "it: give the --state folder that this client used before"
            ) from problem

    def train(self, channel: Channel, task: Message, memory: Memory) -> dict[str, float]:
        self.net.module.train()
        client = self.worker.client(self.name, task.round, memory)
        requests = ClientSide(self.split, self.parts, client).requests(average=bool(task.payload.scalars["average"]))
        try:
            message = next(requests)
            while True:
                if message is None:
                    message = next(requests)
                else:
                    message = requests.send(Message.from_bytes(channel.call(message.to_bytes())))
        except StopIteration:
            return {"loss": client.scalars["loss"]}

    def evaluate(self, channel: Channel, task: Message, memory: Memory) -> dict[str, float]:
        self.net.module.eval()
        client = self.worker.client(self.name, task.round, memory)
        with torch.no_grad():
            predict = ClientSide(self.split, self.parts, client).predictor(channel)
        inputs, worker = self.net.inputs, self.worker
        scores = view_scores("personal", predict, client.data, inputs, worker.device, auroc=worker.auroc)
        clinical, cases = worker.measure(client, predict)
        if cases is not None:
            own = {self.name: clinical}, {self.name: cases}
            write_clinical(self.folder, self.experiment, self.class_names, task.round, *own)
        return {**scores, **clinical}


@dataclass
class _CheckedChannel:
    """The only channel for a batch's messages: it blocks requests that the policy forbids, and invalid answers."""

    connection: Channel
    policy: Policy
    checks: Checks
    images: int = 0  # in the current batch

    def call(self, request: bytes) -> bytes:
        message = Message.from_bytes(request)
        self.policy.check(message.payload)
        if "h" in message.payload.trees:
            self.images = len(message.payload.trees["h"]["x"])
        answer = self.connection.call(request)
        try:
            self.checks.check_answer(message, Message.from_bytes(answer), self.images)
        except ValueError as problem:
            raise AnswerError(f"the answer to {message.kind!r} is {problem}") from problem
        return answer


def site_data(experiment: Experiment, name: str, folder: Path, state: Path) -> tuple[Dataset, Partition]:
    """Load a folder of class folders as the only client, with this name, split as a site's images are."""
    data = experiment.data.model_copy(update={"cache": experiment.data.cache or state / "images", "unseen": 0})
    alone = experiment.model_copy(update={"data": data})
    return load_data(own_experiment(alone, data.class_list, name, folder))
