"""TLS and node keys: who has them takes part, nobody else comes near."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedvit.flower_app import PROFILE
from tests.conftest import tiny
from tests.network.field import MAY_FALL_SILENT, Field, until
from tests.network.keys import Authority, certify, new_authority, node_key

SITES = ["0", "1"]
pytestmark = MAY_FALL_SILENT


class Guarded(Field):
    """A field with TLS, and keys for its sites."""

    def __init__(self, folder: Path, sites: list[str]):
        super().__init__(folder, sites)
        self.ca = new_authority(folder, "ca")
        certificate, key = certify(folder, "server", self.ca)
        self.trial.write_profile({"root-certificates": str(self.ca.file)})
        self.server = (
            "--ssl-ca-certfile",
            str(self.ca.file),
            "--ssl-certfile",
            str(certificate),
            "--ssl-keyfile",
            str(key),
        )

    def node(self, name: str, ca: Authority | None = None) -> tuple[str, ...]:
        """What a SuperNode with a new key is started with; the key is not registered yet."""
        mine, _ = node_key(self.folder, name)
        return "--root-certificates", str((ca or self.ca).file), "--auth-supernode-private-key", str(mine)

    def register(self, name: str) -> None:
        words = ["flwr", "supernode", "register", str(self.folder / f"{name}.pub"), PROFILE]
        until(
            lambda: (
                subprocess.run(words, env=self.trial.environment(), capture_output=True, check=False).returncode == 0
            ),
            "the SuperLink",
        )

    def log_of(self, name: str) -> str:
        return (self.trial.home / f"supernode-{name}.log").read_text()


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    made = Guarded(tmp_path, SITES)
    try:
        made.start("superlink", *made.server, "--enable-supernode-auth")
        yield made
    finally:
        for name in list(made.stacks):
            made.stop(name)


def test_only_registered_sites_with_the_right_certificate_take_part(guarded: Guarded, tmp_path: Path) -> None:
    for name in SITES:
        security = guarded.node(name)
        guarded.register(name)
        guarded.start(name, *security)
    other = new_authority(tmp_path, "other")
    guarded.start("unregistered", *guarded.node("unregistered"))
    guarded.start("deceived", *guarded.node("deceived", other))
    guarded.start("plain")
    out = tmp_path / "out"
    run = guarded.finish(tiny("fedper", clients=2, samples=80, cohort=2), out)
    assert run.finished, (out / "error.txt").read_text()
    assert [row["failed"] for row in run.rounds] == [[], []]
    # The SuperLink knows the sites' keys again after a restart: they are in its database.
    guarded.kill("superlink")
    guarded.start("superlink", *guarded.server, "--enable-supernode-auth")
    again = guarded.finish(tiny("fedper", clients=2, samples=80, cohort=2, rounds=1), tmp_path / "again")
    assert again.finished, (tmp_path / "again" / "error.txt").read_text()
    for name in ("unregistered", "deceived", "plain"):
        assert not guarded.said(name), f"{name} got a message"
        assert "SuperNode ID" not in guarded.log_of(name)


def test_a_user_with_another_certificate_cannot_start_a_run(guarded: Guarded, tmp_path: Path) -> None:
    def lists() -> bool:
        words = ["flwr", "list", PROFILE]
        return subprocess.run(words, env=guarded.trial.environment(), capture_output=True, check=False).returncode == 0

    until(lists, "the SuperLink")
    other = new_authority(tmp_path, "other")
    guarded.trial.write_profile({"root-certificates": str(other.file)})
    assert not lists()
