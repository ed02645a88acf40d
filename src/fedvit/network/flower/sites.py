"""The transport to the sites of a Flower federation."""

import logging
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedvit.core import payload
from fedvit.core.errors import UserError, one_line
from fedvit.core.payload import Failure, Payload
from fedvit.core.settings import Experiment
from fedvit.engine.inprocess import DROPPED, drops_out
from fedvit.engine.net import Net
from fedvit.engine.transport import Task
from fedvit.network.boundary import Declined, Hello, read_hello, read_refusal, read_report, read_scores
from fedvit.network.flower.records import from_records, to_records
from fedvit.network.handshake import common, differences
from fedvit.network.payload_check import up_of
from fedvit.network.site import Federation
from fedvit.runs.write import Holding

log = logging.getLogger(__name__)
TRIES, PAUSE = 3, 1.0
HELLO = 120.0  # seconds for a new node to introduce itself
FORGIVEN = 60.0  # seconds that Flower keeps a message after we stop waiting for its answer
T = TypeVar("T")


@dataclass
class FlowerSites:
    """The transport over Flower: one message to each sampled site, with answers in the order of the messages.

    A site that is offline or late, refuses, or sends an invalid answer fails in this round but may return later.
    """

    grid: Grid
    experiment: Experiment
    federation: Federation
    net: Net
    run: str  # the run's ID at the sites, which stays the same when the run is resumed
    round_timeout: float
    min_sites: int
    at_once: int = 0  # messages that wait for an answer at the same time; 0: one per site
    pinned: Mapping[int, str] | None = None  # names by node, where the server registered them; None: nodes say theirs
    trained: dict[str, int] = field(default_factory=dict)  # by site: the last round whose training counted
    pending: list[str] = field(default_factory=list)
    nodes: dict[str, int] = field(default_factory=dict)  # node IDs by site
    strangers: set[int] = field(default_factory=set)  # nodes that were turned away
    reasons: dict[int, str] = field(default_factory=dict)  # why, by node
    roster: dict[str, Holding] = field(default_factory=dict)  # like `tests`, for every site that was ever connected
    tests: dict[str, int] = field(default_factory=dict)  # test images by site

    def clients(self) -> Sequence[str]:
        return self.federation.sites

    def commit(self, round_: int) -> None:
        """Let the sites that trained in this round continue from its states."""
        self.trained.update(dict.fromkeys(self.pending, round_))
        self.pending = []

    def exchange(self, task: Task, messages: Mapping[str, Payload]) -> Iterator[tuple[str, Payload | Failure]]:
        asked = [name for name in messages if task == "evaluate" or not self.drops_out(name, messages[name])]
        least = min(self.min_sites, len(asked))
        for _ in range(TRIES):
            self.wait_for(self.min_sites)
            with tempfile.TemporaryDirectory() as spool:  # all answers must have arrived before the first is used
                problems = self.collect(task, messages, Path(spool))
                if len(asked) - sum(name in problems for name in asked) < least:
                    log.warning("fewer than %d sites answered: %s", least, said(problems))
                    continue
                if task == "train":
                    self.pending = [name for name in messages if name not in problems]
                for name in messages:
                    if name in problems:
                        yield name, Failure(problems[name])
                    else:
                        yield name, payload.from_bytes((Path(spool) / str(self.nodes[name])).read_bytes())
                return
        raise UserError(
            f"fewer than {least} sites answered in each of {TRIES} attempts: {said(problems)}. The run is saved up to "
            "the previous round; start it again with resume=true when they are back, or with a smaller min-sites"
        )

    def collect(self, task: Task, messages: Mapping[str, Payload], spool: Path) -> dict[str, str]:
        """Ask all sites, write valid answers to the spool, and return the problems of the other sites."""
        problems: dict[str, str] = {}
        self.meet()
        online = set(self.grid.get_node_ids())

        def questions() -> Iterator[tuple[str, Message]]:
            for name, down in messages.items():
                if task == "train" and self.drops_out(name, down):
                    problems[name] = DROPPED
                elif self.nodes.get(name) not in online:
                    problems[name] = "is not connected"
                else:
                    content = to_records(down, {"run": self.run, "continues": self.trained.get(name, 0)})
                    node, number = self.nodes[name], str(int(down.scalars["round"]))
                    yield name, self.message(content, node, task, number)

        for name, reply in self.replies(questions(), self.round_timeout):
            answer = self.read(task, name, messages[name], reply)
            if isinstance(answer, Failure):
                problems[name] = answer.reason
            else:
                (spool / str(self.nodes[name])).write_bytes(payload.to_bytes(answer))
        return problems

    def message(self, content: RecordDict, node: int, kind: str, group: str) -> Message:
        """Return a message that Flower discards soon after we stop waiting for its answer."""
        ttl = self.round_timeout + FORGIVEN
        return Message(content, dst_node_id=node, message_type=kind, group_id=group, ttl=ttl)

    def drops_out(self, name: str, down: Payload) -> bool:
        return drops_out(self.experiment, name, int(down.scalars["round"]))

    def replies(self, questions: Iterator[tuple[T, Message]], seconds: float) -> Iterator[tuple[T, Message | None]]:
        """Yield each answer as it arrives, or None if it is late; at most `at_once` messages wait for one."""
        out: dict[str, tuple[T, float]] = {}
        exhausted = False
        while True:
            while not exhausted and len(out) < (self.at_once or len(self.federation.sites)):
                found = next(questions, None)
                exhausted = found is None
                if found is not None:
                    (number,) = self.grid.push_messages([found[1]])
                    out[number] = found[0], time.monotonic() + seconds
            if not out:
                return
            for reply in self.grid.pull_messages(list(out)):
                yield out.pop(reply.metadata.reply_to_message_id)[0], reply
            for number in [number for number, (_, end) in out.items() if time.monotonic() > end]:
                yield out.pop(number)[0], None
            if out:
                time.sleep(PAUSE)

    def read(self, task: Task, name: str, down: Payload, reply: Message | None) -> Payload | Failure:
        """Return a valid answer, or a failure that says what is wrong with it."""
        if reply is None:
            return Failure(f"did not answer within {self.round_timeout:g} s")
        if reply.has_error():
            return Failure(f"did not answer (Flower error {reply.error.code})")
        try:
            up, about = from_records(reply.content)
        except ValueError as problem:
            return Failure(one_line(f"sent something that cannot be read: {problem}"))
        if "code" in about:
            return Failure(str(read_refusal(about)))
        if about.get("run") != self.run or about.get("round") != down.scalars["round"]:
            return Failure(one_line(f"answered for round {about.get('round')} of run {about.get('run')}"))
        try:
            return self.read_content(task, name, down, up)
        except ValueError as problem:
            return Failure(one_line(f"sent something unexpected: {problem}"))

    def read_content(self, task: Task, name: str, down: Payload, up: Payload) -> Payload:
        """Return a report or scores that the loop may trust; raise ValueError for anything else."""
        agreed = self.roster[name]
        if task == "evaluate":
            return read_scores(up, len(self.federation.classes), agreed)
        found = read_report(up, up_of(self.net, down, int(down.scalars["round"])), agreed)
        if found.scalars["examples"] != up.scalars["examples"]:
            log.warning(
                "round %d: site %s reports %g training images, but said %d when it connected: it counts as %g",
                int(down.scalars["round"]), name, up.scalars["examples"], agreed.train, found.scalars["examples"],
            )  # fmt: skip
        return found

    # Connected sites.

    def meet(self, seconds: float = HELLO) -> None:
        """Ask new nodes to introduce themselves; a node that does not fit is reported and left out."""
        online = set(self.grid.get_node_ids())
        self.strangers &= online  # a node that was offline may have been corrected
        new = [node for node in online if node not in self.nodes.values() and node not in self.strangers]
        for node, hello in self.introductions(self.admitted(sorted(new)), seconds):
            name, has = hello.site, hello.holding
            old = self.nodes.get(name)
            if old is not None and old in set(self.grid.get_node_ids()):
                if self.trained:  # Flower counts a killed node as connected for a minute
                    log.warning("node %d claims to be site %s, but node %d is still connected", node, name, old)
                    continue
                if next(self.introductions([old], seconds), None) is not None:  # it still answers
                    why = f"two sites have the name {name!r} (nodes {old} and {node}): give each its own site="
                    self.turn_away(node, f"{why} in --node-config")
                    continue
            self.nodes[name], self.roster[name], self.tests[name] = node, has, has.test
            log.info(
                "site %s connected as node %d with %d training and %d test images", name, node, has.train, has.test
            )

    def admitted(self, nodes: Sequence[int]) -> list[int]:
        """Leave out nodes whose key was registered for another site or, with a warning, for none."""
        if self.pinned is None:
            return list(nodes)
        for node in nodes:
            if self.pinned.get(node) not in self.federation.sites:
                self.strangers.add(node)
                log.warning("node %d is left out: its key was registered for no site of this run", node)
        return [node for node in nodes if node not in self.strangers]

    def introductions(self, nodes: Sequence[int], seconds: float) -> Iterator[tuple[int, Hello]]:
        if not nodes:
            return
        hello = to_records(Payload(), {"run": self.run})
        questions = ((node, self.message(hello, node, "query.hello", "hello")) for node in nodes)
        ours = common(self.experiment, self.net, self.federation.classes)
        for node, reply in self.replies(questions, seconds):
            if reply is None or reply.has_error():
                log.warning("node %d did not introduce itself; it will be asked again", node)
                continue
            try:
                found = read_hello(from_records(reply.content)[1])
            except ValueError as problem:
                self.turn_away(node, f"node {node} sent something that cannot be read: {one_line(problem)}")
                continue
            owner = found.site if self.pinned is None else self.pinned[node]
            if isinstance(found, Declined):
                self.turn_away(node, f"site {owner} does not take part: {found.text}")
            elif found.site != owner:
                self.turn_away(node, f"the node that was registered for site {owner} says that it is {found.site!r}")
            elif found.site not in self.federation.sites:
                self.turn_away(node, f"site {found.site!r} is not one of {', '.join(self.federation.sites)}")
            elif parts := differences(ours, found.common):
                self.turn_away(node, f"site {found.site} differs from the server in {', and in '.join(parts)}")
            else:
                yield node, found

    def turn_away(self, node: int, why: str) -> None:
        """Leave out a site that does not fit; before the first round, end the run if too few others can be left."""
        self.strangers.add(node)
        self.reasons = {node: why, **{n: text for n, text in self.reasons.items() if n in self.strangers}}
        if not self.trained and len(self.federation.sites) - len(self.reasons) < self.min_sites:
            raise UserError(f"{why}. Nothing was trained; correct this and start again")
        log.warning("%s", why)

    def gather(self, timeout: float) -> None:
        """Wait for all sites; after `timeout` seconds, `min_sites` are enough."""
        end = time.monotonic() + timeout
        while True:
            self.meet(max(PAUSE, min(HELLO, end - time.monotonic())))
            missing = [name for name in self.federation.sites if name not in self.nodes]
            if not missing:
                return
            if time.monotonic() > end:
                if len(self.nodes) >= self.min_sites:
                    log.warning("starting without %s", ", ".join(missing))
                    return
                raise UserError(
                    f"{len(self.nodes)} of {len(self.federation.sites)} sites connected within {timeout:g} s, but at "
                    f"least {self.min_sites} are needed; missing: {', '.join(missing)}. Are their SuperNodes running?"
                    + "".join(f" Turned away: {why}." for why in self.reasons.values())
                )
            time.sleep(PAUSE)

    def wait_for(self, count: int) -> None:
        """Wait until `count` sites are connected, for at most `round_timeout`; log who is connected once a minute."""
        told, end = 0.0, time.monotonic() + self.round_timeout
        while True:
            self.meet()
            online = set(self.grid.get_node_ids())
            here = [name for name, node in self.nodes.items() if node in online]
            if len(here) >= count:
                return
            if time.monotonic() > end:
                raise UserError(
                    f"{len(here)} sites are connected ({', '.join(here) or 'none'}), but {count} are needed. The run "
                    "is saved up to the previous round; start it again with resume=true when they are back, or with a "
                    "smaller min-sites"
                )
            if time.monotonic() > told + 60:
                told = time.monotonic()
                log.warning("waiting for %d sites; connected: %s", count, ", ".join(here) or "none")
            time.sleep(PAUSE)


def said(problems: Mapping[str, str]) -> str:
    return "; ".join(f"{name} {problem}" for name, problem in problems.items())
