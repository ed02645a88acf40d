"""Searches: what is chosen, on which images, at what cost, and that nothing is lost when one is stopped."""

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from fedvit.core.errors import UserError
from fedvit.engine.loop import Round
from fedvit.report.load import collect
from fedvit.report.search_tables import found_lines, search_table
from fedvit.runs.folder import Run
from fedvit.studies.rates import auto_rates, parse_rates, planned_rounds, search_rates, with_values
from fedvit.studies.rows import Row, run_of
from fedvit.studies.search import LR, Found, Schedule, best_of, edge, parse_over, search
from fedvit.studies.search_rows import prepare_searches, run_searches
from tests.conftest import TINY, tiny
from tests.unit.cli.test_command_line import QUICK, call

FEW = {**TINY, "clients": 4, "samples": 240}


def ended(steps: Iterator[Round]) -> Any:
    """Run a generator to its end and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def row_of(label: str = "fedper", **flags: Any) -> Row:
    return Row(label, {0: tiny(label, **{**FEW, **flags})})


def searched(row: Row, rates: list[float], schedule: Schedule, folder: Path, **options: Any) -> Found:
    return ended(search(row.label, lambda values: with_values(row, values), {LR: rates}, schedule, folder, **options))  # type: ignore[arg-type, no-any-return]


def without_seconds(found: Found) -> Found:
    return replace(found, seconds=0.0, trials=[replace(trial, seconds=0.0) for trial in found.trials])


def test_the_best_on_validation_images_is_chosen(tmp_path: Path) -> None:
    found = searched(row_of(), [1e-5, 3e-3], Schedule.grid(3), tmp_path)
    runs = {lr: Run(tmp_path / "fedper" / f"lr={lr}" / "seed0") for lr in (1e-5, 3e-3)}
    vals = {lr: run.summary["views"]["personal"]["val"] for lr, run in runs.items()}
    assert vals[3e-3] > vals[1e-5]
    assert found.chosen == {LR: 3e-3}
    assert found.val == vals[3e-3]
    assert all(run.experiment.data.val == 0.2 for run in runs.values())
    assert found.rounds == 6
    assert found.at_edge == {LR: "largest"}
    assert found.seconds > 0


def npz_with_test_labels(path: Path, labels: np.ndarray) -> Path:
    generator = np.random.default_rng(0)
    images = generator.integers(0, 255, (300, 8, 8, 3), dtype=np.uint8)
    train = generator.integers(0, 3, 300)
    images[train == 0, :4] = 0
    images[train == 1, 4:] = 0
    np.savez(path, train_images=images, train_labels=train, test_images=images[:90], test_labels=labels,
             class_names=np.array(["a", "b", "c"]))  # fmt: skip
    return path


def test_test_labels_change_nothing_in_a_search(tmp_path: Path) -> None:
    found = []
    for name, labels in (("real", np.arange(90) % 3), ("turned", (np.arange(90) + 1) % 3)):
        data = npz_with_test_labels(tmp_path / f"{name}.npz", labels)
        row = row_of("fedavg", data=str(data), partition="dirichlet_train", samples=None, rounds=2)
        found.append(searched(row, [1e-4, 5e-3], Schedule.grid(2), tmp_path / name))
    assert without_seconds(found[0]) == without_seconds(found[1])
    scores = [Run(tmp_path / name / "fedavg/lr=0.005/seed0").summary["server_accuracy"] for name in ("real", "turned")]
    assert scores[0] != scores[1], "the two sets have the same score, so this cannot tell which images decide"


def test_halving_trains_the_best_longer_and_continues_after_a_stop(tmp_path: Path) -> None:
    row, rates, schedule = row_of(), [1e-6, 1e-4, 1e-3, 3e-3], Schedule.halving(4)
    assert schedule.rungs == (1, 2, 4)
    whole = searched(row, rates, schedule, tmp_path / "whole")
    assert sorted(len(trial.val) for trial in whole.trials) == [1, 1, 2, 3]
    assert whole.rounds == schedule.rounds(4, planned=False) == 4 + 2 + 2
    make = lambda values: with_values(row, values)  # noqa: E731
    steps = search(row.label, make, {LR: rates}, schedule, tmp_path / "stopped")
    for _ in range(5):  # in the middle of the second stage
        next(steps)
    steps.close()
    again = searched(row, rates, schedule, tmp_path / "stopped")
    assert without_seconds(again) == without_seconds(whole)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "stopped").rglob("*") if path.is_file()}
    searched(row, rates, schedule, tmp_path / "stopped")
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "stopped").rglob("*") if path.is_file()}


def test_a_schedule_that_plans_its_rates_is_run_anew_at_every_stage(tmp_path: Path) -> None:
    row = Row("fedper", {0: tiny("fedper", {"train.schedule": "cosine"}, **FEW)})
    found = searched(row, [1e-4, 3e-3], Schedule((1, 2)), tmp_path)
    assert found.rounds == Schedule((1, 2)).rounds(2, planned=True) == 2 + 2
    chosen = tmp_path / "fedper" / f"lr={found.chosen[LR]}"
    assert all((chosen / f"rounds{n}" / "seed0" / "summary.json").is_file() for n in (1, 2))


def test_a_rate_that_diverges_is_left_out_and_named(tmp_path: Path) -> None:
    row = Row("fedavg", {0: tiny("fedavg", {"train.optimizer": "sgd"}, **FEW)})
    found = searched(row, [1e-2, 1e30], Schedule.grid(2), tmp_path)
    assert found.chosen == {LR: 1e-2}
    assert [bool(trial.val) for trial in found.trials] == [True, False]
    shown = io.StringIO()
    Console(width=100, file=shown).print(search_table([found.to_json()]))
    assert "diverged" in shown.getvalue()
    with pytest.raises(UserError, match="diverges with every value"):
        searched(row, [1e29, 1e30], Schedule.grid(2), tmp_path)


def test_a_worker_process_tells_that_a_client_diverged(tmp_path: Path) -> None:
    row = Row("fedavg", {0: tiny("fedavg", {"train.optimizer": "sgd"}, **FEW)})
    assert searched(row, [1e-2, 1e30], Schedule.grid(1), tmp_path, workers=2).chosen == {LR: 1e-2}


def test_auto_looks_beyond_an_edge_and_stops_after_two_steps(tmp_path: Path) -> None:
    row = row_of(lr=1e-6, rounds=2)
    (chosen,) = ended(search_rates([row], None, tmp_path))
    assert chosen.search is not None
    tried = [trial["values"][LR] for trial in chosen.search["trials"]]
    assert tried[:4] == [1e-7, 3e-7, 1e-6, 3e-6]
    assert tried == auto_rates(row.first)[LR] + tried[4:]
    assert len(tried) <= 6
    assert chosen.first.train.lr == chosen.search["chosen"][LR]
    assert chosen.first.train.rounds == 2
    assert chosen.first.data.val == 0.0, "the row itself trains on all its images"
    assert json.loads((tmp_path / "search.json").read_text())[0]["chosen"] == chosen.search["chosen"]


def test_any_setting_can_be_searched_over_and_values_are_checked_before_training(tmp_path: Path) -> None:
    options: dict[str, Any] = {"halving": False, "seeds": [0, 1], "base": None, "sets": {}}
    over = parse_over(["method.mu=0,0.1", "tune.name=full,head"])
    (one,) = prepare_searches(["fedprox"], over, **options, flags={**FEW, "rounds": 1})
    assert one.candidates == 4
    assert one.rounds == 8
    (found,) = ended(run_searches([one], tmp_path, lambda *_: None, 1))
    assert len(found.trials) == 4
    assert run_of(tmp_path, Row("fedprox/mu=0,name=head", {}), 1).finished
    lines = "\n".join(found_lines([found.to_json()]))
    assert "method.mu=" in lines
    with pytest.raises(UserError, match="no row has this key"):
        prepare_searches(["fedavg"], {"method.mu": [0, 1]}, **options, flags=FEW)
    with pytest.raises(UserError, match="greater than"):
        prepare_searches(["fedavg"], {LR: [0.1, -1]}, **options, flags=FEW)


def test_edges_ties_and_plans() -> None:
    assert best_of([1.0, 3.0, 3.0, None]) == 1
    assert best_of([None, None]) is None
    assert [edge([1, 2, 3], value) for value in (1, 2, 3)] == ["smallest", "", "largest"]
    assert edge(["a", "b"], "a") == ""
    assert Schedule.short(16).rungs == (4, 8)
    assert Schedule.short(1).rungs == (1,)
    assert Schedule.halving(6).rungs == (1, 2, 6)
    assert Schedule.short(16).words(4) == "4 values x 4 rounds, the best 2 to round 8"
    assert planned_rounds(row_of(rounds=16), None) == 4 * 4 + 2 * 4
    assert parse_rates("0.1") == (0.1, False, None)
    assert parse_rates("auto") == (None, True, None)
    assert parse_rates("1e-3,0.01") == (None, True, [0.001, 0.01])
    assert parse_over(["lr=1e-3,1e-2"]) == {LR: [0.001, 0.01]}


def test_compare_searches_rates_for_each_row_and_shows_edges(tmp_path: Path) -> None:
    flags = [*QUICK, "--seeds", "0", "--samples", "240", "--clients", "4", "--out", tmp_path / "c"]
    status, shown, told = call("compare", "fedper", "--lr", "1e-5,3e-3", *flags)
    assert status == 0, told
    entries = {entry["label"]: entry for entry in json.loads((tmp_path / "c" / "compare.json").read_text())}
    assert set(entries) == {"local", "fedper"}
    for label, entry in entries.items():
        assert entry["lr"] == entry["search"]["chosen"][LR]
        assert Run(tmp_path / "c" / label / "seed0").experiment.train.lr == entry["lr"]
        assert entry["search"]["at_edge"]
    assert "the smallest or largest rate that was tried" in shown
    assert "2 rows (2 values x 1 round, the best 1 to round 2): 6 rounds, about " in told
    assert {row.label for group in collect([tmp_path / "c"]) for row in group} == {"local", "fedper"}
    page = (tmp_path / "c" / "report.html").read_text()
    for entry in entries.values():
        assert f"{entry['lr']} ({entry['search']['at_edge'][LR]} tried)" in page
    assert call("compare", "fedper", "--lr", "1e-5,3e-3", *flags, "--quiet")[0] == 0


def test_run_finds_its_rate_and_refuses_what_is_no_rate(tmp_path: Path) -> None:
    flags = [*QUICK, "--samples", "240", "--clients", "4"]
    status, _, told = call("run", "--method", "fedper", "--lr", "auto", *flags, "--out", tmp_path / "r")
    assert status == 0, told
    (found,) = json.loads((tmp_path / "r" / "search" / "search.json").read_text())
    assert Run(tmp_path / "r").experiment.train.lr == found["chosen"][LR]
    assert "val" in told
    for wrong, words in (("often", "or auto"), ("-1,2", "above 0"), ("0", "train.lr")):
        status, _, told = call("run", "--lr", wrong, "--out", tmp_path / "x")
        assert status == 2
        assert words in told


def test_the_search_command_writes_what_it_found(tmp_path: Path) -> None:
    flags = [
        "--patch-size",
        "4",
        "--rounds",
        "2",
        "--epochs",
        "1",
        "--cohort",
        "2",
        "--clients",
        "4",
        "--samples",
        "240",
    ]
    out, save = tmp_path / "s", tmp_path / "new" / "rates.json"
    status, shown, told = call("search", "fedper", "--over", "lr=1e-5,3e-3", *flags, "--out", out, "--save", save)
    assert status == 0, told
    assert "search for 1 row (2 values x 2 rounds): 4 rounds in all, about " in told
    assert json.loads(save.read_text()) == json.loads((out / "search.json").read_text())
    assert "✓ train.lr=0.003" in shown
    assert "is the largest value tried" in shown
    assert call("search", "fedper", "--over", "lr=1e-3", "--out", out)[0] == 2
