"""A trial on a machine with other users: none of them can start an app, fetch work or join."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fedvit.network.flower.template import PROFILE, for_trial, write_app
from tests.conftest import tiny
from tests.network.field import MAY_FALL_SILENT, Field, ending
from tests.network.strangers import as_stranger, needs_another_user

pytestmark = [MAY_FALL_SILENT, pytest.mark.attack, needs_another_user]


def test_another_user_cannot_start_an_app_fetch_work_or_join(tmp_path: Path) -> None:
    sites = ["0", "1"]
    with ending(Field(tmp_path, sites)) as made:
        for name in ("superlink", *sites):
            made.start(name)
        foreign = tmp_path / "foreign"
        experiment, federation, _, _ = for_trial(tiny("fedper", clients=2, samples=80, cohort=2, rounds=1))
        write_app(foreign, experiment, federation, str(tmp_path / "nowhere"))
        environment = {**made.trial.environment(), "FLWR_HOME": str(tmp_path / "stranger")}
        (tmp_path / "stranger").mkdir()
        (tmp_path / "stranger" / "config.toml").write_text((made.trial.home / "config.toml").read_text())
        for words in (["run", foreign, PROFILE], ["list", PROFILE]):
            done = as_stranger(["flwr", *words], environment)
            assert done.returncode != 0
            assert "403" in done.stdout + done.stderr
        for process in made.processes.values():
            port = process.args[process.args.index("--port") + 1]  # type: ignore[union-attr, operator]
            for path in ("control/start-run", "runtime/acquire-task", "fleet/register-node"):
                assert posted(f"http://127.0.0.1:{port}/v1/{path}", port) == "403"
        words = ["flwr", "list", PROFILE, "--format", "json"]
        told = subprocess.run(words, env=made.trial.environment(), capture_output=True, check=True)
        assert json.loads(told.stdout)["runs"] == []


POST = """
import sys, urllib.request, urllib.error
own = "127.0.0.1:" + sys.argv[2]  # a header that claims to come from the server itself
try:
    print(urllib.request.urlopen(urllib.request.Request(sys.argv[1], b"", {"X-Forwarded-For": own})).status)
except urllib.error.HTTPError as problem:
    print(problem.code)
"""


def posted(address: str, claims: str) -> str:
    """The status of a request by another user."""
    done = as_stranger([sys.executable, "-c", POST, address, claims])
    return done.stdout.strip() or done.stderr
