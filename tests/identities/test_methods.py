"""Limits in which a method must be one that we trust, to the bit where both compute in the same way."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fedvit.core import tree
from fedvit.core.payload import Payload
from fedvit.core.plan import client_round
from fedvit.core.server import Server
from fedvit.core.tree import Tree
from fedvit.engine.loop import federate
from fedvit.methods.layer_editing import layers_of
from fedvit.methods.pfededit import edit
from tests.conftest import Bench, assert_close_trees, same_trees, tiny


def ended(
    label: str, folder: Path, sets: Mapping[str, Any] | None = None, other: Bench | None = None, **flags: Any
) -> tuple[Server, Bench]:
    """The server after the run, and the bench with the clients' memories. `other` lends its split."""
    bench = Bench(tiny(label, sets, **flags), folder)
    if other is not None:
        bench.worker.partition = other.split
    *_, last = federate(bench.net.plan, bench.server, bench.transport, bench.experiment, None, bench.test_samples)
    return last.server, bench


def memories(bench: Bench, key: str) -> dict[str, Tree]:
    found = {name: bench.store.get(name)[key] for name in bench.store.versions}
    return {name: value for name, value in found.items() if isinstance(value, dict)}


SAME_SERVER = {
    "fedprox, mu 0": ("fedprox", {"mu": 0}, {}),
    "ditto's shared model": ("ditto", {}, {}),
    "apfl's shared model": ("apfl", {"method.alpha": 0, "adaptive": False}, {}),
    "apfl's shared model, as the fork": ("apfl", {"mode": "fork"}, {}),
    "fedala, eta 0": ("fedala", {"eta": 0}, {}),
    "moon without contrast and projection": ("moon", {"mu": 0, "projection": 0}, {}),
    "fedprox under a tune": ("fedprox+bias", {"mu": 0}, {}),
    "fedala under a tune": ("fedala+lora", {"eta": 0}, {}),
    "ditto on a ResNet": ("ditto", {}, {"model": "resnet18", "image_size": 32, "patch_size": None, "rounds": 1}),
    "apfl on a ResNet": ("apfl", {}, {"model": "resnet18", "image_size": 32, "patch_size": None, "rounds": 1}),
}


@pytest.mark.parametrize("case", SAME_SERVER)
def test_the_server_is_fedavgs(case: str, tmp_path: Path) -> None:
    label, sets, flags = SAME_SERVER[case]
    tune = label.partition("+")[2]
    server, _ = ended(label, tmp_path / "a", sets, **flags)
    plain, _ = ended(f"fedavg+{tune}" if tune else "fedavg", tmp_path / "b", **flags)
    if label == "apfl":  # it trains weights beside the module, not the module's own
        assert_close_trees(server.shared, plain.shared)
    else:
        assert same_trees(server.shared, plain.shared)


def test_scaffold_is_fedavg_with_equal_weights_in_its_first_round_and_not_later(tmp_path: Path) -> None:
    equal = {"weighting": "equal"}
    for rounds, same in ((1, True), (2, False)):
        server, _ = ended("scaffold", tmp_path / f"a{rounds}", rounds=rounds)
        plain, _ = ended("fedavg", tmp_path / f"b{rounds}", equal, rounds=rounds)
        assert same_trees(server.shared, plain.shared) == same


@pytest.mark.parametrize(
    ("label", "sets"),
    [("ditto", {"lam": 0}), ("apfl", {"method.alpha": 1, "adaptive": False}), ("ditto+bias", {"lam": 0})],
)
def test_the_own_model_is_locals(label: str, sets: dict[str, Any], tmp_path: Path) -> None:
    _, bench = ended(label, tmp_path / "a", sets, rounds=3)
    tune = label.partition("+")[2]
    _, alone = ended(f"local+{tune}" if tune else "local", tmp_path / "b", rounds=3)
    own, personal = memories(bench, "own"), memories(alone, "personal")
    assert own.keys() == personal.keys()
    for name in own:
        if label == "apfl":
            assert_close_trees(own[name], personal[name])
        else:
            assert same_trees(own[name], personal[name])


