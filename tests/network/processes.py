"""Servers and clients as processes of their own, on loopback, and certificates for them."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from fedvit.config.resolve import to_tables
from fedvit.core.settings import Experiment
from tests.conftest import tiny

NAMES = ("0", "1", "2")
LONG = 240  # seconds; for machines that are busy


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def wait_for(what: Callable[[], Any], seconds: float = LONG) -> Any:
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)
    return found


@dataclass
class Process:
    """A command of ours, its output in a file."""

    popen: "subprocess.Popen[bytes]"
    output: Path

    @property
    def text(self) -> str:
        return " ".join(self.output.read_text().split())

    def wait(self, expected: int = 0) -> str:
        code = self.popen.wait(LONG)
        assert code == expected, f"status {code}: {self.text}"
        return self.text

    def kill(self) -> None:
        self.popen.send_signal(signal.SIGKILL)
        self.popen.wait()


class Site:
    """A folder with an experiment, and the processes that a test starts in it."""

    def __init__(self, folder: Path, label: str, sets: Mapping[str, Any] | None = None, **flags: Any):
        self.folder, self.address, self.started = folder, free_address(), 0
        chosen = {"data.samples": 240, **(sets or {})}
        self.experiment: Experiment = tiny(label, chosen, **{"clients": 3, "cohort": 3, **flags})
        self.file = folder / "experiment.toml"
        self.file.write_text(tomli_w.dumps(to_tables(self.experiment)))
        self.processes: list[Process] = []
        self.out = folder / "server"

    def start(self, *arguments: object) -> Process:
        self.started += 1
        output = self.folder / f"output-{self.started}.txt"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "300", "NO_COLOR": "1"}
        command = [sys.executable, "-m", "fedvit", *map(str, arguments)]
        with output.open("wb") as stream:
            popen = subprocess.Popen(command, stdout=stream, stderr=stream, env=environment, start_new_session=True)
        self.processes.append(Process(popen, output))
        return self.processes[-1]

    def server(self, *more: object, security: Sequence[object] = ("--insecure",)) -> Process:
        names = ("--address", self.address, "--clients", ",".join(NAMES), "--out", self.out)
        return self.start("split-server", self.file, *names, *security, *more)

    def client(self, name: str, *more: object, security: Sequence[object] = ("--insecure",)) -> Process:
        own = ("--server", self.address, "--name", name, "--state", self.folder / f"client-{name}", "--wait", LONG)
        return self.start("split-client", self.file, *own, *security, *more)

    def rows(self) -> list[dict[str, Any]]:
        path = self.out / "rounds.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []

    def log(self, name: str) -> str:
        path = self.folder / f"client-{name}" / "log.txt"
        return path.read_text() if path.is_file() else ""

    @property
    def run(self) -> str:
        return str(json.loads((self.out / "network.json").read_text())["run"])


@contextmanager
def site(folder: Path, label: str, sets: Mapping[str, Any] | None = None, **flags: Any) -> Iterator[Site]:
    made = Site(folder, label, sets, **flags)
    try:
        yield made
    finally:
        for process in made.processes:
            if process.popen.poll() is None:
                process.kill()


class Authority:
    """Certificates as docs/split_deploy.md makes them."""

    def __init__(self, folder: Path, name: str = "ca"):
        self.folder, self.ca, self.ca_key = folder, folder / f"{name}.pem", folder / f"{name}.key"
        self.openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                     "-days", "2", "-subj", f"/CN={name}", "-keyout", self.ca_key, "-out", self.ca)  # fmt: skip

    def openssl(self, *arguments: object) -> None:
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)

    def sign(self, name: str, alternatives: str | None = None) -> tuple[Path, Path]:
        """A certificate for a name, and its key."""
        cert, key, request = (self.folder / f"{self.ca.stem}-{name}.{kind}" for kind in ("pem", "key", "csr"))
        self.openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                     "-subj", f"/CN={name}", "-keyout", key, "-out", request)  # fmt: skip
        extensions = self.folder / "extensions.txt"
        extensions.write_text(f"subjectAltName={alternatives or f'DNS:{name}'}\n")
        self.openssl("x509", "-req", "-in", request, "-CA", self.ca, "-CAkey", self.ca_key, "-CAcreateserial",
                     "-days", "2", "-extfile", extensions, "-out", cert)  # fmt: skip
        return cert, key

    def flags(self, name: str, alternatives: str | None = None) -> tuple[object, ...]:
        cert, key = self.sign(name, alternatives)
        return "--cert", cert, "--key", key, "--ca", self.ca
