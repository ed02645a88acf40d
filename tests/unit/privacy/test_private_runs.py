"""Runs with differential privacy, from end to end."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedvit.cli.main import app
from fedvit.core.errors import UserError
from fedvit.core.settings import Experiment
from fedvit.runs.folder import Run
from fedvit.runs.resume import start_or_resume
from tests.conftest import finish, tiny

EPSILON: dict[str, Any] = {"privacy.epsilon": 8.0, "data.samples": 300}


def private(label: str = "fedper+bias", sets: dict[str, Any] | None = None, **flags: Any) -> Experiment:
    return tiny(label, {**EPSILON, **(sets or {})}, clients=4, **flags)


def files(folder: Path) -> dict[str, bytes]:
    names = ("rounds.jsonl", "clients.csv", "confusion.json")
    return {
        **{name: (folder / name).read_bytes() for name in names},
        **{path.name: path.read_bytes() for path in sorted((folder / "privacy").iterdir())},
    }


def begin_with_the_secret_of(other: Path, folder: Path) -> Path:
    (folder / "privacy").mkdir(parents=True)
    (folder / "privacy" / "secret").write_text((other / "privacy" / "secret").read_text())
    return folder


def test_a_run_spends_its_budget_and_says_what_it_does_not_cover(tmp_path: Path) -> None:
    run = Run(finish(private(), tmp_path / "run"))
    summary = run.summary
    found = summary["privacy"]
    assert 0.9 * 8 < summary["epsilon"] <= 8
    trained = {row["client"] for row in run.clients if row["rounds_trained"]}
    assert set(found["epsilon_by_client"]) == trained
    assert summary["epsilon"] == max(found["epsilon_by_client"].values())
    assert found["unprotected"] == ["the scores of tested models", "the numbers of images"]
    assert [row["loss"] for row in run.rounds] == [None, None]  # of single images, without noise
    assert (tmp_path / "run" / "privacy").stat().st_mode & 0o077 == 0


def test_the_same_secret_gives_the_same_bytes_with_any_workers_and_after_a_break(tmp_path: Path) -> None:
    experiment = private()
    first = finish(experiment, tmp_path / "first")
    other = finish(experiment, tmp_path / "other")
    assert files(other)["rounds.jsonl"] != files(first)["rounds.jsonl"]  # the server's seed is not enough

    two = finish(experiment, begin_with_the_secret_of(first, tmp_path / "two"), workers=2)
    assert files(two) == files(first)

    broken = begin_with_the_secret_of(first, tmp_path / "broken")
    next(iter(start_or_resume(experiment, broken, resume=False)))
    for _ in start_or_resume(experiment, broken, resume=True):
        pass
    assert files(broken) == files(first)


@pytest.mark.parametrize(
    ("label", "sets", "words"),
    [
        ("fedfa", {}, "fedfa cannot train with differential privacy: it redraws features"),
        ("fedfed", {}, "residuals of single images"),
        ("fedala", {}, "mixing weights"),
        ("fedv", {}, "split learning"),
        ("fedavg", {"model.name": "resnet18", "model.image_size": 16, "model.patch_size": None}, "batch normalization"),
    ],
)
def test_what_cannot_be_private_is_refused_before_anything_is_trained(
    label: str, sets: dict[str, Any], words: str, tmp_path: Path
) -> None:
    flags = {"patch_size": None} if "model.name" in sets else {}
    with pytest.raises(UserError, match=words):
        finish(private(label, sets, **flags), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        ({"privacy.epsilon": 0}, "greater than 0"),
        ({"privacy.epsilon": -1}, "greater than 0"),
        ({"privacy.delta": 1.0}, "less than 1"),
        ({"privacy.noise": 1.0}, "leave one of them out"),
        ({"privacy.epsilon": None, "privacy.clip": 2.0}, "has no effect without --epsilon"),
        ({"privacy.epsilon": None, "privacy.noise": 1.0, "privacy.accountant": "per_step"}, "leave privacy.noise out"),
        ({"privacy.unit": "house"}, "privacy.unit"),
    ],
)
def test_settings_that_mean_nothing_are_refused(sets: dict[str, Any], words: str) -> None:
    given = {key: value for key, value in {**EPSILON, **sets}.items() if value is not None}
    with pytest.raises(UserError, match=words):
        tiny("fedavg", given)


def test_a_budget_that_allows_no_training_is_refused_before_round_1(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no noise keeps"):
        finish(private(sets={"privacy.epsilon": 1e-6}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_with_a_budget_cannot_be_extended(tmp_path: Path) -> None:
    finish(private(rounds=1), tmp_path / "run")
    with pytest.raises(UserError, match=r"noise was chosen so that 1 rounds spend privacy.epsilon=8"):
        list(start_or_resume(private(rounds=2), tmp_path / "run", resume=True))


def test_noise_of_ones_own_has_no_limit_and_is_counted(tmp_path: Path) -> None:
    sets = {"privacy.noise": 0.0, "data.samples": 300}
    run = Run(finish(tiny("fedavg+bias", sets, clients=4, rounds=1), tmp_path / "run"))
    assert run.summary["epsilon"] is None  # no noise, no bound
    more = Run(finish(tiny("fedavg+bias", {**sets, "privacy.noise": 2.0}, clients=4, rounds=1), tmp_path / "more"))
    assert 0 < more.summary["epsilon"] < 8


def test_the_command_says_what_was_spent(tmp_path: Path) -> None:
    arguments = ["run", "--tune", "bias", "--epsilon", "8", "--rounds", "1", "--clients", "4", "--samples", "300"]
    found = CliRunner().invoke(app, [*arguments, "--patch-size", "4", "--out", str(tmp_path / "run")])
    assert found.exit_code == 0, found.output
    assert "at delta 1e-05 for each training image, the most of any client; not covered:" in found.output
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["privacy"]["delta"] == 1e-5
