"""A SuperLink and SuperNodes as Flower starts them, for tests that kill and restart them."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from fedvit.core.settings import Experiment
from fedvit.network.flower.template import PROFILE, for_trial, write_app
from fedvit.network.flower.trial import Trial, free_port, last_lines, submit, superlink, supernode
from fedvit.network.site import Federation
from fedvit.runs.folder import Run

PATIENCE = 300.0
MAY_FALL_SILENT = pytest.mark.flaky(reruns=1, only_rerun="did not come in")  # a node of Flower's, once in many runs


class Field:
    """One SuperLink, and a SuperNode for each site, each of which may be stopped and started again."""

    def __init__(self, folder: Path, sites: list[str]):
        self.folder, self.sites = folder, sites
        self.trial = Trial(folder, free_port())
        self.trial.write_profile({"insecure": True})
        self.stacks: dict[str, ExitStack] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *security: str, **told: str) -> None:
        """`superlink`, or a site's name with more of its --node-config."""
        stack = ExitStack()
        if name == "superlink":
            process = stack.enter_context(superlink(self.trial, *security))
        else:
            own = {"site": name, "state": str(self.state_of(name)), "trial": "yes", **told}
            process = stack.enter_context(supernode(self.trial, name, own, *security))
        self.stacks[name], self.processes[name] = stack, process

    def stop(self, name: str) -> None:
        self.stacks.pop(name).close()

    def signal(self, name: str, kind: signal.Signals) -> None:
        """To a process and all its children."""
        os.killpg(self.processes[name].pid, kind)

    def kill(self, name: str) -> None:
        self.signal(name, signal.SIGKILL)
        self.stop(name)

    def state_of(self, site: str) -> Path:
        return self.folder / "sites" / site

    def said(self, site: str) -> str:
        """The site's own log."""
        file = self.state_of(site) / "log.txt"
        return file.read_text() if file.is_file() else ""

    def flower_log(self, number: str) -> str:
        """What Flower's user sees of a run: the output of its ServerApp."""
        done = subprocess.run(
            ["flwr", "log", number, PROFILE, "--show"],
            env=self.trial.environment(), capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.stdout + done.stderr

    def last_words(self) -> str:
        """How all processes are and what they and the run said last, for a test that failed."""
        status = {name: process.poll() for name, process in self.processes.items()}
        logs = [*self.trial.home.glob("*.log"), *self.folder.glob("**/log.txt"), *self.folder.glob("*/error.txt")]
        said = [f"--- {file.relative_to(self.folder)}\n{last_lines(file)}" for file in sorted(logs)]
        return "\n".join([f"exit statuses: {status}", *said])

    def submit(self, experiment: Experiment, out: Path, **told: object) -> str:
        """Start a run whose folder is `out`."""
        experiment, federation, _, _ = for_trial(experiment)
        return self.submit_app(experiment, federation, out, **told)

    def submit_app(self, experiment: Experiment, federation: Federation, out: Path, **told: object) -> str:
        app = out.with_name(out.name + "-app")
        if not app.exists():
            write_app(app, experiment, federation, str(out))
        return submit(self.trial, app, {key.replace("_", "-"): value for key, value in told.items()})

    def finish(self, experiment: Experiment, out: Path, **told: object) -> Run:
        self.submit(experiment, out, **told)
        return self.wait(out)

    def wait(self, out: Path) -> Run:
        until(lambda: Run(out).finished or (out / "error.txt").is_file(), f"the end of {out.name}")
        return Run(out)


@contextmanager
def ending(made: Field) -> Iterator[Field]:
    """Whatever is left at the end is stopped; a test that fails shows what all said."""
    try:
        yield made
    except AssertionError as problem:
        problem.add_note(made.last_words())
        raise
    finally:
        for name in list(made.stacks):
            made.stop(name)


@contextmanager
def field(folder: Path, sites: list[str]) -> Iterator[Field]:
    """All started."""
    with ending(Field(folder, sites)) as made:
        for name in ("superlink", *sites):
            made.start(name)
        yield made


def until(happens: Callable[[], bool], what: str, patience: float = PATIENCE) -> None:
    end = time.monotonic() + patience
    while not happens():
        assert time.monotonic() < end, f"{what} did not come in {patience:g} s"
        time.sleep(0.2)
