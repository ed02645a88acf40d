"""`fedvit run --also local`: a single run that knows what every client gains."""

import csv
import json
from pathlib import Path

import pytest

from fedvit.runs.folder import Run
from tests.unit.cli.test_command_line import QUICK, call


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("also") / "r"
    sets = ["--set", "method.s=0.5", "--set", "train.weight_decay=0.01"]
    status, shown, message = call("run", "--method", "fedperfix", *QUICK, *sets, "--out", folder, "--also", "local")
    assert status == 0, message
    return folder, shown


def test_the_gains_are_in_the_files_the_terminal_and_the_page(finished: tuple[Path, str]) -> None:
    folder, shown = finished
    run, alone = Run(folder), Run(folder / "local")
    local = {row["client"]: row["personal_accuracy"] for row in alone.clients}
    for row in run.clients:
        assert row["local_accuracy"] == local[row["client"]]
        assert row["gain"] == pytest.approx(row["personal_accuracy"] - local[row["client"]])
    gains = [row["gain"] for row in run.clients]
    told = run.summary["gain_over_local"]
    assert (told["mean"], told["hurt"]) == (pytest.approx(sum(gains) / 12), sum(gain < 0 for gain in gains))
    assert "training alone" in shown
    text = (folder / "report.html").read_text()
    assert "Gains need Local" not in text
    assert "2 rows compared" in text
    with (folder / "sites.csv").open(newline="") as stream:
        assert {line["row"] for line in csv.DictReader(stream)} == {"fedperfix", "local"}


def test_local_runs_with_the_same_settings(finished: tuple[Path, str]) -> None:
    folder, _ = finished
    run, alone = Run(folder).settings, Run(folder / "local").settings
    assert alone["method"] == {"name": "local", "schedule": "sampled"}
    for table in ("data", "partition", "model", "train", "tune", "run"):
        assert alone[table] == run[table], table


def test_it_can_be_resumed_and_added_later(finished: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = finished
    before = {name: (folder / name).read_bytes() for name in ("clients.csv", "sites.csv", "summary.json")}
    status, _, message = call("run", "--resume", "--out", folder, "--also", "local", "--quiet")
    assert status == 0, message
    assert before == {name: (folder / name).read_bytes() for name in before}
    arguments = ["run", "--method", "fedper", *QUICK, "--out", tmp_path / "r", "--quiet"]
    assert call(*arguments)[0] == 0
    assert Run(tmp_path / "r").summary["gain_over_local"] is None
    assert call(*arguments, "--resume", "--also", "local")[0] == 0
    assert Run(tmp_path / "r").summary["gain_over_local"] is not None


@pytest.mark.parametrize(
    ("words", "told"),
    [(["--also", "fedavg"], "--also expects local"), (["--method", "local", "--also", "local"], "this run is Local")],
)
def test_other_values_are_refused_before_anything_runs(words: list[str], told: str, tmp_path: Path) -> None:
    status, _, message = call("run", *QUICK, *words, "--out", tmp_path / "r")
    assert status == 2
    assert told in " ".join(message.split())
    assert not (tmp_path / "r").exists()


def test_json_stays_readable_after_gains_are_added(finished: tuple[Path, str]) -> None:
    folder, _ = finished
    content = json.loads((folder / "summary.json").read_text())
    assert set(content) >= {"method", "views", "gain_over_local", "seconds"}
