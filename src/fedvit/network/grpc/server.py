"""The split learning server on a network: it holds the body; the heads, tails and images are at the clients.

A single thread answers all messages in the order in which they arrive, and the contributions of the clients are summed
in the order of the cohort. A run therefore ends with the same bits as in one process.
"""

import json
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from fedvit.core.errors import UserError, nearest
from fedvit.core.settings import Experiment
from fedvit.data.dataset import metrics_of
from fedvit.data.sources import load_dataset
from fedvit.engine.client_store import ClientStore
from fedvit.engine.loop import Round
from fedvit.engine.net import Net, make_net
from fedvit.engine.split_loop import federate_split
from fedvit.engine.system import reset_peak_rss
from fedvit.models.build import input_size
from fedvit.network.boundary import is_count
from fedvit.network.grpc.channel import (
    ConnectionRefusedByServerError,
    Listener,
)
from fedvit.network.grpc.checks import Checks
from fedvit.network.grpc.identity import Identity
from fedvit.network.grpc.remote_clients import RemoteClients
from fedvit.network.handshake import common, differences
from fedvit.network.server import NETWORK, description, last_rounds, run_name, write_network
from fedvit.network.site import Federation
from fedvit.runs.execute import begin_run, run_log
from fedvit.runs.kept import check_validation, is_over, refuse_over_network
from fedvit.runs.lock import only_run
from fedvit.runs.write import Holding
from fedvit.split.messages import Message
from fedvit.split.plan import SplitPlan

log = logging.getLogger(__name__)
NAME = re.compile(r"[^\s,/\\]{1,100}")


def _class_names_of(experiment: Experiment) -> tuple[str, ...]:
    """Return the class names from the settings or, in a trial, from the dataset itself."""
    if experiment.data.class_list:
        return experiment.data.class_list
    try:
        return load_dataset(experiment.data, input_size(experiment.model)).class_names
    except UserError as problem:
        raise UserError(
            "the server has no images and needs the class names: set data.class_names=a,b,c on both sides, in the "
            f"experiment file or with --set ({problem})"
        ) from problem


def _check_names(names: Sequence[str], method: str, net: Net) -> None:
    if not isinstance(net.plan, SplitPlan):
        raise UserError(
            f"{method} is not a split learning method: it runs over Flower, see `fedvit flower`; split-server accepts "
            "fedv, fedvz, festa, fesvibs, splitfed_v1, splitfed_v2 and minibatch_sfl"
        )
    wrong = [name for name in names if not NAME.fullmatch(name)]
    if wrong or not names:
        raise UserError(
            f"--clients expects names separated by commas, such as --clients north,south, found {wrong[:1]}"
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UserError(f"--clients lists the same name twice: {', '.join(twice)}; every client needs its own name")


def serve_split(
    experiment: Experiment,
    folder: Path,
    address: str,
    identity: Identity | None,
    names: Sequence[str],
    *,
    resume: bool = False,
    patience: float = 600.0,
    least: int = 1,
    said: Callable[[str], None] = log.info,
) -> Iterator[Round]:
    """Serve an experiment and yield its rounds; the files are complete when the iterator ends."""
    begin = time.perf_counter()
    reset_peak_rss()
    torch.set_num_threads(experiment.run.threads)
    if experiment.data.unseen:
        raise UserError(
            "data.unseen works only in one process: leave it out, and list in --clients only the sites that train"
        )
    refuse_over_network(experiment)
    check_validation(experiment, None)
    with run_log() as log_to, ExitStack() as stack:
        class_names = _class_names_of(experiment)
        net = make_net(experiment, len(class_names), torch.device(experiment.run.devices[0]))
        _check_names(names, str(experiment.method["name"]), net)
        store = ClientStore(folder / "checkpoint", in_ram=False)
        checks, mine = Checks(net, experiment.train.batch), common(experiment, net, class_names)
        run_id = _saved_id(folder, names) if resume else run_name(folder, resume=False)
        sizes: dict[str, int] = {}  # test images, as reported by the clients
        roster: dict[str, Holding] = {}

        def admit(hello: Mapping[str, Any]) -> None:
            _check_hello(hello, mine, names)
            name, test = str(hello["name"]), int(hello["test"])
            sizes[name], roster[name] = test, Holding(int(hello["train"]), test, int(hello["classes_here"]))

        listener = Listener(
            address, identity, admit, {"run": run_id}, clients=len(names), longest=checks.longest
        )  # fmt: skip
        over = stack.enter_context(_closing(listener))
        federation = Federation(tuple(names), class_names)
        stack.enter_context(only_run(folder))
        write_network(folder, run_id, federation)
        run = begin_run(
            experiment, folder, net, store, names, description(federation), log_to, resume=resume, since=begin
        )
        past, last = run.past, last_rounds(run.past.rows)
        remote = RemoteClients(listener, names, experiment, checks, last, patience=patience, least=least)
        said(f"listening on {address.rpartition(':')[0]}:{listener.port} for {', '.join(names)}")
        if not is_over(past.rows, experiment.run) and run.server.round < experiment.train.rounds:
            remote.gather(len(names), patience)
        loop = federate_split(net, run.server, remote, experiment, sizes)
        yield from run.record(loop, roster, metrics_of(experiment.data, len(class_names)))
        over.append(Message(experiment.train.rounds, "", 0, "finished").to_bytes())
        run.finish()


class _closing:  # noqa: N801, used as a statement
    """A context that stops a listener at its end, with a last message to the clients if there is one."""

    def __init__(self, listener: Listener):
        self.listener = listener
        self.last: list[bytes] = []

    def __enter__(self) -> list[bytes]:
        return self.last

    def __exit__(self, *problem: object) -> None:
        self.listener.close(self.last[0] if self.last else None)


def _check_hello(hello: Mapping[str, Any], mine: Mapping[str, Any], names: Sequence[str]) -> None:
    """Refuse a client that is not expected, reports impossible counts, or differs from the server."""
    name = hello["name"]
    if name not in names:
        raise ConnectionRefusedByServerError(f"no client {name!r} is expected here; {nearest(str(name), names)}")
    counts = [hello.get(key) for key in ("train", "test", "classes_here")]
    if not all(map(is_count, counts)):
        raise ConnectionRefusedByServerError("expected the numbers of training images, test images and classes")
    theirs = hello.get("common")
    found = differences(mine, theirs if isinstance(theirs, dict) else {})
    if found:
        raise ConnectionRefusedByServerError(f"{name} differs from the server in {', and in '.join(found)}")


def _saved_id(folder: Path, names: Sequence[str]) -> str:
    """Return the ID of a run that is resumed; it must have the same clients."""
    try:
        saved = json.loads((folder / NETWORK).read_text())
        found, before = str(saved["run"]), list(saved["sites"])
    except (OSError, ValueError, KeyError) as problem:
        raise UserError(f"{folder} is not a run of fedvit split-server: give another --out") from problem
    if before != list(names):
        raise UserError(f"{folder} began with --clients {','.join(before)}: give the same clients in the same order")
    return found
