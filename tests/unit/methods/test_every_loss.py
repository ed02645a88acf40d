"""train.loss reaches the training of every method, or is refused by name."""

import json
from pathlib import Path

import pytest

from fedvit.core.errors import UserError
from fedvit.methods import METHODS
from fedvit.split.plan import SplitPlan
from tests.conftest import finish, tiny

AT_THE_SERVER = [name for name, plan in METHODS.items() if isinstance(made := plan(), SplitPlan) and made.labels_leave]


def losses(method: str, loss: str, folder: Path) -> list[float]:
    sets = {"train.loss": loss, **({"distill_rounds": 1} if method == "fedfed" else {})}
    done = finish(tiny(method, sets, cohort=1, eval_every=0), folder)
    return [json.loads(line)["loss"] for line in (done / "rounds.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("method", [name for name in METHODS if name not in AT_THE_SERVER])
def test_a_loss_reaches_the_training_of_a_method(method: str, tmp_path: Path) -> None:
    plain, focal = losses(method, "cross_entropy", tmp_path / "plain"), losses(method, "focal", tmp_path / "focal")
    assert all(one < other for one, other in zip(focal, plain, strict=True)), "(1 - p)^2 makes every loss smaller"


@pytest.mark.parametrize("method", AT_THE_SERVER)
def test_a_server_that_computes_the_loss_has_only_the_cross_entropy(method: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the server computes the loss, without the class counts.*train.loss=balanced"):
        finish(tiny(method, {"train.loss": "balanced"}), tmp_path / "run")


def test_a_gamma_without_its_loss_is_refused() -> None:
    with pytest.raises(UserError, match=r"train.focal_gamma is only for the loss focal"):
        tiny("fedavg", {"focal_gamma": 1.0})
    assert tiny("fedavg", {"train.loss": "focal"}).train.focal_gamma == 2.0
    assert tiny("fedavg").train.focal_gamma is None


def test_class_weights_are_the_clients_own(tmp_path: Path) -> None:
    """A client with images of only one class: its weighted loss is its cross-entropy, whatever others have."""
    sets = {"partition.classes": 1}
    flags = {"partition": "pathological", "clients": 10, "cohort": 10, "rounds": 1}
    runs = [
        finish(tiny("fedavg", {**sets, "train.loss": loss}, **flags), tmp_path / loss)
        for loss in ("cross_entropy", "weighted")
    ]
    plain, weighted = (json.loads((run / "rounds.jsonl").read_text())["losses"] for run in runs)
    assert weighted == pytest.approx(plain, rel=1e-6)
