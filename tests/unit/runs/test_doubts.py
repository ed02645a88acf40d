"""Doubts about a run: which results are called doubtful, who is named, and where it is said."""

import csv
import html
import json
import math
from pathlib import Path
from typing import Any

from fedvit.runs.doubts import doubts, with_auto_rate
from fedvit.runs.folder import Run
from tests.conftest import finish, tiny
from tests.unit.cli.test_command_line import QUICK, call

NAMES = ["cat", "dog", "cow", "hen"]


def folder_of(
    path: Path,
    accuracies: dict[str, float],
    confusion: dict[str, list[list[int]]] | None = None,
    trained: int = 2,
    train: dict[str, int] | None = None,
) -> Run:
    """The files that doubts are found in, of clients with 40 test images of four classes."""
    path.mkdir()
    counts = {name: {"train": train or {"0": 10, "1": 10}, "test": {"0": 20, "1": 20}} for name in accuracies}
    split = {"class_names": NAMES, "class_counts": counts, "clients": {n: {"val": [0] * 500} for n in accuracies}}
    (path / "split.json").write_text(json.dumps(split))
    (path / "confusion.json").write_text(json.dumps(confusion or {}))
    with (path / "clients.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["client", "test_samples", "rounds_trained", "personal_accuracy"])
        writer.writerows([name, 40, trained, accuracy] for name, accuracy in accuracies.items())
    return Run(path)


def rounds_of(*losses: dict[str, float], view: list[dict[str, float]] | None = None) -> list[dict[str, Any]]:
    views = view or [{"mean": 60.0}] * len(losses)
    return [
        {"round": n + 1, "loss": sum(own.values()) / len(own), "losses": own, "views": {"personal": views[n]}}
        for n, own in enumerate(losses)
    ]


def found(run: Run, rows: list[dict[str, Any]], *, terms: int = 1, keeps: bool = True) -> list[str]:
    return doubts(run, tiny("fedper", lr=0.01), rows, loss_terms=terms, keeps_own=keeps)


GOOD = {"a": 0.4, "b": 0.5}


def test_a_run_that_learned_leaves_no_doubt(tmp_path: Path) -> None:
    confusion = {name: [[0, 0, 18], [0, 1, 2], [1, 1, 20]] for name in GOOD}
    run = folder_of(tmp_path / "r", {"a": 95.0, "b": 95.0}, confusion)
    assert found(run, rounds_of(GOOD, GOOD, GOOD)) == []


def test_a_loss_above_chance_names_the_clients_and_the_rate(tmp_path: Path) -> None:
    run = folder_of(tmp_path / "r", {"a": 50.0, "b": 50.0})
    high = {"a": 5.0, "b": 2.6}
    (doubt,) = found(run, rounds_of(high, high, high))
    assert "3.80, above chance" in doubt
    assert f"{math.log(4):.2f}" in doubt
    assert "a (5.00), b (2.60)" in doubt
    assert "learning rate 0.01" in doubt
    assert "--lr auto" in doubt
    assert found(run, rounds_of({"a": 1.5, "b": 1.4})) == [], "in the first round a loss near chance is normal"
    assert found(run, rounds_of(*[{"a": 1.6, "b": 1.6}] * 3), terms=2) == [], "two losses have twice the chance"


def test_a_diverging_client_is_named(tmp_path: Path) -> None:
    run = folder_of(tmp_path / "r", {"a": 95.0, "b": 95.0, "7": 50.0})
    rows = rounds_of({"a": 0.4, "7": 0.6}, {"b": 0.4}, {"a": 0.3, "b": 0.2, "7": 2.9})
    (doubt,) = found(run, rows)
    assert "client 7 from 0.60 to 2.90" in doubt
    assert "b from" not in doubt


def test_a_fall_is_told_on_validation_images_where_there_are_some(tmp_path: Path) -> None:
    run = folder_of(tmp_path / "r", {"a": 95.0, "b": 95.0})
    val = [{"mean": 60.0, "val": v} for v in (40.0, 60.0, 50.0)]
    (doubt,) = found(run, rounds_of(GOOD, GOOD, GOOD, view=val))
    assert "on validation images fell from 60.0 % in round 2 to 50.0 % in round 3" in doubt
    small = [{"mean": 60.0, "val": v} for v in (40.0, 60.0, 58.0)]
    assert found(run, rounds_of(GOOD, GOOD, GOOD, view=small)) == [], "two points of 1,000 images are chance"
    collapse = [{"mean": m} for m in (40.0, 59.7, 13.0)]
    (doubt,) = found(run, rounds_of(GOOD, GOOD, GOOD, view=collapse))
    assert "fell from 59.7 %" in doubt


def test_a_site_that_answers_one_class_to_everything_is_named(tmp_path: Path) -> None:
    confusion = {"north": [[0, 1, 20], [1, 1, 20]], "south": [[0, 0, 20], [1, 1, 20]], "east": [[1, 1, 40]]}
    run = folder_of(tmp_path / "r", {"north": 50.0, "south": 95.0, "east": 95.0}, confusion)
    (doubt,) = found(run, rounds_of(GOOD, GOOD, GOOD))
    assert "north ('dog' to all 40 images, 20 of them rightly)" in doubt
    assert "south" not in doubt
    assert "east" not in doubt, "all its images are of that class"


def test_a_collapsed_client_is_worse_than_its_most_frequent_class(tmp_path: Path) -> None:
    run = folder_of(tmp_path / "r", {"a": 95.0, "b": 10.0})
    (doubt,) = found(run, rounds_of(GOOD, GOOD, GOOD))
    assert "b (10.0 % instead of 50.0 %)" in doubt
    assert "a (" not in doubt


def test_clients_that_were_never_sampled_are_named_if_they_keep_something(tmp_path: Path) -> None:
    run = folder_of(tmp_path / "r", {"a": 95.0, "b": 95.0}, trained=0)
    (doubt,) = found(run, rounds_of(GOOD, GOOD, GOOD))
    assert "a, b have never been sampled" in doubt
    assert found(run, rounds_of(GOOD, GOOD, GOOD), keeps=False) == []


def test_doubts_are_in_the_terminal_the_log_and_the_summary_with_a_command_that_runs(tmp_path: Path) -> None:
    out = tmp_path / "hot"
    flags = [*QUICK, "--clients", "4", "--samples", "240", "--lr", "0.8", "--set", "train.optimizer=sgd"]
    status, _, told = call("run", *flags, "--rounds", "3", "--out", out)
    assert status == 0
    written = Run(out).summary["warnings"]
    assert any("above chance" in doubt for doubt in written)
    for doubt in written:
        assert f"WARNING: fedavg: {doubt}" in told
        assert doubt in (out / "log.txt").read_text()
    page = (out / "report.html").read_text()
    assert "Doubts" in page
    assert all(html.escape(doubt, quote=True).replace("&#x27;", "&#39;") in page for doubt in written)
    log = (out / "log.txt").read_text()
    assert f"fedvit run {out}/run.toml --lr auto --out {out}-auto" in log
    assert str(out) not in json.dumps(written), "the same run elsewhere has the same summary"
    status, _, told = call("run", out / "run.toml", "--lr", "auto", "--out", f"{out}-auto")
    assert status == 0, told
    assert Run(Path(f"{out}-auto")).experiment.train.lr < 0.8
    assert call("run", *flags, "--rounds", "3", "--out", tmp_path / "quiet", "--quiet")[1:] == ("", "")


def test_every_round_states_each_clients_loss(tmp_path: Path) -> None:
    for label in ("fedavg", "fedv"):
        run = Run(finish(tiny(label), tmp_path / label))
        for row in run.rounds:
            assert set(row["losses"]) == set(row["cohort"])
            assert min(row["losses"].values()) <= row["loss"] <= max(row["losses"].values())


def test_the_command_with_auto_keeps_all_other_flags() -> None:
    words = ["compare", "fedavg", "--lr", "0.1", "--out", "runs/a b", "--resume", "--set", "x.y=1"]
    assert with_auto_rate(words) == "fedvit compare fedavg --out 'runs/a b-auto' --set x.y=1 --lr auto"
    assert with_auto_rate(["run", "--lr=0.1", "--out=r"]) == "fedvit run --out r-auto --lr auto"
