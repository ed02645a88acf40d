"""One model and the data of its clients: everything a process needs to act as any client."""

import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedvit.core.batches import ClientData
from fedvit.core.cases import CASES, Cases, measure_cases, positive_class
from fedvit.core.client import Client, LocalSettings, Memory, Predictor
from fedvit.core.clinical import score_cases
from fedvit.core.clinical_message import to_scalars
from fedvit.core.errors import PublicError, UserError
from fedvit.core.metrics import pooled, score, view_scores
from fedvit.core.payload import Payload
from fedvit.core.plan import Plan, client_round
from fedvit.core.settings import Experiment
from fedvit.core.thresholds import RULES, parse_threshold
from fedvit.core.training import descend, holding
from fedvit.core.tree import Tree
from fedvit.data.dataset import Dataset, metrics_of, wants_auroc
from fedvit.data.partition.records import ClientPartition, Partition
from fedvit.data.partition.split import partition_dataset
from fedvit.data.sources import check_task, load_dataset
from fedvit.engine.activation_cache import (
    Activations,
    accept_activations_,
    first_learned,
    is_random_before,
    same_result,
)
from fedvit.engine.loop import choose, for_round
from fedvit.engine.net import POOLED, Net, local_settings, window_of
from fedvit.engine.private import Private
from fedvit.engine.system import free_ram
from fedvit.methods import plan_of
from fedvit.models.build import input_size
from fedvit.models.width import FULL, Window
from fedvit.split.plan import SplitPlan


def client_data(
    images: Tensor,
    labels: Tensor,
    classes: int,
    part: ClientPartition,
    activations: Callable[[Tensor], Tensor] | None = None,
) -> ClientData:
    """Return a client's data as views into tensors that all clients share."""
    train, val, test, probe = (torch.from_numpy(i) for i in (part.train, part.val, part.test, part.probe))
    return ClientData(images, labels, train, val, test, probe, classes, activations)


