"""A federated method as data: the role of every weight, and the few functions that differ from FedAvg's."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from torch import nn

from fedvit.core import tree
from fedvit.core.client import Client
from fedvit.core.payload import Payload, flatten, unflatten
from fedvit.core.roles import SHARED, Roles, Rules, everything
from fedvit.core.server import Server
from fedvit.core.training import descend
from fedvit.core.tree import Tree


class Plugin(Protocol):
    """A part that a method or a tune adds to the model; `models.plugins` defines them all."""

    kind: ClassVar[str]


@dataclass(frozen=True)
class LayerChoice:
    """Each client chooses among layers and reports its choice as a mask over them, in the group `choice`."""

    layers: Callable[[nn.Module, Roles], Sequence[str]]  # their names
    probe: float  # the fraction of a client's training images by which it chooses
    held_out: float | None = None  # the fraction that is not trained on; None: those by which it chooses


class Report(NamedTuple):
    """A client's answer, with its weight in the mean.

    Attributes:
        client: The client's name.
        weight: The client's number of training images, or 1 if the weighting is "equal".
        payload: The client's message, as the plan's `report` made it.
    """

    client: str
    weight: float
    payload: Payload


Views = Callable[[Client, Payload], Mapping[str, Tree]]


# FedAvg's functions, which are the default for every slot.


def _send_shared(server: Server, client: str) -> Payload:
    """dispatch: send the shared weights to every client."""
    return Payload({"shared": server.shared})


def overwrite(client: Client, down: Payload) -> Tree:
    """merge: take the received weights, and the client's own if it has any."""
    return tree.overlay(client.personal(), down.trees.get("shared", {}))


def train(client: Client, start: Tree) -> Tree:
    """local: train everything trainable, without any changes to the loop."""
    return descend(client, start)


def report_shared(client: Client, start: Tree, end: Tree) -> Payload:
    """report: send the shared weights after training; personal ones stay at the client."""
    return Payload({"shared": tree.pick(end, client.roles.shared)})


def average(server: Server, reports: Iterable[Report]) -> Server:
    """aggregate: take the mean over the sampled clients, weighted unless `train.aggregate` says otherwise."""
    if not server.shared:
        for _ in reports:
            pass
        return server
    return replace(server, shared=server.combine((r.weight, r.payload.trees["shared"]) for r in reports))


def means(server: Server, reports: Iterable[Report]) -> dict[str, Tree]:
    """Return the same mean of every group in the reports."""
    return unflatten(server.combine((r.weight, flatten(r.payload.trees)) for r in reports))


def own_model(client: Client, down: Payload) -> Mapping[str, Tree]:
    """views: combine the client's own weights with the latest shared ones."""
    return {"personal": overwrite(client, down)}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A method: `Plan(name="fedavg")` is FedAvg, and every other method replaces what differs.

    Attributes:
        name: The method's name in logs, tables and files.
        roles: Pairs of a selector and a role for trainable weights; FROZEN here overrides any tune.
        build: The plugins that the method adds to the model.
        start: Returns the server's own memory before the first round.
        dispatch: Returns the server's message to a client.
        merge: Returns the weights with which a client starts, from its own and the received ones.
        local: Trains, and returns the weights at the end.
        report: Returns a client's message to the server, from the weights at the start and at the end.
        aggregate: Returns the server's new state from the reports of the sampled clients.
        views: Returns the models by which a client is evaluated, by name; "personal" is the client's own.
        weighting: How much a client counts in means: by its training images, or equally; `train.weighting` overrides.
        trains: Who trains in each round: the sampled clients, every client, or a single owner of all data ("pooled").
        check: Raises an error if the model is unsuitable.
        choice: The layers among which each client chooses those that stay its own, if the method does this.
        changes: The groups of a report that hold changes to what the server sent, instead of new values.
        not_between_sites: Why the method's messages must not cross a network, or None.
        not_private: Why the method cannot be trained with differential privacy of its gradients, or None.
        unprotected: What the method uses or sends of the images besides their gradients, which such privacy leaves out.
        one_label_only: Why an image must not have several labels, or None.
        remembers: For `fedvit cost`: the trees that a client keeps besides its personal weights.
        loss_terms: How many losses, each as large as a cross-entropy, the training loss sums up; 1 for FedAvg.
        passes: For `fedvit cost`: the training passes per image and epoch; 1 for FedAvg.
        costs: For `fedvit cost`: any other figures of the method, by name.
    """

    name: str
    roles: Rules = ((everything, SHARED),)
    build: tuple[Plugin, ...] = ()
    start: Callable[[nn.Module, Tree], Mapping[str, Tree]] = lambda module, shared: {}
    dispatch: Callable[[Server, str], Payload] = _send_shared
    merge: Callable[[Client, Payload], Tree] = overwrite
    local: Callable[[Client, Tree], Tree] = train
    report: Callable[[Client, Tree, Tree], Payload] = report_shared
    aggregate: Callable[[Server, Iterable[Report]], Server] = average
    views: Views = own_model
    weighting: Literal["samples", "equal"] = "samples"
    trains: Literal["sampled", "everyone", "pooled"] = "sampled"
    check: Callable[[nn.Module, Roles], None] = lambda module, roles: None
    choice: LayerChoice | None = None
    changes: tuple[str, ...] = ()
    not_between_sites: str | None = None
    not_private: str | None = None
    unprotected: tuple[str, ...] = ()
    one_label_only: str | None = None
    remembers: Callable[[nn.Module, Tree], Mapping[str, Tree]] = lambda module, trainable: {}
    loss_terms: int = 1
    passes: Callable[[int], float] = lambda epochs: 1.0
    costs: Callable[[Client], Mapping[str, Any]] = lambda client: {}

    @property
    def pooled(self) -> bool:
        """Whether a single owner of all data trains, so that nothing is sent."""
        return self.trains == "pooled"


def client_round(plan: Plan, client: Client, down: Payload) -> Payload:
    """Run one client's part of a round: personal weights go to its memory, and `report` decides what leaves."""
    start = plan.merge(client, down)
    end = plan.local(client, start)
    if client.roles.personal:
        client.memory["personal"] = tree.pick(end, client.roles.personal)
    up = plan.report(client, start, end)
    return replace(up, scalars={"examples": float(len(client.data.train)), **client.scalars, **up.scalars})