def test_pfededit_that_edits_nothing_is_fedavg_with_equal_weights(tmp_path: Path) -> None:
    server, bench = ended("pfededit", tmp_path / "a", {"k": 0})
    plain, _ = ended("fedavg", tmp_path / "b", {"weighting": "equal"}, other=bench)
    assert same_trees(server.shared, plain.shared)
    with_probe, _ = ended("fedavg", tmp_path / "c", {"weighting": "equal"})
    assert not same_trees(plain.shared, with_probe.shared)  # it did hold images out


def test_pfededit_that_always_edits_all_norms_is_fedbn(tmp_path: Path) -> None:
    """The last point of Figure 2's norms. The norms of the server differ, and nobody uses them."""
    sets, everyone = {"metric": "random", "flexible": False, "layers": "norms", "k": 9}, {"cohort": 12, "rounds": 3}
    edited, bench = ended("pfededit", tmp_path / "a", sets, **everyone)
    plain, other = ended("fedbn", tmp_path / "b", {"weighting": "equal"}, other=bench, **everyone)
    assert plain.shared.keys() < edited.shared.keys()
    assert same_trees({name: edited.shared[name] for name in plain.shared}, plain.shared)
    last, personal = memories(bench, "last"), memories(other, "personal")
    for name in personal:
        assert same_trees({key: last[name][key] for key in personal[name]}, personal[name])


def test_fedala_mixes_exactly_the_last_tensors_and_takes_the_others_over(tmp_path: Path) -> None:
    bench = Bench(tiny("fedala", {"p": 3, "most_epochs": 1}), tmp_path)
    last = {name: tensor + 0.05 for name, tensor in bench.net.initial.items()}
    client = bench.worker.client("0", 2, {"last": last})
    start = bench.net.plan.merge(client, Payload({"shared": bench.net.initial}))
    mix = client.memory["mix"]
    assert isinstance(mix, dict)
    assert set(mix) == {"norm.bias", "head.weight", "head.bias"}
    assert {n for n in start if not torch.equal(start[n], bench.net.initial[n])} == set(mix)
    assert all(bool((mix[name] < 1).any()) for name in mix)


def test_pfededits_choice_is_a_byte_a_layer(tmp_path: Path) -> None:
    bench = Bench(tiny("pfededit", {"k": 3}), tmp_path)
    layers = layers_of(bench.net.module, bench.net.roles.trainable)
    last = {name: tensor + 0.05 for name, tensor in bench.net.initial.items()}
    up = client_round(
        bench.net.plan, bench.worker.client("0", 2, {"last": last}), Payload({"shared": bench.net.initial})
    )
    mask = up.trees["choice"]["layers"]
    assert (mask.dtype, mask.shape) == (torch.uint8, (len(layers),))
    assert sorted(mask.tolist()) == [0] * (len(layers) - 3) + [1] * 3
    assert up.nbytes == tree.nbytes(bench.net.shared) + len(layers)


def test_editing_every_layer_gives_the_last_model_and_editing_changes_predictions(tmp_path: Path) -> None:
    bench = Bench(tiny("pfededit", {"k": 3}), tmp_path)
    last = {name: tensor + 0.05 for name, tensor in bench.net.initial.items()}
    client = bench.worker.client("0", 2, {"last": last})
    layers = layers_of(bench.net.module, bench.net.roles.trainable)
    down = Payload({"shared": bench.net.initial})

    def edited(k: int) -> Tree:
        plan = Bench(tiny("pfededit", {"k": k}), tmp_path).net.plan
        assert getattr(plan.merge, "func", None) is edit
        return plan.merge(client, down)

    everything = edited(len(layers))
    outside = {"cls_token", "pos_embed"}  # not modules, so no layers
    inside = set(last) - outside
    assert same_trees(tree.pick(everything, inside), tree.pick(last, inside))
    assert same_trees(tree.pick(everything, outside), tree.pick(bench.net.initial, outside))
    three = edited(3)
    changed = {name for name in three if not torch.equal(three[name], bench.net.initial[name])}
    chosen = client.scratch["choice"]["layers"].nonzero().flatten().tolist()
    assert len(chosen) == 3
    assert changed == {name for i in chosen for name in layers[i].tensors}
    x = next(client.batches(1, "look"))[0]
    assert not torch.equal(client.net(three)(x), client.net(bench.net.initial)(x))
    assert same_trees(three, edited(3)), "the ranking is not deterministic"


