"""Models from a run's folder: each client's own, and the server's if it has one. Nothing is written."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, get_args

import torch
from torch import Tensor, nn

from fedvit.core import payload, tree
from fedvit.core.batches import ClientData, shrinks
from fedvit.core.client import Client, Memory
from fedvit.core.errors import UserError, hint
from fedvit.core.payload import Payload
from fedvit.core.server import Server
from fedvit.core.settings import Experiment
from fedvit.core.training import load_
from fedvit.engine.checkpoint import load_checkpoint, load_kept
from fedvit.engine.client_store import ClientStore
from fedvit.engine.loop import for_round
from fedvit.engine.net import Net, join_plugins, make_net, window_of
from fedvit.engine.worker import Worker, load_data
from fedvit.models.build import portable
from fedvit.models.cuts import Cut, Parts, Where
from fedvit.models.plugins.specs import SecondHead
from fedvit.models.token_skipping import give_all_tokens_, skip_unread_tokens_
from fedvit.models.width import FULL, Window
from fedvit.runs.description import Description, Inputs, Parted, Reading, shared_options
from fedvit.runs.folder import Run
from fedvit.runs.kept import Rows, best_round
from fedvit.runs.write import check_same_partition
from fedvit.split.messages import pack, unpack
from fedvit.split.plan import SplitPlan, newer_average

log = logging.getLogger(__name__)
RECEIVED = "received.safetensors"  # in the folder of a site's run: the server's last message


@dataclass(frozen=True)
class OpenedRun:
    """A run's checkpoint, of its last round or of the one it kept.

    Models taken from it share one module: finish with one before you take the next.
    """

    run: Run
    experiment: Experiment
    net: Net
    server: Server
    store: ClientStore
    split: dict[str, Any]  # split.json
    received: Payload | None = None  # at a site: the server's last message
    kept_best: bool = False  # whether this is the round that the run kept as its best on validation images

    def down(self, name: str) -> Payload:
        """Return the server's message to a client: the one it received, or the one it would be sent now."""
        if self.received is not None:
            return self.received
        return for_round(self.net.federated.dispatch(self.server, name), self.server.round)

    @property
    def clients(self) -> list[str]:
        return list(self.split["clients"])

    @property
    def scores(self) -> dict[str, Any]:
        """The views of this round over all clients, from the files of a finished run."""
        summary = self.run.summary if self.run.finished else {"views": {}}
        found: dict[str, Any] = summary["kept"]["views"] if self.kept_best and "kept" in summary else summary["views"]
        return found

    @cached_property
    def worker(self) -> Worker:
        """The worker with the run's images, loaded once, for a method that trains on them before it predicts."""
        why = f"{self.net.plan.name} makes a client's model from the client's images before it predicts"
        if self.experiment.data.name == "python" and self.run.dataset is None:
            raise UserError(
                f"{why}, and they were given from Python: pass them again, fedvit.load_run(FOLDER, data=...); the "
                "server's model needs none"
            )
        try:
            dataset, split = load_data(self.experiment, self.run.dataset)
            check_same_partition(self.run.folder, split.to_json())
        except UserError as problem:
            raise UserError(f"{why}, and they cannot be loaded ({problem}); the server's model needs none") from problem
        return Worker(self.experiment, self.net, dataset, split, torch.device("cpu"))


