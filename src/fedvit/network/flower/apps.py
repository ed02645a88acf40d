"""Flower's ServerApp and ClientApp for an experiment."""

import json
import logging
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedvit.config.load import read_tables
from fedvit.config.resolve import resolve
from fedvit.core.errors import UserError
from fedvit.core.files import make_private, private_files
from fedvit.core.payload import Payload
from fedvit.core.settings import Experiment
from fedvit.engine.net import make_net
from fedvit.network.boundary import read_order
from fedvit.network.flower.nodes import pinned_names
from fedvit.network.flower.records import from_records, to_records
from fedvit.network.flower.sites import FlowerSites
from fedvit.network.policy import Policy, described, read_policy
from fedvit.network.server import run_name, serve_sites, tell_errors
from fedvit.network.site import Federation, Refusal, Site, guarded, note
from fedvit.runs.lock import only_run

log = logging.getLogger(__name__)


def read_app(folder: Path, data_dir: str | None = None, threads: str | None = None) -> tuple[Experiment, Federation]:
    """Read experiment.toml and federation.toml of a Flower app that `fedvit flower` wrote."""
    agreed = tomllib.loads((folder / "federation.toml").read_text())
    federation = Federation(tuple(agreed["sites"]), tuple(agreed["classes"]))
    tables = read_tables(folder / "experiment.toml")
    tables["data"].pop("dir", None)  # no one but this machine says where its files are
    if data_dir:
        tables["data"]["dir"] = data_dir
    if threads:
        tables["run"]["threads"] = threads
    return resolve(tables, federation.sites), federation


def server_app(folder: Path) -> ServerApp:
    """Return the app of a SuperLink, which runs the rounds; its run-config holds what differs between starts."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        told = context.run_config
        out = Path(str(told["out"]))
        out.mkdir(parents=True, exist_ok=True)
        logging.getLogger("fedvit").addHandler(logging.StreamHandler())  # for `flwr log`
        logging.getLogger("flwr").addFilter(one_sentence)
        with tell_errors(out), only_run(out):
            experiment, federation = read_app(folder, str(told["data-dir"]))
            if not 0 <= int(told["min-sites"]) <= len(federation.sites):
                raise UserError(f"min-sites expects 0 to {len(federation.sites)}, found {told['min-sites']}")
            net = make_net(experiment, len(federation.classes), torch.device("cpu"))
            resume = bool(told["resume"])
            run = run_name(out, resume=resume)
            least = int(told["min-sites"]) or len(federation.sites)
            seconds, at_once = float(told["round-timeout"]), int(told["at-once"])
            sites = FlowerSites(grid, experiment, federation, net, run, seconds, least, at_once, pinned_names())
            for _ in serve_sites(
                sites, experiment, net, federation, out, run, float(told["start-timeout"]), resume=resume
            ):
                pass

    return app


def one_sentence(record: logging.LogRecord) -> bool:
    """Reduce Flower's report of a user's mistake, such as a site's refusal, from a traceback to what it says."""
    problem = record.exc_info[1] if record.exc_info else None
    while problem is not None and not isinstance(problem, UserError):
        problem = problem.__cause__
    if problem is not None:
        record.msg, record.args, record.exc_info, record.exc_text = f"the run ended: {problem}", (), None, None
    return True


def client_app(folder: Path) -> ClientApp:
    """Return the app of a SuperNode; its --node-config says which site it is."""
    app = ClientApp()

    @app.query("hello")
    def hello(message: Message, context: Context) -> Message:
        return answered(folder, message, context, "hello")

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return answered(folder, message, context, "train")

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return answered(folder, message, context, "evaluate")

    return app


def answered(folder: Path, message: Message, context: Context, task: str) -> Message:
    """Return a reply whatever happens, because Flower's own reply to an exception would contain its text."""
    told = {key: str(value) for key, value in context.node_config.items()}
    name = told.get("site", "")
    if not name or not told.get("state"):
        found: Any = Refusal("mistake", "--node-config must contain site= and state=")
    else:
        state = Path(told["state"])
        with private_files():
            found = guarded(state, name, task, lambda: answer(folder, told, message.content, task))
    if isinstance(found, Refusal):
        log.warning("site %s: %s: %s: %s", name, task, found.code, found.text)  # in the SuperNode's output
        found = to_records(Payload(), {"code": found.code, "text": found.text, "site": name})
    return Message(found, reply_to=message)


def answer(folder: Path, told: Mapping[str, str], records: RecordDict, task: str) -> RecordDict:
    """Answer one message under a lock, because Flower starts a process per message and does not wait for the last."""
    make_private(Path(told["state"]))
    with FileLock(Path(told["state"]) / "lock"):
        return _answer_alone(folder, told, records, task)


def _answer_alone(folder: Path, told: Mapping[str, str], records: RecordDict, task: str) -> RecordDict:
    content, about = from_records(records)
    order = read_order(content, about) if task != "hello" else None
    note(Path(told["state"]), told["site"], task if order is None else f"round {order.round}: {task}")
    experiment, federation = read_app(folder, told.get("data-dir"), told.get("threads"))
    own, rules = told.get("data"), told.get("policy")
    if not own and told.get("trial") != "yes":
        raise UserError("--node-config must contain data=, the folder or manifest of this site's images")
    site = Site(
        experiment,
        federation,
        told["site"],
        Path(told["state"]),
        folder=Path(own) if own else None,
        policy=read_policy(Path(rules)) if rules else None,
    )
    if order is None:
        if own and not rules:
            note(site.state, site.name, described(Policy()))
            log.warning("site %s: %s", site.name, described(Policy()))
        found = site.hello()
        return to_records(Payload(), {**found, "common": json.dumps(found["common"])})
    work = site.train if task == "train" else site.evaluate
    up = work(order.run, order.continues, content)
    return to_records(up, {"run": order.run, "round": content.scalars["round"]})
