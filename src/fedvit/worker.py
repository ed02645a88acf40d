"""One model and the data of its clients: all that a process needs to play any client."""

import logging
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import nn

from fedvit import tree
from fedvit.client import Client, LocalSettings, Memory, Predictor
from fedvit.data import pipeline
from fedvit.data.datasets import Dataset, wants_auroc
from fedvit.data.partition import ClientSplit, Split
from fedvit.errors import UserError
from fedvit.evaluation import AUROC, METRICS, pooled, score, view_scores
from fedvit.frozen import (
    BESIDE_HEAD,
    Activations,
    accept_activations_,
    first_learned,
    is_random_before,
    lies_under,
    same_result,
)
from fedvit.methods import METHODS, plan_of
from fedvit.models.classifier import InputSettings, build, input_settings, state
from fedvit.models.cuts import TAIL
from fedvit.models.last_block import skip_unread_tokens_
from fedvit.models.plugins import Plugin
from fedvit.models.width import FULL, Window, axes, cut, narrow
from fedvit.payload import Payload
from fedvit.plan import Plan, client_round, own_model
from fedvit.ram import free_ram
from fedvit.roles import Roles, assign
from fedvit.server import Server
from fedvit.settings import Experiment, TrainSettings
from fedvit.split import SplitPlan
from fedvit.training import descend, holding, load_
from fedvit.tree import Tree
from fedvit.tunes import Tune, make_tune, trainable_names

log = logging.getLogger(__name__)
POOLED = "/pooled"  # the one client of a plan that pools all data; no folder can have this name


@dataclass(frozen=True)
class Net:
    """The model of one process for its whole life, with the role of every weight."""

    plan: Plan
    tune: Tune
    module: nn.Module
    roles: Roles
    inputs: InputSettings
    initial: Tree  # trainable weights at the start
    frozen: Tree
    live: Tree  # the module's own tensors
    classes: int
    compiled: Predictor | None = None  # the module for training, as torch.compile makes it
    skips: bool = False  # whether the last block skips tokens that nobody reads
    window: Window = FULL
    narrower: dict[float, "Net"] = field(default_factory=dict)  # by rate, the newest window of each

    def at(self, window: Window) -> "Net":
        """The part of this net in a window: one module per rate, with the weights of the newest window asked for."""
        if window.rate == 1:
            return self
        known = self.narrower.get(window.rate)
        if known is None or known.window != window:
            module = known.module if known else narrow(self.module, window.rate)
            codes = axes(self.module)
            initial, frozen = (cut(weights, codes, window) for weights in (self.initial, self.frozen))
            live = state(module)
            load_(live, {**initial, **frozen})
            known = replace(
                self,
                module=module,
                initial=initial,
                frozen=frozen,
                live=live,
                window=window,
                narrower={},
                compiled=None,
            )
            self.narrower[window.rate] = known
        return known

    @property
    def shared(self) -> Tree:
        return tree.pick(self.initial, self.roles.shared)

    def server(self, clients: Sequence[str]) -> Server:
        """The server before round 1."""
        self.plan.admit(clients)
        return Server(0, self.shared, self.plan.start(self.module, self.shared), tuple(clients))

    @property
    def memory_nbytes(self) -> int:
        """What a client keeps between rounds."""
        trees = [tree.pick(self.initial, self.roles.personal), *self.plan.remembers(self.module, self.initial).values()]
        return sum(map(tree.nbytes, trees))

    @property
    def one_global_model(self) -> bool:
        """Whether the server's weights alone make a model."""
        return not self.roles.personal

    def clients_test_the_servers(self, clients: Sequence[str]) -> bool:
        """Whether clients test the server's weights as they are, whatever they get beside them."""
        server = self.server(clients)
        plain = self.plan.dispatch(server, clients[0]).trees.get("shared") is server.shared
        return plain and self.plan.views is own_model and self.one_global_model

    def bare_client(self, memory: Memory | None = None) -> Client:
        """A client without images: enough to ask a plan what it would send, or for its own weights."""
        nothing = torch.zeros(0, dtype=torch.int64)
        no_images = torch.zeros(0, 1, 1, 3, dtype=torch.uint8)
        data = pipeline.ClientData(no_images, nothing, nothing, nothing, nothing, nothing, self.classes)
        settings = LocalSettings(lr=1.0)
        memory = memory or {}
        return Client(
            "0", 1, self.roles, self.initial, self.frozen, data, memory, settings, self.module, self.inputs, self.live,
            self.compiled, self.window.rate,
        )  # fmt: skip

    def params(self) -> dict[str, int]:
        """Numbers by role; buffers are not parameters."""
        sizes = {name: parameter.numel() for name, parameter in self.module.named_parameters()}

        def count(names: tuple[str, ...]) -> int:
            return sum(sizes.get(name, 0) for name in names)

        r = self.roles
        return {
            "total": sum(sizes.values()),
            "trainable": count(r.trainable),
            "shared": count(r.shared),
            "personal": count(r.personal),
            "frozen": count(r.frozen),
        }


