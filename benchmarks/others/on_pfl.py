"""Run Apple's pfl-research: its FederatedAveraging on its SimulatedBackend, a torch.distributed process per worker.

    python -m torch.distributed.run --standalone --nproc-per-node 2 on_pfl.py WORK OUT

Differences: it averages the changes, not the weights, in single precision, so the last bits vary. It scores clients
with the weights from before the round's mean (as many passes, but other weights). The clients of a cohort are assigned
to the processes in turn, larger clients first, so that both have about as much to do.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import bare
import torch
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.common_types import Population
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel


class Turn(Dataset):
    """A client in one round, which gives the batches of all epochs at once, in the order of the work."""

    def __init__(self, work: bare.Work, round_: int, client: str):
        super().__init__(raw_data=(), user_id=client)
        self.work, self.round, self.client = work, round_, client

    def __len__(self) -> int:
        return self.work.examples(self.client)

    def iter(self, batch_size: int | None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return self.work.batches(self.round, self.client)


class Averaging(FederatedAveraging):
    """Averages without the scores that pfl takes before and after training on the first round's training images."""

    def get_next_central_contexts(self, *args: Any, **kwargs: Any) -> Any:
        contexts, model, metrics = super().get_next_central_contexts(*args, **kwargs)
        if contexts is not None:
            contexts = tuple(replace(c, do_evaluation=c.population != Population.TRAIN) for c in contexts)
        return contexts, model, metrics


class Marks(TrainingProcessCallback):
    """Records when each round ended."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def after_central_iteration(self, *args: Any, **kwargs: Any) -> tuple[bool, Metrics]:
        self.marks.append(bare.now())
        return False, Metrics()


def with_loss_and_metrics_(model: torch.nn.Module) -> None:
    """Add what pfl requires of a module."""

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        model.train()
        return F.cross_entropy(model(x), y)

    @torch.no_grad()
    def metrics(x: torch.Tensor, y: torch.Tensor) -> dict[str, Weighted]:
        model.eval()
        return {"accuracy": Weighted(int((model(x).argmax(1) == y).sum()), len(y))}

    model.loss, model.metrics = loss, metrics


def larger_first(clients: Iterable[str], work: bare.Work) -> list[str]:
    return sorted(clients, key=lambda client: -work.examples(client))


def main(folder: str, out: str) -> None:
    work = bare.load(folder)
    torch.set_num_threads(work.threads)
    module = bare.build(work)
    with_loss_and_metrics_(module)
    model = PyTorchModel(
        module,
        local_optimizer_create=lambda parameters, lr: bare.make_optimizer(work, parameters),
        central_optimizer=torch.optim.SGD(bare.learned(module).values(), lr=1.0),
    )
    trained = ((round_, client) for round_ in work.rounds for client in larger_first(work.cohort(round_), work))
    tested = (client for _ in work.rounds for client in larger_first(work.clients, work))
    backend = SimulatedBackend(
        FederatedDataset(lambda turn: Turn(work, *turn), lambda: next(trained)),
        FederatedDataset(lambda client: Dataset(work.test(client), user_id=client), lambda: next(tested)),
        postprocessors=[WeightByDatapoints()],
    )
    parameters = NNAlgorithmParams(
        central_num_iterations=len(work.cohorts),
        evaluation_frequency=1,
        train_cohort_size=len(work.cohorts[0]),
        val_cohort_size=len(work.clients) if work.evaluates else None,
    )
    local = NNTrainHyperParams(local_num_epochs=1, local_learning_rate=work.options["lr"], local_batch_size=work.batch)
    marks = Marks()
    Averaging().run(parameters, backend, model, local, callbacks=[marks])
    if os.environ.get("RANK", "0") == "0":
        bare.report(out, marks.marks, bare.weights(module), "pfl", "torch")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
