"""Killed at any moment: a real process, a real SIGKILL, and the same bytes in the end."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedvit.runs.folder import Run
from tests.contract.test_every_plan import weights

FLAGS = [
    "--method",
    "fedperfix",
    "--patch-size",
    "4",
    "--rounds",
    "4",
    "--epochs",
    "1",
    "--cohort",
    "3",
    "--clients",
    "12",
]

# Each replaces one function by one that kills its own process at a chosen call.
MOMENTS = {
    "training": ("fedvit.core.plan", "descend", 8),
    "between clients' files": ("fedvit.engine.client_store", "memory_to_bytes", 8),
    "before the manifest": (
        "fedvit.engine.checkpoint",
        "write_bytes",
        6,
    ),  # its calls: server, manifest, server, manifest ...
    "after the manifest": ("fedvit.engine.checkpoint", "collect_garbage", 3),
    "with half a server file on disk": ("fedvit.engine.checkpoint", "write_bytes", 5),
    "between rounds": ("fedvit.runs.execute", "append_line", 6),
    "after the last round": ("fedvit.runs.execute", "write_summary", 1),
}
DRIVER = """
import importlib, os, signal, sys
module, name, calls = sys.argv[1], sys.argv[2], int(sys.argv[3])
if module != "none":
    owner = importlib.import_module(module)
    whole, count = getattr(owner, name), 0
    def deadly(*args, **kwargs):
        global count
        count += 1
        if count == calls:
            if name == "write_bytes":  # leave half of the file behind
                folder, file, blob = args
                (folder / (file + ".partial")).write_bytes(blob[: len(blob) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(*args, **kwargs)
    setattr(owner, name, deadly)
from fedvit.cli.main import app
app(sys.argv[4:])
"""


def fedvit(
    folder: Path, *extra: str, moment: tuple[str, str, int] = ("none", "none", 0)
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", DRIVER, *map(str, moment), "run", *FLAGS, "--out", str(folder), *extra]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    result = fedvit(folder)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_run_resumes_to_the_same_bytes(moment: str, uninterrupted: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    killed = fedvit(folder, moment=MOMENTS[moment])
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not Run(folder).finished
    resumed = fedvit(folder, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    same_results(folder, uninterrupted)


def same_results(folder: Path, uninterrupted: Path) -> None:
    for name in ("clients.csv", "confusion.json", "rounds.jsonl", "split.json", "run.toml"):
        assert (folder / name).read_bytes() == (uninterrupted / name).read_bytes(), name
    assert weights(folder) == weights(uninterrupted)


@pytest.mark.parametrize("victim", ["server-000003.safetensors", "manifest-000003.json", "clients"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    victim: str, uninterrupted: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    assert fedvit(folder, moment=("fedvit.runs.execute", "save_checkpoint", 4)).returncode == -signal.SIGKILL
    path = folder / "checkpoint" / victim
    if victim == "clients":
        manifest = json.loads((folder / "checkpoint" / "manifest-000003.json").read_text())
        newest = [v["file"] for v in manifest["clients"].values() if v["file"].endswith("-000003.safetensors")]
        path = folder / "checkpoint" / newest[0]
    blob = bytearray(path.read_bytes())
    blob[len(blob) // 2] ^= 0xFF
    path.write_bytes(blob if victim != "manifest-000003.json" else blob[: len(blob) // 2])
    resumed = fedvit(folder, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    log = (folder / "log.txt").read_text()
    assert "manifest-000003.json is damaged" in log
    assert "resuming after round 2" in log
    same_results(folder, uninterrupted)


def test_when_no_generation_is_whole_it_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert fedvit(folder, moment=MOMENTS["after the last round"]).returncode == -signal.SIGKILL
    for path in (folder / "checkpoint").glob("server-*"):
        path.write_bytes(b"")
    resumed = fedvit(folder, "--resume")
    assert resumed.returncode == 2
    assert "no generation" in resumed.stderr


def test_the_checkpoint_keeps_two_generations_and_no_litter(uninterrupted: Path) -> None:
    names = sorted(path.name for path in (uninterrupted / "checkpoint").iterdir())
    assert names == [
        "clients",
        "manifest-000003.json",
        "manifest-000004.json",
        "server-000003.safetensors",
        "server-000004.safetensors",
    ]
    needed = set()
    for manifest in (uninterrupted / "checkpoint").glob("manifest-*.json"):
        needed |= {Path(v["file"]).name for v in json.loads(manifest.read_text())["clients"].values()}
    assert {path.name for path in (uninterrupted / "checkpoint" / "clients").iterdir()} == needed


def test_a_killed_run_may_be_extended_too(uninterrupted: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    killed = fedvit(folder, "--rounds", "3", moment=("fedvit.runs.execute", "save_checkpoint", 3))
    assert killed.returncode == -signal.SIGKILL
    assert fedvit(folder, "--resume", "--rounds", "4").returncode == 0
    same_results(folder, uninterrupted)


def test_a_larger_number_of_rounds_extends_a_run_to_the_same_bytes(uninterrupted: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert fedvit(folder, "--rounds", "2").returncode == 0
    extended = fedvit(folder, "--resume", "--rounds", "4")
    assert extended.returncode == 0, extended.stderr
    same_results(folder, uninterrupted)
