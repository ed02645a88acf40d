"""The single model of a process, built once, with the role of every weight."""

import logging
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from fedvit.core import tree
from fedvit.core.batches import ClientData, InputSettings
from fedvit.core.client import Client, LocalSettings, Memory, Part, Predictor
from fedvit.core.errors import UserError
from fedvit.core.finetune import not_fine_tuned
from fedvit.core.payload import Payload
from fedvit.core.plan import Plan, Plugin, own_model
from fedvit.core.roles import Roles, assign
from fedvit.core.server import Server
from fedvit.core.settings import FOCAL_GAMMA, Experiment, TrainSettings
from fedvit.core.training import load_
from fedvit.core.tree import Tree
from fedvit.engine.activation_cache import (
    BESIDE_CLASSIFIER,
    lies_under,
)
from fedvit.methods import METHODS, Method, plan_of
from fedvit.methods.tunes import Tune, make_tune, trainable_names
from fedvit.models.build import build, input_settings
from fedvit.models.cuts import TAIL
from fedvit.models.groups import group, head, state
from fedvit.models.token_skipping import skip_unread_tokens_
from fedvit.models.width import FULL, Window, axes, cut, narrow
from fedvit.split.plan import SplitPlan

log = logging.getLogger(__name__)
POOLED = "/pooled"  # the only client of a plan that pools all data; no folder can have this name


@dataclass(frozen=True)
class Net:
    """The model that a process uses throughout its life, with the role of every weight."""

    plan: Method
    tune: Tune
    module: nn.Module
    roles: Roles
    inputs: InputSettings
    initial: Tree  # trainable weights before training
    frozen: Tree
    live: Tree  # the module's own tensors
    classes: int
    compiled: Predictor | None = None  # the module compiled for training by torch.compile
    skips: bool = False  # whether the last block skips tokens that are never read
    parts: Mapping[str, Part] = field(default_factory=dict)  # of weights that may have a rate of their own
    window: Window = FULL
    narrower: dict[float, "Net"] = field(default_factory=dict)  # by rate; only the newest window of each

    def at(self, window: Window) -> "Net":
        """Return the part of this net in a window: one module per rate, with the weights of the last window used."""
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
        """Return the server before round 1."""
        if isinstance(self.plan, SplitPlan):
            return Server(0, self.shared, {}, tuple(clients))
        server = Server(0, self.shared, self.plan.start(self.module, self.shared), tuple(clients))
        for first in clients[:1]:
            self.plan.dispatch(server, first)  # raises an error if the clients do not suit the plan
        return server

    @property
    def federated(self) -> Plan:
        """The plan of a method that exchanges weights."""
        assert isinstance(self.plan, Plan)
        return self.plan

    @property
    def not_fine_tuned(self) -> "Net":
        """The same without training before a test, which costs what other training costs."""
        return replace(self, plan=not_fine_tuned(self.plan)) if isinstance(self.plan, Plan) else self

    @property
    def split(self) -> SplitPlan:
        """The plan of a method that exchanges activations."""
        assert isinstance(self.plan, SplitPlan)
        return self.plan

    @property
    def memory_nbytes(self) -> int:
        """The bytes that a client keeps between rounds."""
        trees = [tree.pick(self.initial, self.roles.personal), *self.plan.remembers(self.module, self.initial).values()]
        return sum(map(tree.nbytes, trees))

    @property
    def one_global_model(self) -> bool:
        """Whether the server's weights alone make up a model."""
        return not self.roles.personal

    def clients_test_the_servers(self, clients: Sequence[str]) -> bool:
        """Return whether clients test the server's weights as they are, whatever else they receive."""
        server = self.server(clients)
        plain = self.federated.dispatch(server, clients[0]).trees.get("shared") is server.shared
        return plain and self.federated.views is own_model and self.one_global_model

    def bare_client(self, memory: Memory | None = None) -> Client:
        """Return a client without images, enough to ask a plan what it would send, or for the client's own weights."""
        nothing = torch.zeros(0, dtype=torch.int64)
        no_images = torch.zeros(0, 1, 1, 3, dtype=torch.uint8)
        data = ClientData(no_images, nothing, nothing, nothing, nothing, nothing, self.classes)
        settings = LocalSettings(lr=1.0)
        memory = memory or {}
        return Client(
            "0", 1, self.roles, self.initial, self.frozen, data, memory, settings, self.module, self.inputs, self.live,
            self.compiled, self.window.rate, self.parts,
        )  # fmt: skip

    def bare_report(self, down: Payload, round_: int) -> Payload:
        """Return the report of a client that received this message and trained nothing."""
        own = self.at(window_of(down))
        return own.federated.report(replace(own.bare_client(), round=round_), own.initial, own.initial)

    def params(self) -> dict[str, int]:
        """Return the number of parameters by role; buffers are not parameters."""
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
    """Build the model and combine the method and the tune in it."""
    plan, tune = plan_of(experiment), make_tune(experiment.tune)
    model = experiment.model
    if model.weights is not None:
        model = model.model_copy(update={"weights": experiment.data.find(model.weights)})
    own = experiment.own.module
    plugins = join_plugins(plan.build, tune.build)
    module = build(model, classes, plugins, experiment.run.seed, own)
    roles = assign(module, plan.roles, trainable_names(module, tune, plan.build))
    parts = parts_of(module, plugins)
    if not roles.trainable:
        raise UserError(
            f"{experiment.label} trains nothing: the method freezes everything that the tune would train; "
            "choose another tune, such as full or bias"
        )
    if isinstance(plan, SplitPlan):
        _check_split_settings(experiment, plan)
    else:
        _check_rates(experiment, plan, roles, parts)
        plan.check(module, roles)
    for simpler in (METHODS["fedavg"](), METHODS["local"](), METHODS["fedper"]()):
        if _differ_in_roles_only(plan, simpler):
            same = assign(module, simpler.roles, trainable_names(module, tune, simpler.build)) == roles
            if same and plan.name != simpler.name:
                log.info("%s equals %s+%s", experiment.label, simpler.name, tune.name)
    if isinstance(plan, SplitPlan) and plan.init == "random" and not model.from_scratch:
        untrained = model.model_copy(update={"weights": None, "pretrained": False})
        fresh = state(build(untrained, classes, plugins, experiment.run.seed, own))
        names = [name for name in plan.cut.names(module, "client_head", "client_tail") if name in roles.trainable]
        load_(state(module), tree.pick(fresh, names))
    tensors = {name: tensor.detach().clone() for name, tensor in state(module).items()}
    module = module.to(device)
    skips = _may_skip_tokens(plan, roles, experiment)
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
        compiled=_compile_module(module) if experiment.train.compile else None,
        skips=skips,
        parts=parts,
    )


