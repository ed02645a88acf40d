"""PFedEdit's options: how layers are counted, what is held out, and choices that stay."""

from collections import Counter
from pathlib import Path

import pytest

from fedvit.core.errors import UserError
from fedvit.core.payload import Payload
from fedvit.core.roles import state_names
from fedvit.core.settings import ModelSettings
from fedvit.engine.worker import load_data
from fedvit.methods import make_plan
from fedvit.methods.layer_editing import Size, layers_of
from fedvit.models.build import build
from tests.conftest import Bench, tiny


@pytest.mark.parametrize(
    ("name", "size", "layers", "edited"),
    [
        ("resnet18", 32, 54, [1, 2, 3, 4, 5]),
        ("resnet50", 32, 107, [2, 4, 6, 8, 10]),
        ("densenet121", 32, 370, [4, 12, 19, 26, 34]),
        ("vit_base_patch16_224", 224, 111, [2, 4, 6, 8, 10]),
        ("mlp", 32, 4, [1, 1, 1, 1, 1]),
    ],
)
def test_the_papers_count_of_layers_is_the_one_that_a_ratio_is_taken_of(
    name: str, size: int, layers: int, edited: list[int]
) -> None:
    model = build(ModelSettings(name=name, image_size=size), 10, (), 0)
    found = layers_of(model, state_names(model), "paper")
    assert len(found) == layers
    assert [Size(None, share / 100).of(len(found)) for share in (1, 3, 5, 7, 9)] == edited


def test_a_ratio_is_taken_of_the_layers_that_can_be_chosen(tmp_path: Path) -> None:
    flags = {"model": "resnet18", "image_size": 32, "patch_size": None}
    for rule, candidates, chosen in (("leaves", 41, 3), ("paper", 54, 4), ("main_norms", 17, 2)):
        bench = Bench(tiny("pfededit", {"layers": rule, "metric": "random"}, **flags), tmp_path)
        client = bench.worker.client("0", 2, {"last": bench.net.initial})
        bench.net.plan.merge(client, Payload({"shared": bench.net.initial}))
        mask = client.scratch["choice"]["layers"]
        assert (len(mask), int(mask.sum())) == (candidates, chosen)


def test_main_norms_are_the_17_outside_the_shortcuts_of_resnet18() -> None:
    model = build(ModelSettings(name="resnet18", image_size=32), 10, (), 0)
    names = [layer.name for layer in layers_of(model, state_names(model), "main_norms")]
    assert len(names) == 17
    assert "bn1" in names
    assert not any("downsample" in name for name in names)


def test_the_layers_of_the_paper_need_a_network_that_it_counts() -> None:
    model = build(ModelSettings(name="shufflenet_v2_x0_5", image_size=32), 10, (), 0)
    with pytest.raises(UserError, match="use layers=leaves"):
        layers_of(model, state_names(model), "paper")
    with pytest.raises(UserError, match="trains none of the 54 layers that the paper counts"):
        layers_of(build(ModelSettings(name="resnet18"), 10, (), 0), ("fc.weight",), "paper")


def test_the_training_images_stay_while_the_probe_varies() -> None:
    parts = {}
    for probe in (0.05, 0.1, 0.2):
        data, split = load_data(tiny("pfededit", {"probe": probe, "held_out": 0.2}, clients=4))
        parts[probe] = split.clients["0"]
    most = parts[0.2]
    for probe, part in parts.items():
        images = len(most.train) + len(most.probe)
        assert part.train.tolist() == most.train.tolist()
        assert len(part.probe) == round(probe * images)
        assert set(part.probe.tolist()) <= set(most.probe.tolist())
        got, had = (Counter(data.labels[part.probe].tolist()), Counter(data.labels[most.probe].tolist()))
        share = len(part.probe) / len(most.probe)
        assert all(abs(got[label] - had[label] * share) < 1 for label in had), "not in the mix of classes"
    alone = load_data(tiny("pfededit", {"probe": 0.2}, clients=4))[1].clients["0"]
    assert (alone.train.tolist(), alone.probe.tolist()) == (most.train.tolist(), most.probe.tolist())


def test_no_more_can_be_tried_than_is_held_out() -> None:
    with pytest.raises(UserError, match=r"held_out=0.1 is less than method.probe=0.2"):
        make_plan({"name": "pfededit", "probe": 0.2, "held_out": 0.1})
    with pytest.raises(UserError, match=r"method.held_out=0.999"):
        load_data(tiny("pfededit", {"probe": 0.2, "held_out": 0.999}))


def test_a_fixed_random_choice_is_the_same_for_all_clients_and_rounds(tmp_path: Path) -> None:
    def masks(flexible: bool) -> list[list[int]]:
        sets = {"metric": "random", "flexible": flexible, "k": 3}
        bench = Bench(tiny("pfededit", sets), tmp_path)
        found = []
        for name, round_ in (("0", 2), ("0", 3), ("1", 2)):
            client = bench.worker.client(name, round_, {"last": bench.net.initial})
            bench.net.plan.merge(client, Payload({"shared": bench.net.initial}))
            found.append(client.scratch["choice"]["layers"].tolist())
        return found

    first, *others = masks(flexible=False)
    assert sum(first) == 3
    assert others == [first, first]
    assert len({tuple(mask) for mask in masks(flexible=True)}) == 3
