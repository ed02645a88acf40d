"""A site runs the app that this version of FedViT writes, with any settings, and no other code."""

import io
import zipfile
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk

from fedvit.network.flower.own_app import foreign
from fedvit.network.flower.template import for_trial, write_app
from tests.conftest import tiny

pytestmark = [pytest.mark.attack, pytest.mark.filterwarnings("ignore:GitWildMatchPattern")]  # in Flower's command


@pytest.fixture
def app(tmp_path: Path) -> Path:
    experiment, federation, _, _ = for_trial(tiny("fedper", clients=2, samples=80))
    write_app(tmp_path / "app", experiment, federation, "/srv/run")
    return tmp_path / "app"


def judged(app: Path) -> str | None:
    return foreign(build_fab_from_disk(app))


def test_our_own_app_is_recognized_whatever_its_settings(app: Path) -> None:
    assert judged(app) is None
    settings = app / "fedvit_app" / "experiment.toml"
    settings.write_text(settings.read_text().replace("fedper", "fedavg"))
    project = app / "pyproject.toml"
    project.write_text(project.read_text().replace("round-timeout = 3600.0", "round-timeout = 5.0"))
    assert judged(app) is None


@pytest.mark.parametrize("name", ["server_app.py", "client_app.py", "__init__.py"])
def test_other_code_is_foreign(name: str, app: Path) -> None:
    file = app / "fedvit_app" / name
    file.write_text(file.read_text() + "\n")
    assert judged(app) == f"fedvit_app/{name} is another"


@pytest.mark.parametrize("name", ["torch.py", "fedvit_app/more.py", "fedvit/__init__.py", "sitecustomize.py"])
def test_one_more_file_is_foreign(name: str, app: Path) -> None:
    (app / name).parent.mkdir(exist_ok=True)
    (app / name).write_text("")
    assert judged(app) == f"its files are others: {name}"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('clientapp = "fedvit_app.client_app:app"', 'clientapp = "os:system"'),
        ('publisher = "fedvit"', 'publisher = "else"'),
        ('dependencies = ["', 'dependencies = ["evil", "'),
        ('version = "1.0.0"', 'version = "2.0.0"'),
    ],
)
def test_another_project_is_foreign(old: str, new: str, app: Path) -> None:
    project = app / "pyproject.toml"
    assert old in project.read_text()
    project.write_text(project.read_text().replace(old, new))
    assert judged(app) == "pyproject.toml is another"


def test_a_file_twice_or_a_large_one_is_foreign(app: Path) -> None:
    fab = build_fab_from_disk(app)
    with pytest.warns(UserWarning, match="Duplicate name"):
        assert foreign(repacked(fab, twice="fedvit_app/client_app.py")) == "its files are others: a file twice"
    large = "x" * 2_000_000
    assert foreign(repacked(fab, replace={"fedvit_app/experiment.toml": large})) == (
        "fedvit_app/experiment.toml is too large"
    )
    assert foreign(repacked(fab, replace={"pyproject.toml": "tool = 1"})) == "pyproject.toml is another"


def repacked(fab: bytes, *, twice: str = "", replace: dict[str, str] | None = None) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(fab)) as old, zipfile.ZipFile(packed, "w") as new:
        for name in old.namelist():
            new.writestr(name, (replace or {}).get(name, old.read(name)))
        if twice:
            new.writestr(twice, "evil = True")
    return packed.getvalue()


@pytest.mark.parametrize("content", [b"", b"PK", b"PK\x05\x06" + bytes(18), bytes(1000)])
def test_what_is_no_app_is_foreign(content: bytes) -> None:
    assert foreign(content) is not None


def test_damaged_apps_are_foreign_or_the_same(app: Path) -> None:
    """Any byte may change: never an exception, and never other code."""
    fab = build_fab_from_disk(app)
    for place in range(0, len(fab), 7):
        damaged = fab[:place] + bytes([fab[place] ^ 0xFF]) + fab[place + 1 :]
        if foreign(damaged) is None:
            with zipfile.ZipFile(io.BytesIO(damaged)) as packed:
                assert packed.read("fedvit_app/client_app.py") == (app / "fedvit_app" / "client_app.py").read_bytes()
