"""One owner of images on a network: its name, folder, state and rules, and its answers to a server.

Nothing here knows how messages travel. Everything that may not leave stays in the site's state folder:

    log.txt             what was asked, what was refused, every traceback
    states/RUN/         personal weights and other memory after the last two rounds the site took part in
    runs/RUN/           a run's folder for `fedvit export` and `fedvit predict`, as of the last evaluation
    cache/              decoded images
"""

import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fedvit.config.resolve import to_toml
from fedvit.core import payload
from fedvit.core.client import Memory
from fedvit.core.errors import PublicError, UserError
from fedvit.core.files import write_bytes, write_json, write_text
from fedvit.core.payload import Payload
from fedvit.core.server import Server
from fedvit.core.settings import Experiment
from fedvit.data.dataset import Dataset
from fedvit.data.partition.records import Partition
from fedvit.engine.checkpoint import save_checkpoint
from fedvit.engine.client_store import ClientStore
from fedvit.engine.net import Net, make_net
from fedvit.engine.worker import Worker, load_data
from fedvit.network.handshake import common
from fedvit.network.payload_check import difference, down_of, up_of
from fedvit.network.policy import Policy
from fedvit.network.site_state import SiteState
from fedvit.runs.models import RECEIVED
from fedvit.runs.write import class_counts, roster_of


@dataclass(frozen=True)
class Federation:
    """What server and sites have agreed on beside the experiment."""

    sites: tuple[str, ...]  # in the order in which sums are taken
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Refusal:
    """What leaves a site instead of an answer: a code and a short text."""

    code: str  # refused, unexpected, mistake or failed
    text: str


class Site:
    """A site in one experiment. Without a folder it plays the client of its name in the experiment's own data."""

    def __init__(
        self,
        experiment: Experiment,
        federation: Federation,
        name: str,
        state: Path,
        *,
        folder: Path | None = None,
        policy: Policy | None = None,
    ):
        data = experiment.data.model_copy(update={"cache": experiment.data.cache or state / "cache"})
        self.experiment = experiment.model_copy(update={"data": data})
        if folder is not None:
            self.experiment = own_experiment(self.experiment, federation.classes, name, folder)
        self.federation, self.name, self.state = federation, name, state
        self.policy, self.memories = policy or Policy(), SiteState(state / "states")

    @cached_property
    def holdings(self) -> tuple[Dataset, Partition]:
        """The site's images, divided as they would be in one process with all the others."""
        return load_data(self.experiment)

    @cached_property
    def net(self) -> Net:
        torch.set_num_threads(self.experiment.run.threads)
        return make_net(self.experiment, len(self.federation.classes), torch.device(self.experiment.run.devices[0]))

    @cached_property
    def worker(self) -> Worker:
        dataset, partition = self.holdings
        if self.name not in partition.clients:
            raise UserError(f"no client {self.name!r} in {dataset.name}; there are {', '.join(partition.clients)}")
        return Worker(self.experiment, self.net, dataset, partition, torch.device(self.experiment.run.devices[0]))

    # Answers.

    def hello(self) -> dict[str, Any]:
        """Who this is, what it would compute with, and how much it has. Its rules are asked first."""
        self.admit()
        dataset, partition = self.holdings
        has = roster_of(dataset.labels, partition)[self.name]
        agreed = common(self.experiment, self.net, dataset.class_names)
        return {"site": self.name, "train": has.train, "test": has.test, "classes": has.classes, "common": agreed}

    def admit(self) -> None:
        """Refuse a run that the site's rules forbid. They may have changed since the last message."""
        down = down_of(self.net, self.federation.sites, self.name, 0)
        method = str(self.experiment.method["name"])
        self.policy.admit(self.experiment.label, method, up_of(self.net, down, 1), epsilon=None)

    def recalled(self, run: str, continues: int, *, drop: bool) -> Memory:
        """The state that the server goes on from, that one and no other."""
        memory = self.memories.get(run, continues, drop=drop)
        if continues and continues not in self.memories.states(run):
            raise PublicError(f"the server goes on from the state of round {continues}, which this site does not have")
        return memory

    def train(self, run: str, continues: int, down: Payload) -> Payload:
        """A round's training, from the state after the round that the server names; what may leave of it."""
        round_ = self.check(down, after=int(down.scalars["round"]) - 1)
        up, memory = self.worker.train(self.name, down, self.recalled(run, continues, drop=True))
        up = self.policy.release(up)
        self.memories.put(run, round_, memory)
        return up

    def evaluate(self, run: str, continues: int, down: Payload) -> Payload:
        """The site's own model on its own images. It is kept for the site to export and predict with."""
        round_ = self.check(down, after=int(down.scalars["round"]))
        memory = self.recalled(run, continues, drop=False)
        scores = self.worker.evaluate(self.name, down, memory)
        self.keep_model(run, round_, down, memory)
        return self.policy.release(scores)

    def check(self, down: Payload, after: int) -> int:
        """Refuse what the rules forbid, and what the server should not have sent."""
        self.admit()
        wrong = difference(down, down_of(self.net, self.federation.sites, self.name, after))
        if wrong is not None:
            raise PublicError(f"the server's message is not what was agreed: {wrong}")
        return int(down.scalars["round"])

    def keep_model(self, run: str, round_: int, down: Payload, memory: Memory) -> None:
        """A folder like that of a run in one process, with this one client."""
        folder, (dataset, partition) = self.state / "runs" / self.memories.folder_of(run).name, self.holdings
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "run.toml", to_toml(self.experiment))
        mine = replace(partition, clients={self.name: partition.clients[self.name]}, unseen=())
        about = {"image": list(dataset.images.shape[1:]), "class_counts": class_counts(dataset, mine)}
        write_json(folder / "split.json", {**mine.to_json(), "hash": partition.to_json()["hash"], **about})
        write_bytes(folder, RECEIVED, payload.to_bytes(down))
        store = ClientStore(folder / "checkpoint", in_ram=False)
        store.put(round_, {self.name: memory})
        save_checkpoint(folder / "checkpoint", Server(round_, down.trees.get("shared", {})), store)
        kept = {version["file"] for version in store.versions.values()}
        for path in (folder / "checkpoint").glob("clients/*"):
            if f"clients/{path.name}" not in kept:
                path.unlink()


