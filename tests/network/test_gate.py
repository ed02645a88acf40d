"""A study as `fedvit provision` sets it up, with its own services: who may start code, and who may take part."""

import http.client
import os
import shutil
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from PIL import Image
from typer.testing import CliRunner

from fedvit.cli.main import app
from fedvit.network.flower import guard
from fedvit.network.flower.nodes import read_nodes
from fedvit.network.flower.trial import Trial, free_port, last_lines
from fedvit.network.provision.keys import write_node_key
from fedvit.runs.folder import Run
from tests.network.field import MAY_FALL_SILENT, until
from tests.network.strangers import as_stranger
from tests.network.units import command_of, output_of, started

SITES = ("north", "south")
pytestmark = [
    pytest.mark.attack,
    MAY_FALL_SILENT,
    pytest.mark.skipif(
        os.environ.get("CI") != "true" and shutil.which("nginx") is None,
        reason="needs nginx, which is not installed here; .ci/run installs it",
    ),
]


def fedvit(*words: object) -> str:
    done = CliRunner().invoke(app, ["provision", *map(str, words)])
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


def refused(*words: object) -> str:
    done = CliRunner().invoke(app, ["provision", *map(str, words)])
    assert done.exit_code == 2, done.output
    return " ".join(done.output.split())


class Study:
    """The folders of a study and its services."""

    def __init__(self, folder: Path):
        self.port, self.folder = free_port(), folder / "trial"
        file = folder / "experiment.toml"
        chosen = {"data": {"class_names": "dark,light"}, "model": {"image_size": 16, "patch_size": 4}}
        file.write_text(tomli_w.dumps({**chosen, "method": {"name": "fedper"}, "train": {"rounds": 1, "epochs": 1}}))
        told = ("--sites", ",".join(SITES), "--host", "localhost", "--port", self.port, "--out", self.folder)
        fedvit(file, *told)
        self.server = self.folder / "server"
        (self.superlink,) = self.server.glob("*-superlink.service")
        (self.gate,) = self.server.glob("*-gate.service")
        self.images = folder / "images"

    def site(self, name: str) -> Path:
        return self.folder / "sites" / name

    def service(self, name: str) -> Path:
        return self.site(name) / f"fedvit-trial-{name}.service"

    def prepare(self, name: str) -> str:
        rng = np.random.default_rng(SITES.index(name))
        for label, bright in (("dark", 60), ("light", 180)):
            (self.images / name / label).mkdir(parents=True)
            for number in range(12):
                pixels = np.clip(rng.normal(bright, 30, (16, 16, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(self.images / name / label / f"{number}.png")
        return fedvit("--site", name, "--data", self.images / name, "--out", self.site(name))

    def register(self, name: str) -> str:
        return fedvit("--register", self.site(name) / f"{name}.pub", "--out", self.server)

    def asks(self, path: str, method: str = "POST") -> int:
        """The status of a request without a signature, by somebody who has the certificate of the authority."""
        trust = ssl.create_default_context(cafile=str(self.server / "ca.crt"))
        with closing(http.client.HTTPSConnection("localhost", self.port, context=trust, timeout=60)) as connection:
            connection.putrequest(method, path)
            connection.putheader("Content-Length", "0")
            connection.putheader("Content-Type", "application/x-protobuf")
            connection.endheaders()
            with connection.getresponse() as answer:
                return answer.status

    def foreign_node(self, stack: ExitStack, name: str, *key: str) -> Path:
        """Start a SuperNode that was not registered; return its service, which is that of north except for its key."""
        north, home = self.site("north"), self.folder / name
        shutil.copytree(north, home, ignore=shutil.ignore_patterns("state", "flower", "*.key", "*.pub"))
        unit = (home / self.service("north").name).rename(home / f"{name}.service")
        for file in (home / "node.toml", unit):
            file.write_text(file.read_text().replace(str(north), str(home)))
        words = unit.read_text()
        port = words.split("--port ")[1].split()[0]
        own = " ".join(f"--auth-supernode-private-key {file}" for file in key)
        words = words.replace(f"--auth-supernode-private-key {home}/north.key", own)
        unit.write_text(words.replace(f"--port {port}", f"--port {free_port()}"))
        stack.enter_context(started(unit))
        return unit


def answers(port: int) -> Callable[[], bool]:
    def found() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    return found


@contextmanager
def telling(study: Study) -> Iterator[None]:
    try:
        yield
    except AssertionError as problem:
        logs = [*study.folder.glob("**/*.log"), *study.folder.glob("**/log.txt"), *study.folder.glob("**/error.txt")]
        problem.add_note("\n".join(f"--- {file}\n{last_lines(file)}" for file in logs))
        raise


def test_a_provisioned_study_runs_and_everything_else_is_refused(tmp_path: Path) -> None:
    study = Study(tmp_path)
    with ExitStack() as stack:
        stack.enter_context(telling(study))
        for unit in (study.superlink, study.gate):
            stack.enter_context(started(unit))
        keys = [study.prepare(name) for name in SITES]
        own = int(command_of(study.superlink)[command_of(study.superlink).index("--port") + 1])
        until(lambda: answers(own)() and answers(study.port)(), "the services")
        for name, said in zip(SITES, keys, strict=True):
            study.register(name)
            assert read_nodes(study.server / "nodes.json")[name]["fingerprint"] in said

        # A second key for a registered name, and a registered key for a second name.
        write_node_key(tmp_path / "evil.key", tmp_path / "evil.pub", "north")
        assert "already has another key" in refused("--register", tmp_path / "evil.pub", "--out", study.server)
        (tmp_path / "again.pub").write_text((study.site("north") / "north.pub").read_text().replace("north", "south"))
        assert "is the key of the site north" in refused("--register", tmp_path / "again.pub", "--out", study.server)
        assert "was registered already" in study.register("north")

        # Nodes that were never registered.
        for name in SITES:
            stack.enter_context(started(study.service(name)))
        strange = study.foreign_node(stack, "strange", str(tmp_path / "evil.key"))
        keyless = study.foreign_node(stack, "keyless")

        done = subprocess.run([study.server / "flwr", "run", "app"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

        # Flower's own command through the gate, by somebody with the certificate; then the same calls by hand.
        outsider = Trial(tmp_path / "outsider", study.port, "localhost")
        outsider.write_profile({"root-certificates": str(study.server / "ca.crt")})
        environment = outsider.environment()
        for words in (["run", study.server / "app"], ["supernode", "register", tmp_path / "evil.pub"]):
            done = subprocess.run(["flwr", *words], env=environment, capture_output=True, text=True, check=False)
            assert done.returncode != 0
            assert "403" in done.stdout + done.stderr
        for path in (
            "/v1/control/start-run", "/v1/control/list-runs", "/v1/fleet/register-node", "/v1/fleet/unregister-node",
            "/v1/runtime/acquire-task", "/docs", "/health", "/", "//v1/control/start-run",
            "/v1/fleet/../control/start-run", "/v1/fleet/%2e%2e/control/start-run", "/v1/fleet/pull-messages/x",
            "/v1/control/start-run?/v1/fleet/pull-messages", "/v1/fleet/pull-messages%00", "/v1/%63ontrol/start-run",
        ):  # fmt: skip
            assert study.asks(path) in (400, 403), path
        assert study.asks(guard.SIGNED[0], "GET") == 403
        assert '"POST /v1/control/start-run HTTP/1.1" 403' in (study.server / "gate" / "access.log").read_text()
        assert {study.asks(path) for path in guard.SIGNED} <= {400, 401, 415, 422}  # without a signature
        if os.geteuid() == 0:  # another user of the server's own machine, who goes past the gate
            passed_by = Trial(tmp_path / "other", own, "localhost")
            passed_by.write_profile({"root-certificates": str(study.server / "ca.crt")})
            done = as_stranger(["flwr", "run", study.server / "app"], passed_by.environment())
            assert done.returncode != 0
            assert "403" in done.stdout + done.stderr

        out = study.server / "run"
        until(lambda: Run(out).finished or (out / "error.txt").is_file(), "the end of the run")
        # Whoever runs the server starts another app: the sites do not run it.
        evil, mark = tmp_path / "evil", tmp_path / "stolen"
        shutil.copytree(study.server / "app", evil)
        client = evil / "fedvit_app" / "client_app.py"
        client.write_text(f"open({str(mark)!r}, 'w')\n{client.read_text()}")
        told = f'out="{tmp_path / "elsewhere"}" round-timeout=1.0'
        subprocess.run([study.server / "flwr", "run", evil, "--run-config", told], capture_output=True, check=True)
        assert Run(out).finished, (out / "error.txt").read_text()
        assert [row["failed"] for row in Run(out).rounds] == [[]]
        assert (study.site("north") / "state" / "log.txt").is_file()
        for unit in (strange, keyless):
            assert "SuperNode ID" not in output_of(unit)
            assert not (unit.parent / "state").exists()
        ignored = "client_app.py is another"
        until(lambda: all(ignored in output_of(study.service(name)) for name in SITES), "the sites' refusal")
        assert not mark.exists()
