"""A trial over Flower on this machine: a SuperLink and one SuperNode per client, which end with the run."""

import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from random import SystemRandom
from typing import Any, NamedTuple
from urllib.parse import quote

import psutil
import tomli_w
import torch

from fedvit.core.errors import UserError
from fedvit.core.files import write_json
from fedvit.core.settings import Experiment
from fedvit.engine.net import make_net
from fedvit.engine.system import free_ram
from fedvit.network.flower import guard
from fedvit.network.flower.template import INSECURE, PROFILE, QUIET, for_trial, need_flower, write_app
from fedvit.network.server import check_servable
from fedvit.runs.folder import Run
from fedvit.runs.lock import TRIAL_LOCK, only_run
from fedvit.runs.resume import data_errors_first, standing
from fedvit.runs.write import about_images

SECONDS_BETWEEN_QUESTIONS = 20.0
STARTING = 120.0  # seconds for a SuperLink on a busy machine
LOOPBACK = "127.0.0.1"
PORTS = range(20000, 32000)  # below the ports that outgoing connections get at random
TURN = count(SystemRandom().randrange(len(PORTS)))  # so that consecutive calls return different ports
ONE_PROCESS = 10**9  # bytes of RAM, with torch and a small ViT

log = logging.getLogger(__name__)


class FollowedRound(NamedTuple):
    """A round that another process finished: its line in rounds.jsonl, and its seconds by phase."""

    row: dict[str, Any]
    seconds: dict[str, float]


