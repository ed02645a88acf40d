"""Check split learning messages before the server or a client uses them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedvit.core import tree
from fedvit.core.batches import EVALUATION_BATCH
from fedvit.core.errors import one_line
from fedvit.core.metrics import LARGEST
from fedvit.core.payload import Payload, flatten
from fedvit.core.tree import Tree
from fedvit.engine.net import Net
from fedvit.models.cuts import Parts
from fedvit.network.boundary import MOST_ROUNDS, read_scores
from fedvit.network.grpc.channel import GarbageError, LateError
from fedvit.network.payload_check import LARGEST as LARGEST_VALUE
from fedvit.network.payload_check import beyond, difference, largest
from fedvit.runs.write import Holding
from fedvit.split.messages import Message
from fedvit.split.plan import Wire
from fedvit.split.server import ServerSide

Shape = tuple[int, ...]
KINDS = ("start", "forward", "labelled", "backward", "query", "probe", "losses", "parts", "infer")
WIRES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}
LARGEST_LOSS = 1e4  # of a batch, in a zeroth-order step
SLACK = 1_000_000  # bytes that a message may have in addition to its tensors


@dataclass
class Progress:
    """A client's progress in its task."""

    task: str  # train, receive or evaluate
    steps: int  # in a round, from the number of the client's training images
    average: bool = False
    started: bool = False
    step: int = -1  # the latest
    queries: int = 0  # in this step

    @property
    def complete(self) -> bool:
        return self.started and (self.task != "train" or self.step == self.steps - 1)


class AnswerError(Exception):
    """A message from the server that cannot be used: a correct server never sends it, or its values diverged."""


