"""Split learning: what the client does, what the server does, and the messages between them.

A client's round is a generator of requests; the server answers one at a time. Both sides see messages only, as bytes,
each with the round, client and step it belongs to, so that any channel can carry them.
"""

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from fedvit import payload, randomness, tree
from fedvit.client import Client, Memory
from fedvit.models.cuts import Cut, Parts
from fedvit.payload import Payload
from fedvit.training import note_loss
from fedvit.tree import Tree

Wire = Literal["fp32", "bf16", "int8"]
BodyRule = Literal["round", "step", "copies", "turns"]
GIVEN_UP = "given up"  # in place of a task's kind, at the end of one that a client could not do


@dataclass(frozen=True, kw_only=True)
class SplitPlan:
    """How a split method learns. The defaults are FedV's."""

    cut: Cut = field(default_factory=Cut)
    # When the body learns: once a round from each client's last batch; at every step from the mean over clients; at
    # every step in a copy per client, averaged after the round; or at every step, client after client.
    body: BodyRule = "round"
    gradient: Literal["exact", "spsa"] = "exact"
    epsilon: float = 1e-4
    draws: int = 1
    black_box: bool = False  # no weight learns through a gradient of the body: the head stays as it is
    server_lr: float | None = None  # None: the clients' rate
    server_optimizer: Literal["sgd", "adam"] = "sgd"
    average_every: int = 20  # rounds between averages of the clients' parts; 0: never
    receives: Literal["all", "sampled"] = "all"
    init: Literal["pretrained", "random"] = "pretrained"  # of the clients' parts
    wire: Wire = "fp32"

    def deepest(self, parts: Parts) -> int | None:
        """The most blocks that a changing body passes; None where it does not change."""
        return (self.cut.block or max(1, len(parts.model.blocks) // 2)) if self.cut.kind == "vibs" else None

    @property
    def labels_leave(self) -> bool:
        """Whether the classifier is at the server."""
        return self.cut.kind == "after"

    @property
    def lockstep(self) -> bool:
        """Whether clients must wait for each other at every step."""
        return self.body == "step"


# Messages.


@dataclass(frozen=True)
class Message:
    """One thing that crosses, and where it belongs; a late one is recognised by it."""

    round: int
    client: str
    step: int
    kind: str
    payload: Payload = field(default_factory=Payload)

    def to_bytes(self) -> bytes:
        head = json.dumps([self.round, self.client, self.step, self.kind])
        return payload.frame(self.payload.trees, {"message": head, "numbers": json.dumps(dict(self.payload.scalars))})

    @staticmethod
    def from_bytes(blob: bytes) -> "Message":
        """The message that `to_bytes` wrote, its tensors in place; ValueError for anything else."""
        trees, metadata = payload.unframe(blob)
        try:
            round_, client, step, kind = json.loads(metadata["message"])
            scalars = json.loads(metadata["numbers"])
            numbers = all(isinstance(value, int | float) for value in scalars.values())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
            raise ValueError(f"not a message: {str(problem)[:200]}") from problem
        if not (numbers and type(round_) is type(step) is int and type(client) is type(kind) is str):
            raise ValueError("not a message: its head or its numbers are of the wrong kind")
        return Message(round_, client, step, kind, Payload(trees, scalars))

    def answered(self, content: Payload) -> "Message":
        return replace(self, payload=content)


class Channel(Protocol):
    """How a client's requests reach the server."""

    def call(self, request: bytes) -> bytes: ...


def pack(tensor: Tensor, wire: Wire) -> Tree:
    """Activations or gradients as they cross; int8 has one scale per token."""
    tensor = tensor.detach().cpu()
    if wire == "fp32":
        return {"x": tensor.float()}
    if wire == "bf16":
        return {"x": tensor.bfloat16()}
    scale = tensor.abs().amax(-1, keepdim=True).float().clamp(min=1e-30) / 127
    return {"x": (tensor / scale).round().to(torch.int8), "scale": scale}


def unpack(packed: Tree, device: torch.device) -> Tensor:
    """In memory of its own: where a tensor begins inside a message must not decide how its products are rounded.

    This is the one copy on the side that reads, as `payload.frame` makes the one on the side that writes.
    """
    x = packed["x"].to(device, torch.float32, copy=True)
    return x * packed["scale"].to(device) if "scale" in packed else x


# The client.

Requests = Generator[Message | None, Message, None]  # None: the end of a step


class ClientSide:
    """One client's head and tail in one round. Its optimiser lives on in the client's memory."""

    def __init__(self, split: SplitPlan, parts: Parts, client: Client):
        self.split, self.parts, self.client = split, parts, client
        device = client.settings.device
        self.weights = {name: tensor.to(device, copy=True) for name, tensor in client.personal().items()}
        self.parameters = parameters = {name for name, _ in client.module.named_parameters()}
        self.body_learns = True
        frozen = split.cut.names(client.module, "head") if split.black_box else []
        self.leaves = {n: nn.Parameter(self.weights[n]) for n in self.weights if n in parameters and n not in frozen}
        self.weights.update(self.leaves)
        self.losses: list[tuple[int, Tensor]] = []

    def message(self, step: int, kind: str, trees: dict[str, Tree], **scalars: float) -> Message:
        return Message(self.client.round, self.client.id, step, kind, Payload(trees, scalars))

    def head(self, x: Tensor) -> Tensor:
        return self.parts.run("head", self.weights, x)

    def tail(self, b: Tensor) -> Tensor:
        return self.parts.run("tail", self.weights, b).float()

    def address(self, step: int, part: str) -> tuple[int, int, str, int, str]:
        return self.client.settings.seed, self.client.round, self.client.id, step, part

    @contextmanager
    def drawing(self, step: int, part: str) -> Iterator[None]:
        """Mixed precision if asked for, and dropout that depends on this step alone."""
        with self.client.settings.autocast(), randomness.addressed(*self.address(step, part)):
            yield

    def requests(self, *, average: bool) -> Requests:
        """All that this client asks of the server in a round."""
        client, settings = self.client, self.client.settings
        reply = yield self.message(0, "start", {}, updated=float(client.memory.get("updated", 0.0)))  # type: ignore[arg-type]
        self.take_average(reply.payload)
        self.body_learns = bool(reply.payload.scalars["learns"])
        if "depth" in reply.payload.scalars:
            client.memory["depth"] = reply.payload.scalars["depth"]
        optimizer = make(settings.optimizer, settings.lr, self.leaves, settings.momentum, settings.weight_decay)
        if optimizer is not None:
            restore(optimizer, self.leaves, client.memory)
        total = settings.epochs * -(-len(client.data.train) // settings.batch)
        learn = self.ask_for_gradient if self.split.labels_leave else self.learn_across
        for step, (x, y) in enumerate(client.batches(settings.epochs, "train")):
            yield from learn(step, x, y, last=step == total - 1)
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            yield None
        end = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.weights.items()}
        note_loss(client, self.losses, end)
        client.memory["personal"] = end
        client.memory["updated"] = float(client.round)
        client.memory.update(state_of(optimizer, self.leaves) if optimizer is not None else {})
        own = {name: tensor for name, tensor in end.items() if name in self.leaves or name not in self.parameters}
        if average and own:
            yield self.message(total, "parts", {"parts": own})

    def take_average(self, content: Payload) -> None:
        """The server's newer mean of all clients' parts, if it has one."""
        with torch.no_grad():
            for name, tensor in content.trees.get("average", {}).items():
                self.weights[name].copy_(tensor)

    def learn_across(self, step: int, x: Tensor, y: Tensor, *, last: bool) -> Requests:
        """Activations up, features down, gradient up, gradient down; labels stay here."""
        settings, wire = self.client.settings, self.split.wire
        with self.drawing(step, "head"):
            h = self.head(x)
        reply = yield self.message(step, "forward", {"h": pack(h, wire)}, last=float(last))
        b = unpack(reply.payload.trees["b"], settings.device).requires_grad_()
        with self.drawing(step, "tail"):
            logits = self.tail(b)
        loss = F.cross_entropy(logits, y)
        loss.backward()  # type: ignore[no-untyped-call]
        self.losses.append((len(y), loss.detach()))
        body_wants = self.body_learns and self.split.gradient == "exact" and (self.split.body != "round" or last)
        if h.requires_grad or body_wants:
            assert b.grad is not None
            wanted = float(h.requires_grad)
            reply = yield self.message(step, "backward", {"b": pack(b.grad, wire)}, last=float(last), wanted=wanted)
            if h.requires_grad:
                h.backward(unpack(reply.payload.trees["h"], settings.device).to(h.dtype))  # type: ignore[no-untyped-call]
        if last and self.split.gradient == "spsa":
            yield from self.answer_probes(step, y)

    def answer_probes(self, step: int, y: Tensor) -> Requests:
        """The loss on both sides of the body's weights, with the head and tail of this step, in full precision."""
        for draw in range(self.split.draws):
            losses = {}
            for side, sign in (("plus", 1.0), ("minus", -1.0)):
                reply = yield self.message(step, "probe", {}, draw=float(draw), sign=sign)
                with torch.no_grad(), randomness.addressed(*self.address(step, "tail")):
                    b = unpack(reply.payload.trees["b"], self.client.settings.device)
                    losses[side] = F.cross_entropy(self.tail(b).double(), y).item()
            yield self.message(step, "losses", {}, draw=float(draw), **losses)

    def ask_for_gradient(self, step: int, x: Tensor, y: Tensor, *, last: bool) -> Requests:
        """Activations and labels up, gradient down."""
        settings, wire = self.client.settings, self.split.wire
        with self.drawing(step, "head"):
            h = self.head(x)
        up = {"h": pack(h, wire), "labels": {"y": y.cpu().to(torch.int32)}}
        reply = yield self.message(step, "labelled", up, last=float(last))
        self.losses.append((len(y), torch.tensor(reply.payload.scalars["loss"])))
        if h.requires_grad:
            h.backward(unpack(reply.payload.trees["h"], settings.device).to(h.dtype))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def predictor(self, channel: Channel) -> Callable[[Tensor], Tensor]:
        """Images to logits through the server, as in training; `start` has fetched the newest average."""
        client, wire, count = self.client, self.split.wire, iter(range(10**9))

        def call(message: Message) -> Payload:
            return Message.from_bytes(channel.call(message.to_bytes())).payload

        updated = float(client.memory.get("updated", 0.0))  # type: ignore[arg-type]
        self.take_average(call(self.message(0, "start", {}, updated=updated)))
        depth = {"depth": client.memory["depth"]} if "depth" in client.memory else {}

        def predict(x: Tensor) -> Tensor:
            with client.settings.autocast():
                h = self.head(x)
                reply = call(self.message(next(count), "infer", {"h": pack(h, wire)}, **depth))  # type: ignore[arg-type]
                b = unpack(reply.trees["b"], client.settings.device)
                return b if self.split.labels_leave else self.tail(b)

        return predict


# The server.


class ServerSide:
    """The body in one round.

    Messages of several clients may come in any order: what a client gives is kept apart until it has finished, and
    sums are taken in the order of the cohort. A client that is dropped leaves nothing behind, but for the steps of a
    body that all clients step together.
    """

    def __init__(
        self, split: SplitPlan, parts: Parts, body: Tree, memory: dict[str, Tree], round_: int, seed: int, lr: float,
        device: torch.device, *, autocast: Callable[[], Any], cohort: Sequence[str] = (),
    ):  # fmt: skip
        self.split, self.parts, self.memory, self.round, self.seed = split, parts, memory, round_, seed
        self.lr = lr
        self.device, self.autocast = device, autocast
        self.names = [name for name, _ in parts.model.named_parameters() if name in body]
        self.body = self.leaves_of(body)
        self.copies: dict[str, tuple[Tree, Optimizer | None]] = {}
        self.pending: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}  # what a backward pass still needs
        self.cohort, self.waiting = list(cohort), list(cohort)  # waiting: those not yet in the sums
        self.finished: set[str] = set()
        self.gradients: dict[str, list[Tensor]] = {}  # of the last batch, or of this step
        self.sums: list[Tensor] = []  # of the gradients of so many clients
        self.count = 0
        self.folded: Tree = {}  # the sum of the copies whose clients are done
        self.slopes: dict[str, dict[int, float]] = {}  # SPSA: the difference quotient of each draw
        self.ends: dict[str, Tree] = {}
        self.before: tuple[Tree, Memory] | None = None  # the body and its optimiser before this turn
        self.optimizer = self.optimizer_of(self.body) if split.body in ("step", "turns") else None
        if self.optimizer is not None:
            restore(self.optimizer, self.learned(self.body), dict(memory))

    def leaves_of(self, body: Tree) -> Tree:
        placed = {name: tensor.to(self.device, copy=True) for name, tensor in body.items()}
        return {name: t.requires_grad_() if name in self.names else t for name, t in placed.items()}

    def learned(self, body: Tree) -> Tree:
        return tree.pick(body, self.names)

    def optimizer_of(self, body: Tree) -> Optimizer | None:
        return make(self.split.server_optimizer, self.lr, self.learned(body))

    def call(self, request: bytes) -> bytes:
        return self.answer(Message.from_bytes(request)).to_bytes()

    def answer(self, message: Message) -> Message:
        """Answer one message."""
        if message.round != self.round:
            raise ValueError(f"a message of round {message.round} came in round {self.round}")
        answers: dict[str, Callable[[Message], Payload]] = {
            "start": self.on_start,
            "forward": self.on_forward,
            "backward": self.on_backward,
            "labelled": self.on_labelled,
            "probe": self.on_probe,
            "losses": self.on_losses,
            "parts": self.on_parts,
            "infer": self.on_infer,
        }
        return message.answered(answers[message.kind](message))

    def weights_for(self, client: str) -> Tree:
        if self.split.body != "copies":
            return self.body
        if client not in self.copies:
            copy = self.leaves_of({name: tensor.detach() for name, tensor in self.body.items()})
            self.copies[client] = copy, self.optimizer_of(copy)
        return self.copies[client][0]

    def depth_of(self, client: str) -> int | None:
        """How many blocks this client's features pass in this round."""
        most = self.split.deepest(self.parts)
        if most is None:
            return None
        generator = randomness.generator(self.seed, self.round, client, "depth")
        return 1 + int(torch.randint(most, (), generator=generator))

    def on_start(self, message: Message) -> Payload:
        """The mean of all clients' parts, if it is newer than the client's own."""
        depth = self.depth_of(message.client)
        scalars = {"learns": float(bool(self.names)), **({} if depth is None else {"depth": float(depth)})}
        newer = newer_average(self.split, self.memory, message.payload.scalars["updated"])
        return Payload({"average": newer} if newer else {}, scalars)

    def features(self, message: Message, weights: Tree) -> tuple[Tensor, Tensor]:
        h = unpack(message.payload.trees["h"], self.device).requires_grad_()
        address = self.seed, self.round, message.client, message.step, "body"
        with self.autocast(), randomness.addressed(*address):
            return h, self.parts.run("body", weights, h, depth=self.depth_of(message.client))

    def on_forward(self, message: Message) -> Payload:
        blind = self.split.black_box
        with torch.no_grad() if blind else nullcontext():
            h, b = self.features(message, self.weights_for(message.client))
        self.forget(message.client)
        if not blind or message.payload.scalars["last"]:
            self.pending[message.client, message.step] = h, b
        return Payload({"b": pack(b, self.split.wire)})

    def on_backward(self, message: Message) -> Payload:
        h, b = self.pending[message.client, message.step]
        if not (message.payload.scalars["last"] and self.split.gradient == "spsa"):
            del self.pending[message.client, message.step]
        slope = unpack(message.payload.trees["b"], self.device).to(b.dtype)
        at_input = self.back(message, h, b, slope)
        return Payload({"h": pack(at_input, self.split.wire)} if message.payload.scalars["wanted"] else {})

    def on_labelled(self, message: Message) -> Payload:
        h, logits = self.features(message, self.weights_for(message.client))
        loss = F.cross_entropy(logits.float(), message.payload.trees["labels"]["y"].to(self.device).long())
        return Payload({"h": pack(self.back(message, h, loss, None), self.split.wire)}, {"loss": loss.item()})

    def back(self, message: Message, h: Tensor, output: Tensor, slope: Tensor | None) -> Tensor:
        """The gradient at the body's input; on the way the body learns, or keeps its own gradient for later."""
        weights = self.weights_for(message.client)
        exact = self.split.gradient == "exact"
        wanted = exact and (self.split.body != "round" or bool(message.payload.scalars["last"]))
        leaves = [weights[name] for name in self.names] if wanted else []
        at_input, *own = torch.autograd.grad(output, [h, *leaves], slope, allow_unused=True)
        if wanted:
            self.learn(
                message.client,
                weights,
                [torch.zeros_like(w) if g is None else g for w, g in zip(leaves, own, strict=True)],
            )
        assert at_input is not None
        return at_input

    def learn(self, client: str, weights: Tree, gradients: list[Tensor]) -> None:
        if self.split.body in ("round", "step"):
            self.gradients[client] = gradients
            return
        optimizer = self.copies[client][1] if self.split.body == "copies" else self.optimizer
        take(optimizer, [weights[name] for name in self.names], gradients)

    def finish(self, client: str) -> None:
        """A client's round is over: what it gave goes into the sums, after that of all before it in the cohort."""
        self.finished.add(client)
        self.fold_in_order()

    def drop(self, client: str) -> None:
        """A client is lost: what it gave is forgotten."""
        for kept in (self.copies, self.gradients, self.slopes, self.ends):
            kept.pop(client, None)
        self.forget(client)
        if client in self.waiting:
            self.waiting.remove(client)
        self.fold_in_order()

    def forget(self, client: str) -> None:
        """Older steps of this client, whose gradient nobody asked for."""
        for key in [key for key in self.pending if key[0] == client]:
            del self.pending[key]

    def fold_in_order(self) -> None:
        while self.waiting and self.waiting[0] in self.finished:
            self.fold(self.waiting.pop(0))

    def fold(self, client: str) -> None:
        """Add a client's gradient, or its copy in full precision, to the sum, and forget it."""
        if client in self.gradients and self.split.body == "round":
            self.add(self.gradients.pop(client))
        if client in self.copies:
            copy, _ = self.copies.pop(client)
            added = {name: tensor.detach().double() for name, tensor in copy.items()}
            self.folded = {n: self.folded[n] + t for n, t in added.items()} if self.folded else added
            self.count += 1

    def add(self, gradients: list[Tensor]) -> None:
        self.sums = [a + b for a, b in zip(self.sums, gradients, strict=True)] if self.count else gradients
        self.count += 1

    def in_order(self, names: Iterable[str]) -> list[str]:
        """Clients in the order of the cohort."""
        there = list(names)
        return [name for name in self.cohort if name in there] + [name for name in there if name not in self.cohort]

    def begin_turn(self) -> None:
        """Keep the body as it is, in case that the next client is lost in its turn."""
        body = {name: self.body[name].detach().clone() for name in self.names}
        self.before = body, {} if self.optimizer is None else state_of(self.optimizer, self.learned(self.body))

    @torch.no_grad()
    def undo_turn(self) -> None:
        assert self.before is not None
        body, state = self.before
        for name, tensor in body.items():
            self.body[name].copy_(tensor)
        self.optimizer = self.optimizer_of(self.body)
        if self.optimizer is not None:
            restore(self.optimizer, self.learned(self.body), state)

    @torch.no_grad()
    def on_probe(self, message: Message) -> Payload:
        """Features under weights moved a little along, or against, a direction that only its seed is kept of."""
        x, _ = self.pending[message.client, message.step]
        step = message.payload.scalars["sign"] * self.split.epsilon
        draw = int(message.payload.scalars["draw"])
        with randomness.addressed(self.seed, self.round, message.client, message.step, "body"):
            b = self.moved_body(x, message.client, draw, step)
        return Payload({"b": pack(b, "fp32")})

    def moved_body(self, x: Tensor, client: str, draw: int, step: float) -> Tensor:
        """The body with its weights moved by `step` along a direction, one stage at a time: never a second body."""
        for stage in self.parts.stages("body", self.depth_of(client)):
            names = [name for name in stage.names if name in self.names]
            moved = {name: self.body[name] + step * self.direction(client, draw, name) for name in names}
            x = stage.under({**self.body, **moved}, x)
        return self.parts.rows_of(x)

    def direction(self, client: str, draw: int, name: str) -> Tensor:
        generator = randomness.generator(self.seed, self.round, client, f"direction {draw} {name}")
        return torch.randn(self.body[name].shape, generator=generator).to(self.device)

    def on_losses(self, message: Message) -> Payload:
        s = message.payload.scalars
        quotient = (s["plus"] - s["minus"]) / (2 * self.split.epsilon)
        self.slopes.setdefault(message.client, {})[int(s["draw"])] = quotient
        if len(self.slopes[message.client]) == self.split.draws:
            del self.pending[message.client, message.step]
        return Payload()

    def on_parts(self, message: Message) -> Payload:
        self.ends[message.client] = message.payload.trees["parts"]
        return Payload()

    @torch.no_grad()
    def on_infer(self, message: Message) -> Payload:
        """Features for testing; nothing is kept."""
        h = unpack(message.payload.trees["h"], self.device)
        most = self.split.deepest(self.parts)
        depth = None if most is None else int(message.payload.scalars.get("depth", most))
        with self.autocast():
            b = self.parts.run("body", self.body, h, depth=depth)
        return Payload({"b": pack(b, "fp32" if self.split.labels_leave else self.split.wire)})

    def end_of_step(self) -> None:
        """All clients have sent their gradients of this step: one step along their mean."""
        if self.split.body == "step" and self.gradients:
            for client in self.in_order(self.gradients):
                self.add(self.gradients.pop(client))
            take(self.optimizer, [self.body[name] for name in self.names], [total / self.count for total in self.sums])
            self.sums, self.count = [], 0

    def end_of_round(self) -> tuple[Tree, dict[str, Tree]]:
        """The body and the server's memory after the round."""
        for client in self.in_order(self.gradients | self.copies):
            self.fold(client)
        body = {name: tensor.detach() for name, tensor in self.body.items()}
        if self.split.body == "round":
            body.update(self.one_step(body))
        elif self.folded:
            body = {name: (total / self.count).to(body[name].dtype) for name, total in self.folded.items()}
        memory = dict(self.memory)
        if self.optimizer is not None:
            memory.update(
                {k: v for k, v in state_of(self.optimizer, self.learned(self.body)).items() if isinstance(v, dict)}
            )
        if self.ends:
            memory["average"] = tree.mean((1.0, self.ends[client]) for client in self.in_order(self.ends))
            memory["averaged"] = {"round": torch.tensor(self.round)}
        return {name: tensor.cpu() for name, tensor in body.items()}, memory

    def one_step(self, body: Tree) -> Tree:
        """FedV's step of a round: along the mean over clients of their last batch's gradient."""
        moved = {}
        for number, name in enumerate(self.names):
            if self.count:
                mean = self.sums[number] / self.count
            elif self.slopes:
                total = torch.zeros_like(body[name])
                for client in self.in_order(self.slopes):
                    for draw, quotient in self.slopes[client].items():
                        total += quotient * self.direction(client, draw, name)
                mean = total / sum(map(len, self.slopes.values()))
            else:
                return {}
            moved[name] = body[name] - self.lr * mean
        return moved


def newer_average(split: SplitPlan, memory: Mapping[str, Tree], updated: float) -> Tree:
    """The server's mean of the clients' parts, for a client that last changed its own in round `updated`."""
    newer = split.receives == "all" and "averaged" in memory and int(memory["averaged"]["round"]) >= updated
    return memory["average"] if newer else {}


# Optimisers whose state is kept in trees.


def make(
    name: str, lr: float, leaves: Mapping[str, Tensor], momentum: float = 0.0, weight_decay: float = 0.0
) -> Optimizer | None:
    parameters = list(leaves.values())
    if not parameters:
        return None
    if name == "sgd":
        return SGD(parameters, lr, momentum=momentum, weight_decay=weight_decay)
    return (AdamW if name == "adamw" else Adam)(parameters, lr, weight_decay=weight_decay)


def take(optimizer: Optimizer | None, leaves: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """One step along these gradients."""
    if optimizer is not None:
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def state_of(optimizer: Optimizer, leaves: Mapping[str, Tensor]) -> Memory:
    """The optimiser's tensors, one tree a kind."""
    found: dict[str, Tree] = {}
    for name, leaf in leaves.items():
        for kind, value in optimizer.state.get(leaf, {}).items():
            if isinstance(value, Tensor):
                found.setdefault(f"optimizer {kind}", {})[name] = value.detach().to("cpu", copy=True)
    return dict(found)


def restore(optimizer: Optimizer, leaves: Mapping[str, Tensor], memory: Memory) -> None:
    """Give an optimiser back what `state_of` took."""
    for key, kept in memory.items():
        if key.startswith("optimizer ") and isinstance(kept, dict):
            for name, value in kept.items():
                kind = key.removeprefix("optimizer ")
                placed = value.clone() if kind == "step" else value.to(leaves[name].device, copy=True)
                optimizer.state[leaves[name]][kind] = placed
