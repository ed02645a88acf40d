"""A run with several labels per image, from a manifest to predictions."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fedvit.cli.main import app
from fedvit.config.load import load_experiment
from fedvit.core.errors import UserError
from fedvit.core.settings import Experiment
from fedvit.methods import METHODS
from fedvit.report.load import collect
from fedvit.report.statistics import rank
from fedvit.report.verdict import headline
from fedvit.runs.execute import run_rounds
from fedvit.runs.folder import Run
from fedvit.split.plan import SplitPlan
from tests.conftest import THREADS, finish
from tests.labels import LABELS, write_manifest

SMALL = {"image_size": 8, "patch_size": 4, "rounds": 2, "epochs": 1, "batch": 8, "threads": THREADS}
Made = Callable[..., Experiment]


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_manifest(tmp_path_factory.mktemp("xray"))


@pytest.fixture
def made(manifest: Path) -> Made:
    def make(method: str = "fedavg", sets: dict[str, Any] | None = None, **flags: Any) -> Experiment:
        sets = {"data.cache": str(manifest.parent / "cache"), "data.val": 0.2, **(sets or {})}
        return load_experiment(None, sets, {**SMALL, "method": method, "data": str(manifest), **flags})

    return make


def test_a_run_learns_every_label(made: Made, tmp_path: Path) -> None:
    run = Run(finish(made("fedavg", {"train.loss": "weighted"}, rounds=12, lr=3e-3, eval_every=0), tmp_path / "run"))
    view = run.summary["views"]["personal"]
    assert set(view["auroc_labels"]) == {"0", "1", "2"}
    assert view["auroc"] > 0.8, "every label brightens a part of its own"
    assert view["auroc"] == pytest.approx(sum(view["auroc_labels"].values()) / 3)
    assert 0 <= view["val"] <= 100
    row = run.clients[0]
    assert 50 < row["personal_accuracy"] <= 100
    assert row["personal_auroc"] is not None
    assert run.settings["data"]["task"] == "multi"
    labels = run.summary["clinical"]["classes"]
    assert [one["class"] for one in labels] == sorted(LABELS)
    for one in labels:
        assert one["f1"] is not None
        assert one["average_precision"] is not None
    found = json.loads((run.folder / "clinical.json").read_text())["clients"]["north"]["classes"]
    assert {one["threshold_from"] for one in found} <= {"val", "default"}, "thresholds are never chosen on test"
    assert "val" in {one["threshold_from"] for one in found}


@pytest.mark.parametrize("method", list(METHODS))
def test_every_method_trains_or_says_why_not(method: str, made: Made, tmp_path: Path) -> None:
    plan = METHODS[method]()
    sets = {"distill_rounds": 1} if method == "fedfed" else {"ramp": 2} if method == "cd2_pfed" else {}
    if (isinstance(plan, SplitPlan) and plan.labels_leave) or method == "fedfed":
        with pytest.raises(UserError, match=rf"{method} (sends class numbers|draws the residuals).*choose another"):
            made(method, sets)
        return
    run = Run(finish(made(method, {**sets, "run.eval_every": 0}), tmp_path / "run"))
    losses = [row["loss"] for row in run.rounds]
    assert all(0 < loss < 5 for loss in losses)
    assert run.summary["views"]["personal"]["auroc"] is not None


@pytest.mark.parametrize("metric", ["prediction_list", "te", "loss", "accuracy"])
def test_layers_are_chosen_by_every_answer(metric: str) -> None:
    """One label is the same as two exclusive classes whose scores are 0 and the logit."""
    from fedvit.methods.layer_editing import ranking

    generator = torch.Generator().manual_seed(0)
    logits, own = torch.randn(5, 12, 1, generator=generator), torch.randn(12, 1, generator=generator)
    y = torch.randint(2, (12,), generator=generator)
    two = [torch.cat([torch.zeros_like(v), v], dim=-1) for v in (logits, own)]
    assert ranking(logits, own, y[:, None], metric) == ranking(*two, y, metric)  # type: ignore[arg-type]


def test_two_workers_and_a_resumed_run_give_the_same_files(made: Made, tmp_path: Path) -> None:
    experiment = made("fedper", {"train.loss": "balanced"}, rounds=3)
    whole = finish(experiment, tmp_path / "one")
    shared = finish(experiment, tmp_path / "two", workers=2)
    rounds = run_rounds(experiment, tmp_path / "stopped")
    next(rounds)
    rounds.close()
    resumed = finish(experiment, tmp_path / "stopped", resume=True)
    for name in ("rounds.jsonl", "clients.csv"):
        expected = (whole / name).read_bytes()
        assert (shared / name).read_bytes() == expected
        assert (resumed / name).read_bytes() == expected


def test_a_model_is_exported_and_predicts_and_is_scored_by_label(made: Made, manifest: Path, tmp_path: Path) -> None:
    run, shell = finish(made(rounds=1), tmp_path / "run"), CliRunner()
    file, image = tmp_path / "north.safetensors", manifest.parent / "000.png"
    assert shell.invoke(app, ["report", str(run)]).exit_code == 0
    assert shell.invoke(app, ["export", str(run), "--client", "north", "--out", str(file)]).exit_code == 0

    said = shell.invoke(app, ["predict", str(file), str(image)]).output
    assert all(f"{label} " in said for label in LABELS), "every label has a probability of its own"
    table = tmp_path / "predictions.csv"
    shell.invoke(app, ["predict", str(run), "--client", "north", str(manifest.parent), "--csv", str(table)])
    with table.open(newline="") as stream:
        lines = list(csv.DictReader(stream))
    assert len(lines) == 90
    for line in lines:
        likely = [name for name in sorted(LABELS) if float(line[f"probability {name}"]) >= 0.5]
        assert line["labels"] == "|".join(likely)

    scored = shell.invoke(app, ["evaluate", str(file), str(manifest), "--json"])
    found = json.loads(scored.output)
    assert [one["name"] for one in found["labels"]] == sorted(LABELS)
    areas = [one["auroc"] for one in found["labels"]]
    assert found["auroc"] == pytest.approx(sum(areas) / 3)
    assert (found["images"], found["patients"]) == (90, 45)
    assert "AUROC" in shell.invoke(app, ["evaluate", str(file), str(manifest)]).output
    wrong = shell.invoke(app, ["evaluate", str(file), str(manifest.parent)])
    assert wrong.exit_code == 2
    assert "expected a manifest (.csv)" in wrong.stderr


def test_a_site_without_a_label_has_no_auroc_of_it_and_still_counts(manifest: Path, tmp_path: Path, made: Made) -> None:
    lines = manifest.read_text().splitlines()
    head, *rows = lines
    place = head.split(",").index("label_edema")
    kept = []
    for row in rows:
        cells = row.split(",")
        cells[place] = "0" if cells[-1] == "north" else cells[place]
        kept.append(",".join([str(manifest.parent / cells[0]), *cells[1:]]))
    other = tmp_path / "manifest.csv"
    other.write_text("\n".join([head, *kept]) + "\n")
    run = Run(finish(made(data=str(other), rounds=1), tmp_path / "run"))
    view = run.summary["views"]["personal"]
    assert len(view["auroc_labels"]) == 3
    assert {row["client"] for row in run.clients} == {"east", "north", "south"}


def test_auroc_cannot_be_left_out(made: Made) -> None:
    with pytest.raises(UserError, match="would leave out the main score of a task with several labels"):
        made("fedavg", {"data.auroc": False})


def test_a_report_ranks_rows_by_the_mean_auroc_of_the_labels(made: Made, tmp_path: Path) -> None:
    for method in ("local", "fedavg"):
        finish(made(method, rounds=1), tmp_path / "runs" / method)
    rows = [row for group in collect([tmp_path / "runs"]) for row in group]
    areas = {row.label: row.view("auroc") for row in rows}
    best = max(areas, key=lambda label: areas[label] or 0)
    assert rank(rows)[0].label == best
    words = headline(rows)
    assert words.startswith(f"{best} has the highest mean AUROC of the labels")
    assert "In accuracy, the share of right answers to labels" in words


def test_advice_is_refused(manifest: Path) -> None:
    result = CliRunner().invoke(app, ["advise", "--data", str(manifest)])
    assert result.exit_code == 2
    assert "may have several labels" in result.stderr
