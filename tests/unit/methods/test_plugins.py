"""A method from another package, found by its entry point, is as good as one of ours."""

import json
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedvit.cli.main import app
from fedvit.methods import _tell_once, plugins

QUICK = ["--patch-size", "4", "--rounds", "1", "--epochs", "1", "--cohort", "2", "--clients", "4", "--samples", "400"]
CODE = '''"""FedOutside (Author 2026): the head is personal."""

from fedvit import PERSONAL, SHARED, Plan, everything, head


def plan(strength: float = 0.5) -> Plan:
    return Plan(name="fedoutside", roles=((head, PERSONAL), (everything, SHARED)))


def without_types(strength):
    return plan()


def no_plan() -> str:
    return "nothing"
'''


def package(place: Path, name: str, points: dict[str, str], code: str = CODE) -> None:
    """Install a tiny package by hand: a module and its metadata."""
    module = name.replace("-", "_")
    (place / f"{module}.py").write_text(code)
    about = place / f"{module}-1.5.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
    lines = [f"{key} = {module}:{value}" for key, value in points.items()]
    (about / "entry_points.txt").write_text("\n".join(["[fedvit.methods]", *lines, ""]))
    forget()


def call(*words: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr.replace("\n", " ")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for packages, which Python finds during one test."""
    place = tmp_path / "site"
    place.mkdir()
    monkeypatch.syspath_prepend(place)
    yield place
    for path in place.glob("*.py"):
        sys.modules.pop(path.stem, None)
    forget()


def forget() -> None:
    plugins.found.cache_clear()
    _tell_once.cache_clear()


def test_a_method_of_another_package_runs_in_worker_processes_and_resumes(site: Path, tmp_path: Path) -> None:
    package(site, "fed-outside", {"fedoutside": "plan"})
    out = tmp_path / "r"
    words = ["--method", "fedoutside", "--set", "strength=0.7", *QUICK, "--workers", 2, "--out", out, "--quiet"]
    status, _, message = call("run", *words)
    assert status == 0, message
    saved = tomllib.loads((out / "run.toml").read_text())
    assert saved["method"] == {"name": "fedoutside", "strength": 0.7}
    assert saved["versions"]["fed-outside"] == "1.5"
    status, _, message = call("run", out / "run.toml", "--resume", "--rounds", 2, "--out", out, "--quiet")
    assert status == 0, message
    assert json.loads((out / "summary.json").read_text())["rounds"] == 2


def test_methods_lists_methods_of_other_packages_and_what_is_wrong_with_them(site: Path) -> None:
    package(site, "fed-outside", {"fedoutside": "plan", "untyped": "without_types", "fedavg": "plan"})
    package(site, "fed-broken", {"fedbroken": "plan"}, "import nothing_of_this_name\n")
    package(site, "fed-twin", {"twin": "plan"})
    package(site, "fed-other-twin", {"twin": "plan"})
    status, shown, _ = call("methods", "--json")
    assert status == 0
    entries = {entry["name"]: entry for entry in json.loads(shown) if "package" in entry}
    assert entries["fedoutside"]["package"] == "fed-outside"
    assert entries["fedoutside"]["options"] == {"strength": 0.5}
    assert "the head is personal" in entries["fedoutside"]["summary"]
    assert "fed-broken cannot be loaded (ModuleNotFoundError" in entries["fedbroken"]["error"]
    assert "option strength has no type" in entries["untyped"]["error"]
    assert "the package fed-outside has a method 'fedavg'" in entries["fedavg"]["error"]
    assert "both have a method 'twin'" in entries["twin"]["error"]
    _, shown, _ = call("methods")
    assert "fedoutside" in shown
    assert "[fed-outside]" in shown


def test_a_broken_package_is_named_where_it_is_used_and_nowhere_else(site: Path, tmp_path: Path) -> None:
    package(site, "fed-broken", {"fedbroken": "plan"}, "import nothing_of_this_name\n")
    package(site, "fed-outside", {"fedavg": "plan", "fednoplan": "no_plan"})
    status, _, message = call("run", "--method", "fedper", *QUICK, "--out", tmp_path / "r", "--quiet")
    assert (status, message) == (0, "")
    status, _, message = call("cost", "--method", "fedbroken")
    assert status == 2
    assert "the package fed-broken cannot be loaded" in message
    status, _, message = call("cost", "--method", "fednoplan")
    assert status == 2
    assert "should return a fedvit.Plan, found str" in message
    status, _, message = call("cost", "--method", "fedavg", "--json")
    assert status == 0
    assert message.count("the package fed-outside has a method 'fedavg'") == 1
    assert "did you mean 'fedbroken'?" in call("cost", "--method", "fedbrokn")[2]