def make_net(experiment: Experiment, classes: int, device: torch.device) -> Net:
    """Build the model and meet method and tune in it."""
    plan, tune = plan_of(experiment), make_tune(experiment.tune)
    model = experiment.model
    if model.weights is not None:
        model = model.model_copy(update={"weights": experiment.data.find(model.weights)})
    own = experiment.own.module
    module = build(model, classes, joined(plan.build, tune.build), experiment.run.seed, own)
    roles = assign(module, plan.roles, trainable_names(module, tune, plan.build))
    if not roles.trainable:
        raise UserError(
            f"{experiment.label} trains nothing: the method freezes all that the tune would train; "
            "choose another tune, such as full or bias"
        )
    plan.check(module, roles)
    if plan.split is not None:
        check_split_settings(experiment, plan.split)
    for simpler in (METHODS["fedavg"](), METHODS["local"](), METHODS["fedper"]()):
        if differ_in_roles_only(plan, simpler):
            same = assign(module, simpler.roles, trainable_names(module, tune, simpler.build)) == roles
            if same and plan.name != simpler.name:
                log.info("%s equals %s+%s", experiment.label, simpler.name, tune.name)
    if plan.split is not None and plan.split.init == "random" and not model.from_scratch:
        untrained = model.model_copy(update={"weights": None, "pretrained": False})
        fresh = state(build(untrained, classes, joined(plan.build, tune.build), experiment.run.seed, own))
        names = [name for name in plan.split.cut.names(module, "head", "tail") if name in roles.trainable]
        load_(state(module), tree.pick(fresh, names))
    tensors = {name: tensor.detach().clone() for name, tensor in state(module).items()}
    module = module.to(device)
    skips = may_skip_tokens(plan, roles, experiment)
    if skips:
        skip_unread_tokens_(module)
    return Net(
        plan=plan,
        tune=tune,
        module=module,
        roles=roles,
        inputs=input_settings(module, model),
        initial=tree.pick(tensors, roles.trainable),
        frozen=tree.pick(tensors, roles.frozen),
        live=state(module),
        classes=classes,
        compiled=compiled(module) if experiment.train.compile else None,
        skips=skips,
    )


def compiled(module: nn.Module) -> Predictor:
    """The module as torch.compile makes it at its first batch; on a CPU that takes a C++ compiler."""
    if next(module.parameters()).device.type == "cpu" and not (os.environ.get("CXX") or shutil.which("g++")):
        raise UserError(
            "train.compile needs a C++ compiler, and there is no g++ here: install it, or leave compile out"
        )
    made: Predictor = torch.compile(module)
    return made


def may_skip_tokens(plan: Plan, roles: Roles, experiment: Experiment) -> bool:
    """Whether all that anybody sees of the last block goes through the classifier.

    Not where activations cross, and not for a stranger's plan or module, which may look at tokens. Nor where only what
    comes behind the blocks learns: an image passes them once, and sums of few rows round differently in every batch.
    """
    behind = all(lies_under(name, (*TAIL, *BESIDE_HEAD)) for name in roles.trainable)
    ours = experiment.own.plan is None and experiment.own.module is None
    return plan.split is None and ours and not behind


