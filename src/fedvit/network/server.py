"""A run whose clients are real sites: the same loop and files as in one process, without any image at the server."""

import json
import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from filelock import FileLock, Timeout

from fedvit.core.errors import UserError
from fedvit.core.files import write_json, write_text
from fedvit.core.metrics import AUROC, CONFUSION, METRICS, pooled
from fedvit.core.settings import Experiment
from fedvit.core.tree import Tree
from fedvit.data.dataset import wants_auroc
from fedvit.engine.client_store import ClientStore
from fedvit.engine.loop import Round, federate
from fedvit.engine.net import Net
from fedvit.engine.system import peak_rss_mb
from fedvit.engine.transport import Transport
from fedvit.network.site import Federation
from fedvit.runs.execute import STARTED, FinishedRounds, load_server, record, run_log
from fedvit.runs.folder import Run
from fedvit.runs.resume import refuse_changes
from fedvit.runs.tracking import check_tracker
from fedvit.runs.write import Holding, open_folder, write_summary
from fedvit.split.plan import SplitPlan

log = logging.getLogger(__name__)
NETWORK = "network.json"  # in a run's folder: its name at the sites, and how it ended


class Gathering(Transport, Protocol):
    """A transport to sites that come and go."""

    trained: dict[str, int]
    roster: dict[str, Holding]
    tests: dict[str, int]  # test images by site

    def gather(self, timeout: float) -> None:
        """Wait for the sites and compare them with the server."""


def run_name(folder: Path, *, resume: bool) -> str:
    """The run's name at the sites: a new one, or that of the run that goes on."""
    saved = folder / NETWORK
    if resume and saved.is_file():
        return str(json.loads(saved.read_text())["run"])
    return uuid.uuid4().hex


def write_network(folder: Path, run: str, federation: Federation) -> None:
    write_json(folder / NETWORK, {"run": run, "sites": list(federation.sites)})


@contextmanager
def only_server(folder: Path) -> Iterator[None]:
    """Two servers must not write into one folder."""
    try:
        with FileLock(folder / "lock", timeout=0):
            yield
    except Timeout as problem:
        raise UserError(f"another server is at work in {folder}: stop it first, or give another out=") from problem


@contextmanager
def tell_errors(folder: Path) -> Iterator[None]:
    """Leave word of a mistake in the run's folder, for whoever started it from elsewhere."""
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
    """The rounds of a run with these sites, as `experiment.run_rounds` yields them."""
    begin = time.perf_counter()
    check_servable(experiment, net)
    torch.set_num_threads(experiment.run.threads)
    again = resume and (folder / "run.toml").is_file()
    if again:
        refuse_changes(folder, experiment)
    elif (folder / "run.toml").is_file():
        raise UserError(f"{folder} already holds a run: continue it with resume=true, or give another out=")
    check_tracker(experiment)
    with run_log() as log_to:
        transport.gather(start_timeout)
        store = ClientStore(folder / "checkpoint", in_ram=True)  # stays empty: memories are at the sites
        open_folder(folder, experiment, description(federation), resume=again)
        write_network(folder, run, federation)
        log_to(folder / "log.txt")
        log.info("%s a server of %d sites", STARTED, len(federation.sites))
        server = net.server(federation.sites)
        if again:
            server = load_server(folder, server, store)
        past = FinishedRounds.of(folder, server.round, experiment)
        transport.trained.update(last_rounds(past.rows))
        setup = time.perf_counter() - begin
        loop = federate(
            net.federated, server, transport, experiment, server_score(net, experiment, federation), transport.tests
        )
        metrics = (*METRICS, AUROC) if wants_auroc(experiment.data, len(federation.classes)) else METRICS
        yield from record(loop, folder, experiment, past, store, transport.roster, metrics)
        write_summary(Run(folder), experiment, net, past.rows, None, None, setup + past.seconds, peak_rss_mb())


def check_servable(experiment: Experiment, net: Net) -> None:
    """Refuse what makes no sense where nobody holds all images."""
    label = experiment.label
    if isinstance(net.plan, SplitPlan):
        raise UserError(f"{label} is split learning, whose messages go over gRPC: fedvit split-server")
    if net.plan.not_between_sites is not None:
        raise UserError(f"{label} {net.plan.not_between_sites}")


def last_rounds(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """For every site the last round whose training counted."""
    return {name: row["round"] for row in rows for name in row["cohort"] if name not in row["failed"]}


def description(federation: Federation) -> dict[str, Any]:
    """split.json of a run whose images nobody but their owners can list."""
    return {
        "hash": "",
        "clients": {name: {} for name in federation.sites},
        "unseen": [],
        "class_names": list(federation.classes),
        "network": True,
    }


def server_score(net: Net, experiment: Experiment, federation: Federation) -> Any:
    """The server's model on all sites' test images, from their counts, where every site tests that very model."""
    after = experiment.run.evaluate == "after"
    if not after or wants_auroc(experiment.data, len(federation.classes)):
        return None
    if not net.clients_test_the_servers(list(federation.sites)):
        return None

    def score(shared: Tree, round_: int, scores: Mapping[str, Mapping[str, float]]) -> dict[str, float] | None:
        counted = [any(f"_{CONFUSION}_" in key for key in score) for score in scores.values()]
        return pooled(scores) if len(scores) == len(federation.sites) and all(counted) else None

    return score
