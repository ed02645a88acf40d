"""The updates of a round at the server: measured, shortened if the settings say so, and compared with each other."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fedvit.core.payload import Failure, Payload, flatten, unflatten
from fedvit.core.plan import Plan
from fedvit.core.robust import Spool
from fedvit.core.tree import Tree
from fedvit.core.updates import HARDLY, clip_update, flat, length, update_in
from fedvit.engine.ledger import Ledger

AUTO = 2.0  # train.clip_update=auto: this many times the median length of past updates
REMEMBERED = 256  # past lengths
_CANCELLED = 1e-3  # the sum of the others' directions is shorter, so it points nowhere

Answers = Iterator[tuple[str, Payload | Failure]]


class Updates:
    """What one round's updates are like. `past` has the lengths of the updates of earlier rounds."""

    def __init__(self, plan: Plan, setting: float | Literal["off", "auto"], past: Sequence[float]):
        self.changes, self.past, self.auto = plan.changes, past, setting == "auto"
        self.bound = setting if isinstance(setting, int | float) else None
        if self.auto and past:
            self.bound = AUTO * statistics.median(past)
        self.norms: dict[str, float] = {}  # before anything was shortened
        self.shortened: list[str] = []
        self.spool, self.kept = Spool(), dict[str, Tensor]()
        self.sum: Tensor | None = None  # of the directions
        self.comparable = True  # not where clients hold different parts of the model

    def bounded(self, answers: Answers, messages: Mapping[str, Payload], ledger: Ledger) -> Answers:
        """Yield the answers, none of them with an update beyond the bound.

        The first bound of `auto` is known when all clients of the round have answered: it is that of their own updates.
        """
        if self.auto and self.bound is None:
            answers = iter(self._held_back(answers, messages))
        for name, answer in answers:
            if isinstance(answer, Payload):
                with ledger.phase("updates"):
                    answer = self.take(name, answer, messages[name])
            yield name, answer

    def _held_back(self, answers: Answers, messages: Mapping[str, Payload]) -> list[tuple[str, Payload | Failure]]:
        held: list[tuple[str, Payload | Failure]] = []
        spool, norms = Spool(), []
        for name, answer in answers:
            if isinstance(answer, Payload):
                norms.append(length(flat(update_in(answer, messages[name], self.changes))))
                empty = {group: Tree() for group, members in answer.trees.items() if not members}
                answer = Payload({**unflatten(spool.keep(flatten(answer.trees))), **empty}, answer.scalars)
            held.append((name, answer))
        if norms:
            self.bound = AUTO * statistics.median(norms)
        return held

    def take(self, name: str, up: Payload, down: Payload) -> Payload:
        """Measure the update in a client's report, and return the report with an update within the bound."""
        update = update_in(up, down, self.changes)
        if not update:
            return up
        vector = flat(update)
        norm = self.norms[name] = length(vector)
        self._add_direction(name, vector, norm)
        if self.bound is None or norm <= self.bound:
            return up
        self.shortened.append(name)
        return clip_update(up, down, self.bound, self.changes, update)

    def _add_direction(self, name: str, vector: Tensor, norm: float) -> None:
        """Add the update, scaled to length 1, to the sum of the round; its length must not decide where that points."""
        if not HARDLY < norm < math.inf:
            return
        if self.sum is None:
            self.sum = torch.zeros_like(vector)
        if vector.shape != self.sum.shape:
            self.comparable = False
            self.kept.clear()
        if self.comparable:
            self.sum.add_(vector, alpha=1 / norm)
            self.kept[name] = self.spool.keep({"vector": vector})["vector"]

    def cosines(self) -> dict[str, float]:
        """Return each update's cosine with the mean direction of the other clients' updates."""
        if self.sum is None:
            return {}
        along = {name: float(torch.dot(vector, self.sum)) / self.norms[name] for name, vector in self.kept.items()}
        square = sum(along.values())  # of the sum, because it consists of these directions
        found = {}
        for name, own in along.items():
            others = square - 2 * own + 1
            if len(along) > 1 and others > _CANCELLED**2:
                found[name] = max(-1.0, min(1.0, (own - 1) / math.sqrt(others)))
        return found

    def row(self) -> dict[str, Any]:
        """Return the fields of rounds.jsonl."""
        if not self.norms:
            return {}
        bounds = {} if self.bound is None else {"update_bound": self.bound, "clipped": self.shortened}
        return {"update_norms": self.norms, "update_cosines": self.cosines(), **bounds}

    def lengths(self) -> tuple[float, ...]:
        """Return what the next round needs to know of the past."""
        return (*self.past, *self.norms.values())[-REMEMBERED:] if self.auto else ()