def open_run(run: Run, *, last: bool = False) -> OpenedRun:
    """Open the run's model on the CPU, its server and its clients' memories, as of the round that the run keeps.

    That is the last round unless run.keep=best; `last` means the last round in any case.
    """
    saved = run.folder / "split.json"
    if not saved.is_file():
        raise UserError(f"{run.folder} has no checkpoint yet: run it first")
    split, experiment = json.loads(saved.read_text()), run.experiment
    store = ClientStore(run.folder / "checkpoint", in_ram=False)
    server = load_checkpoint(run.folder / "checkpoint", store, clean=False)
    if server is None:
        raise UserError(f"{run.folder} has no checkpoint yet: run it first")
    received = run.folder / RECEIVED
    message = payload.from_bytes(received.read_bytes()) if received.is_file() else None
    whole = run.finished or (message is not None and server.round == experiment.train.rounds)
    if not whole:
        log.warning("%s is not finished: this is round %d of %d", run.folder, server.round, experiment.train.rounds)
    best = None if last or experiment.run.keep == "last" else best_round(_saved(run.rounds, server.round))
    if best is not None and best != server.round:
        log.info("%s keeps round %d, its best on validation images", run.folder, best)
        server = load_kept(run.folder / "checkpoint", store, best)
    seen = tuple(name for name in split["clients"] if name not in split.get("unseen", []))
    if "class_names" not in split:
        raise UserError(f"{saved} does not name the classes: the run was made by a version too old to be opened")
    net = make_net(experiment, len(split["class_names"]), torch.device("cpu"))
    return OpenedRun(run, experiment, net, replace(server, clients=seen), store, split, message, best is not None)


def _saved(rows: Rows, newest: int) -> Rows:
    """Return the rounds that the checkpoint holds: a run that was killed may have written one more line."""
    return [row for row in rows if row["round"] <= newest]


def client_model(opened: OpenedRun, name: str) -> nn.Module:
    """Return the client's model of view `personal`, in evaluation mode, with its description."""
    if name not in opened.clients:
        known = opened.clients
        raise UserError(f"no client {name!r} in {opened.run.folder}; {hint(name, known)}there are {', '.join(known)}")
    if opened.split.get("network") and opened.received is None:
        raise UserError(
            f"{opened.run.folder} is a server's run, and what makes a client's own model stays at the site: open the "
            "run there, in the folder runs of the site's state folder"
        )
    net, memory = opened.net, opened.store.get(name)
    if isinstance(net.plan, SplitPlan):
        return _split_model(opened, net.plan, name, memory)
    down = opened.down(name)
    window = window_of(down)
    with _same_sums(opened.experiment):
        owner, weights = _personal_view(opened, name, down, window)
    load_(owner.live, {**owner.initial, **owner.frozen, **weights})
    return attach_description(owner.module, describe(opened, name, window=window))


class NeedsImagesError(Exception):
    """Raised when a view looks at the client's images, which were not loaded."""


class _NoImages:
    """A placeholder for a client's images, which most methods never look at."""

    def __getattr__(self, name: str) -> Any:
        raise NeedsImagesError


def _personal_view(opened: OpenedRun, name: str, down: Payload, window: Window) -> tuple[Client, tree.Tree]:
    """Return the client and its weights of view `personal`, loading its images only if the method looks at them."""
    net, memory = opened.net, opened.store.get(name)
    owner = net.at(window).bare_client(dict(memory))
    if net.skips:  # as in the run; a model handed out earlier was set to give all tokens
        skip_unread_tokens_(owner.module)
    missing: ClientData = _NoImages()  # type: ignore[assignment]
    owner.data = missing
    try:
        return owner, net.federated.views(owner, down)["personal"]
    except NeedsImagesError:
        owner = opened.worker.client(name, opened.server.round, dict(memory), window)
        return owner, net.federated.views(owner, down)["personal"]


@contextmanager
def _same_sums(experiment: Experiment) -> Iterator[None]:
    """Use as many threads as the run did, because their number changes floating-point sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(experiment.run.threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# The server.


def why_no_server(opened: OpenedRun) -> str | None:
    """Return why the server's weights do not make a model, or None if they do."""
    net, plan = opened.net, opened.net.plan
    if isinstance(plan, SplitPlan):
        return f"the server of {plan.name} has only the body; heads and tails are at the clients"
    if _only_second_head(net):
        return None
    if net.roles.personal:
        first = ", ".join(net.roles.personal[:3])
        more = f" and {len(net.roles.personal) - 3} more" if len(net.roles.personal) > 3 else ""
        return f"under {opened.experiment.label} these weights never leave the clients: {first}{more}"
    return None