@dataclass(frozen=True)
class Trial:
    """The folder that holds all files of a trial, and the address at which its processes find each other."""

    folder: Path
    port: int
    host: str = LOOPBACK
    inside: tuple[str, ...] = ()  # a prefix of every command, such as ip netns exec NAME

    @property
    def home(self) -> Path:
        """Flower's own folder."""
        return self.folder / "flower"

    def log_of(self, name: str) -> Path:
        """Return the file with the output of `superlink` or of a SuperNode, given by its `node_name`."""
        return self.home / f"{name}.log"

    def write_profile(self, connection: Mapping[str, Any]) -> None:
        """Write the profile that tells Flower's commands which SuperLink to use."""
        profile = {"address": f"{self.host}:{self.port}", **connection}
        self.home.mkdir(parents=True, exist_ok=True)
        (self.home / "config.toml").write_text(tomli_w.dumps({"superlink": {"default": PROFILE, PROFILE: profile}}))

    def environment(self) -> dict[str, str]:
        own = {**QUIET, **os.environ, "FLWR_HOME": str(self.home), "PYTHONUNBUFFERED": "1"}
        own["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), own.get("PATH", "")])
        return own


def start_or_resume_trial(
    experiment: Experiment, folder: Path, *, resume: bool, workers: int | None = 1
) -> Iterator[FollowedRound]:
    """Do what `runs.resume.start_or_resume` does, but over Flower on this machine."""
    if (workers or 1) > 1:
        log.warning("over Flower, every client runs in its own process: --workers has no effect")
    with data_errors_first(experiment):
        found = standing(experiment, folder, resume=resume)
    return iter(()) if found == "finished" else run_trial(experiment, folder, resume=found == "begun")


def run_trial(experiment: Experiment, folder: Path, *, resume: bool = False) -> Iterator[FollowedRound]:
    """Run `--engine flower`: start a SuperLink and one SuperNode per client on loopback, and yield finished rounds."""
    need_flower()
    experiment, federation, dataset, partition = for_trial(experiment)
    net = make_net(experiment, dataset.classes, torch.device("cpu"))
    check_servable(experiment, net, federation.sites)
    folder = folder.resolve()
    with ExitStack() as stack:
        stack.enter_context(only_run(folder, TRIAL_LOCK))  # its server takes the lock of the run itself
        trial = Trial(folder, free_port())
        shutil.rmtree(trial.home, ignore_errors=True)
        (folder / "error.txt").unlink(missing_ok=True)
        app = trial.home / "app"
        write_app(app, experiment, federation, str(folder))
        trial.write_profile({"insecure": True})
        data_dir = str(experiment.data.folder.resolve()) if experiment.data.folder else ""
        stack.enter_context(_end_on_sigterm())
        processes = {"superlink": stack.enter_context(superlink(trial))}
        for name in federation.sites:
            told = {"site": name, "state": str(folder / "sites" / quote(name, safe="")), "data-dir": data_dir}
            told["trial"] = "yes"  # it acts as a client of the experiment's own data
            processes[node_name(name)] = stack.enter_context(supernode(trial, name, told))
        start = {"resume": resume, "data-dir": data_dir, "at-once": _at_once(len(federation.sites))}
        old = (folder / "summary.json").read_bytes() if Run(folder).finished else None  # of a run that is extended
        number = submit(trial, app, start)
        done = 0 if not resume else len(Run(folder).rounds)
        yield from follow(trial, processes, folder, number, done, old)
    write_json(folder / "split.json", {**partition.to_json(), **about_images(dataset, partition), "network": True})


def _at_once(sites: int) -> int:
    """Return how many clients may work at the same time; each is a process with its own model."""
    return max(1, min(sites, 2 * (os.cpu_count() or 1), free_ram() // (2 * ONE_PROCESS)))


@contextmanager
def _end_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end the run and all its processes, as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def submit(trial: Trial, app: Path, told: Mapping[str, Any]) -> str:
    """Submit the app to the SuperLink, and return Flower's ID of the run."""
    words = " ".join(f"{key}={json.dumps(value)}" for key, value in told.items())
    end = time.monotonic() + 60
    while True:  # the SuperLink may need a moment before it listens
        done = subprocess.run(
            [*trial.inside, "flwr", "run", str(app), PROFILE, "--run-config", words, "--format", "json"],
            env=trial.environment(), capture_output=True, text=True, check=False,
        )  # fmt: skip
        try:
            answer = json.loads(done.stdout)
        except ValueError:
            answer = {}
        if answer.get("success"):
            return str(answer["run-id"])
        if time.monotonic() > end:
            raise RuntimeError(f"Flower did not accept the run: {done.stdout}{done.stderr}")
        time.sleep(1)


def follow(
    trial: Trial,
    processes: Mapping[str, subprocess.Popen[bytes]],
    folder: Path,
    number: str,
    done: int,
    old: bytes | None = None,
) -> Iterator[FollowedRound]:
    """Yield the rounds as they appear in the run's folder, until the folder or Flower says that the run is over."""
    run, asked = Run(folder), time.monotonic()

    def finished() -> bool:
        return run.finished and (folder / "summary.json").read_bytes() != old

    while True:
        over = finished() or (folder / "error.txt").is_file()
        if not over and time.monotonic() > asked + SECONDS_BETWEEN_QUESTIONS:
            over, asked = _is_over(trial, number), time.monotonic()
        rows, timings = run.rounds, run.timings
        while done < min(len(rows), len(timings)):
            yield FollowedRound(rows[done], timings[done]["seconds"])
            done += 1
        if over:
            break
        _check_alive(trial, processes)
        time.sleep(0.5)
    if not finished():
        told = folder / "error.txt"
        if told.is_file():
            raise UserError(told.read_text().strip())
        raise RuntimeError(f"the run over Flower ended before its last round; see the logs in {trial.home}")


def _check_alive(trial: Trial, processes: Mapping[str, subprocess.Popen[bytes]]) -> None:
    """Raise UserError if a process has ended, because Flower itself does not report this."""
    for name, process in processes.items():
        if process.poll() is not None:
            raise UserError(
                f"{name} ended with status {process.returncode} before the run did; --resume continues after the last "
                f"finished round. The last lines of {trial.log_of(name)}:\n{last_lines(trial.log_of(name))}"
            )


def _is_over(trial: Trial, number: str) -> bool:
    """Return whether the run is over according to Flower."""
    done = subprocess.run(
        [*trial.inside, "flwr", "list", PROFILE, "--run-id", number, "--format", "json"],
        env=trial.environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    try:
        (run,) = json.loads(done.stdout)["runs"]
    except (ValueError, KeyError):
        return False
    return str(run["status"]).startswith("finished")


def _guard(host: str) -> tuple[str, ...]:
    """Return the prefix of a command that serves its own user only, unless other machines have to reach it."""
    return (sys.executable, "-m", guard.__name__) if host == LOOPBACK else ()


@contextmanager
def superlink(trial: Trial, *security: str) -> Iterator[subprocess.Popen[bytes]]:
    words = [*_guard(trial.host), "flower-superlink", "--host", trial.host, "--port", str(trial.port)]
    words += security or INSECURE
    words += ["--disable-runtime-dependency-installation", "--database", str(trial.home / "state.db")]
    with daemon(words, trial, "superlink") as process:
        if trial.host == LOOPBACK:
            _wait_until_it_listens(trial, process)
        yield process


def _wait_until_it_listens(trial: Trial, process: subprocess.Popen[bytes]) -> None:
    """Wait for our own SuperLink, so that nothing else at its address can send code to our SuperNodes."""
    end = time.monotonic() + STARTING
    while (owner := guard.listener_at(trial.host, trial.port)) is None:
        _check_alive(trial, {"superlink": process})
        if time.monotonic() > end:
            raise RuntimeError(f"the SuperLink does not listen after {STARTING:g} s; see {trial.log_of('superlink')}")
        time.sleep(0.1)
    if owner != os.geteuid():
        raise UserError(f"another user's process has taken port {trial.port} of {trial.host}: start the run again")


@contextmanager
def supernode(trial: Trial, name: str, told: Mapping[str, str], *security: str) -> Iterator[subprocess.Popen[bytes]]:
    settings = " ".join(f"{key}={json.dumps(value)}" for key, value in told.items() if value)
    words = [*_guard(LOOPBACK), "flower-supernode", "--superlink", f"{trial.host}:{trial.port}"]
    words += security or INSECURE
    words += ["--host", LOOPBACK, "--port", str(free_port()), "--node-config", settings]
    with daemon(words, trial, node_name(name)) as process:
        yield process


def node_name(site: str) -> str:
    """Return the name of a site's SuperNode, as used in file names."""
    return f"supernode-{quote(site, safe='')}"


def last_lines(file: Path, lines: int = 20) -> str:
    return "\n".join(file.read_text(errors="replace").splitlines()[-lines:])


@contextmanager
def daemon(words: Sequence[str], trial: Trial, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process in its own group, and end the whole group, because Flower's children outlive their parents."""
    trial.home.mkdir(parents=True, exist_ok=True)
    with trial.log_of(name).open("ab") as stream:
        process = subprocess.Popen(
            [*trial.inside, *words], env=trial.environment(), stdout=stream, stderr=stream, stdin=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        _end_group(process)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Terminate the group and its children in groups of their own, then kill whatever is left."""
    children = []
    with suppress(psutil.Error):
        children = psutil.Process(process.pid).children(recursive=True)
    for kind in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, kind)
        for child in children:
            with suppress(psutil.Error):
                child.send_signal(kind)
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)


def free_port() -> int:
    """Return a free port that no recent call returned, because a process takes seconds until it listens."""
    for number in islice(TURN, len(PORTS)):
        port = PORTS[number % len(PORTS)]
        with socket.socket() as listener, suppress(OSError):
            listener.bind((LOOPBACK, port))
            return port
    raise UserError(f"no port of {LOOPBACK} from {PORTS[0]} to {PORTS[-1]} is free: end other processes that use them")
