"""Runs from Python: your own plan, module, layer groups and data; what is needed to open them again."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedvit
from fedvit.core.errors import UserError
from fedvit.core.plan import Plan
from fedvit.data.sources import load_digits
from fedvit.engine import net
from fedvit.methods import METHODS
from fedvit.models.plugins.specs import Adapter
from tests.conftest import same_trees

FLAGS: dict[str, Any] = {"clients": 4, "cohort": 2, "rounds": 2, "epochs": 1, "samples": 320, "eval_every": 0}
SMALL = {**FLAGS, "patch_size": 4}
GROUPS = {"head": ["classify"], "stem": ["features.0", "features.1"]}


class Net(nn.Module):
    """A stranger's network: no timm, no `fc`, batch normalisation inside."""

    def __init__(self, classes: int = 10, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten()
        )
        self.classify = nn.Linear(8 * 16, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.classify(self.features(x))
        return out


def run_net(folder: Path, net: nn.Module, **flags: Any) -> Any:
    settings = {"min_samples": 20, **flags.pop("settings", {})}
    return fedvit.run(
        model=net, groups=GROUPS, image_size=8, out=folder, settings=settings, **{**FLAGS, "method": "fedper", **flags}
    )


def test_a_plan_of_your_own_is_the_method_it_equals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(net, "skip_unread_tokens_", lambda model: None)  # your plan may look at all of them
    plan = replace(METHODS["fedper"](), name="mine")
    mine = fedvit.run(method=plan, out=tmp_path / "mine", **SMALL)
    theirs = fedvit.run(method="fedper", out=tmp_path / "fedper", **SMALL)
    assert (tmp_path / "mine" / "clients.csv").read_bytes() == (tmp_path / "fedper" / "clients.csv").read_bytes()
    assert mine.summary["label"] == "mine"
    assert same_trees(mine.model("1").state_dict(), theirs.model("1").state_dict())


def test_a_run_with_a_plan_of_your_own_says_what_opens_it_again(tmp_path: Path) -> None:
    plan = Plan(name="mine", build=(Adapter(width=4),))
    run = fedvit.run(method=plan, out=tmp_path / "r", **{**SMALL, "rounds": 1})
    bare = fedvit.load_run(tmp_path / "r")
    assert bare.summary == run.summary  # results need no plan
    assert bare.experiment.method == {"name": "mine", "python": True}
    with pytest.raises(UserError, match=r"'mine' was written in Python .*load_run\(FOLDER, method=plan\)"):
        bare.model("1")
    again = fedvit.load_run(tmp_path / "r", method=plan)
    assert same_trees(again.model("1").state_dict(), run.model("1").state_dict())
    longer = fedvit.run(method=plan, out=tmp_path / "r", resume=True, **SMALL)
    assert longer.summary["rounds"] == 2
    with pytest.raises(UserError, match="leave workers=1"):
        fedvit.run(method=plan, workers=2, out=tmp_path / "w", **SMALL)
    with pytest.raises(UserError, match=r"unknown key method\.mu of mine, a plan from Python"):
        fedvit.run(method=plan, settings={"method.mu": 1}, out=tmp_path / "w", **SMALL)
    with pytest.raises(UserError, match="method should be a name or a Plan, found int"):
        fedvit.run(method=3, out=tmp_path / "w")  # type: ignore[arg-type]


def test_an_export_of_your_own_plan_needs_no_plan_to_be_opened(tmp_path: Path) -> None:
    from tests.unit.runs.test_export import written

    plan = Plan(name="mine", build=(Adapter(width=4),))
    run = fedvit.run(method=plan, out=tmp_path / "r", **{**SMALL, "rounds": 1})
    (one,) = written(run, tmp_path, "1")
    x = torch.rand(2, 3, 8, 8)
    assert torch.equal(fedvit.load_model(one.path)(x), run.model("1")(x))


def test_a_module_of_your_own_keeps_what_its_groups_say_personal(tmp_path: Path) -> None:
    net = Net()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    run = run_net(tmp_path / "r", net, method="custom", settings={"personal": "stem,head"})
    assert same_trees(net.state_dict(), before), "the module that was given is not touched"
    own = 3 * 8 * 9 + 8 + 2 * 8 + 8 * 16 * 10 + 10
    assert run.summary["params"] == {
        "total": own + 8 * 8 * 9 + 8, "trainable": own + 8 * 8 * 9 + 8, "shared": 8 * 8 * 9 + 8, "personal": own,
        "frozen": 0,
    }  # fmt: skip
    one, two = (run.model(name) for name in ("0", "1"))
    assert torch.equal(one.features[3].weight, two.features[3].weight)
    assert not torch.equal(one.features[0].weight, two.features[0].weight)


def test_a_run_with_a_module_of_your_own_is_opened_with_the_same_module(tmp_path: Path) -> None:
    from tests.unit.runs.test_export import written

    run = run_net(tmp_path / "r", Net(), tune="stem")  # the rest is frozen, and on no disk
    bare = fedvit.load_run(tmp_path / "r")
    assert bare.experiment.tune == {"name": "stem"}
    with pytest.raises(UserError, match=r"a module from Python and no file holds it.*load_run\(FOLDER, model=module\)"):
        bare.model("1")
    with pytest.raises(UserError, match="not those that the run began with"):
        fedvit.load_run(tmp_path / "r", model=Net(seed=1)).model("1")
    again = fedvit.load_run(tmp_path / "r", model=Net())
    assert same_trees(again.model("1").state_dict(), run.model("1").state_dict())
    with pytest.raises(UserError, match=r"model\.fingerprint was"):
        run_net(tmp_path / "r", Net(seed=1), tune="stem", resume=True)

    (one,) = written(again, tmp_path, "1")
    assert "a module of your own" in one.description.not_timm
    with pytest.raises(UserError, match=r"load_model\(FILE, module=YourModule\(\)\)"):
        fedvit.load_model(one.path)
    x = torch.rand(2, 3, 8, 8)
    assert torch.equal(fedvit.load_model(one.path, module=Net(seed=5))(x), run.model("1")(x))


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"model": Net(classes=3)}, r"shape \(2, 10\) for two images; found \(2, 3\)"),
    ({"model": nn.Linear(3, 3)}, r"cannot take images of shape \(2, 3, 8, 8\)"),
    ({"groups": {}}, r"which part of this Net is its classifier\? Name it.*features, classify"),
    ({"groups": {"head": ["clasify"]}}, r"clasify \(of the layer group head\)' matches no weight"),
    ({"image_size": None}, "give image_size"),
    ({"tune": "stemm,head"}, "did you mean 'stem'"),
    ({"method": "fedperfix"}, "needs a timm ViT or DeiT"),
    ({"method": "fedv"}, "cannot be cut"),
    ({"method": "heterofl"}, "cannot be made narrower"),
    ({"model": 7}, "model should be a name or a Module, found int"),
    ({"data": 7}, "data should be a name"),
]