def _only_second_head(net: Net) -> bool:
    """Return whether all personal weights are a second classifier, which is zero until it is trained (Fed-RoD)."""
    return bool(net.roles.personal) and all(name.split(".")[0] == SecondHead.kind for name in net.roles.personal)


def server_model(opened: OpenedRun) -> nn.Module:
    """Return the server's model, in evaluation mode, with its description; raise an error if there is none."""
    why = why_no_server(opened)
    if why is not None:
        raise UserError(
            f"the server has no model of its own: {why}. Take a client's model (--client NAME; run.model(NAME)), "
            f"or run a method with one model for all, such as fedavg"
        )
    net = opened.net
    load_(net.live, {**net.initial, **net.frozen, **opened.server.shared})
    return attach_description(net.module, describe(opened, None))


# Split learning.


class Chain(nn.Module):
    """The head, body and tail of a cut ViT in one process; what was sent between them is rounded as on the wire."""

    def __init__(self, module: nn.Module, parted: Parted):
        super().__init__()
        self.module, self.parted = module, parted
        self.parts = Parts(module, Cut(parted.cut, parted.block))

    def forward(self, x: Tensor) -> Tensor:
        for part in get_args(Where):
            for stage in self.parts.stages(part, self.parted.depth):
                x = stage(x)
            if part == "body":
                x = self.parts.rows_of(x)
            whole = part == "client_tail" or (part == "body" and self.parted.cut == "after")
            if not whole and self.parted.wire != "fp32":
                x = unpack(pack(x, self.parted.wire), x.device)
        return x


def _split_model(opened: OpenedRun, split: SplitPlan, name: str, memory: Memory) -> nn.Module:
    """Return a client's head and tail around the server's body, as one model."""
    net, updated = opened.net, memory.get("updated", 0.0)
    assert isinstance(updated, float)
    own = net.bare_client(memory).personal()
    average = newer_average(split, opened.server.memory, updated)
    load_(net.live, tree.overlay(own, average, opened.server.shared))
    if split.cut.kind != "vibs" and split.wire == "fp32":
        return attach_description(net.module, describe(opened, name))
    deepest = split.deepest(Parts(net.module, split.cut))
    depth = memory.get("depth", deepest)
    assert depth is None or isinstance(depth, int | float)
    parted = Parted(
        cut=split.cut.kind, block=split.cut.block, wire=split.wire, depth=None if depth is None else int(depth)
    )
    return attach_description(Chain(net.module, parted), describe(opened, name, parted=parted))


# Descriptions.


def describe(opened: OpenedRun, client: str | None, window: Window = FULL, parted: Parted | None = None) -> Description:
    """Describe what a model from this run takes, returns and is made of."""
    experiment, net, split = opened.experiment, opened.net, opened.split
    side = experiment.data.size or net.inputs.size
    height, width, channels = image = tuple(split.get("image", (side, side, 3)))
    inputs = net.inputs
    return Description(
        client=client,
        view="server" if client is None else "personal",
        round=opened.server.round,
        method=shared_options(experiment.method, window.rate),
        tune=experiment.tune,
        model=portable(experiment.model),
        plugins=[plugin_table(plugin) for plugin in join_plugins(net.plan.build, net.tune.build)],
        rate=window.rate,
        split=parted,
        classes=split["class_names"],
        task="multi" if experiment.data.several_labels else None,
        input=Inputs(size=inputs.size, mean=inputs.mean, std=inputs.std, antialias=shrinks((height, width), inputs)),
        image=image,
        reading=Reading(width=width, height=height, window=experiment.data.window, gray=channels == 1),
        precision=experiment.run.precision,
    )


def plugin_table(plugin: Any) -> dict[str, Any]:
    return {"kind": plugin.kind, **vars(plugin)}


def attach_description(module: nn.Module, description: Description) -> nn.Module:
    give_all_tokens_(module)
    module.description = description  # type: ignore[assignment]
    return module.eval()