class Checks:
    """The names, data types and shapes of the tensors in a model's messages."""

    def __init__(self, net: Net, batch: int):
        self.split, self.batch, self.classes = net.split, batch, net.classes
        parts = Parts(net.module, self.split.cut)
        x = torch.zeros(1, 3, net.inputs.size, net.inputs.size, device=next(net.module.parameters()).device)
        net.module.eval()
        with torch.no_grad():
            h = parts.run("client_head", {}, x)
            b = parts.run("body", {}, h)
        self.h: Shape = tuple(h.shape[1:])
        self.b: Shape = tuple(b.shape[1:])
        self.own: Tree = tree.pick(net.initial, self.split.averaged(net.roles.personal))  # what is averaged
        heads = set(net.split.cut.names(net.module, "client_head")) & set(net.roles.personal)
        self.queries = 2 if self.split.black_box and heads else 0  # per step
        self.most = self.split.deepest(parts)

    @property
    def longest(self) -> int:
        """The size in bytes of the longest message that a client may send."""
        largest = max(self.batch, EVALUATION_BATCH)
        return max(largest * (math.prod(self.h) + 1) * 8, 2 * tree.nbytes(self.own)) + SLACK

    def check(self, message: Message, progress: Progress, side: ServerSide) -> None:
        """Check a client's message and record its step.

        Raise LateError if it belongs to another round, step or task, and GarbageError if it is invalid anywhere.
        """
        if message.round != side.round:
            raise LateError(f"a message for round {message.round} arrived in round {side.round}")
        allowed = ("start", "infer") if progress.task == "evaluate" else self.kinds(progress)
        if message.kind not in KINDS:
            raise GarbageError(f"there is no message of kind {message.kind[:40]!r}")
        if message.kind not in allowed:
            raise LateError(f"a message of kind {message.kind!r} does not belong to this task")
        expected = self.place(message, progress, side)
        if message.step != expected or (message.kind == "start") == progress.started:
            raise LateError(f"a message of kind {message.kind!r} for step {message.step} arrived in step {expected}")
        self.check_numbers(message, progress)
        self.check_tensors(message, side)
        progress.started = True
        if message.kind in ("forward", "labelled", "infer"):
            progress.step, progress.queries = message.step, 0
        progress.queries += message.kind == "query"

    def kinds(self, progress: Progress) -> tuple[str, ...]:
        if self.split.labels_leave:
            return ("start", "labelled", *(("parts",) if progress.average else ()))
        probes = ("probe", "losses") if self.split.gradient == "spsa" else ()
        queries = ("query",) if self.queries else ()
        return ("start", "forward", "backward", *queries, *probes, *(("parts",) if progress.average else ()))

    def place(self, message: Message, progress: Progress, side: ServerSide) -> int:
        """Return the step that a message of this kind must have now, or -1 if none is allowed."""
        match message.kind:
            case "start":
                return 0
            case "infer":
                return progress.step + 1
            case "forward" | "labelled":
                return progress.step + 1 if progress.step + 1 < progress.steps else -1
            case "query":
                return progress.step if progress.queries < self.queries else -1
            case "parts":
                ready = progress.complete and message.client not in side.ends
                return progress.steps if ready else -1
            case _:
                return progress.step if (message.client, progress.step) in side.pending else -1

    def check_numbers(self, message: Message, progress: Progress) -> None:
        numbers = message.payload.scalars
        wanted: dict[str, set[str]] = {
            "start": {"updated"},
            "forward": {"last"},
            "labelled": {"last", "wanted"},
            "backward": {"last", "wanted"},
            "query": set(),
            "probe": {"draw", "sign"},
            "losses": {"draw", "plus", "minus"},
            "parts": set(),
            "infer": {"depth"} & set(numbers),
        }
        if set(numbers) != wanted[message.kind] or not _all_numbers(numbers):
            raise GarbageError(f"the numbers in {message.kind!r} are not the expected ones")
        fits: dict[str, Callable[[float], bool]] = {
            "last": lambda v: bool(v) == (message.step == progress.steps - 1),
            "wanted": lambda v: v in (0, 1),
            "draw": lambda v: v in range(self.split.draws),
            "sign": lambda v: v in (-1, 1),
            "depth": lambda v: self.most is not None and v in range(1, self.most + 1),
            "plus": lambda v: abs(v) <= LARGEST_LOSS,
            "minus": lambda v: abs(v) <= LARGEST_LOSS,
        }
        for name, value in numbers.items():
            if name in fits and not fits[name](value):
                raise GarbageError(f"{message.kind!r} has an invalid value of {name}: {value:g}")

    def check_tensors(self, message: Message, side: ServerSide) -> None:
        found = flatten(message.payload.trees)
        match message.kind:
            case "forward" | "labelled" | "infer" | "query":
                images = len(found["h/x"]) if "h/x" in found and found["h/x"].ndim else 0
                limit = EVALUATION_BATCH if message.kind == "infer" else self.batch
                if not 1 <= images <= limit:
                    raise GarbageError(f"expected h/x to hold 1 to {limit} images, found {images}")
                wanted = self.packed("h", (images, *self.h), "fp32" if message.kind == "query" else None)
                if message.kind == "labelled":
                    wanted["labels/y"] = torch.int32, (images,)
            case "backward":
                wanted = self.packed("b", tuple(side.pending[message.client, message.step][1].shape))
            case "parts":
                wanted = {f"parts/{name}": (t.dtype, tuple(t.shape)) for name, t in self.own.items()}
            case _:
                wanted = {}
        compare(found, wanted, message.kind)
        wrong = difference(message.payload, Payload({"parts": self.own})) if message.kind == "parts" else None
        if wrong is not None:
            raise GarbageError(wrong)
        if "labels/y" in found and not ((found["labels/y"] >= 0) & (found["labels/y"] < self.classes)).all():
            raise GarbageError("some labels are not class numbers")

    def check_task(self, task: Message) -> None:
        """Check a task from the server; raise AnswerError if it is invalid."""
        numbers = task.payload.scalars
        if set(numbers) != {"continues", "average"} or not _all_numbers(numbers):
            raise AnswerError(f"the numbers in the task {task.kind[:40]!r} are not the expected ones")
        if not (1 <= task.round <= MOST_ROUNDS and 0 <= numbers["continues"] <= MOST_ROUNDS):
            raise AnswerError(f"the task {task.kind[:40]!r} is for no round")
        wrong = difference(task.payload, Payload({"average": self.own} if task.kind == "receive" else {}))
        if wrong is not None:
            raise AnswerError(f"the task {task.kind[:40]!r}: {wrong}")

    def check_answer(self, request: Message, answer: Message, images: int) -> None:
        """Check the server's answer to a request in a batch of `images` images; raise AnswerError if it is invalid."""
        about = [(m.round, m.client, m.step, m.kind) for m in (request, answer)]
        if about[0] != about[1]:
            raise AnswerError(f"the answer to {request.kind!r} belongs to another message")
        self.check_answered_numbers(answer)
        plain = request.kind in ("probe", "query") or (request.kind == "infer" and self.split.labels_leave)
        found: Tree = flatten(answer.payload.trees)
        wanted: dict[str, tuple[torch.dtype, Shape]] = {}
        match request.kind:
            case "start":
                wrong = difference(answer.payload, Payload({"average": self.own})) if found else None
                if wrong is not None:
                    raise AnswerError(f"the answer to 'start': {wrong}")
                return
            case "forward" | "probe" | "query" | "infer":
                wanted = self.packed("b", (images, *self.b), "fp32" if plain else None)
            case "labelled" | "backward" if request.payload.scalars.get("wanted", 1.0):
                wanted = self.packed("h", (images, *self.h))
        try:
            compare(found, wanted, request.kind)
        except GarbageError as problem:
            raise AnswerError(f"the answer to {request.kind!r}: {problem}") from problem

    def check_answered_numbers(self, answer: Message) -> None:
        numbers = answer.payload.scalars
        start = {"learns"} if self.most is None else {"learns", "depth"}
        wanted = {"start": start, "labelled": {"loss"}}.get(answer.kind, set())
        if set(numbers) != wanted or not _all_numbers(numbers):
            raise AnswerError(f"the numbers in the answer to {answer.kind!r} are not the expected ones")
        if self.most is not None and "depth" in numbers and numbers["depth"] not in range(1, self.most + 1):
            raise AnswerError(f"expected a body of 1 to {self.most} blocks, found {numbers['depth']:g}")

    def largest(self, train: int, test: int) -> list[Payload]:
        """Return the largest payload of each kind with tensors that a client with this many images sends."""
        batch = min(self.batch, train)
        kinds = [
            {"h": self.zeros("h", (batch, *self.h))},
            {"h": self.zeros("h", (min(EVALUATION_BATCH, test), *self.h))},
        ]
        if self.split.labels_leave:
            kinds[0]["labels"] = {"y": torch.zeros(batch, dtype=torch.int32)}
        else:
            kinds.append({"b": self.zeros("b", (batch, *self.b))})
        if self.own:
            kinds.append({"parts": self.own})
        return [Payload(trees) for trees in kinds]

    def zeros(self, group: str, shape: Shape) -> Tree:
        wanted = self.packed(group, shape)
        return {name: torch.zeros(1, dtype=dtype).expand(size) for name, (dtype, size) in wanted.items()}

    def packed(self, group: str, shape: Shape, wire: Wire | None = None) -> dict[str, tuple[torch.dtype, Shape]]:
        wire = wire or self.split.wire
        wanted = {f"{group}/x": (WIRES[wire], shape)}
        if wire == "int8":
            wanted[f"{group}/scale"] = torch.float32, (*shape[:-1], 1)
        return wanted

    def check_scores(self, scores: Mapping[str, float], agreed: Holding) -> Mapping[str, float]:
        """Return the scores that a client with these images reports, which have only the view personal."""
        try:
            found = read_scores(Payload(scalars=scores), self.classes, agreed).scalars
        except ValueError as problem:
            raise GarbageError(str(problem)) from problem
        strange = [
            name for name in scores if name.endswith("_balanced_accuracy") and name != "personal_balanced_accuracy"
        ]
        if strange:
            raise GarbageError(f"no score is called {one_line(strange[0], 60)!r}")
        return found


def _all_numbers(numbers: Mapping[str, float]) -> bool:
    """Return whether all values are finite and no integer is too large for a float."""
    return all(-LARGEST <= value <= LARGEST for value in numbers.values())


def compare(found: Mapping[str, Tensor], wanted: Mapping[str, tuple[torch.dtype, Shape]], kind: str) -> None:
    """Check the names, data types and shapes of tensors, and that all values are finite; raise GarbageError if not."""
    if found.keys() != wanted.keys():
        names = ", ".join(sorted(found.keys() ^ wanted.keys())[:3])
        raise GarbageError(f"the tensors in {kind!r} are not the expected ones: {one_line(names, 200)}")
    for name, tensor in found.items():
        dtype, shape = wanted[name]
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            text = f"expected {name} to be {dtype} {shape}, found {tensor.dtype} {tuple(tensor.shape)}"
            raise GarbageError(text)
    most = largest(found.values())
    if not most <= LARGEST_VALUE:
        raise GarbageError(f"the tensors in {kind!r} have values that are {beyond(most)}")
