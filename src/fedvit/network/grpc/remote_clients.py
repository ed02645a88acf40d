"""The clients of split learning over a network, as the split loop sees them."""

import logging
import math
import queue
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedvit.core.cases import Cases
from fedvit.core.errors import DivergedError, UserError, one_line
from fedvit.core.payload import Payload
from fedvit.core.settings import Experiment
from fedvit.core.tree import Tree
from fedvit.engine.inprocess import DROPPED, drops_out
from fedvit.engine.loop import WITHHELD
from fedvit.engine.split_loop import Answer, Scores, Trained, order
from fedvit.network.grpc.channel import (
    Event,
    GarbageError,
    LateError,
    Listener,
    Session,
)
from fedvit.network.grpc.checks import LARGEST_LOSS, Checks, Progress
from fedvit.network.payload_check import LARGEST
from fedvit.runs.write import Holding
from fedvit.split.messages import GIVEN_UP, Message
from fedvit.split.server import ServerSide

log = logging.getLogger(__name__)
TICK = 0.5  # seconds between checks of the deadlines
LONGEST_WAIT = 10  # times the patience with one silent client
REMIND = 30  # seconds between log lines about missing clients


@dataclass
class _Work:
    """A client's task, from its assignment to its end."""

    session: Session
    progress: Progress
    deadline: float
    up: int = 0
    down: int = 0
    held: Event | None = None  # a message for a step that has not begun
    result: Mapping[str, float] | None = None


@dataclass
class _ClientTasks:
    """One task of several clients, and the progress of each."""

    kind: str
    number: int
    side: ServerSide | None = None
    average: bool = False
    lockstep: bool = False
    limit: float = 0.0  # the time at which the last clients are given up; 0: not yet known
    step: int = 0
    active: dict[str, _Work] = field(default_factory=dict)
    ended: dict[str, _Work] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


