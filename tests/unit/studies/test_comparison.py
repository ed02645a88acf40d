"""`fedvit.compare`: the comparison of the command line, from Python."""

import builtins
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import fedvit
from fedvit.studies.comparison import Comparison
from tests.conftest import TINY, almost
from tests.unit.cli.test_command_line import QUICK, call

SMALL: dict[str, Any] = {key: value for key, value in TINY.items() if key != "batch"}


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    out = tmp_path_factory.mktemp("compared") / "c"
    return fedvit.compare("fedavg", "fedper+bias", seeds=(0, 1), out=out, **SMALL)


def without_seconds(entries: Any) -> Any:
    return [{key: value for key, value in entry.items() if key != "seconds"} for entry in entries]


def test_python_and_the_command_line_give_the_same_comparison(compared: Comparison, tmp_path: Path) -> None:
    rows = ["fedavg", "fedper+bias", "--seeds", "0,1"]
    status, _, message = call("compare", *rows, *QUICK, "--out", tmp_path / "c", "--quiet")
    assert status == 0, message
    told = json.loads((tmp_path / "c" / "compare.json").read_text())
    assert without_seconds(told) == almost(without_seconds(compared.entries))
    assert json.loads((compared.folder / "compare.json").read_text()) == list(compared.entries)
    for name in ("compare.png", "report.html"):
        assert (compared.folder / name).is_file()


def test_local_is_always_there_and_every_run_can_be_opened(compared: Comparison) -> None:
    assert list(compared.runs) == ["local", "fedavg", "fedper+bias"] == [entry["label"] for entry in compared.entries]
    assert [run.summary["seed"] for run in compared.runs["fedavg"]] == [0, 1]
    assert compared.runs["fedper+bias"][1].model("3").description.client == "3"
    assert len(compared.clients) == 3 * 2 * 12
    first = compared.clients[0]
    assert (first["label"], first["seed"], first["client"]) == ("local", 0, "0")
    assert "personal_accuracy" in first


def test_frames_have_the_same_numbers(compared: Comparison) -> None:
    pytest.importorskip("pandas", reason="needs pandas")
    frame = compared.frame()
    assert list(frame["label"]) == ["local", "fedavg", "fedper+bias"]
    assert list(frame["mean"]) == [entry["mean"] for entry in compared.entries]
    clients = compared.client_frame()
    assert len(clients) == len(compared.clients)
    means = clients.groupby("label")["personal_accuracy"].mean()
    for entry in compared.entries:
        assert means[entry["label"]] == pytest.approx(entry["mean"])


def test_without_pandas_a_frame_says_what_to_install(compared: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name == "pandas":
            raise ImportError("No module named 'pandas'")
        return plain(name, *rest)

    monkeypatch.delitem(sys.modules, "pandas", raising=False)
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(fedvit.UserError, match="pip install pandas"):
        compared.frame()
    with pytest.raises(fedvit.UserError, match="pip install pandas"):
        compared.client_frame()


def test_finished_rows_are_not_run_again(compared: Comparison) -> None:
    before = {path: path.stat().st_mtime_ns for path in compared.folder.rglob("summary.json")}
    again = fedvit.compare("fedavg", "fedper+bias", seeds=[0, 1], out=compared.folder, **SMALL)
    assert {path: path.stat().st_mtime_ns for path in compared.folder.rglob("summary.json")} == before
    assert again.entries == compared.entries


def test_settings_and_a_base_file_reach_every_row(tmp_path: Path) -> None:
    base = tmp_path / "base.toml"
    base.write_text("[train]\nepochs = 1\nrounds = 1\n[partition]\nclients = 4\n")
    flags = {"patch_size": 4, "cohort": 2, "samples": 320, "eval_every": 0}
    sets = {"partition.alpha": 5.0}
    found = fedvit.compare("fedper", seeds=(3,), experiment=base, settings=sets, out=tmp_path / "c", **flags)
    for runs in found.runs.values():
        tables = runs[0].settings
        assert tables["partition"]["alpha"] == 5.0
        assert tables["partition"]["clients"] == 4
        assert tables["train"]["rounds"] == 1
        assert tables["run"]["seed"] == 3


def test_a_list_of_rates_is_searched_for_every_row(tmp_path: Path) -> None:
    flags = {**SMALL, "clients": 4, "samples": 320, "eval_every": 0}
    found = fedvit.compare("fedper", seeds=(0,), lr=[1e-9, 0.003], out=tmp_path / "c", **flags)
    for entry in found.entries:
        assert entry["lr"] in (1e-9, 0.003)
        assert len(entry["search"]["trials"]) == 2
    shown = call("table", tmp_path / "c")[1]
    assert "chosen on validation images" in shown
    assert "edge of the rates tried" in shown


def test_mistakes_are_told() -> None:
    with pytest.raises(fedvit.UserError, match="name at least one row"):
        fedvit.compare()
    with pytest.raises(TypeError, match="no argument 'round'; did you mean 'rounds'"):
        fedvit.compare("fedavg", round=3)
    with pytest.raises(TypeError, match="no argument 'method'"):
        fedvit.compare("fedavg", method="fedper")
    with pytest.raises(fedvit.UserError, match="unknown method"):
        fedvit.compare("fedavgg")


def test_a_row_that_diverges_does_not_keep_the_others_from_their_table(tmp_path: Path) -> None:
    wild = tmp_path / "wild.toml"
    wild.write_text('[method]\nname = "fedper"\n[train]\nlr = 1e30\n')
    status, shown, message = call(
        "compare", wild, "fedavg", "--seeds", "0", "--set", "train.optimizer=sgd", *QUICK, "--out", tmp_path / "c"
    )
    assert status == 2
    assert "training diverged in wild (seed 0)" in message
    assert "the others are finished" in message
    assert [entry["label"] for entry in json.loads((tmp_path / "c" / "compare.json").read_text())] == [
        "local",
        "fedavg",
    ]
    assert "fedavg" in shown
    wild.write_text('[train]\nlr = 1e30\n[method]\nname = "local"\n')  # nothing can be measured against it
    status, _, message = call(
        "compare", wild, "fedavg", "--seeds", "0", "--set", "train.optimizer=sgd", *QUICK, "--out", tmp_path / "d"
    )
    assert status == 2
    assert "training loss" in message
    assert not (tmp_path / "d" / "compare.json").exists()