def own_experiment(experiment: Experiment, classes: Sequence[str], name: str, folder: Path) -> Experiment:
    """The experiment of one site with a folder of its own: a federation of one."""
    if not folder.is_dir():
        raise UserError(f"the site's images: expected a folder of class folders, found {folder}")
    if experiment.data.samples is not None or experiment.data.unseen:
        raise PublicError("data.samples and data.unseen choose among all sites' images: leave them out")
    own = {"name": str(folder.resolve()), "layout": "class", "site": name, "class_names": ",".join(classes) or None}
    return experiment.model_copy(
        update={
            "data": experiment.data.model_copy(update=own),
            "partition": experiment.partition.model_copy(update={"name": "site", "clients": 1}),
            "train": experiment.train.model_copy(update={"cohort": 1}),
        }
    )


def guarded(state: Path, name: str, what: str, work: Callable[[], Any]) -> Any:
    """An answer, or a refusal without a word about the site's files; the site's own log has the whole story."""
    see = "log.txt in its state folder"
    try:
        return work()
    except PublicError as problem:
        note(state, name, f"{what}: refused: {problem}")
        return Refusal("refused", str(problem))
    except UserError as problem:
        note(state, name, f"{what}: {problem}\n{traceback.format_exc()}")
        return Refusal("mistake", f"a file or setting at the site is not as expected; {see} says which")
    except Exception:
        note(state, name, f"{what}: {traceback.format_exc()}")
        return Refusal("failed", f"the program at the site failed; {see} has the traceback")


def note(state: Path, name: str, text: str) -> None:
    """A line in the site's own log. What cannot be written there may not go elsewhere."""
    with suppress(OSError):
        state.mkdir(parents=True, exist_ok=True)
        with (state / "log.txt").open("a") as stream:
            stream.write(f"{datetime.now().isoformat(timespec='seconds')} {name}: {text}\n")
