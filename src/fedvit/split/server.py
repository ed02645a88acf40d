"""The server's side of split learning: the body of the model, in one round."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fedvit.core import randomness, tree
from fedvit.core.client import Memory
from fedvit.core.errors import DivergedError
from fedvit.core.losses import cross_entropy
from fedvit.core.payload import Payload
from fedvit.core.training import clip_
from fedvit.core.tree import Tree
from fedvit.models.cuts import Parts
from fedvit.split.messages import Message, pack, unpack
from fedvit.split.optimizers import make_split_optimizer, optimizer_state, restore_optimizer, step_along
from fedvit.split.plan import SplitPlan, newer_average
from fedvit.split.spsa import Key, direction, moved


class ServerSide:
    """The server's body of the model in one round.

    Messages from several clients may arrive in any order: the server keeps each client's contribution apart until
    that client has finished, and adds contributions in the order of the cohort. A client that is dropped has no effect
    on the result, except through steps that the body has already taken along the mean over clients.
    """

    def __init__(
        self, split: SplitPlan, parts: Parts, body: Tree, memory: dict[str, Tree], round_: int, seed: int, lr: float,
        device: torch.device, *, autocast: Callable[[], Any], cohort: Sequence[str] = (), clip_grad: float = 0.0,
    ):  # fmt: skip
        self.split, self.parts, self.memory, self.round, self.seed = split, parts, memory, round_, seed
        self.lr, self.clip_grad = lr, clip_grad  # the largest norm of one client's gradient in one batch; 0: unlimited
        self.device, self.autocast = device, autocast
        self.names = [name for name, _ in parts.model.named_parameters() if name in body]
        self.body = self.leaves_of(body)
        self.copies: dict[str, tuple[Tree, Optimizer | None]] = {}
        self.pending: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}  # for backward passes still to come
        self.cohort, self.waiting = list(cohort), list(cohort)  # waiting: clients not yet in the sums
        self.finished: set[str] = set()
        self.gradients: dict[str, list[Tensor]] = {}  # of the last batch, or of this step
        self.sums: list[Tensor] = []  # of the gradients of `count` clients
        self.count = 0
        self.folded: Tree = {}  # the sum of the finished clients' copies
        self.slopes: dict[str, dict[int, float]] = {}  # SPSA: the difference quotient of each draw
        self.ends: dict[str, Tree] = {}
        self.before: tuple[Tree, Memory] | None = None  # the body and its optimizer state before this turn
        self.optimizer = self.optimizer_of(self.body) if split.body in ("step", "turns") else None
        if self.optimizer is not None:
            restore_optimizer(self.optimizer, self.learned(self.body), dict(memory))

    def leaves_of(self, body: Tree) -> Tree:
        placed = {name: tensor.to(self.device, copy=True) for name, tensor in body.items()}
        return {name: t.requires_grad_() if name in self.names else t for name, t in placed.items()}

    def learned(self, body: Tree) -> Tree:
        return tree.pick(body, self.names)

    def optimizer_of(self, body: Tree) -> Optimizer | None:
        return make_split_optimizer(self.split.server_optimizer, self.lr, self.learned(body))

    def call(self, request: bytes) -> bytes:
        return self.answer(Message.from_bytes(request)).to_bytes()

    def answer(self, message: Message) -> Message:
        """Answer one message."""
        if message.round != self.round:
            raise ValueError(f"a message for round {message.round} arrived in round {self.round}")
        answers: dict[str, Callable[[Message], Payload]] = {
            "start": self.on_start,
            "forward": self.on_forward,
            "backward": self.on_backward,
            "labelled": self.on_labelled,
            "query": self.on_query,
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
        """Return how many blocks process this client's features in this round; None if all of them do."""
        most = self.split.deepest(self.parts)
        if most is None:
            return None
        generator = randomness.generator(self.seed, self.round, client, "depth")
        return 1 + int(torch.randint(most, (), generator=generator))

    def on_start(self, message: Message) -> Payload:
        """Send the mean of the clients' parts if it is new to the client, and the body's settings for the round."""
        depth = self.depth_of(message.client)
        scalars = {"learns": float(bool(self.names)), **({} if depth is None else {"depth": float(depth)})}
        newer = newer_average(self.split, self.memory, message.payload.scalars["updated"])
        return Payload({"average": newer} if newer else {}, scalars)

    def features(self, message: Message, weights: Tree) -> tuple[Tensor, Tensor]:
        h = unpack(message.payload.trees["h"], self.device).requires_grad_()
        address = self.seed, self.round, message.client, message.step, "body"
        with self.autocast(), randomness.seeded(*address):
            return h, self.parts.run("body", weights, h, depth=self.depth_of(message.client))

    def on_forward(self, message: Message) -> Payload:
        last, exact = bool(message.payload.scalars["last"]), self.split.gradient == "exact"
        head_learns = not self.split.black_box and self.split.client_head_lr != 0
        body_learns = exact and (last or self.split.body != "round")
        with torch.set_grad_enabled(head_learns or body_learns):
            h, b = self.features(message, self.weights_for(message.client))
        self.forget(message.client)
        if head_learns or last or body_learns:
            self.pending[message.client, message.step] = h, b
        return Payload({"b": pack(b, self.split.wire)})

    @torch.no_grad()
    def on_query(self, message: Message) -> Payload:
        """Return features for a head that its client moved, and keep nothing."""
        _, b = self.features(message, self.weights_for(message.client))
        return Payload({"b": pack(b, "fp32")})

    def on_backward(self, message: Message) -> Payload:
        h, b = self.pending[message.client, message.step]
        if not (message.payload.scalars["last"] and self.split.gradient == "spsa"):
            del self.pending[message.client, message.step]
        slope = unpack(message.payload.trees["b"], self.device).to(b.dtype)
        at_input = self.back(message, h, b, slope)
        return Payload({"h": pack(at_input, self.split.wire)} if message.payload.scalars["wanted"] else {})

    def on_labelled(self, message: Message) -> Payload:
        h, logits = self.features(message, self.weights_for(message.client))
        loss = cross_entropy(logits.float(), message.payload.trees["labels"]["y"].to(self.device).long())
        at_input = self.back(message, h, loss, None)
        trees = {"h": pack(at_input, self.split.wire)} if message.payload.scalars["wanted"] else {}
        return Payload(trees, {"loss": loss.item()})

    def back(self, message: Message, h: Tensor, output: Tensor, slope: Tensor | None) -> Tensor:
        """Return the gradient at the body's input; also train the body, or keep its gradient for later."""
        weights = self.weights_for(message.client)
        exact = self.split.gradient == "exact"
        wanted = exact and (self.split.body != "round" or bool(message.payload.scalars["last"]))
        leaves = [weights[name] for name in self.names] if wanted else []
        at_input, *own = torch.autograd.grad(output, [h, *leaves], slope, allow_unused=True)
        if wanted:
            gradients = [torch.zeros_like(w) if g is None else g for w, g in zip(leaves, own, strict=True)]
            clip_(gradients, self.clip_grad)
            self.learn(message.client, weights, gradients)
        assert at_input is not None
        return at_input

    def learn(self, client: str, weights: Tree, gradients: list[Tensor]) -> None:
        if self.split.body in ("round", "step"):
            self.gradients[client] = gradients
            return
        optimizer = self.copies[client][1] if self.split.body == "copies" else self.optimizer
        step_along(optimizer, [weights[name] for name in self.names], gradients)

    def check_contribution(self, client: str, largest: float) -> None:
        """Raise DivergedError if what this client last sent would move the body by more than any useful step."""
        moved = self.gradients.get(client, [])
        if client in self.copies:
            moved = [self.copies[client][0][name].detach() for name in self.names]
        elif self.split.body == "turns":
            moved = [self.body[name].detach() for name in self.names]
        norm = float(torch.nn.utils.get_total_norm(moved)) if moved else 0.0
        if not norm <= largest:
            raise DivergedError(f"the body cannot learn from it: a norm of {norm:.3g}, more than {largest:,.0f}")

    def finish(self, client: str) -> None:
        """Record that a client has finished its round; its contribution is added in the order of the cohort."""
        self.finished.add(client)
        self.fold_in_order()

    def drop(self, client: str) -> None:
        """Discard the contribution of a client that was lost."""
        for kept in (self.copies, self.gradients, self.slopes, self.ends):
            kept.pop(client, None)
        self.forget(client)
        if client in self.waiting:
            self.waiting.remove(client)
        self.fold_in_order()

    def forget(self, client: str) -> None:
        """Discard older steps of this client for which no gradient was requested."""
        for key in [key for key in self.pending if key[0] == client]:
            del self.pending[key]

    def fold_in_order(self) -> None:
        while self.waiting and self.waiting[0] in self.finished:
            self.fold(self.waiting.pop(0))

    def fold(self, client: str) -> None:
        """Add a client's gradient, or its copy of the body in double precision, to the sum, and discard it."""
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
        """Return these clients in the order of the cohort."""
        there = list(names)
        return [name for name in self.cohort if name in there] + [name for name in there if name not in self.cohort]

    def begin_turn(self) -> None:
        """Save the body and its optimizer state, in case the next client is lost during its turn."""
        body = {name: self.body[name].detach().clone() for name in self.names}
        self.before = body, {} if self.optimizer is None else optimizer_state(self.optimizer, self.learned(self.body))

    @torch.no_grad()
    def undo_turn(self) -> None:
        assert self.before is not None
        body, state = self.before
        for name, tensor in body.items():
            self.body[name].copy_(tensor)
        self.optimizer = self.optimizer_of(self.body)
        if self.optimizer is not None:
            restore_optimizer(self.optimizer, self.learned(self.body), state)

    @torch.no_grad()
    def on_probe(self, message: Message) -> Payload:
        """Return features for weights moved slightly along or against a random direction.

        Only the seed of the direction is kept.
        """
        x, _ = self.pending[message.client, message.step]
        step = message.payload.scalars["sign"] * self.split.epsilon
        draw = int(message.payload.scalars["draw"])
        with randomness.seeded(self.seed, self.round, message.client, message.step, "body"):
            b = self.moved_body(x, message.client, draw, step)
        return Payload({"b": pack(b, "fp32")})

    def moved_body(self, x: Tensor, client: str, draw: int, step: float) -> Tensor:
        """Run the body with its weights moved by `step` along a direction.

        Weights are moved one stage at a time, so memory never holds a second body.
        """
        for stage in self.parts.stages("body", self.depth_of(client)):
            names = [name for name in stage.names if name in self.names]
            x = stage.under({**self.body, **moved(self.body, names, self.key_of(client, draw), step)}, x)
        return self.parts.rows_of(x)

    def key_of(self, client: str, draw: int) -> Key:
        return self.seed, self.round, client, f"direction {draw}"

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
        """Return features for evaluation, and keep nothing."""
        h = unpack(message.payload.trees["h"], self.device)
        most = self.split.deepest(self.parts)
        depth = None if most is None else int(message.payload.scalars.get("depth", most))
        with self.autocast():
            b = self.parts.run("body", self.body, h, depth=depth)
        return Payload({"b": pack(b, "fp32" if self.split.labels_leave else self.split.wire)})

    def end_of_step(self) -> None:
        """Take one step along the mean of the gradients that the clients sent in this step, if the body does so."""
        if self.split.body == "step" and self.gradients:
            for client in self.in_order(self.gradients):
                self.add(self.gradients.pop(client))
            step_along(
                self.optimizer, [self.body[name] for name in self.names], [total / self.count for total in self.sums]
            )
            self.sums, self.count = [], 0

    def end_of_round(self) -> tuple[Tree, dict[str, Tree]]:
        """Return the body and the server's memory after the round."""
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
                {
                    k: v
                    for k, v in optimizer_state(self.optimizer, self.learned(self.body)).items()
                    if isinstance(v, dict)
                }
            )
        if self.ends:
            memory["average"] = tree.mean((1.0, self.ends[client]) for client in self.in_order(self.ends))
            memory["averaged"] = {"round": torch.tensor(self.round)}
        return {name: tensor.cpu() for name, tensor in body.items()}, memory

    def one_step(self, body: Tree) -> Tree:
        """Return the body's weights after FedV's one step per round, along the mean gradient of the last batches."""
        end = {}
        for number, name in enumerate(self.names):
            if self.count:
                mean = self.sums[number] / self.count
            elif self.slopes:
                total = torch.zeros_like(body[name])
                for client in self.in_order(self.slopes):
                    for draw, quotient in self.slopes[client].items():
                        total += quotient * direction(self.key_of(client, draw), name, total)
                mean = total / sum(map(len, self.slopes.values()))
            else:
                return {}
            end[name] = body[name] - self.lr * mean
        return end
