"""What a run takes is said before it begins, and holds afterwards."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedvit.cli.main import app
from fedvit.core.errors import UserError
from fedvit.core.settings import DataSettings
from fedvit.data.size import size_of
from fedvit.engine.calibrate import calibrate
from fedvit.engine.estimate import Estimate, estimate, estimate_run, say, total
from fedvit.engine.net import make_net
from fedvit.engine.probe import footprint
from fedvit.engine.rates import calibration_file
from fedvit.engine.system import peak_of_all_mb, peak_rss_mb
from fedvit.engine.worker import load_data
from fedvit.methods import METHODS
from fedvit.runs.folder import Run
from tests.conftest import finish, tiny

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_measured_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def foretell(label: str = "fedavg", sets: Any = None, workers: int = 1, **flags: Any) -> Estimate:
    return estimate(tiny(label, sets, **flags), 1797, 10, workers, shape=(8, 8, 1))


@pytest.mark.parametrize(
    "label", ["fedavg", "fedper", "fedavg+bias", "scaffold", "local", "centralized", "fedbabu", "moon"]
)
def test_the_bytes_of_a_run_are_known_in_advance(label: str, tmp_path: Path) -> None:
    experiment = tiny(label, {"run.eval_every": 2}, rounds=3)
    sent = Run(finish(experiment, tmp_path / "run")).summary["nbytes_run"]
    found = foretell(label, {"run.eval_every": 2}, rounds=3)
    assert found.nbytes == sum(sent.values())
    assert (found.traffic.down, found.traffic.up, found.traffic.evaluation) == tuple(sent.values())[:3]


@pytest.mark.parametrize("label", ["heterofl", "cd2_pfed", "fedv", "splitfed_v1", "pfededit"])
def test_the_bytes_of_other_methods_are_nearly_known(label: str, tmp_path: Path) -> None:
    experiment = tiny(label, rounds=3)
    sent = Run(finish(experiment, tmp_path / "run")).summary["nbytes_run"]
    net = make_net(experiment, 10, CPU)
    found = estimate_run(experiment, net, *load_data(experiment), workers=1)
    assert found.nbytes == pytest.approx(sum(sent.values()), rel=0.25)


def test_the_batch_changes_minutes_and_memory() -> None:
    small, large = foretell(batch=8), foretell(batch=128)
    assert small.minutes > large.minutes, "many small steps take longer"
    assert small.memory_mb < large.memory_mb


def test_rounds_epochs_images_and_evaluations_take_time() -> None:
    plain = foretell(rounds=4).minutes
    assert foretell(rounds=8).minutes > plain
    assert foretell(rounds=4, epochs=3).minutes > plain
    assert foretell(rounds=4, sets={"run.eval_every": 0}).minutes < plain
    assert estimate(tiny(rounds=4), 3000, 10, 1, shape=(8, 8, 1)).minutes > plain
    assert foretell("ditto", rounds=4).minutes > plain, "it trains two models"
    rounds = foretell("local", {"method.schedule": "every_round"}, rounds=4).minutes
    assert rounds > plain, "everyone trains in every round"


def test_frozen_layers_are_computed_once(tmp_path: Path) -> None:
    net = make_net(tiny("fedper+head"), 10, CPU)
    found = footprint(tiny("fedper+head"), net, ["0", "1"], (8, 8, 1))
    assert found.cached_nbytes > 0
    assert found.train_first.macs > 100 * found.train_image_epoch.macs
    whole = footprint(tiny(), make_net(tiny(), 10, CPU), ["0", "1"], (8, 8, 1))
    assert (whole.cached_nbytes, whole.train_first.macs) == (0, 0)
    with_cache, without = (foretell("fedper+head", {"run.cache_mb": mb}, rounds=40).minutes for mb in (100, 0))
    assert with_cache < without


@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_can_be_probed_and_leaves_the_model_as_it_was(name: str) -> None:
    experiment = tiny(name, rounds=6)
    net = make_net(experiment, 10, CPU)
    before = {key: tensor.detach().clone() for key, tensor in net.live.items()}
    found = footprint(experiment, net, [str(number) for number in range(12)], (8, 8, 1))
    assert found.train_image_epoch.macs > 0
    assert found.test_image.macs > 0
    assert found.working_nbytes(64) > found.working_nbytes(32)
    assert all(torch.equal(before[key], tensor) for key, tensor in net.live.items())
    assert all(parameter.grad is None for parameter in net.module.parameters())


@pytest.mark.parametrize("name", ["fedfed", "cd2_pfed"])
def test_methods_that_hold_more_need_more_memory(name: str) -> None:
    plain, more = (
        footprint(tiny(label, rounds=6), make_net(tiny(label, rounds=6), 10, CPU), ["0", "1"], (8, 8, 1))
        for label in ("fedavg", name)
    )
    assert more.train_nbytes_image > 1.5 * plain.train_nbytes_image


def test_a_run_uses_the_memory_of_all_processes(tmp_path: Path) -> None:
    alone, pair = (Run(finish(tiny(), tmp_path / str(count), workers=count)).summary["peak_rss_mb"] for count in (1, 2))
    assert pair > alone + 100, "two more processes"
    assert pair > peak_rss_mb()
    assert peak_of_all_mb() >= peak_rss_mb() * 0.9
    assert foretell(workers=2).memory_mb > foretell(workers=1).memory_mb + 100


@pytest.mark.parametrize("label", ["fedavg", "fedper+head", "splitfed_v1", "centralized", "pfededit"])
def test_a_measurement_is_kept_and_used(label: str) -> None:
    experiment = tiny(label)
    before = estimate(experiment, 1797, 10, 1, shape=(8, 8, 1))
    rates = calibrate(experiment, make_net(experiment, 10, CPU), (8, 8, 1), 1)
    after = estimate(experiment, 1797, 10, 1, shape=(8, 8, 1))
    assert (before.how, rates.how, after.how) == ("table", "measured", "measured")
    assert after.nbytes == before.nbytes
    assert estimate(tiny(label, batch=16), 1797, 10, 1, shape=(8, 8, 1)).how == "table", "another batch"
    calibration_file(experiment).write_text("no JSON")
    assert estimate(experiment, 1797, 10, 1, shape=(8, 8, 1)).how == "table"


def test_several_runs_of_a_command_import_once() -> None:
    one = foretell()
    both = total([one, one])
    assert both.nbytes == 2 * one.nbytes
    assert one.minutes < both.minutes < 2 * one.minutes
    assert both.memory_mb == one.memory_mb
    assert "seconds and" in say(both)


def test_a_run_says_first_what_it_will_take(tmp_path: Path) -> None:
    flags = ["--rounds", "1", "--clients", "12", "--patch-size", "4"]
    ended = CliRunner().invoke(app, ["run", *flags, "--out", str(tmp_path / "run")])
    first = ended.stderr.splitlines()[0]
    assert first.startswith("fedavg: about "), ended.stderr
    assert "MB of memory with 1 process" in first
    assert first in (tmp_path / "run" / "log.txt").read_text()
    silent = CliRunner().invoke(app, ["run", *flags, "--quiet", "--out", str(tmp_path / "quiet")])
    assert "about" not in silent.stderr
    assert "MB of memory" in (tmp_path / "quiet" / "log.txt").read_text()
    assert not logging.getLogger("fedvit.engine.estimate").handlers


def test_a_comparison_says_first_what_all_rows_will_take(tmp_path: Path) -> None:
    rows = ["compare", "fedavg", "--seeds", "0", "--rounds", "1", "--clients", "12", "--out", str(tmp_path / "both")]
    ended = CliRunner().invoke(app, rows)
    assert ended.stderr.splitlines()[0].startswith("2 runs: about "), ended.stderr
    assert "about" in (tmp_path / "both" / "fedavg" / "seed0" / "log.txt").read_text()
    again = CliRunner().invoke(app, rows)
    assert "runs: about" not in again.stderr, "nothing is left to do"


def told(*flags: str) -> dict[str, Any]:
    ended = CliRunner().invoke(app, ["cost", "--json", *flags])
    assert ended.exit_code == 0, ended.output
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def test_cost_tells_the_run_of_these_settings(tmp_path: Path) -> None:
    plain = told("--rounds", "3", "--workers", "1")
    assert set(plain["run"]) == {
        *("minutes", "nbytes", "memory_mb", "workers", "how"),
        *("nbytes_down", "nbytes_up", "nbytes_evaluation"),
    }
    assert isinstance(plain["run"]["nbytes"], int)
    file = tmp_path / "experiment.toml"
    file.write_text("[train]\nrounds = 3\n[run]\nthreads = 1\n")
    assert told(str(file), "--workers", "1") == plain
    more = told("--rounds", "6", "--workers", "1")
    assert more["run"]["nbytes"] == 2 * plain["run"]["nbytes"]
    batch = told("--rounds", "3", "--workers", "1", "--batch", "256")
    assert batch["run"]["memory_mb"] > plain["run"]["memory_mb"]
    assert batch["run"]["minutes"] != plain["run"]["minutes"]
    assert told("--rounds", "3", "--workers", "1", "--calibrate")["run"]["how"] == "measured"
    assert told("--rounds", "3", "--workers", "1")["run"]["how"] == "measured", "it was kept"


def test_cost_says_what_it_leaves_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FEDVIT_DATA", raising=False)
    unknown = CliRunner().invoke(app, ["cost", "--data", "nothing_of_this_name"])
    assert unknown.exit_code == 2
    assert "unknown dataset 'nothing_of_this_name'" in unknown.stderr
    absent = CliRunner().invoke(app, ["cost", "--data", "pathmnist"])
    assert absent.exit_code == 0
    assert "left out: minutes, memory and bytes of a run, because pathmnist.npz is not in" in absent.stdout
    assert told("--data", "pathmnist")["run"] is None
    assert told("--data", "cifar100", "--rounds", "1")["run"]["nbytes"] > 0, "its size is known without the files"


def test_the_size_of_data_is_known_without_reading_images(tmp_path: Path) -> None:
    images, labels = np.zeros((30, 9, 9, 3), np.uint8), np.arange(30) % 7
    np.savez(tmp_path / "some.npz", train_images=images, train_labels=labels, test_images=images[:4], test_labels=labels[:4])  # fmt: skip  # noqa: E501
    found = size_of(DataSettings(name="some", dir=tmp_path), 16)
    assert (found.images, found.tests, found.classes, found.shape) == (34, 4, 7, (9, 9, 3))
    for site in ("a", "b"):
        for label in ("x", "y"):
            (tmp_path / "folder" / site / label).mkdir(parents=True)
            (tmp_path / "folder" / site / label / "1.png").touch()
    folder = size_of(DataSettings(name=str(tmp_path / "folder")), 16)
    assert (folder.images, folder.classes, folder.sites, folder.shape) == (4, 2, (2, 2), (16, 16, 3))
    (tmp_path / "bad.npz").write_bytes(b"no archive")
    with pytest.raises(UserError, match=r"bad\.npz cannot be read"):
        size_of(DataSettings(name=str(tmp_path / "bad.npz")), 16)
