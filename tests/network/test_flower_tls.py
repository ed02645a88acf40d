"""TLS and node keys: who has them takes part, nobody else comes near."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedvit.network.flower.template import PROFILE
from fedvit.network.flower.trial import node_name
from tests.conftest import tiny
from tests.network.field import MAY_FALL_SILENT, Field, ending, until
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


@contextmanager
def guarded(folder: Path) -> Iterator[Guarded]:
    with ending(Guarded(folder, SITES)) as made:
        made.start("superlink", *made.server, "--enable-supernode-auth")
        yield made


def test_only_registered_sites_with_the_right_certificate_take_part(tmp_path: Path) -> None:
    with guarded(tmp_path) as made:
        for name in SITES:
            security = made.node(name)
            made.register(name)
            made.start(name, *security)
        other = new_authority(tmp_path, "other")
        made.start("unregistered", *made.node("unregistered"))
        made.start("deceived", *made.node("deceived", other))
        made.start("plain")
        out = tmp_path / "out"
        run = made.finish(tiny("fedper", clients=2, samples=80, cohort=2), out)
        assert run.finished, (out / "error.txt").read_text()
        assert [row["failed"] for row in run.rounds] == [[], []]
        # The SuperLink knows the sites' keys again after a restart: they are in its database.
        made.kill("superlink")
        made.start("superlink", *made.server, "--enable-supernode-auth")
        again = made.finish(tiny("fedper", clients=2, samples=80, cohort=2, rounds=1), tmp_path / "again")
        assert again.finished, (tmp_path / "again" / "error.txt").read_text()
        for name in ("unregistered", "deceived", "plain"):
            assert not made.said(name), f"{name} got a message"
            assert "SuperNode ID" not in made.trial.log_of(node_name(name)).read_text()


def test_a_user_with_another_certificate_cannot_start_a_run(tmp_path: Path) -> None:
    with guarded(tmp_path) as made:

        def lists() -> bool:
            words = ["flwr", "list", PROFILE]
            return subprocess.run(words, env=made.trial.environment(), capture_output=True, check=False).returncode == 0

        until(lists, "the SuperLink")
        other = new_authority(tmp_path, "other")
        made.trial.write_profile({"root-certificates": str(other.file)})
        assert not lists()
