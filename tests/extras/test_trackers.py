"""MLflow and Weights & Biases on this machine alone. `make test-extras` runs these in an environment that has both."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedvit.runs.execute import run_rounds
from fedvit.runs.folder import Run
from fedvit.runs.tracking import parameters, tags
from tests.conftest import finish, tiny

mlflow = pytest.importorskip("mlflow", reason="needs mlflow: make test-extras")
wandb = pytest.importorskip("wandb", reason="needs wandb: make test-extras")
pytestmark = pytest.mark.filterwarnings("ignore")  # those of other people's packages


@pytest.fixture(autouse=True)
def _nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_MODE", "WANDB_PROJECT", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def stopped_and_resumed(experiment: Any, folder: Path) -> Run:
    steps = run_rounds(experiment, folder)
    next(steps)
    next(steps)
    steps.close()
    return Run(finish(experiment, folder, resume=True))


# MLflow.


def in_mlflow(uri: str) -> Any:
    """The only run there, with its client."""
    client = mlflow.MlflowClient(uri)
    (one,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    return client, one


def database(folder: Path) -> str:
    return f"sqlite:///{folder / 'mlflow.db'}"


def test_mlflow_has_the_numbers_settings_and_tags_of_a_run(tmp_path: Path) -> None:
    experiment = tiny("fedavg", {"run.track": "mlflow"}, rounds=3)
    run = Run(finish(experiment, tmp_path / "r"))
    client, found = in_mlflow(database(run.folder))
    assert found.info.status == "FINISHED"
    assert found.info.run_name == "r"
    assert found.data.params == {key: value[:500] for key, value in parameters(experiment).items()}
    assert found.data.params["train.rounds"] == "3"
    assert tags(experiment).items() <= found.data.tags.items()
    losses = client.get_metric_history(found.info.run_id, "train/loss")
    assert [(m.step, m.value) for m in losses] == [(row["round"], row["loss"]) for row in run.rounds]
    means = client.get_metric_history(found.info.run_id, "personal/accuracy")
    assert [m.value for m in means] == [row["views"]["personal"]["mean"] for row in run.rounds]
    sent = run.summary["nbytes_run"]
    assert found.data.metrics["sent/MB"] == pytest.approx((sent["down"] + sent["up"]) / 1e6)


def test_a_resumed_run_goes_on_in_mlflow_with_every_round_once(tmp_path: Path) -> None:
    run = stopped_and_resumed(tiny("fedper", {"run.track": "mlflow"}, rounds=4), tmp_path / "r")
    client, found = in_mlflow(database(run.folder))
    assert found.info.status == "FINISHED"
    assert [m.step for m in client.get_metric_history(found.info.run_id, "train/loss")] == [1, 2, 3, 4]
    finish(tiny("fedper", {"run.track": "mlflow"}, rounds=5), tmp_path / "r", resume=True)  # a longer run
    assert in_mlflow(database(run.folder))[1].data.metrics["train/loss"] == run.rounds[-1]["loss"]


def test_a_run_that_stops_early_is_not_finished_in_mlflow(tmp_path: Path) -> None:
    steps = run_rounds(tiny("fedper", {"run.track": "mlflow"}, rounds=3), tmp_path / "r")
    next(steps)
    steps.close()
    assert in_mlflow(database(tmp_path / "r"))[1].info.status == "KILLED"


def test_mlflow_logs_to_the_server_that_the_environment_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", database(tmp_path))
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "hospitals")
    for method in ("fedavg", "fedper"):
        finish(tiny(method, {"run.track": "mlflow"}), tmp_path / method)
        assert not (tmp_path / method / "mlflow.db").exists()
    client = mlflow.MlflowClient(database(tmp_path))
    home = client.get_experiment_by_name("hospitals")
    assert {one.data.tags["method"] for one in client.search_runs([home.experiment_id])} == {"fedavg", "fedper"}


# Weights & Biases.


def records(folder: Path) -> Iterator[Any]:
    """What `wandb sync` would upload, read from the files of all offline runs."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        for blob in chunks(path.read_bytes()):
            record = Record()
            record.ParseFromString(blob)
            yield record


def chunks(log: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format: blocks of 32 KiB with parts of records, after a header of 7 bytes."""
    place, whole = 7, b""
    while place + 7 <= len(log):
        left = 32768 - place % 32768
        if left < 7:  # a block ends in zeros if no header fits
            place += left
            continue
        length, kind = struct.unpack("<HB", log[place + 4 : place + 7])
        whole += log[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # all of a record, or its last part
            yield whole
            whole = b""


def history(folder: Path) -> list[dict[str, Any]]:
    items = [one.history.item for one in records(folder) if one.HasField("history")]
    return [{i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in item} for item in items]


def test_wandb_stays_offline_and_has_the_numbers_settings_and_tags_of_a_run(tmp_path: Path) -> None:
    experiment = tiny("fedavg", {"run.track": "wandb"}, rounds=3)
    run = Run(finish(experiment, tmp_path / "r"))
    rows = history(run.folder)
    assert [row["_step"] for row in rows] == [1, 2, 3]
    assert [row["train/loss"] for row in rows] == [row["loss"] for row in run.rounds]
    assert [row["server/accuracy"] for row in rows] == [row["views"]["server"]["mean"] for row in run.rounds]
    (start,) = [one.run for one in records(run.folder) if one.HasField("run")]
    assert (start.project, start.display_name) == ("fedvit", "r")
    assert set(start.tags) == {f"{key}={text}" for key, text in tags(experiment).items()}
    config = {item.key: json.loads(item.value_json) for item in start.config.update}
    assert parameters(experiment).items() <= config.items()
    assert [one.exit.exit_code for one in records(run.folder) if one.HasField("exit")] == [0]


def test_a_resumed_run_goes_on_in_wandb_with_every_round_once(tmp_path: Path) -> None:
    run = stopped_and_resumed(tiny("fedper", {"run.track": "wandb"}, rounds=4), tmp_path / "r")
    assert sorted(row["_step"] for row in history(run.folder)) == [1, 2, 3, 4]
    assert len({one.run.run_id for one in records(run.folder) if one.HasField("run")}) == 1


@pytest.mark.parametrize("tracker", ["mlflow", "wandb"])
def test_tracking_changes_no_result(tracker: str, tmp_path: Path) -> None:
    tracked = finish(tiny("fedper", {"run.track": tracker}), tmp_path / "tracked")
    plain = finish(tiny("fedper"), tmp_path / "plain")
    for name in ("rounds.jsonl", "clients.csv", "split.json", "confusion.json"):
        assert (tracked / name).read_bytes() == (plain / name).read_bytes(), name
