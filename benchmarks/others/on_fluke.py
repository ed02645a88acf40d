"""Run fluke, with its CentralizedFL and FedAvg's server and clients.

    python on_fluke.py WORK OUT

Differences: it simulates all clients in one process (its other mode needs a GPU per process), so that process gets the
threads of all. It averages in single precision, so the last bits vary. It sends whole models, including frozen parts.
It waits for every batch's loss. After the last round, it evaluates and distributes the model once more.
"""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import bare
import torch
from fluke import DDict, FlukeENV
from fluke.algorithms import CentralizedFL
from fluke.client import Client
from fluke.config import OptimizerConfigurator
from fluke.data import FastDataLoader
from fluke.evaluation import ClassificationEval
from fluke.server import Server
from fluke.utils import FederationObserver
from torchmetrics import Accuracy


class InOrder(FastDataLoader):
    """A client's images, in the order of the work in every epoch."""

    def __init__(self, work: bare.Work, client: str):
        chosen = torch.from_numpy(work.data[f"train {client}"])
        super().__init__(*work.take(chosen), num_labels=work.classes, batch_size=work.batch)
        self.work = work
        rounds = [round_ for round_ in work.rounds if client in work.cohort(round_)]
        self.epochs = (epoch for round_ in rounds for epoch in work.order(round_, client))

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return (self.work.take(chosen) for chosen in next(self.epochs).split(self.work.batch))


class SameCohorts(Server):
    """A server that samples the clients of the work, one cohort after another."""

    def __init__(self, work: bare.Work, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        numbers = {client: number for number, client in enumerate(work.clients)}
        self.cohorts = ([self.clients[numbers[client]] for client in cohort] for cohort in work.cohorts)

    def get_eligible_clients(self, eligible_perc: float) -> Sequence[Client]:
        return next(self.cohorts)


class Marks(FederationObserver):
    """Records when each round ended."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def end_round(self, round: int) -> None:
        self.marks.append(bare.now())


def main(folder: str, out: str) -> None:
    work = bare.load(folder)
    torch.set_num_threads(work.threads_alone)
    environment = FlukeENV()
    environment.set_device("cpu")
    environment.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=work.evaluates)
    accuracy = Accuracy(task="multiclass", num_classes=work.classes)
    environment.set_evaluator(ClassificationEval(1, work.classes, accuracy=accuracy))
    tests = [
        FastDataLoader(*work.test(client), num_labels=work.classes, batch_size=0, skip_singleton=False)
        for client in work.clients
    ]
    optimizer = OptimizerConfigurator(DDict(name=bare.OPTIMIZERS[work.optimizer], fused=True, **work.options))
    epochs = len(work.order(1, work.cohort(1)[0]))
    clients = [
        Client(
            number, InOrder(work, client), tests[number], optimizer, torch.nn.CrossEntropyLoss(), local_epochs=epochs,
            persistency=False,
        )
        for number, client in enumerate(work.clients)
    ]  # fmt: skip
    model = bare.build(work)
    server = SameCohorts(work, model, tests, clients, weighted=True)
    federation, marks = CentralizedFL(len(clients), None, {}, clients=clients, server=server), Marks()
    federation.set_callbacks([marks])
    federation.run(len(work.cohorts), len(work.cohorts[0]) / len(clients))
    bare.report(out, marks.marks, bare.weights(model), "fluke-fl", "torch")


if __name__ == "__main__":
    main(*sys.argv[1:])