def image_tensors(dataset: Dataset) -> tuple[Tensor, Tensor]:
    """Return the dataset's arrays as tensors, without a copy. Nothing writes to them, so a read-only map will do."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        return torch.from_numpy(dataset.images), torch.from_numpy(dataset.labels)


log = logging.getLogger(__name__)


def load_data(experiment: Experiment, dataset: Dataset | None = None) -> tuple[Dataset, Partition]:
    """Return the dataset, loaded unless given, and its partition among the clients."""
    data, seed = experiment.data, experiment.run.seed
    if dataset is None:
        dataset = load_dataset(data, input_size(experiment.model))
    check_task(dataset, data)
    plan = plan_of(experiment)
    choice = plan.choice if isinstance(plan, Plan) else None
    probe, held_out = (0.0, None) if choice is None else (choice.probe, choice.held_out)
    settings, batch = experiment.partition, experiment.train.batch
    found = partition_dataset(dataset, settings, data, batch=batch, seed=seed, probe=probe, held_out=held_out)
    if experiment.run.clinical:
        check_clinical(experiment, found)
    return dataset, found


def check_clinical(experiment: Experiment, partition: Partition) -> None:
    """Refuse clinical scores for a class that is not there, or with a threshold that nothing could choose."""
    rule = experiment.run.threshold
    positive_class(experiment.run.positive, partition.class_names)
    without = [name for name in partition.seen if not len(partition.clients[name].val)]
    if rule in RULES and without:
        raise PublicError(
            f"run.threshold={rule} is chosen on validation images, which {len(without)} of {len(partition.seen)} "
            "clients do not have: set data.val, such as data.val=0.2, or give a number as the threshold"
        )


def has_clinical(experiment: Experiment, round_: int) -> bool:
    """Return whether this round may be the last, after which clinical scores are measured if they are wanted."""
    run = experiment.run
    may_stop = run.until_accuracy is not None or run.patience is not None
    return bool(run.clinical) and (round_ == experiment.train.rounds or may_stop)


class Worker:
    """Acts as any client, by loading a handful of tensors into the one model and reading them back."""

    def __init__(
        self,
        experiment: Experiment,
        net: Net,
        dataset: Dataset,
        partition: Partition,
        device: torch.device,
        processes: int = 1,
        accounts: Path | None = None,
    ):
        self.experiment, self.net, self.partition, self.device = experiment, net, partition, device
        self.images, self.labels = image_tensors(dataset)
        self.classes, self.auroc = dataset.classes, wants_auroc(experiment.data, dataset.classes)
        self.patients, self.positive = dataset.patients, positive_class(experiment.run.positive, dataset.class_names)
        self.activations = self.frozen_activations(processes)
        self.private = None
        if experiment.privacy.on and accounts is not None:
            self.private = Private(experiment, accounts, self.rounds_of)

    def frozen_activations(self, processes: int) -> Activations | None:
        """Return a cache of the frozen layers' activations, or None if it gains nothing or something prevents it."""
        net, run = self.net, self.experiment.run
        if self.experiment.model.name == "python" or isinstance(net.plan, SplitPlan):  # a user's module may be random
            return None
        limit = (free_ram() // 4 if run.cache_mb is None else run.cache_mb * 1_000_000) // processes
        start = first_learned(net.module, net.roles.trainable)
        if start is None:
            return None
        if is_random_before(net.module, start):
            log.info("dropout or noise acts before %s: frozen layers are computed anew for every batch", start)
            return None
        found = Activations(net.module, start, self.images, net.inputs, self.settings(1), limit)
        accept_activations_(net.module, start)
        if not same_result(net.module, start, self.images[:2], net.inputs, device=self.device):
            log.info(
                "%s does not give the same result from %s on: the full pass is used", type(net.module).__name__, start
            )
            return None
        if self.experiment.train.augment != "none":
            log.info("train.augment changes the images: only evaluation starts at %s", start)
        log.info(
            "everything before %s is frozen: its output is computed once per image, at most %.0f MB",
            start,
            found.megabytes,
        )
        return found

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics of every view."""
        return metrics_of(self.experiment.data, self.classes)

    @cached_property
    def tests_make_the_global_one(self) -> bool:
        """Whether the clients' test sets make up the global one; never with AUROC, which is not a sum over parts."""
        parts = [self.partition.clients[name].test for name in self.partition.seen]
        return not self.auroc and np.array_equal(np.sort(np.concatenate(parts)), np.sort(self.partition.global_test))

    @cached_property
    def clients_score_the_server(self) -> bool:
        """Whether every client tests exactly the server's model, each on its own part of the global test set."""
        after = self.experiment.run.evaluate == "after"
        return after and self.tests_make_the_global_one and self.net.clients_test_the_servers(self.partition.seen)

    def client(self, name: str, round_: int, memory: Memory, window: Window = FULL) -> Client:
        """Return this client in this round, with the part of the model in its window."""
        net, settings = self.net.at(window), self.settings(round_)
        activations = self.activations if window.rate == 1 else None
        data = client_data(self.images, self.labels, self.classes, self.part(name), activations)
        return Client(
            name, round_, net.roles, net.initial, net.frozen, data, memory, settings, net.module, net.inputs, net.live,
            net.compiled, window.rate, net.parts,
        )  # fmt: skip

    def settings(self, round_: int) -> LocalSettings:
        return local_settings(self.experiment, round_, self.device)

    def part(self, name: str) -> ClientPartition:
        if name != POOLED:
            return self.partition.clients[name]
        parts = [self.partition.clients[client] for client in self.partition.seen]
        train, val = (np.concatenate([getattr(part, kind) for part in parts]) for kind in ("train", "val"))
        return ClientPartition(train, self.partition.global_test, val)

    def train(self, name: str, down: Payload, memory: Memory) -> tuple[Payload, Memory]:
        """Do a client's part of a round; return its report and its memory afterwards."""
        client, plan = self.client(name, int(down.scalars["round"]), memory, window_of(down)), self.net.federated
        if self.private is None:
            if self.experiment.privacy.on:
                raise UserError("this process has no account to charge for privacy, so nothing was trained")
            return client_round(plan, client, down), client.memory
        client.private = used = self.private.begin(client, plan, down)
        up = client_round(plan, client, down)
        self.private.end(client, down, used)
        numbers = {key: value for key, value in up.scalars.items() if key != "loss"}  # of single images, and not noised
        return replace(up, scalars=numbers), client.memory

    def check_budget(self) -> None:
        """Raise an error if the privacy budget allows no training of the client with the fewest images."""
        if self.private is None:
            return
        plan, seen = self.net.federated, self.partition.seen
        trained = [POOLED] if plan.pooled else [name for name in seen if self.rounds_of(name)]
        name = min(trained, key=lambda name: len(self.part(name).train))
        down = for_round(plan.dispatch(self.net.server(seen), name), 1)
        noise, planned = self.private.noise_of(self.client(name, 1, {}, window_of(down)), plan, down)
        log.info("privacy: noise of %.3g times privacy.clip for %d gradients at client %s, which has the fewest images",
                 noise, sum(planned.values()), name)  # fmt: skip

    def rounds_of(self, name: str) -> int:
        """Return in how many rounds of the run a client trains."""
        plan, train = self.net.federated, self.experiment.train
        clients = list(self.partition.seen)
        return sum(name in choose(plan, clients, self.experiment, number + 1) for number in range(train.rounds))

    def evaluate_here(self, name: str, down: Payload, memory: Memory) -> Payload:
        """Score a client of this machine: its scores, and what `measure` knows of its test images one by one."""
        scores, cases = self.evaluate(name, down, memory)
        return Payload({} if cases is None else {CASES: cases.to_tree()}, scores)

    def evaluate(self, name: str, down: Payload, memory: Memory) -> tuple[dict[str, float], Cases | None]:
        """Score a client's views on its own images; also return what `measure` knows of them one by one.

        This uses a scratch copy of its memory, which is thrown away. A client that never trains has one more view,
        `finetuned`: after one round's local training of all trainable weights. `run.before_after` gives the other
        clients the views `before` and `after` such training.
        """
        client = self.client(name, int(down.scalars["round"]), dict(memory), window_of(down))
        scalars: dict[str, float] = {}
        views = dict(self.net.federated.views(client, down))
        if name in self.partition.unseen:
            views["finetuned"] = descend(client, self.net.federated.merge(client, down), tag="finetune")
        elif self.experiment.run.before_after:
            views["before"] = self.net.federated.merge(client, down)
            views["after"] = descend(client, views["before"], tag="finetune")
        data, inputs, cases = client.data, self.net.inputs, None
        for view, weights in views.items():
            with holding(client, weights) as predict:
                scalars |= view_scores(view, predict, data, inputs, self.device, auroc=self.auroc)
                if view == "personal":
                    clinical, cases = self.measure(client, predict)
                    scalars |= clinical
        return scalars, cases

    def measure(self, client: Client, predict: Predictor) -> tuple[dict[str, float], Cases | None]:
        """Return a client's clinical scores, as they may leave it, and its test images one by one, which may not.

        Both are empty if this round has no clinical scores, or if a probability is not finite.
        """
        run = self.experiment.run
        if not has_clinical(self.experiment, client.round) or client.id in self.partition.unseen:
            return {}, None
        cases = measure_cases(
            predict, client.data, self.patients, self.net.inputs, self.device,
            parse_threshold(run.threshold or ("f1" if client.data.several_labels else "youden")), self.positive,
        )  # fmt: skip
        return ({}, None) if cases is None else (to_scalars(score_cases(cases, run.seed, client.id)), cases)

    def evaluate_server(
        self, shared: Tree, round_: int, scores: Mapping[str, Mapping[str, float]] | None = None
    ) -> dict[str, float]:
        """Score the server's model on the global test set, client by client if their test sets make it up.

        If the clients' `scores` already measure exactly that, they are summed instead of measured again.
        """
        if scores is not None and self.clients_score_the_server and scores.keys() == set(self.partition.seen):
            return pooled(scores)
        client, inputs = self.client(POOLED, round_, {}), self.net.inputs
        with holding(client, shared) as predict:
            if not self.tests_make_the_global_one:
                return score(predict, client.data, client.data.test, inputs, self.device, auroc=self.auroc)
            parts = {name: torch.from_numpy(self.partition.clients[name].test) for name in self.partition.seen}
            return pooled(
                {name: view_scores("personal", predict, replace(client.data, test=part, val=part[:0]), inputs,
                                   self.device, auroc=False) for name, part in parts.items()}
            )  # fmt: skip
