"""A site, the owner of images on a network: its name, folder, state and policy, and its answers to a server.

Nothing here depends on how messages are sent. Everything that must not leave the site stays in its state folder:

    log.txt             requests, refusals and every traceback
    states/RUN/         personal weights and other memory after the last rounds in which the site took part
    runs/RUN/           a run folder for `fedvit export` and `fedvit predict`, as of the last evaluation, with the
                        site's own clinical.json and predictions.csv if the run has them
    cache/              decoded images

Only its owner can read this folder.
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

from fedvit.config.hashing import agreed_hash
from fedvit.config.resolve import to_toml
from fedvit.core import payload
from fedvit.core.client import Memory
from fedvit.core.clinical_message import is_clinical
from fedvit.core.errors import PublicError, UserError
from fedvit.core.files import make_private, write_bytes, write_json, write_text
from fedvit.core.metrics import CONFUSION
from fedvit.core.payload import Payload
from fedvit.core.server import Server
from fedvit.core.settings import MAX_PIXELS, Experiment
from fedvit.data.dataset import Dataset
from fedvit.data.manifest import is_manifest
from fedvit.data.partition.records import Partition
from fedvit.engine.checkpoint import newest_round, save_checkpoint
from fedvit.engine.client_store import ClientStore
from fedvit.engine.net import Net, make_net
from fedvit.engine.worker import Worker, load_data
from fedvit.network.handshake import common
from fedvit.network.payload_check import difference, down_of, up_of
from fedvit.network.policy import TRIAL, Policy
from fedvit.network.site_state import SiteState
from fedvit.runs.clinical import write_clinical
from fedvit.runs.models import RECEIVED
from fedvit.runs.write import about_images, roster_of


@dataclass(frozen=True)
class Federation:
    """The agreement between the server and the sites, in addition to the experiment."""

    sites: tuple[str, ...]  # in the order in which their reports are summed
    classes: tuple[str, ...]

    def hash_with(self, experiment: Experiment) -> str:
        """Return the hash of the whole agreement, as in a policy's settings_sha256."""
        return agreed_hash(experiment, [list(self.sites), list(self.classes)])


@dataclass(frozen=True)
class Refusal:
    """The reply of a site that does not give an answer: a code and a short text."""

    code: str  # refused, mistake or failed
    text: str


class Site:
    """A site in one experiment. Without a folder, it acts as the client of its name in the experiment's own data."""

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
        self.agreed, self.settings = experiment, federation.hash_with(experiment)
        self.policy, self.memories = policy or (Policy() if folder else TRIAL), SiteState(state / "states")
        own = {
            "cache": state / "cache",
            "follow_links": self.policy.follow_links,
            "max_pixels": min(MAX_PIXELS, experiment.data.max_pixels),
        }
        self.experiment = experiment.model_copy(update={"data": experiment.data.model_copy(update=own)})
        if folder is not None:
            check_paths(experiment)
            self.experiment = own_experiment(self.experiment, federation.classes, name, folder)
        self.federation, self.name, self.state = federation, name, state

    @cached_property
    def holdings(self) -> tuple[Dataset, Partition]:
        """The site's dataset and its split, which is the same as in one process with all sites."""
        return load_data(self.experiment)

    @cached_property
    def net(self) -> Net:
        torch.set_num_threads(self.experiment.run.threads)
        return make_net(self.experiment, len(self.federation.classes), torch.device(self.experiment.run.devices[0]))

    @cached_property
    def worker(self) -> Worker:
        dataset, partition = self.holdings
        if self.name not in partition.clients:
            raise UserError(
                f"{dataset.name} has no client {self.name!r}; its clients are {', '.join(partition.clients)}"
            )
        return Worker(self.experiment, self.net, dataset, partition, torch.device(self.experiment.run.devices[0]))

    # Answers to the server.

    def hello(self) -> dict[str, Any]:
        """Introduce the site if its policy admits the run: its name, its image counts and the parts that must agree."""
        self.admit()
        dataset, partition = self.holdings
        has = roster_of(dataset.labels, partition)[self.name]
        agreed = common(self.experiment, self.net, dataset.class_names)
        return {"site": self.name, "train": has.train, "test": has.test, "classes": has.classes, "common": agreed}

    def admit(self) -> None:
        """Refuse a run that the site's policy forbids; the policy may have changed since the last message."""
        self.policy.allow(self.agreed, self.settings)
        down = down_of(self.net, self.federation.sites, self.name, 0)
        self.policy.check(up_of(self.net, down, 1))
        _, partition = self.holdings
        if self.name in partition.clients:
            self.policy.allow_images(len(partition.clients[self.name].train))

    def train(self, run: str, continues: int, down: Payload) -> Payload:
        """Train for one round from the state that the server names, and return what may leave of the report."""
        round_ = self.check(down, after=int(down.scalars["round"]) - 1)
        up, memory = self.worker.train(self.name, down, self.memories.get(run, continues))
        up = self.policy.report(up)
        self.memories.put(run, round_, memory, after=continues)
        return up

    def evaluate(self, run: str, continues: int, down: Payload) -> Payload:
        """Evaluate the site's model on its own images, and keep it for the site to export and predict with."""
        round_ = self.check(down, after=int(down.scalars["round"]))
        memory = self.memories.get(run, continues)
        scores, cases = self.worker.evaluate(self.name, down, memory)
        kept = self.keep_model(run, round_, down, memory)
        if kept and cases is not None:
            names, own = self.holdings[0].class_names, {self.name: cases}
            write_clinical(self.folder_of(run), self.experiment, names, round_, {self.name: scores}, own)
        found = Payload(scalars=scores)
        if self.policy.scores != "full":
            note(self.state, self.name, f"round {round_}: {in_words(found)}")
        return self.policy.release(found)

    def check(self, down: Payload, after: int) -> int:
        """Refuse a run that the policy forbids, or a message that the plan would not send; return the round."""
        self.admit()
        self.policy.allow_round(int(down.scalars["round"]))
        agreed = down_of(self.net, self.federation.sites, self.name, after)
        wrong = difference(down, agreed)
        if wrong is None and {**agreed.scalars, "round": down.scalars["round"]} != down.scalars:
            wrong = "its numbers are others"
        if wrong is not None:
            raise PublicError(f"the server's message is not what was agreed: {wrong}")
        return int(down.scalars["round"])

    def folder_of(self, run: str) -> Path:
        """Return the folder that this site keeps of a run."""
        return self.state / "runs" / self.memories.folder_of(run).name

    def keep_model(self, run: str, round_: int, down: Payload, memory: Memory) -> bool:
        """Write a folder like that of a run in one process, with this site as the only client.

        Return False for a message that comes too late, which does not replace the model of a later round.
        """
        folder, (dataset, partition) = self.folder_of(run), self.holdings
        if newest_round(folder / "checkpoint") > round_:
            return False
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "run.toml", to_toml(self.experiment))
        mine = replace(partition, clients={self.name: partition.clients[self.name]}, unseen=())
        about = {"hash": partition.to_json()["hash"], **about_images(dataset, mine)}
        write_json(folder / "split.json", {**mine.to_json(), **about})
        write_bytes(folder, RECEIVED, payload.to_bytes(down))
        store = ClientStore(folder / "checkpoint", in_ram=False)
        store.put(round_, {self.name: memory})
        save_checkpoint(folder / "checkpoint", Server(round_, down.trees.get("shared", {})), store)
        kept = {version["file"] for version in store.versions.values()}
        for path in (folder / "checkpoint").glob("clients/*"):
            if f"clients/{path.name}" not in kept:
                path.unlink()
        return True


