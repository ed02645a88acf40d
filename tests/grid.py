"""Flower's grid without its processes: messages go straight into the real ClientApp of each node."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedvit.core.client import Memory
from fedvit.core.settings import Experiment
from fedvit.engine.loop import Round
from fedvit.engine.net import make_net
from fedvit.network.flower.apps import client_app, read_app
from fedvit.network.flower.sites import FlowerSites
from fedvit.network.flower.template import for_sites, for_trial, write_app
from fedvit.network.server import run_name, serve_sites
from fedvit.network.site_state import SiteState

Told = dict[str, str]  # a node's --node-config


def newest(state: SiteState, run: str) -> Memory:
    """What a site kept last of a run, or nothing."""
    return state.get(run, max(state.states(run), default=0))


class Wires:
    """What a Grid does, in memory. `meddle` may change a reply, or lose it by giving None."""

    def __init__(self, app: Path, nodes: Mapping[int, Told]):
        self.app, self.nodes = client_app(app / "fedvit_app"), dict(nodes)
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1  # what Flower's processes begin with
        self.crossed: list[Message] = []
        self.came: dict[str, Message] = {}
        self.meddle: Callable[[str, Message], Message | None] = lambda site, reply: reply

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [self.push(message) for message in messages]

    def push(self, message: Message) -> str:
        number = f"m{len(self.crossed)}"
        message.metadata.__dict__["_message_id"] = number
        self.crossed.append(message)
        node = message.metadata.dst_node_id
        reply = self.app(message, Context(1, node, dict(self.nodes[node]), RecordDict(), {}))
        self.crossed.append(reply)
        changed = self.meddle(self.nodes[node]["site"], reply)
        if changed is not None:
            self.came[number] = changed
        return number

    def pull_messages(self, numbers: Iterable[str]) -> Iterable[Message]:
        return [self.came.pop(number) for number in numbers if number in self.came]

    def contents(self) -> Iterator[RecordDict]:
        return (message.content for message in self.crossed)


class Federated:
    """An app on disk, a node for each of its sites, and a server that may be started more than once."""

    pinned: Mapping[int, str] | None = None  # the server's list of sites, by node

    def __init__(self, experiment: Experiment, folder: Path, **told: str):
        experiment, self.federation, _, _ = for_trial(experiment)
        write_app(folder / "app", experiment, self.federation, "unused")
        self.folder, self.out = folder, folder / "out"
        nodes = {
            100 + number: {"site": name, "state": str(folder / "sites" / name), "trial": "yes", **told}
            for number, name in enumerate(self.federation.sites)
        }
        self.wires = Wires(folder / "app", nodes)

    @classmethod
    def of_folders(cls, experiment: Experiment, folder: Path, images: Mapping[str, Path], **told: str) -> "Federated":
        """Real sites, each with its own folder or manifest of images, whose classes are ill and well."""
        made = cls.__new__(cls)
        experiment, made.federation = for_sites(experiment, sorted(images), ["ill", "well"])
        made.folder, made.out = folder, folder / "out"
        write_app(folder / "app", experiment, made.federation, "unused")
        nodes = {
            100 + number: {"site": name, "state": str(made.state_of(name)), "data": str(images[name]), **told}
            for number, name in enumerate(made.federation.sites)
        }
        made.wires = Wires(folder / "app", nodes)
        return made

    def rounds(self, *, resume: bool = False, min_sites: int = 1) -> Iterator[Round]:
        experiment, federation = read_app(self.folder / "app" / "fedvit_app")
        net = make_net(experiment, len(federation.classes), torch.device("cpu"))
        run = run_name(self.out, resume=resume)
        sites = FlowerSites(self.wires, experiment, federation, net, run, 0.2, min_sites, pinned=self.pinned)  # type: ignore[arg-type]
        return serve_sites(sites, experiment, net, federation, self.out, run, 1.0, resume=resume)

    def finish(self, *, resume: bool = False, min_sites: int = 1) -> None:
        for _ in self.rounds(resume=resume, min_sites=min_sites):
            pass

    def state_of(self, site: str) -> Path:
        return self.folder / "sites" / site