class RemoteClients:
    """The clients of a listener, with the interface that the split loop expects."""

    def __init__(
        self,
        listener: Listener,
        names: Sequence[str],
        experiment: Experiment,
        checks: Checks,
        trained: Mapping[str, int],
        *,
        patience: float,
        least: int,
    ):
        self.listener, self.names, self.experiment, self.checks = listener, list(names), experiment, checks
        # The round whose state each client continues from.
        self.trained = {name: trained.get(name, 0) for name in names}
        self.patience, self.least = patience, least
        self.without: set[str] = set()  # clients that declined
        self.desk: _ClientTasks | None = None
        self.finished_now: list[str] = []
        self.evaluated: _ClientTasks | None = None  # the last evaluation

    def clients(self) -> Sequence[str]:
        return self.names

    def present(self) -> list[str]:
        sessions = self.listener.sessions
        return [name for name in self.names if name in sessions and sessions[name].alive]

    def gather(self, wanted: int, limit: float = math.inf) -> None:
        """Wait until `wanted` clients are connected; after `limit` seconds, `least` are enough."""
        begin = said = time.monotonic()
        while len(self.present()) < wanted:
            self.look_at_declined()
            now = time.monotonic()
            if now - begin > limit and len(self.present()) >= self.least:
                return
            if now - said > REMIND:
                said = now
                missing = [name for name in self.names if name not in self.present()]
                log.warning("waiting for %s", ", ".join(missing))
            self.handle(TICK)

    def look_at_declined(self) -> None:
        """Log who declines; before the first round, end the run if fewer clients than `least` are left."""
        while self.listener.declined:
            name, reason = self.listener.declined.popitem()
            text = f"client {name} does not take part: {reason}"
            self.without |= {name} & set(self.names)
            too_few = len(self.names) - len(self.without) < self.least
            if name in self.without and too_few and not any(self.trained.values()):
                raise UserError(f"{text}; agree on other settings, or leave the client out of --clients")
            log.warning("%s", text)

    # Calls from the loop.

    def train(self, side: ServerSide, cohort: Sequence[str], number: int, *, average: bool) -> Trained:
        split, done = side.split, Trained()
        self.look_at_declined()
        self.gather(self.least)
        for name in cohort:
            if drops_out(self.experiment, name, number):
                log.warning("round %d: client %s dropped out (train.dropout)", number, name)
                done.failed[name], done.reasons[name] = 0, DROPPED
                side.drop(name)
        names = [name for name in cohort if name not in done.failed]
        desk = _ClientTasks("train", number, side, average, split.lockstep)
        if split.body == "turns":
            for name in order(split, names, self.experiment.run.seed, number):
                side.begin_turn()
                self.work(desk, [name])
                if name in desk.failed:
                    side.undo_turn()
        else:
            self.work(desk, names)
        done.failed |= desk.failed
        done.reasons |= desk.reasons
        for name in (name for name in cohort if name in desk.ended):
            work = desk.ended[name]
            assert work.result is not None
            examples = int(work.session.hello["train"])
            done.answers[name] = Answer(work.result.get("loss"), examples, work.up, work.down)
        self.finished_now = list(done.answers)
        return done

    def receive(self, names: Sequence[str], number: int, average: Tree) -> None:
        # A client that is lost at this point continues with its own parts.
        self.work(_ClientTasks("receive", number), names, {"average": average}, continues=number)

    def commit(self, number: int) -> None:
        for name in self.finished_now:
            self.trained[name] = number
        self.finished_now = []

    def evaluate(
        self, side: ServerSide, names: Sequence[str], number: int, cases: dict[str, Cases] | None = None
    ) -> tuple[Scores, int]:
        desk = self.evaluated = _ClientTasks("evaluate", number, side)
        self.work(desk, names)
        works = [*desk.ended.values()]
        scores = {name: dict(desk.ended[name].result or {}) for name in names if name in desk.ended}
        desk.reasons |= {name: WITHHELD for name, found in scores.items() if not found}
        scores = {name: found for name, found in scores.items() if found}
        return scores, sum(work.up + work.down for work in works)

    def absences(self, number: int) -> Mapping[str, str]:
        last = self.evaluated
        return last.reasons if last is not None and last.number == number else {}

    # One task of several clients.

    def work(
        self,
        desk: _ClientTasks,
        names: Sequence[str],
        trees: Mapping[str, Tree] | None = None,
        continues: int | None = None,
    ) -> None:
        """Assign the task to these clients, and answer their messages until each client is done or lost."""
        self.desk = desk
        for name in names:
            session = self.listener.sessions.get(name)
            if session is None or not session.alive:
                self.lose(name, "is not connected")
                continue
            steps = self.steps_of(session)
            progress = Progress(desk.kind, steps, desk.average)
            desk.active[name] = _Work(session, progress, time.monotonic() + self.patience)
            after = self.trained[name] if continues is None else continues
            scalars = {"continues": after, "average": float(desk.average)}
            task = Message(desk.number, name, 0, desk.kind, Payload(trees or {}, scalars))
            session.tasks.put(task.to_bytes())
        while desk.active:
            self.handle(TICK)
            for name, work in list(desk.active.items()):
                if work.held is None and time.monotonic() > work.deadline:
                    self.lose(name, f"sent nothing for {self.patience:g} s")
            if not desk.limit and len(desk.active) <= max(
                1, len(names) // 2
            ):  # half of them have finished: the others may not
                desk.limit = time.monotonic() + LONGEST_WAIT * self.patience  # hold the round open for ever
            for name in list(desk.active) if desk.limit and time.monotonic() > desk.limit else ():
                self.lose(name, f"took {LONGEST_WAIT * self.patience:g} s longer than half of the clients")
        self.desk = None

    def steps_of(self, session: Session) -> int:
        train = self.experiment.train
        return train.epochs * -(-int(session.hello["train"]) // train.batch)

    def handle(self, seconds: float) -> None:
        """Handle the next event, if one arrives within this many seconds."""
        try:
            event = self.listener.events.get(timeout=seconds)
        except queue.Empty:
            return
        name = event.session.name
        if event.kind == "came":
            log.info("client %s connected", name)
        elif event.kind == "gone":
            log.info("client %s disconnected", name)
            if self.desk is not None and name in self.desk.active and self.desk.active[name].session is event.session:
                self.lose(name, "was lost: its connection ended")
        else:
            self.answer(event)

    def answer(self, event: Event) -> None:
        """Answer a message, hold it until its step begins, or refuse it with a reason."""
        name, desk = event.session.name, self.desk
        try:
            if desk is None or name not in desk.active or desk.active[name].session is not event.session:
                raise LateError("this client has no task in progress: its message came too late")
            work = desk.active[name]
            message = _parsed(event)
            if event.kind == "call" and desk.lockstep and message.step > desk.step:
                if work.held is not None or message.step > desk.step + 1:
                    raise LateError(f"a message for step {message.step} arrived in step {desk.step}")
                work.held = event
                self.open_barrier()
                return
            reply = self.use(desk, work, message, event.kind)
        except LateError as problem:
            log.info("client %s: %s", name, problem)
            event.reply.set_exception(problem)
        except GarbageError as problem:
            event.reply.set_exception(problem)
            self.lose(name, f"sent an invalid message: {problem}")
        except Exception as problem:
            log.exception("a message from client %s could not be answered", name)
            event.reply.set_exception(GarbageError(f"the server could not use this message ({type(problem).__name__})"))
            self.lose(name, "sent a message that could not be answered")
        else:
            work.deadline = time.monotonic() + self.patience
            event.reply.set_result(reply)

    def use(self, desk: _ClientTasks, work: _Work, message: Message, kind: str) -> bytes:
        if kind == "done":
            self.end(desk, work, message)
            return b""
        if desk.side is None:
            raise LateError("this task expects no messages")
        self.checks.check(message, work.progress, desk.side)
        reply = desk.side.answer(message)
        try:
            desk.side.check_contribution(message.client, LARGEST)
        except DivergedError as problem:
            raise GarbageError(str(problem)) from problem
        work.up += message.payload.nbytes
        work.down += reply.payload.nbytes
        return reply.to_bytes()

    def end(self, desk: _ClientTasks, work: _Work, message: Message) -> None:
        """Record the end of a client's task, and its results."""
        name, numbers = work.session.name, message.payload.scalars
        if message.kind == GIVEN_UP and message.round == desk.number:
            self.lose(name, "gave up: its log says why")
            return
        if message.kind != desk.kind or message.round != desk.number:
            raise LateError(f"the end of {message.kind!r} for round {message.round} arrived in round {desk.number}")
        if message.payload.trees or not all(type(value) in (int, float) for value in numbers.values()):
            raise GarbageError("the end of a task must contain only numbers")
        if desk.kind == "train" and desk.side is not None:
            owed = desk.average and bool(self.checks.own) and name not in desk.side.ends
            if not work.progress.complete or owed:
                raise GarbageError("the end of a round arrived before its last message")
            if set(numbers) - {"loss"} or not abs(numbers.get("loss", 0)) <= LARGEST_LOSS:
                raise GarbageError("expected the mean loss, a finite number, or nothing")
            desk.side.finish(name)
        if desk.kind == "evaluate":
            numbers = self.checks.check_scores(numbers, holding_of(work.session))
        work.result = {key: float(value) for key, value in numbers.items()}
        desk.ended[name] = desk.active.pop(name)
        self.open_barrier()

    def lose(self, name: str, reason: str) -> None:
        """Drop a client from the current task; it may return for the next one."""
        desk, reason = self.desk, one_line(reason)
        assert desk is not None
        work = desk.active.pop(name, None)
        desk.failed[name] = work.down if work else 0
        desk.reasons[name] = reason
        if work is not None and work.held is not None:
            work.held.reply.set_exception(LateError(f"dropped: {reason}"))
        if desk.kind == "train" and desk.side is not None:
            desk.side.drop(name)
        doing = {"train": "", "receive": " while averages were being sent", "evaluate": " during evaluation"}[desk.kind]
        log.warning("round %d: client %s %s%s", desk.number, name, reason, doing)
        self.open_barrier()

    def open_barrier(self) -> None:
        """Once all active clients wait for the next step, let the body finish this one and answer them."""
        desk = self.desk
        if desk is None or desk.side is None or not desk.lockstep:
            return
        waiting = {name: work.held for name, work in desk.active.items() if work.held is not None}
        if len(waiting) < len(desk.active):
            return
        desk.side.end_of_step()
        desk.step += 1
        for work in desk.active.values():
            work.held, work.deadline = None, time.monotonic() + self.patience
        for event in waiting.values():
            self.answer(event)


def holding_of(session: Session) -> Holding:
    """Return the counts of images that a client gave when it connected, which `server._check_hello` has checked."""
    return Holding(*(int(session.hello[key]) for key in ("train", "test", "classes_here")))


def _parsed(event: Event) -> Message:
    try:
        message = Message.from_bytes(event.content)
    except ValueError as problem:
        raise GarbageError(str(problem)) from problem
    if message.client != event.session.name:
        raise GarbageError("the message is in another client's name")
    return message