def check_split_settings(experiment: Experiment, split: SplitPlan) -> None:
    """Settings that mean nothing where activations cross instead of weights are refused, not ignored."""
    run = experiment.run
    if run.before_after or run.evaluate == "in_round" or experiment.train.weighting == "samples":
        raise UserError(
            f"{experiment.label} is split learning, which knows no run.before_after, no run.evaluate=in_round and no "
            "train.weighting=samples: leave them out"
        )
    if experiment.train.compile:
        raise UserError(f"{experiment.label} is split learning, whose parts are not compiled: leave train.compile out")
    if split.black_box and split.init == "random" and not experiment.model.from_scratch:
        raise UserError("black_box=true leaves the head as it is, and init=random would leave it random: choose one")


def differ_in_roles_only(a: Plan, b: Plan) -> bool:
    """Whether two plans would be the same if their weights had the same roles."""
    return replace(a, name="", roles=()) == replace(b, name="", roles=())


def joined(method: tuple[Plugin, ...], tune: tuple[Plugin, ...]) -> tuple[Plugin, ...]:
    """The plugins of both; a kind that both name exists once, as the method wants it."""
    kinds = {plugin.kind for plugin in method}
    return (*method, *(plugin for plugin in tune if plugin.kind not in kinds))


class Worker:
    """Plays any client: a handful of tensors goes into the one model and comes out again."""

    def __init__(
        self,
        experiment: Experiment,
        net: Net,
        dataset: Dataset,
        split: Split,
        device: torch.device,
        processes: int = 1,
    ):
        self.experiment, self.net, self.split, self.device = experiment, net, split, device
        self.images, self.labels = pipeline.tensors(dataset)
        self.classes, self.auroc = dataset.classes, wants_auroc(experiment.data, dataset.classes)
        self.activations = self.frozen_activations(processes)

    def frozen_activations(self, processes: int) -> Activations | None:
        """The cache of what frozen layers make of the images, if there is anything to gain and nothing in its way."""
        net, run = self.net, self.experiment.run
        if self.experiment.model.name == "python" or net.plan.split is not None:  # who knows what a module draws
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
            log.info("%s does not give the same from %s on: it is computed whole", type(net.module).__name__, start)
            return None
        if self.experiment.train.augment != "none":
            log.info("train.augment changes the images: only evaluation starts at %s", start)
        log.info(
            "all before %s is frozen: its output is computed once an image, at most %.0f MB", start, found.megabytes
        )
        return found

    @property
    def metrics(self) -> tuple[str, ...]:
        """What is measured of every view."""
        return (*METRICS, AUROC) if self.auroc else METRICS

    @cached_property
    def tests_make_the_global_one(self) -> bool:
        """Whether the global test set is the clients' together; an area under a curve is no sum of parts even then."""
        parts = [self.split.clients[name].test for name in self.split.seen]
        return not self.auroc and np.array_equal(np.sort(np.concatenate(parts)), np.sort(self.split.global_test))

    @cached_property
    def clients_score_the_server(self) -> bool:
        """Whether every client tests the server's very model, each on its own part of the global test set."""
        after = self.experiment.run.evaluate == "after"
        return after and self.tests_make_the_global_one and self.net.clients_test_the_servers(self.split.seen)

    def client(self, name: str, round_: int, memory: Memory, window: Window = FULL) -> Client:
        """This client in this round, with the part of the model in its window."""
        net, settings = self.net.at(window), self.settings(round_)
        activations = self.activations if window.rate == 1 else None
        data = pipeline.client_data(self.images, self.labels, self.classes, self.part(name), activations)
        return Client(
            name, round_, net.roles, net.initial, net.frozen, data, memory, settings, net.module, net.inputs, net.live,
            net.compiled, window.rate,
        )  # fmt: skip

    def settings(self, round_: int) -> LocalSettings:
        return local_settings(self.experiment, round_, self.device)

    def part(self, name: str) -> ClientSplit:
        if name != POOLED:
            return self.split.clients[name]
        parts = [self.split.clients[client] for client in self.split.seen]
        train, val = (np.concatenate([getattr(part, kind) for part in parts]) for kind in ("train", "val"))
        return ClientSplit(train, self.split.global_test, val)

    def train(self, name: str, down: Payload, memory: Memory) -> tuple[Payload, Memory]:
        """A client's part of a round: what it reports, and its memory afterwards."""
        client = self.client(name, int(down.scalars["round"]), memory, window_of(down))
        up = client_round(self.net.plan, client, down)
        return up, client.memory

    def evaluate(self, name: str, down: Payload, memory: Memory) -> Payload:
        """A client's views on its own images. It works on a scratch memory, which is thrown away.

        A client that never trains has one more view, finetuned: after a round's local training of all that is
        trainable. `run.before_after` gives every client that view and the one before it.
        """
        client = self.client(name, int(down.scalars["round"]), dict(memory), window_of(down))
        scalars: dict[str, float] = {}
        views = dict(self.net.plan.views(client, down))
        if name in self.split.unseen:
            views["finetuned"] = descend(client, self.net.plan.merge(client, down), tag="finetune")
        elif self.experiment.run.before_after:
            views["before"] = self.net.plan.merge(client, down)
            views["after"] = descend(client, views["before"], tag="finetune")
        data, inputs = client.data, self.net.inputs
        for view, weights in views.items():
            with holding(client, weights) as predict:
                scalars |= view_scores(view, predict, data, inputs, self.device, auroc=self.auroc)
        return Payload(scalars=scalars)

    def evaluate_server(
        self, shared: Tree, round_: int, scores: Mapping[str, Mapping[str, float]] | None = None
    ) -> dict[str, float]:
        """The server's model on the global test set, client by client where that set is made of theirs.

        Where the clients' `scores` are just that, they are summed instead of measured again.
        """
        if scores is not None and self.clients_score_the_server and scores.keys() == set(self.split.seen):
            return pooled(scores)
        client, inputs = self.client(POOLED, round_, {}), self.net.inputs
        with holding(client, shared) as predict:
            if not self.tests_make_the_global_one:
                return score(predict, client.data, client.data.test, inputs, self.device, auroc=self.auroc)
            parts = {name: torch.from_numpy(self.split.clients[name].test) for name in self.split.seen}
            return pooled(
                {name: view_scores("personal", predict, replace(client.data, test=part, val=part[:0]), inputs,
                                   self.device, auroc=False) for name, part in parts.items()}
            )  # fmt: skip