def check_paths(experiment: Experiment) -> None:
    """Refuse an experiment from elsewhere that names weights outside the site's data folder."""
    weights = experiment.model.weights
    if weights is not None and (weights.is_absolute() or ".." in weights.parts):
        raise PublicError(
            "model.weights must name a file inside the data folder of each site, without a leading / and without .."
        )


def own_experiment(experiment: Experiment, classes: Sequence[str], name: str, folder: Path) -> Experiment:
    """Return the experiment of a site with its own folder or manifest of images: a federation of one client."""
    if not folder.is_dir() and not (is_manifest(folder) and folder.is_file()):
        raise UserError(f"the site's images: expected a folder of class folders or a manifest (.csv), found {folder}")
    if experiment.data.samples is not None or experiment.data.unseen:
        raise PublicError("data.samples and data.unseen select from the images of all sites: leave them out")
    own = {"name": str(folder.resolve()), "layout": "class", "site": name, "class_names": ",".join(classes) or None}
    return experiment.model_copy(
        update={
            "data": experiment.data.model_copy(update=own),
            "partition": experiment.partition.model_copy(update={"name": "site", "clients": 1}),
            "train": experiment.train.model_copy(update={"cohort": 1}),
        }
    )


def in_words(scores: Payload) -> str:
    """Write a site's scores for its own log."""
    plain = {
        key: value for key, value in scores.scalars.items() if f"_{CONFUSION}_" not in key and not is_clinical(key)
    }
    return ", ".join(f"{key} {value:.4g}" for key, value in plain.items())


def guarded(state: Path, name: str, what: str, work: Callable[[], Any]) -> Any:
    """Return an answer, or a refusal that reveals nothing about the site's files; the details are in the site's log."""
    see = "log.txt in its state folder"
    try:
        return work()
    except PublicError as problem:
        note(state, name, f"{what}: refused: {problem}")
        return Refusal("refused", str(problem))
    except UserError as problem:
        note(state, name, f"{what}: {problem}\n{traceback.format_exc()}")
        return Refusal("mistake", f"a file or setting at the site is not as expected; see {see}")
    except Exception:
        note(state, name, f"{what}: {traceback.format_exc()}")
        return Refusal("failed", f"the program at the site failed; for the traceback, see {see}")


def note(state: Path, name: str, text: str) -> None:
    """Append a line to the site's own log; if that fails, drop the text, because it must not go anywhere else."""
    with suppress(OSError, UserError):
        make_private(state)
        with (state / "log.txt").open("a") as stream:
            stream.write(f"{datetime.now().isoformat(timespec='seconds')} {name}: {text}\n")