def parts_of(module: nn.Module, plugins: tuple[Plugin, ...]) -> dict[str, Part]:
    """Return the part of every weight that may have a learning rate of its own; what a plugin adds is no classifier."""
    parts: dict[str, Part] = dict.fromkeys(head.match(module), "classifier")
    for plugin in plugins:
        parts |= dict.fromkeys(group(plugin.kind).match(module), "plugins")
    return parts


def _check_rates(experiment: Experiment, plan: Plan, roles: Roles, parts: Mapping[str, Part]) -> None:
    """Refuse, rather than ignore, the learning rate of a part that nothing trains."""
    train, trained = experiment.train, {parts.get(name) for name in roles.trainable}
    if train.lr_plugins is not None and "plugins" not in trained:
        raise UserError(
            f"train.lr_plugins={train.lr_plugins:g} has no effect: {experiment.label} adds no module that is trained; "
            "leave it out, or choose a tune that adds one, such as lora, adapter or prefix"
        )
    if train.lr_classifier is not None and "classifier" not in trained and plan.views is own_model:
        raise UserError(
            f"train.lr_classifier={train.lr_classifier:g} has no effect: {experiment.label} does not train the "
            "classifier; leave it out"
        )


def _compile_module(module: nn.Module) -> Predictor:
    """Return the module wrapped by torch.compile, which acts at the first batch; a CPU needs a C++ compiler for it."""
    if next(module.parameters()).device.type == "cpu" and not (os.environ.get("CXX") or shutil.which("g++")):
        raise UserError(
            "train.compile needs a C++ compiler, but g++ was not found: install it, or leave train.compile out"
        )
    made: Predictor = torch.compile(module)
    return made


