"""The transport that runs all clients in this process, one after another, on one model."""

from collections.abc import Iterator, Mapping, Sequence

import torch

from fedvit.core import randomness
from fedvit.core.client import Memory
from fedvit.core.payload import Failure, Payload
from fedvit.core.settings import Experiment
from fedvit.engine.client_store import ClientStore
from fedvit.engine.transport import Task
from fedvit.engine.worker import Worker

DROPPED = "dropped out (train.dropout)"  # the reason of a failure that the settings ask for


class InProcess:
    """The transport of `--engine local`. `train.dropout` makes sampled clients fail, as real clients do."""

    def __init__(self, worker: Worker, store: ClientStore):
        self.worker, self.store = worker, store
        self.pending: dict[str, Memory] = {}

    def clients(self) -> Sequence[str]:
        return self.worker.partition.seen

    def exchange(self, task: Task, messages: Mapping[str, Payload]) -> Iterator[tuple[str, Payload | Failure]]:
        for name, down in messages.items():
            memory = self.store.get(name)
            if task == "evaluate":
                yield name, self.worker.evaluate_here(name, down, memory)
            elif self.fails(name, int(down.scalars["round"])):
                yield name, Failure(DROPPED)
            else:
                up, self.pending[name] = self.worker.train(name, down, memory)
                yield name, up

    def commit(self, round_: int) -> None:
        self.store.put(round_, self.pending)
        self.pending = {}

    def fails(self, name: str, round_: int) -> bool:
        return drops_out(self.worker.experiment, name, round_)


def drops_out(experiment: Experiment, client: str, round_: int) -> bool:
    """Return whether `train.dropout` makes a sampled client fail in this round."""
    generator = randomness.generator(experiment.run.seed, round_, client, "failure")
    return torch.rand((), generator=generator).item() < experiment.train.dropout