def local_settings(experiment: Experiment, round_: int, device: torch.device) -> LocalSettings:
    """How clients train in this round."""
    train, run = experiment.train, experiment.run
    assert train.lr is not None
    assert train.optimizer is not None
    return LocalSettings(
        lr=train.lr * rate_factor(train, round_),
        optimizer=train.optimizer,
        momentum=train.momentum,
        weight_decay=train.weight_decay,
        epochs=train.epochs,
        batch=train.batch,
        augment=train.augment,
        precision=run.precision,
        device=device,
        seed=run.seed,
    )


def window_of(down: Payload) -> Window:
    """The window that a message's weights lie in; the server says it beside them."""
    return Window(down.scalars.get("rate", 1.0), int(down.scalars.get("shift", 0)))


def rate_factor(train: TrainSettings, round_: int) -> float:
    """The schedule over rounds, 1 at the first."""
    match train.schedule:
        case "constant":
            return 1.0
        case "cosine":
            return 0.5 * (1 + math.cos(math.pi * (round_ - 1) / train.rounds))
        case "step":  # at half and three quarters of the rounds, as FedBABU's authors do
            decay = 0.1 if train.decay is None else train.decay
            return float(decay ** sum(round_ > train.rounds * share for share in (0.5, 0.75)))
        case "exp":
            return float((0.99 if train.decay is None else train.decay) ** (round_ - 1))
