"""Killed at any moment: a real process, a real SIGKILL, and the same bytes in the end."""

import importlib
import itertools
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedvit.cli.main import app
from fedvit.engine.processes import context_for
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


def deadly(module: str, name: str, calls: int) -> None:
    """Replace a function by one that kills its own process at this call."""
    owner = importlib.import_module(module)
    whole, count = getattr(owner, name), itertools.count(1)

    def kill(*args: Any, **kwargs: Any) -> Any:
        if next(count) == calls:
            if name == "write_bytes":  # leave half of the file behind
                folder, file, blob = args
                (folder / (file + ".partial")).write_bytes(blob[: len(blob) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(*args, **kwargs)

    setattr(owner, name, kill)


def command(words: list[str], moment: tuple[str, str, int] | None, folder: Path) -> None:
    """What a process does: a command of ours in this folder, killed at this moment."""
    os.chdir(folder)
    if moment:
        deadly(*moment)
    app(words)


def started(words: list[str], moment: tuple[str, str, int] | None, folder: Path) -> Any:
    """A command as a process of its own, from the one that has imported PyTorch already."""
    process = context_for(["cpu"]).Process(target=command, args=(words, moment, folder))
    process.start()
    return process


def fedvit(folder: Path, *extra: str, moment: tuple[str, str, int] | None = None) -> int:
    process = started(["run", *FLAGS, "--out", str(folder), *extra], moment, folder.parent)
    process.join()
    return int(process.exitcode)


def resumed(folder: Path, *extra: str) -> tuple[int, str]:
    """Another process goes on, this one: its exit status and what it says."""
    result = CliRunner().invoke(app, ["run", *FLAGS, "--out", str(folder), "--resume", *extra])
    return result.exit_code, result.stderr


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert fedvit(folder) == 0
    return folder


@pytest.fixture(scope="module")
def after_three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed after its third checkpoint."""
    folder = tmp_path_factory.mktemp("three") / "run"
    assert fedvit(folder, moment=("fedvit.runs.execute", "save_checkpoint", 4)) == -signal.SIGKILL
    return folder


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_run_resumes_to_the_same_bytes(moment: str, uninterrupted: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert fedvit(folder, moment=MOMENTS[moment]) == -signal.SIGKILL
    assert not Run(folder).finished
    status, said = resumed(folder)
    assert status == 0, said
    same_results(folder, uninterrupted)


def same_results(folder: Path, uninterrupted: Path) -> None:
    for name in ("clients.csv", "confusion.json", "rounds.jsonl", "split.json", "run.toml"):
        assert (folder / name).read_bytes() == (uninterrupted / name).read_bytes(), name
    assert weights(folder) == weights(uninterrupted)


KEEP = ("--set", "data.val=0.3", "--set", "run.keep=best", "--lr", "0.03")


def test_a_killed_run_keeps_the_same_best_round(tmp_path: Path) -> None:
    """A round writes three files here: the server, the clients' scores and the manifest."""
    whole = tmp_path / "whole"
    assert fedvit(whole, *KEEP) == 0
    for number, moment in enumerate(("before the manifest", "after the manifest", "with half a server file on disk")):
        folder = tmp_path / str(number)
        assert fedvit(folder, *KEEP, moment=MOMENTS[moment]) == -signal.SIGKILL
        status, said = resumed(folder, *KEEP)
        assert status == 0, said
        names = {path.relative_to(place) for place in (folder, whole) for path in (place / "checkpoint").rglob("*.*")}
        for path in (*names, "kept.csv"):
            assert (folder / path).read_bytes() == (whole / path).read_bytes(), path
        assert Run(folder).summary["kept"] == Run(whole).summary["kept"]


@pytest.mark.parametrize("victim", ["server-000003.safetensors", "manifest-000003.json", "clients"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    victim: str, uninterrupted: Path, after_three: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(after_three, tmp_path / "run")
    path = folder / "checkpoint" / victim
    if victim == "clients":
        manifest = json.loads((folder / "checkpoint" / "manifest-000003.json").read_text())
        newest = [v["file"] for v in manifest["clients"].values() if v["file"].endswith("-000003.safetensors")]
        path = folder / "checkpoint" / newest[0]
    blob = bytearray(path.read_bytes())
    blob[len(blob) // 2] ^= 0xFF
    path.write_bytes(blob if victim != "manifest-000003.json" else blob[: len(blob) // 2])
    status, said = resumed(folder)
    assert status == 0, said
    log = (folder / "log.txt").read_text()
    assert "manifest-000003.json is damaged" in log
    assert "resuming after round 2" in log
    same_results(folder, uninterrupted)


def test_when_no_generation_is_whole_it_says_so(after_three: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(after_three, tmp_path / "run")
    for path in (folder / "checkpoint").glob("server-*"):
        path.write_bytes(b"")
    status, said = resumed(folder)
    assert status == 2
    assert "no generation" in said


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
    assert killed == -signal.SIGKILL
    assert resumed(folder, "--rounds", "4")[0] == 0
    same_results(folder, uninterrupted)


def test_a_larger_number_of_rounds_extends_a_run_to_the_same_bytes(uninterrupted: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert fedvit(folder, "--rounds", "2") == 0
    status, said = resumed(folder, "--rounds", "4")
    assert status == 0, said
    same_results(folder, uninterrupted)