@pytest.mark.parametrize(("change", "told"), MISTAKES, ids=[told for _, told in MISTAKES])
def test_a_mistake_is_told(change: dict[str, Any], told: str, tmp_path: Path) -> None:
    arguments = {"model": Net(), "groups": GROUPS, "image_size": 8, "method": "fedper", **FLAGS, **change}
    with pytest.raises(UserError, match=told):
        fedvit.run(out=tmp_path / "r", **arguments)
    assert not (tmp_path / "r").exists()


def test_one_set_from_python_is_divided_like_any_other(tmp_path: Path) -> None:
    digits = load_digits()
    mine = fedvit.run(data=(digits.images, digits.labels), out=tmp_path / "mine", **SMALL)
    named = fedvit.run(data="digits", out=tmp_path / "named", **SMALL)
    assert mine.summary["views"] == named.summary["views"]

    class Pairs(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 300

        def __getitem__(self, index: int) -> tuple[Any, int]:
            return torch.from_numpy(np.repeat(digits.images[index], 3, 2)).permute(2, 0, 1) / 255, int(
                digits.labels[index]
            )

    pairs = fedvit.run(data=Pairs(), partition="iid", out=tmp_path / "pairs", **{**SMALL, "rounds": 1, "samples": None})
    assert sum(client["train_samples"] + client["test_samples"] for client in pairs.clients) == 300


def test_what_a_module_of_your_own_draws_is_drawn_anew(tmp_path: Path) -> None:
    """Nobody can see from outside whether it drops features, so its frozen part is not computed once."""
    run = run_net(tmp_path / "r", Net(), tune="head", method="fedavg")
    assert "is frozen" not in (run.folder / "log.txt").read_text()
    assert "came from Python" in (run.folder / "report.html").read_text()