def test_a_fixed_choice_stays_and_a_flexible_one_is_made_anew(tmp_path: Path) -> None:
    _, fixed = ended("pfededit", tmp_path / "a", {"flexible": False}, rounds=5, cohort=6)
    assert any("choice" in fixed.store.get(name) for name in fixed.store.versions)
    bench = Bench(tiny("pfededit", {"flexible": False}), tmp_path / "c")
    layers = layers_of(bench.net.module, bench.net.roles.trainable)
    mask = torch.zeros(len(layers), dtype=torch.uint8)
    mask[5] = 1
    last = {name: tensor + 0.05 for name, tensor in bench.net.initial.items()}
    client = bench.worker.client("0", 2, {"last": last, "choice": {"layers": mask}})
    start = bench.net.plan.merge(client, Payload({"shared": bench.net.initial}))
    assert {n for n in start if not torch.equal(start[n], bench.net.initial[n])} == set(layers[5].tensors)
    _, flexible = ended("pfededit", tmp_path / "b", rounds=2)
    assert not any("choice" in flexible.store.get(name) for name in flexible.store.versions)


def test_a_copied_batch_norm_layer_brings_its_statistics(tmp_path: Path) -> None:
    flags = {"model": "resnet18", "image_size": 32, "patch_size": None}
    bench = Bench(tiny("pfededit", {"k": 41}, **flags), tmp_path)
    assert len(layers_of(bench.net.module, bench.net.roles.trainable)) == 41
    last = {name: tensor + 0.05 for name, tensor in bench.net.initial.items()}
    client = bench.worker.client("0", 2, {"last": last})
    start = bench.net.plan.merge(client, Payload({"shared": bench.net.initial}))
    assert torch.equal(start["layer1.0.bn1.running_mean"], last["layer1.0.bn1.running_mean"])
    paper = Bench(tiny("pfededit", {"layers": "resnet54"}, **flags), tmp_path)
    assert len(paper.net.plan.choice.layers(paper.net.module, paper.net.roles)) == 54


def test_fed_rods_personal_head_corrects_the_generic_one(tmp_path: Path) -> None:
    _, bench = ended("fed_rod", tmp_path)
    name = next(iter(bench.store.versions))
    client = bench.worker.client(name, 2, bench.store.get(name))
    views = bench.net.plan.views(client, Payload({"shared": bench.server.shared}))
    x = next(client.batches(1, "look"))[0]
    heads = dict(bench.net.module.named_modules())
    both, generic = client.net(views["personal"])(x), client.net(views["generic"])(x)
    h = bench.net.module.forward_head(
        torch.func.functional_call(Features(bench.net.module), prefixed(views["generic"]), (x,)), pre_logits=True
    )
    own = views["personal"]
    correction = h @ own["second_head.0.weight"].T + own["second_head.0.bias"]
    assert torch.allclose(both - generic, correction, atol=1e-5)
    assert "second_head.0" in heads


class Features(torch.nn.Module):
    def __init__(self, module: torch.nn.Module):
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> Any:
        return self.module.forward_features(x)  # type: ignore[operator]


def prefixed(weights: Tree) -> Tree:
    return {f"module.{name}": tensor for name, tensor in weights.items()}


def test_fed_rods_hypernetwork_makes_heads_and_learns_from_them(tmp_path: Path) -> None:
    server, bench = ended("fed_rod", tmp_path, {"hyper": True})
    assert "head_maker.0.weight" in server.shared
    assert not torch.equal(server.shared["head_maker.2.bias"], bench.server.shared["head_maker.2.bias"])
    client = bench.worker.client("0", 3, {})
    start = bench.net.plan.merge(client, Payload({"shared": server.shared}))
    assert start["second_head.0.weight"].abs().sum() > 0


def test_distrans_mixes_every_image_with_the_offset_twice(tmp_path: Path) -> None:
    bench = Bench(tiny("distrans", {"a": 0.3}), tmp_path)
    module, x = bench.net.module, torch.randn(4, 3, 8, 8)
    seen: list[torch.Tensor] = []
    module.patch_embed.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    offset = bench.net.initial["offset.image"]
    assert module(x).shape == (4, 10)
    assert torch.allclose(seen[0][:4], 0.7 * x + 0.3 * offset)
    assert torch.allclose(seen[0][4:], 1.3 * x - 0.3 * offset)
    assert bench.net.initial["head.weight"].shape == (10, 2 * 48)
    assert "offset.image" in bench.net.roles.personal
