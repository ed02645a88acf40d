"""The wheel: it holds the whole package, and the package runs from it."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

import fedvit

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"


def python(*arguments: str | Path, folder: Path, **environment: str) -> str:
    """What Python prints, started in `folder`, without a network; a failure is told in its own words."""
    variables = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INDEX": "1", **environment}
    command = (sys.executable, *arguments)
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout's wheel, built without a network."""
    out = tmp_path_factory.mktemp("dist")
    python("-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT, folder=out)
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    files = {path.relative_to(SOURCE).as_posix() for path in (SOURCE / "fedvit").rglob("*") if path.is_file()}
    expected = {file for file in files if "__pycache__" not in file and not Path(file).name.startswith(".")}
    found = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert found == expected
    assert "fedvit/py.typed" in found
    assert any(not name.endswith((".py", "py.typed")) for name in found), "the report's page is a file of its own"


def test_the_package_runs_from_its_wheel(wheel: Path, tmp_path: Path) -> None:
    place = tmp_path / "installed"
    python("-m", "pip", "install", "--quiet", "--no-deps", "--target", place, wheel, folder=tmp_path)
    where = python("-c", "import fedvit; print(fedvit.__file__)", folder=tmp_path, PYTHONPATH=str(place))
    assert Path(where.strip()) == place / "fedvit" / "__init__.py"
    assert "fedperfix" in python("-m", "fedvit", "methods", folder=tmp_path, PYTHONPATH=str(place))


def test_the_version_is_the_same_wherever_it_is_written() -> None:
    version = fedvit.__version__
    assert importlib.metadata.version("fedvit") == version, "install again: pip install -e ."
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## [{version}] - " in (ROOT / "CHANGELOG.md").read_text()
