"""Differential privacy in a run: which runs can have it, each client's noise, and its account."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor, nn

from fedvit.core.client import Client
from fedvit.core.errors import UserError
from fedvit.core.payload import Payload, to_bytes
from fedvit.core.plan import Plan
from fedvit.core.settings import Experiment
from fedvit.data.partition.records import Partition
from fedvit.engine.net import Net
from fedvit.privacy.account import Account
from fedvit.privacy.accounting import epsilon_of, noise_for
from fedvit.privacy.gradients import PrivateGradients, share_of, steps_in
from fedvit.privacy.secret import keep_secret, message_key

log = logging.getLogger(__name__)
FOLDER = "privacy"  # in the folder of a run: the secret and the accounts
UNPROTECTED = ("the scores of tested models", "the numbers of images")  # of every method


def private_folder(experiment: Experiment, net: Net, partition: Partition, folder: Path) -> Path | None:
    """Return where a run keeps its secret and its accounts, None without privacy; refuse what cannot be private."""
    if not experiment.privacy.on:
        return None
    check_private(experiment, net)
    sizes = {name: len(partition.clients[name].train) for name in partition.seen}
    few = [name for name, images in sizes.items() if experiment.privacy.delta >= 1 / images]
    if few:
        log.warning(
            "privacy.delta=%g is at least one in the number of images of %s, where it would allow to reveal an image "
            "outright: choose a smaller delta",
            experiment.privacy.delta, ", ".join(few[:5]) + (" and others" if len(few) > 5 else ""),
        )  # fmt: skip
    return folder / FOLDER


def check_private(experiment: Experiment, net: Net) -> None:
    """Refuse, before anything is trained, what differential privacy of gradients cannot protect."""
    plan, label = net.plan, experiment.label
    if not isinstance(plan, Plan):
        raise UserError(
            f"{label} is split learning: activations and their gradients leave in every step, and privacy.unit=image "
            "protects the gradients of weights only; leave [privacy] out, or choose a method that sends weights"
        )
    if plan.not_private is not None:
        raise UserError(f"{label} cannot train with differential privacy: it {plan.not_private}")
    if any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in net.module.modules()):
        raise UserError(
            f"{experiment.model.name} has batch normalization, which mixes the images of a batch, so that no image has "
            "a gradient of its own: choose a model without it, such as a ViT or resnet50_gn"
        )
    if experiment.train.compile:
        raise UserError("train.compile does not work with differential privacy: leave it out")


def unprotected(experiment: Experiment, plan: Plan) -> list[str]:
    """Name what a run uses or sends of the images besides their gradients."""
    found = [*UNPROTECTED, *plan.unprotected]
    if experiment.train.loss in ("weighted", "balanced"):
        found.append(f"the frequencies of a client's classes, which train.loss={experiment.train.loss} uses")
    if experiment.data.val:
        found.append("the scores on validation images, and what is chosen by them")
    if experiment.run.clinical:
        found.append("the clinical scores")
    return found


def spent(experiment: Experiment, plan: Plan, folder: Path, clients: Iterable[str]) -> dict[str, Any]:
    """Return what summary.json says about privacy, from the accounts."""
    s = experiment.privacy
    each = {name: epsilon_of(account_of(folder, name).history(), s.delta, s.accountant) for name in clients}
    noise = [steps.noise for name in each for steps in account_of(folder, name).history()]
    return {
        "unit": s.unit,
        "accountant": s.accountant,
        "delta": s.delta,
        "clip": s.clip,
        "noise": {"least": min(noise, default=None), "most": max(noise, default=None)},
        "epsilon": max(each.values(), default=0.0),
        "epsilon_by_client": each,
        "unprotected": unprotected(experiment, plan),
    }


class Private:
    """What a process needs to train any client with privacy; `folder` is where the secret and the accounts are."""

    def __init__(self, experiment: Experiment, folder: Path, rounds_of: Callable[[str], int]):
        self.settings, self.folder, self.rounds_of = experiment.privacy, folder, rounds_of
        self.known: dict[str, tuple[float, dict[float, int]]] = {}

    @cached_property
    def secret(self) -> bytes:
        return keep_secret(self.folder / "secret")

    def begin(self, client: Client, plan: Plan, down: Payload) -> PrivateGradients:
        """Return what makes the client's gradients in this round private."""
        noise, _ = self.noise_of(client, plan, down)
        return PrivateGradients(self.settings.clip, noise, message_key(self.secret, client.round, client.id, down))

    def end(self, client: Client, down: Payload, used: PrivateGradients) -> None:
        """Charge the client's account, before its answer leaves."""
        noise, most = self.known[client.id]
        limit = None if self.settings.epsilon is None else most
        digest = sha256(to_bytes(down)).hexdigest()
        account_of(self.folder, client.id).charge(client.round, digest, noise, Counter(used.counted), limit)

    def noise_of(self, client: Client, plan: Plan, down: Payload) -> tuple[float, dict[float, int]]:
        """Return the client's noise, and how many gradients it is for in the whole run; both stay as they are."""
        if client.id not in self.known:
            self.known[client.id] = self._chosen_noise(client, plan, down)
        return self.known[client.id]

    def _chosen_noise(self, client: Client, plan: Plan, down: Payload) -> tuple[float, dict[float, int]]:
        once, rounds = gradients_in_a_round(client, plan, down), self.rounds_of(client.id)
        planned = {share: rounds * count for share, count in once.items()}
        s = self.settings
        if s.noise is not None:
            return s.noise, planned
        assert s.epsilon is not None
        return noise_for(s.epsilon, s.delta, tuple(planned.items()), s.accountant), planned


def account_of(folder: Path, client: str) -> Account:
    return Account(folder / f"{quote(client, safe='')}.jsonl")


def gradients_in_a_round(client: Client, plan: Plan, down: Payload) -> dict[float, int]:
    """Count the gradients that a client takes in a round, by the share of its images in a batch, without taking any."""
    counting = Counting()
    copy = replace(client, private=counting, memory=dict(client.memory), scalars={}, scratch={})
    plan.local(copy, plan.merge(copy, down))
    return counting.found()


class Counting(PrivateGradients):
    """Offers two empty batches instead of every pass, and counts how many gradients are taken of them."""

    def __init__(self) -> None:
        super().__init__(clip=1.0, noise=0.0, key=None)
        self.total: Counter[float] = Counter()

    def orders(self, images: int, size: int, epochs: int) -> Iterator[Tensor]:
        before = len(self.counted)
        self.share = share_of(images, size)
        for _ in range(2):
            yield torch.empty(0, dtype=torch.int64)
        each = (len(self.counted) - before) / 2
        self.total[self.share] += math.ceil(each * epochs * steps_in(images, size))

    def found(self) -> dict[float, int]:
        return dict(self.total)
