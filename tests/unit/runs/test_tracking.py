"""While it runs: progress on terminals and in files, and TensorBoard's scalars."""

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedvit.core.server import Server
from fedvit.engine.ledger import Ledger
from fedvit.engine.loop import Round
from fedvit.report.progress import Progress
from fedvit.runs.execute import run_rounds
from fedvit.runs.folder import Run
from fedvit.runs.tracking import parameters, tags
from tests.conftest import finish, tiny
from tests.unit.cli.test_command_line import QUICK, call


def test_plain_lines_have_round_loss_accuracy_megabytes_and_time_left(tmp_path: Path) -> None:
    status, _, message = call("run", "--method", "fedper", *QUICK, "--rounds", "3", "--out", tmp_path / "r")
    assert status == 0
    lines = [line for line in message.splitlines() if line.startswith("fedper: round")]
    assert lines[0].startswith("fedper: round 1  loss ")
    for words in ("accuracy", " %", " MB", " s left"):
        assert words in lines[0], words
    assert lines[-1].startswith("fedper: round 3")  # the last one is always told
    assert "left" not in lines[-1]
    sent = Run(tmp_path / "r").summary["nbytes_run"]
    assert f"{(sent['down'] + sent['up']) / 1e6:.1f} MB" in lines[-1]
    assert "\x1b" not in message


def test_megabytes_go_on_from_where_a_resumed_run_was(tmp_path: Path) -> None:
    assert call("run", *QUICK, "--rounds", "2", "--out", tmp_path / "r", "--quiet")[0] == 0
    status, _, message = call("run", "--resume", "--rounds", "3", "--out", tmp_path / "r")
    assert status == 0
    sent = Run(tmp_path / "r").summary["nbytes_run"]
    assert f"{(sent['down'] + sent['up']) / 1e6:.1f} MB" in message


def test_quiet_is_quiet(tmp_path: Path) -> None:
    assert call("run", *QUICK, "--out", tmp_path / "r", "--quiet") == (0, "", "")
    assert (tmp_path / "r" / "report.html").is_file()


def test_a_terminal_gets_a_bar(tmp_path: Path) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=120)
    with Progress(console, 2, quiet=False) as progress:
        progress.start("fedavg", 0)
        for done in run_rounds(tiny("fedavg"), tmp_path / "r"):
            progress.step(done)
    shown = stream.getvalue()
    assert "\x1b" in shown
    for words in ("fedavg", "2/2", "loss", "accuracy", "MB"):
        assert words in shown, words


def test_neither_finished_rounds_nor_set_up_count_as_speed() -> None:
    progress = Progress(Console(file=io.StringIO()), 30, quiet=True)
    progress.start("row", 20)
    row = {"round": 21, "loss": 1.0, "views": None, "cohort": [], "failed": [], "nbytes_down": 0, "nbytes_up": 0}
    for _ in range(2):
        progress.step(Round(Server(0, {}), row, None, Ledger(seconds={"train": 4.0, "store": 1.0})))
    assert progress.seconds_left() == pytest.approx(40)  # 5 s a round, 8 to go


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard itself reads."""
    pytest.importorskip("tensorboard", reason="needs tensorboard: pip install 'fedvit[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_gets_the_numbers_of_every_round(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard: pip install 'fedvit[tensorboard]'")
    run = Run(finish(tiny("fedavg", {"run.track": "tensorboard"}, rounds=3), tmp_path / "r"))
    found = scalars(run.folder)
    assert found["train/loss"] == [(row["round"], pytest.approx(row["loss"])) for row in run.rounds]
    for view in ("personal", "server"):
        expected = [(row["round"], pytest.approx(row["views"][view]["mean"])) for row in run.rounds]
        assert found[f"{view}/accuracy"] == expected
    sent = run.summary["nbytes_run"]
    assert found["sent/MB"][-1] == (3, pytest.approx((sent["down"] + sent["up"]) / 1e6))
    assert "seconds/round" in found
    plain = Run(finish(tiny("fedavg", rounds=3), tmp_path / "plain"))
    for name in ("rounds.jsonl", "clients.csv", "split.json", "confusion.json"):
        assert (run.folder / name).read_bytes() == (plain.folder / name).read_bytes(), name


def test_tensorboard_gets_every_setting_and_the_tags_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard: pip install 'fedvit[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    experiment = tiny("fedper", {"run.track": "tensorboard"})
    folder = finish(experiment, tmp_path / "r")
    finish(tiny("fedper", {"run.track": "tensorboard"}, rounds=3), folder, resume=True)
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    start = HParamsPluginData.FromString(
        events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    ).session_start_info
    assert {key: value.string_value for key, value in start.hparams.items()} == parameters(experiment)
    for name, text in tags(experiment).items():
        (one,) = events.Tensors(f"tags/{name}/text_summary")
        assert one.tensor_proto.string_val[0].decode() == text


def test_a_resumed_run_has_every_round_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard: pip install 'fedvit[tensorboard]'")
    experiment = tiny("fedper", {"run.track": "tensorboard"}, rounds=4)
    steps = run_rounds(experiment, tmp_path / "r")
    next(steps)
    next(steps)
    steps.close()
    finish(experiment, tmp_path / "r", resume=True)
    assert [step for step, _ in scalars(tmp_path / "r")["train/loss"]] == [1, 2, 3, 4]


def test_tracking_may_be_switched_on_when_a_run_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard: pip install 'fedvit[tensorboard]'")
    assert call("run", *QUICK, "--out", tmp_path / "r", "--quiet")[0] == 0
    more = ["--rounds", "3", "--set", "run.track=tensorboard"]
    status, _, message = call("run", "--resume", *more, "--out", tmp_path / "r", "--quiet")
    assert status == 0, message
    assert [step for step, _ in scalars(tmp_path / "r")["train/loss"]] == [3]


@pytest.mark.parametrize("tracker", ["tensorboard", "mlflow", "wandb"])
def test_without_the_package_it_names_the_command_and_writes_nothing(
    tracker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden: Any = None
    for name in [name for name in sys.modules if name.split(".")[0] == tracker]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, tracker, hidden)  # as if it were not installed
    status, _, message = call("run", *QUICK, "--set", f"run.track={tracker}", "--out", tmp_path / "r")
    assert status == 2
    assert f"pip install 'fedvit[{tracker}]'" in message.replace("\n", " ")
    assert not (tmp_path / "r").exists()


def test_an_unknown_tracker_is_refused(tmp_path: Path) -> None:
    status, _, message = call("run", *QUICK, "--set", "run.track=aim", "--out", tmp_path / "r")
    assert status == 2
    assert "run.track" in message
