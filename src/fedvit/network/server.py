"""A run whose clients are real sites: the same loop and files as in one process, but no images at the server."""

import json
import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from fedvit.core.errors import DivergedError, UserError
from fedvit.core.files import write_json, write_text
from fedvit.core.metrics import CONFUSION, pooled
from fedvit.core.settings import Experiment
from fedvit.core.tree import Tree
from fedvit.data.dataset import metrics_of, wants_auroc
from fedvit.engine.aggregate import check_aggregate
from fedvit.engine.client_store import ClientStore
from fedvit.engine.loop import Round, federate
from fedvit.engine.net import Net
from fedvit.engine.transport import Transport
from fedvit.network.payload_check import difference, down_of
from fedvit.network.site import Federation
from fedvit.runs.execute import begin_run, run_log
from fedvit.runs.kept import check_validation, refuse_over_network
from fedvit.runs.resume import refuse_changes
from fedvit.runs.write import Holding
from fedvit.split.plan import SplitPlan

log = logging.getLogger(__name__)
NETWORK = "network.json"  # in the run's folder: the run's ID at the sites, and the sites


class Gathering(Transport, Protocol):
    """A transport to sites that may connect and disconnect at any time."""

    trained: dict[str, int]  # by site: the last round whose training counted
    roster: dict[str, Holding]
    tests: dict[str, int]  # test images by site

    def gather(self, timeout: float) -> None:
        """Wait for the sites, and check that they agree with the server."""


def run_name(folder: Path, *, resume: bool) -> str:
    """Return the run's ID at the sites: a new one, or the saved one if the run is resumed."""
    saved = folder / NETWORK
    if resume and saved.is_file():
        return str(json.loads(saved.read_text())["run"])
    return uuid.uuid4().hex


def write_network(folder: Path, run: str, federation: Federation) -> None:
    """Write network.json; call this before run.toml is written, because resuming a run needs both files."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / NETWORK, {"run": run, "sites": list(federation.sites)})


@contextmanager
def tell_errors(folder: Path) -> Iterator[None]:
    """Also write a user's mistake to error.txt in the run's folder, for a run that was started by another process."""
    (folder / "error.txt").unlink(missing_ok=True)
    try:
        yield
    except UserError as problem:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "error.txt", f"{problem}\n")
        raise


def serve_sites(
    transport: Gathering,
    experiment: Experiment,
    net: Net,
    federation: Federation,
    folder: Path,
    run: str,
    start_timeout: float,
    *,
    resume: bool,
) -> Iterator[Round]:
    """Yield the rounds of a run with these sites, as `runs.execute.run_rounds` does."""
    begin = time.perf_counter()
    check_servable(experiment, net, federation.sites)
    torch.set_num_threads(experiment.run.threads)
    again = resume and (folder / "run.toml").is_file()
    if again:
        refuse_changes(folder, experiment)
    elif (folder / "run.toml").is_file():
        raise UserError(f"{folder} already holds a run: continue it with resume=true, or give another out=")
    with run_log() as log_to:
        transport.gather(start_timeout)
        store = ClientStore(folder / "checkpoint", in_ram=True)  # stays empty, because the sites keep their memories
        write_network(folder, run, federation)
        at_work = begin_run(
            experiment, folder, net, store, federation.sites, description(federation), log_to, resume=again,
            since=begin, started_by=f"a server of {len(federation.sites)} sites",
        )  # fmt: skip
        transport.trained.update(last_rounds(at_work.past.rows))
        score = _server_score(net, experiment, federation)
        loop = federate(net.federated, at_work.server, transport, experiment, score, transport.tests)
        loop = _acceptable(loop, net, federation)
        yield from at_work.record(loop, transport.roster, metrics_of(experiment.data, len(federation.classes)))
        at_work.finish()


def _acceptable(loop: Iterator[Round], net: Net, federation: Federation) -> Iterator[Round]:
    """Yield rounds from which the sites would go on; end the run before it saves a round that they would refuse."""
    for done in loop:
        for name in federation.sites:
            agreed = down_of(net, federation.sites, name, done.server.round)
            wrong = difference(net.federated.dispatch(done.server, name), agreed)
            if wrong is not None:
                number = done.server.round
                raise DivergedError(
                    f"after round {number}, the sites would refuse the server's weights: {wrong}. The run is saved up "
                    f"to round {number - 1}; start it again without the site that caused this, or with a smaller rate"
                )
        yield done


def check_servable(experiment: Experiment, net: Net, sites: Sequence[str]) -> None:
    """Refuse a method that cannot run over Flower between sites, or not with these settings."""
    label = experiment.label
    refuse_over_network(experiment)
    check_validation(experiment, None)
    if isinstance(net.plan, SplitPlan):
        raise UserError(f"{label} is a split learning method, which runs over gRPC: use fedvit split-server")
    if experiment.privacy.on:
        raise UserError(
            "differential privacy works on one machine only so far: leave [privacy] out, or run without a network"
        )
    if net.plan.not_between_sites is not None:
        raise UserError(f"{label} {net.plan.not_between_sites}")
    check_aggregate(experiment, net, sites)


def last_rounds(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the last round whose training counted, by site."""
    return {name: row["round"] for row in rows for name in row["cohort"] if name not in row["failed"]}


def description(federation: Federation) -> dict[str, Any]:
    """Return the content of split.json for a run whose images only their owners can list."""
    return {
        "hash": "",
        "clients": {name: {} for name in federation.sites},
        "unseen": [],
        "class_names": list(federation.classes),
        "network": True,
    }


def _server_score(net: Net, experiment: Experiment, federation: Federation) -> Any:
    """Return a function that scores the server's model on the test images of all sites, from their counts.

    Return None if the sites do not test that very model, or if AUROC is wanted, which counts do not determine.
    """
    after = experiment.run.evaluate == "after"
    if not after or wants_auroc(experiment.data, len(federation.classes)):
        return None
    if not net.clients_test_the_servers(list(federation.sites)):
        return None

    def score(shared: Tree, round_: int, scores: Mapping[str, Mapping[str, float]]) -> dict[str, float] | None:
        counted = [any(f"_{CONFUSION}_" in key for key in score) for score in scores.values()]
        return pooled(scores) if len(scores) == len(federation.sites) and all(counted) else None

    return score
