"""The client's side of split learning: the head and tail of the model, in one round."""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedvit.core import randomness, tree
from fedvit.core.client import Client
from fedvit.core.payload import Payload
from fedvit.core.training import clip_, note_loss
from fedvit.core.tree import Tree
from fedvit.models.cuts import Parts
from fedvit.split.messages import Channel, Message, pack, unpack
from fedvit.split.optimizers import make_split_optimizer, optimizer_state, restore_optimizer
from fedvit.split.plan import SplitPlan
from fedvit.split.spsa import direction, moved

Requests = Generator[Message | None, Message, None]  # None marks the end of a step


class ClientSide:
    """One client's head and tail in one round. The client's memory keeps the optimizer state between rounds."""

    def __init__(self, split: SplitPlan, parts: Parts, client: Client):
        self.split, self.parts, self.client = split, parts, client
        device = client.settings.device
        self.weights = {name: tensor.to(device, copy=True) for name, tensor in client.personal().items()}
        parameters = {name for name, _ in client.module.named_parameters()}
        self.body_learns = True
        learned = [name for name in client.roles.personal if name in parameters]
        self.leaves = {name: nn.Parameter(self.weights[name]) for name in learned}
        self.weights.update(self.leaves)
        self.head = [name for name in learned if split.cut.part_of(name) == "client_head"]
        self.losses: list[tuple[int, Tensor]] = []

    def message(self, step: int, kind: str, trees: dict[str, Tree], **scalars: float) -> Message:
        return Message(self.client.round, self.client.id, step, kind, Payload(trees, scalars))

    def client_head(self, x: Tensor) -> Tensor:
        return self.parts.run("client_head", self.weights, x)

    def client_tail(self, b: Tensor) -> Tensor:
        return self.parts.run("client_tail", self.weights, b).float()

    def address(self, step: int, part: str) -> tuple[int, int, str, int, str]:
        return self.client.settings.seed, self.client.round, self.client.id, step, part

    @contextmanager
    def drawing(self, step: int, part: str) -> Iterator[None]:
        """Use mixed precision if it is enabled, and seed dropout so that it depends on this step alone."""
        with self.client.settings.autocast(), randomness.seeded(*self.address(step, part)):
            yield

    def requests(self, *, average: bool) -> Requests:
        """Yield every request of this client to the server in one round, and train between the replies."""
        client, settings = self.client, self.client.settings
        reply = yield self.message(0, "start", {}, updated=float(client.memory.get("updated", 0.0)))  # type: ignore[arg-type]
        self.take_average(reply.payload)
        self.body_learns = bool(reply.payload.scalars["learns"])
        if "depth" in reply.payload.scalars:
            client.memory["depth"] = reply.payload.scalars["depth"]
        head_lr = settings.lr if self.split.client_head_lr is None else self.split.client_head_lr * settings.schedule
        optimizer = make_split_optimizer(
            settings.optimizer,
            settings.lr,
            self.leaves,
            settings.momentum,
            settings.weight_decay,
            own={head_lr: self.head},
        )
        if optimizer is not None:
            restore_optimizer(optimizer, self.leaves, client.memory)
        total = settings.epochs * -(-len(client.data.train) // settings.batch)
        learn = self.ask_for_gradient if self.split.labels_leave else self.learn_across
        for step, (x, y) in enumerate(client.batches(settings.epochs, "train")):
            yield from learn(step, x, y, last=step == total - 1)
            if optimizer is not None:
                self.clip()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            yield None
        end = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.weights.items()}
        note_loss(client, self.losses, end)
        client.memory["personal"] = end
        client.memory["updated"] = float(client.round)
        client.memory.update(optimizer_state(optimizer, self.leaves) if optimizer is not None else {})
        own = tree.pick(end, self.split.averaged(client.roles.personal))
        if average and own:
            yield self.message(total, "parts", {"parts": self.perturbed(own)})

    def perturbed(self, own: Tree) -> Tree:
        """Return the parts with noise of `perturb` times the root mean square of each tensor, if there is any."""
        if not self.split.perturb:
            return own
        generator = self.client.rng("perturb")
        size = {name: self.split.perturb * tensor.square().mean().sqrt() for name, tensor in own.items()}
        return {name: t + size[name] * torch.randn(t.shape, generator=generator) for name, t in own.items()}

    def clip(self) -> None:
        """Bound the gradient of the client's parts; an estimate from losses is long by nature and stays as it is."""
        guessed = self.head if self.split.black_box else []
        gradients = [leaf.grad for name, leaf in self.leaves.items() if name not in guessed and leaf.grad is not None]
        clip_(gradients, self.client.settings.clip_grad)

    def take_average(self, content: Payload) -> None:
        """Load the server's mean of the clients' parts, if the server sent one."""
        with torch.no_grad():
            for name, tensor in content.trees.get("average", {}).items():
                self.weights[name].copy_(tensor)

    def learn_across(self, step: int, x: Tensor, y: Tensor, *, last: bool) -> Requests:
        """Train on one batch: send activations, receive features, send their gradient, receive the head's gradient.

        The labels stay at the client.
        """
        settings, wire = self.client.settings, self.split.wire
        blind = self.split.black_box
        with self.drawing(step, "head"), torch.set_grad_enabled(bool(self.head) and not blind):
            h = self.client_head(x)
        reply = yield self.message(step, "forward", {"h": pack(h, wire)}, last=float(last))
        b = unpack(reply.payload.trees["b"], settings.device).requires_grad_()
        with self.drawing(step, "tail"):
            logits = self.client_tail(b)
        loss = self.client.criterion(logits, y)
        loss.backward()  # type: ignore[no-untyped-call]
        self.losses.append((len(y), loss.detach()))
        body_wants = self.body_learns and self.split.gradient == "exact" and (self.split.body != "round" or last)
        if h.requires_grad or body_wants:
            assert b.grad is not None
            wanted = float(h.requires_grad)
            reply = yield self.message(step, "backward", {"b": pack(b.grad, wire)}, last=float(last), wanted=wanted)
            if h.requires_grad:
                h.backward(unpack(reply.payload.trees["h"], settings.device).to(h.dtype))  # type: ignore[no-untyped-call]
        if blind and self.head:
            yield from self.probe_head(step, x, y)
        if last and self.split.gradient == "spsa":
            yield from self.answer_probes(step, y)

    @torch.no_grad()
    def loss_of(self, step: int, features: Tree, y: Tensor) -> float:
        """Return a batch's loss under features that the server sent, in full precision."""
        with randomness.seeded(*self.address(step, "tail")):
            b = unpack(features, self.client.settings.device)
            return self.client.criterion(self.client_tail(b).double(), y).item()

    def probe_head(self, step: int, x: Tensor, y: Tensor) -> Requests:
        """Estimate the head's gradient without one from the body: two losses with the head moved in both directions."""
        client, epsilon = self.client, self.split.epsilon
        key = client.settings.seed, client.round, client.id, f"head {step}"
        losses = []
        for sign in (1.0, -1.0):
            with torch.no_grad(), randomness.seeded(*self.address(step, "head")):
                there = {**self.weights, **moved(self.weights, self.head, key, sign * epsilon)}
                h = self.parts.run("client_head", there, x)
            reply = yield self.message(step, "query", {"h": pack(h, "fp32")})
            losses.append(self.loss_of(step, reply.payload.trees["b"], y))
        slope = (losses[0] - losses[1]) / (2 * epsilon)
        for name in self.head:
            self.leaves[name].grad = slope * direction(key, name, self.leaves[name])

    def answer_probes(self, step: int, y: Tensor) -> Requests:
        """Report the loss for body weights moved in both directions, as SPSA needs it.

        The head's activations and the tail are those of this step.
        """
        for draw in range(self.split.draws):
            losses = {}
            for side, sign in (("plus", 1.0), ("minus", -1.0)):
                reply = yield self.message(step, "probe", {}, draw=float(draw), sign=sign)
                losses[side] = self.loss_of(step, reply.payload.trees["b"], y)
            yield self.message(step, "losses", {}, draw=float(draw), **losses)

    def ask_for_gradient(self, step: int, x: Tensor, y: Tensor, *, last: bool) -> Requests:
        """Train on one batch: send activations and labels, and receive the head's gradient."""
        settings, wire = self.client.settings, self.split.wire
        with self.drawing(step, "head"), torch.set_grad_enabled(bool(self.head)):
            h = self.client_head(x)
        up = {"h": pack(h, wire), "labels": {"y": y.cpu().to(torch.int32)}}
        reply = yield self.message(step, "labelled", up, last=float(last), wanted=float(h.requires_grad))
        self.losses.append((len(y), torch.tensor(reply.payload.scalars["loss"])))
        if h.requires_grad:
            h.backward(unpack(reply.payload.trees["h"], settings.device).to(h.dtype))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def predictor(self, channel: Channel) -> Callable[[Tensor], Tensor]:
        """Return a function from images to logits that calls the server for the body's part, as training does.

        The newest average of the clients' parts is fetched first.
        """
        client, wire, count = self.client, self.split.wire, iter(range(10**9))

        def call(message: Message) -> Payload:
            return Message.from_bytes(channel.call(message.to_bytes())).payload

        updated = float(client.memory.get("updated", 0.0))  # type: ignore[arg-type]
        self.take_average(call(self.message(0, "start", {}, updated=updated)))
        depth = {"depth": client.memory["depth"]} if "depth" in client.memory else {}

        def predict(x: Tensor) -> Tensor:
            with client.settings.autocast():
                h = self.client_head(x)
                reply = call(self.message(next(count), "infer", {"h": pack(h, wire)}, **depth))  # type: ignore[arg-type]
                b = unpack(reply.trees["b"], client.settings.device)
                return b if self.split.labels_leave else self.client_tail(b)

        return predict