def _may_skip_tokens(plan: Method, roles: Roles, experiment: Experiment) -> bool:
    """Return whether the last block may skip tokens, because its output is only seen through the classifier.

    It may not where activations are exchanged, or with a user's own plan or module, which may look at tokens. Nor may
    it where only weights behind the blocks are trained: an image passes the blocks once, and sums of few rows round
    differently in every batch.
    """
    behind = all(lies_under(name, (*TAIL, *BESIDE_CLASSIFIER)) for name in roles.trainable)
    ours = experiment.own.plan is None and experiment.own.module is None
    return isinstance(plan, Plan) and ours and not behind


def _check_split_settings(experiment: Experiment, split: SplitPlan) -> None:
    """Refuse, rather than ignore, settings that mean nothing where activations are exchanged instead of weights."""
    run = experiment.run
    if run.finetune:
        raise UserError(
            f"{experiment.label} is split learning, whose clients hold only a part of the model and cannot train it "
            "alone: leave run.finetune out"
        )
    if run.before_after or run.evaluate == "in_round" or experiment.train.weighting == "samples":
        raise UserError(
            f"{experiment.label} is split learning, which does not support run.before_after, run.evaluate=in_round or "
            "train.weighting=samples: leave them out"
        )
    train = experiment.train
    if train.aggregate != "mean" or train.clip_update != "off":
        raise UserError(
            f"{experiment.label} is split learning, where the server has no reports of a round to compare: leave "
            "train.aggregate and train.clip_update out"
        )
    if train.lr_classifier is not None or train.lr_plugins is not None:
        raise UserError(
            f"{experiment.label} is split learning: train.lr is the rate of the client's tail, classifier included, "
            "and method.client_head_lr that of its head; leave out train.lr_classifier and train.lr_plugins"
        )
    if split.labels_leave and train.loss != "cross_entropy":
        raise UserError(
            f"with {experiment.label} the server computes the loss, without the class counts of the clients: leave "
            f"train.loss={train.loss} out"
        )
    if train.compile:
        raise UserError(f"{experiment.label} is split learning, whose parts are not compiled: leave train.compile out")
    if split.client_head_lr == 0 and split.init == "random" and not experiment.model.from_scratch:
        raise UserError("client_head_lr=0 freezes the head, and init=random would leave it random: choose one")


def _differ_in_roles_only(a: Method, b: Method) -> bool:
    """Return whether two plans would be the same if their weights had the same roles."""
    if isinstance(a, SplitPlan) or isinstance(b, SplitPlan):
        return False
    return replace(a, name="", roles=()) == replace(b, name="", roles=())


def join_plugins(method: tuple[Plugin, ...], tune: tuple[Plugin, ...]) -> tuple[Plugin, ...]:
    """Return the plugins of both; a kind that both name appears once, as the method defines it."""
    kinds = {plugin.kind for plugin in method}
    return (*method, *(plugin for plugin in tune if plugin.kind not in kinds))


def local_settings(experiment: Experiment, round_: int, device: torch.device) -> LocalSettings:
    """Return the settings with which clients train in this round."""
    train, run = experiment.train, experiment.run
    assert train.lr is not None
    assert train.optimizer is not None
    factor = rate_factor(train, round_)
    return LocalSettings(
        lr=train.lr * factor,
        lr_classifier=None if train.lr_classifier is None else train.lr_classifier * factor,
        lr_plugins=None if train.lr_plugins is None else train.lr_plugins * factor,
        clip_grad=train.clip_grad or 0.0,
        optimizer=train.optimizer,
        momentum=train.momentum,
        weight_decay=train.weight_decay,
        epochs=train.epochs,
        batch=train.batch,
        augment=train.augment,
        loss=train.loss,
        focal_gamma=FOCAL_GAMMA if train.focal_gamma is None else train.focal_gamma,
        precision=run.precision,
        device=device,
        seed=run.seed,
        schedule=factor,
    )


def window_of(down: Payload) -> Window:
    """Return the window of a message's weights, which the server states alongside them."""
    return Window(down.scalars.get("rate", 1.0), int(down.scalars.get("shift", 0)))


def rate_factor(train: TrainSettings, round_: int) -> float:
    """Return the factor by which warm-up and the schedule change the learning rates in this round."""
    return min(1.0, round_ / (train.warmup + 1)) * _schedule_factor(train, round_)


def _schedule_factor(train: TrainSettings, round_: int) -> float:
    """Return the schedule's factor, which is 1 in the first round."""
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
