"""Narrower models: which part a client holds, that the part is a model, and how parts become a whole again."""

import itertools
from functools import partial
from pathlib import Path

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from fedvit.core import tree
from fedvit.core.client import Client
from fedvit.core.errors import UserError
from fedvit.core.plan import client_round
from fedvit.engine.cost import cost
from fedvit.engine.loop import federate
from fedvit.engine.net import window_of
from fedvit.methods import METHODS
from fedvit.models.build import MICRO, ModelSettings, backbone, build
from fedvit.models.groups import state
from fedvit.models.plugins.attach import classifier_names
from fedvit.models.plugins.specs import Adapter, Lora, Prefix, Prompt
from fedvit.models.width import CLASSES, HIDDEN, Axis, Part, Window, Windows, axes, cut, indices, narrow, overlap_mean
from fedvit.models.width import scaled as scaled_layers
from fedvit.runs.folder import Run
from tests.conftest import Bench, finish, same_trees, tiny

IMAGES = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))
HALF = Window(0.5)


def kept(size: int, axis: Axis, rate: float, shift: int = 0) -> list[int]:
    index = indices(size, axis, Window(rate, shift))
    assert index is not None
    return index.tolist()


def test_a_window_is_the_first_part_and_rolls_round() -> None:
    assert kept(6, HIDDEN, 0.5) == [0, 1, 2]
    assert kept(6, HIDDEN, 0.5, shift=4) == [4, 5, 0]
    assert kept(6, HIDDEN, 0.5, shift=6 + 1) == [1, 2, 3]
    assert kept(5, HIDDEN, 0.5) == [0, 1, 2], "half of five is three"
    assert kept(30, HIDDEN, 0.1) == [0, 1, 2]
    assert kept(8, HIDDEN, 0.01) == [0]


def test_heads_are_kept_and_become_narrower() -> None:
    assert kept(12, Axis(3), 0.5) == [0, 1, 4, 5, 8, 9]
    assert kept(12, Axis(3), 0.5, shift=3) == [3, 0, 7, 4, 11, 8]
    assert kept(15, Axis(1, 3), 0.5, shift=10) == [10, 11, 12, 13, 14, 0, 1, 2, 3], "as wide as three heads of three"


def test_the_rolling_window_reaches_everything() -> None:
    windows = Windows.parse("0.25", rolling=True)
    held = {i for round_ in range(8) for i in kept(8, HIDDEN, *windows.of("a", ["a"], round_))}
    assert held == set(range(8))


def test_what_whole_means() -> None:
    assert indices(6, HIDDEN, Window(1.0, 4)) is None
    assert indices(6, CLASSES, HALF) is None


def slow_mean(whole: Tensor, parts: list[tuple[list[int], list[int], Tensor]]) -> Tensor:
    """Number by number: the mean over whoever holds it."""
    result = whole.clone()
    for row in range(whole.shape[0]):
        for column in range(whole.shape[1]):
            held = [
                part[rows.index(row), columns.index(column)]
                for rows, columns, part in parts
                if row in rows and column in columns
            ]
            if held:
                result[row, column] = torch.stack(held).double().mean()
    return result


@pytest.mark.parametrize("shift", [0, 3])
def test_overlapping_parts_are_averaged_where_they_are_held(shift: int) -> None:
    codes, whole = {"w": (HIDDEN, Axis(2))}, torch.randn(5, 8)
    windows = [Window(rate, shift) for rate in (0.5, 0.25, 0.6)]
    places = [(kept(5, HIDDEN, *window), kept(8, Axis(2), *window)) for window in windows]
    parts = [torch.randn(len(rows), len(columns)) for rows, columns in places]
    found = overlap_mean(
        {"w": whole}, codes, (Part(1.0, w, {"w": part}) for w, part in zip(windows, parts, strict=True))
    )["w"]
    expected = slow_mean(whole, [(*place, part) for place, part in zip(places, parts, strict=True)])
    assert torch.equal(found, expected)
    assert (found == whole).any(), "what nobody holds stays"


def test_a_classifiers_row_is_averaged_over_the_owners_of_its_class() -> None:
    codes, whole = {"w": (CLASSES, HIDDEN)}, torch.zeros(3, 4)
    small = Part(1.0, HALF, {"w": torch.full((3, 2), 4.0)}, torch.tensor([0, 1]))
    large = Part(1.0, Window(), {"w": torch.full((3, 4), 2.0)}, torch.tensor([1]))
    expected = torch.tensor([[4.0, 4, 0, 0], [3, 3, 2, 2], [0, 0, 0, 0]])
    assert torch.equal(overlap_mean({"w": whole}, codes, [small, large])["w"], expected)


def test_the_overlap_of_whole_trees_is_their_mean_to_the_bit() -> None:
    trees = [{"w": torch.randn(7, 5), "b": torch.tensor([-0.0])} for _ in range(3)]
    codes = {"w": (HIDDEN, HIDDEN), "b": (HIDDEN,)}
    found = overlap_mean(trees[0], codes, (Part(1.0, Window(), one) for one in trees))
    expected = tree.mean((1.0, one) for one in trees)
    for name in expected:
        assert torch.equal(found[name].view(torch.int32), expected[name].view(torch.int32))


def test_a_vit_at_half_width_is_timms_own_of_half_the_size() -> None:
    model = build(ModelSettings(), 10, (), 0)
    half = VisionTransformer(**{**MICRO, "embed_dim": 24}, num_classes=10)
    half.load_state_dict(cut(state(model), axes(model), HALF))
    assert torch.equal(narrow(model, 0.5).eval()(IMAGES), half.eval()(IMAGES))


def test_narrow_vits_of_other_kinds_run() -> None:
    import timm

    for name in ("deit_tiny_distilled_patch16_224", "vit_small_patch14_reg4_dinov2", "vit_medium_patch16_gap_240"):
        model = timm.create_model(name, num_classes=7, img_size=56, depth=2)
        small = narrow(model, 0.3).eval()
        assert small(torch.zeros(1, 3, 56, 56)).shape[-1] == 7
        assert [codes[0] for path in classifier_names(model) for codes in [axes(model)[f"{path}.weight"]]].count(
            CLASSES
        )


PLUGINS = [
    Prefix(init="random"),
    Prefix(bottleneck=None, init="random"),
    Prefix(combine="concat"),
    Prefix(bottleneck=None, combine="concat"),
    Prompt(),
    Adapter(),
    Adapter(per_layer=True),
    Lora(),
]


@pytest.mark.parametrize("plugin", PLUGINS, ids=str)
def test_a_plugin_of_the_copy_works_on_the_copy(plugin: object) -> None:
    model = build(ModelSettings(), 10, (plugin,), 0).eval()  # type: ignore[arg-type]
    before = model(IMAGES)
    small = narrow(model, 0.5).eval()
    own = set(small.modules())
    calls = [hook for part in own for hook in (*part._forward_hooks.values(), *part._forward_pre_hooks.values())]
    calls += [part.__dict__["forward"] for part in own if "forward" in part.__dict__]
    assert calls
    for call in calls:
        assert isinstance(call, partial)
        assert all(argument in own for argument in call.args if isinstance(argument, nn.Module))
    assert same_trees(
        {name: tensor.detach() for name, tensor in state(small).items()}, cut(state(model), axes(model), HALF)
    )
    for name, parameter in small.named_parameters():
        if set(name.split(".")) & {"prefix", "prompt", "adapter", "lora"}:
            parameter.data.fill_(0.5)
    assert torch.equal(model(IMAGES), before), "the whole model has changed with its copy"
    assert not torch.equal(small(IMAGES), narrow(model, 0.5).eval()(IMAGES)), "the copy's plugin does nothing"


@pytest.mark.parametrize("name", ["resnet18", "resnet50_gn"])
@pytest.mark.parametrize("rate", [0.5, 0.3])
def test_a_narrow_resnet_runs_and_rolls(name: str, rate: float) -> None:
    model = backbone(ModelSettings(name=name), 10)
    small = narrow(model, rate)
    small.load_state_dict(cut(state(model), axes(model), Window(rate, 5)), strict=False)
    assert small(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    assert small.fc.in_features == small.layer4[-1].conv2.weight.shape[0] * (1 if name == "resnet18" else 4)


def test_the_scaler_divides_hidden_layers_while_it_is_on() -> None:
    small = narrow(build(ModelSettings(), 10, (), 0), 0.5).eval()
    plain = small.patch_embed(IMAGES), small(IMAGES)
    with scaled_layers(small, 0.5):
        assert torch.equal(small.patch_embed(IMAGES), plain[0] / 0.5)
        features = small.forward_head(small.forward_features(IMAGES), pre_logits=True)
        assert torch.allclose(small.head(features), features @ small.head.weight.T + small.head.bias, atol=1e-6)
        assert not torch.equal(small(IMAGES), plain[1])
    assert torch.equal(small(IMAGES), plain[1])


@pytest.mark.parametrize("rates", ["", "0", "1.5", "-1", "nan", "a", "1,,1", "a=1,0.5", "a=1,a=0.5"])
@pytest.mark.parametrize("method", ["heterofl", "fedrolex"])
def test_bad_rates_are_refused_where_they_enter(method: str, rates: str) -> None:
    with pytest.raises(UserError, match="above 0 and up to 1"):
        METHODS[method](rates=rates)


def test_rates_are_dealt_out_in_turn_or_by_name() -> None:
    dealt, named = Windows.parse("1, 0.5"), Windows.parse("north=0.25, south=1")
    assert [dealt.of(name, ["a", "b", "c"], 0).rate for name in "abc"] == [1, 0.5, 1]
    assert dealt.of("never trains", ["a", "b"], 0).rate == 1
    assert named.of("south", ["south", "north"], 0).rate == 1
    named.check(["south", "north"])
    with pytest.raises(UserError, match="no width for west"):
        named.check(["north", "west"])


def test_a_client_without_a_width_is_named_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no width for 1, 2, 3, 4, 5"):
        finish(tiny("heterofl", {"rates": "0=1,mistyped=0.5"}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    named, listed = (cost(tiny("heterofl", {"rates": rates}), 10) for rates in ("north=0.5", "0.5"))
    assert named == listed


def test_a_number_is_a_list_of_one() -> None:
    assert tiny("heterofl", {"rates": 0.5}).method["rates"] == "0.5"


@pytest.mark.parametrize("method", ["heterofl", "fedrolex"])
def test_a_model_without_widths_is_refused(method: str) -> None:
    with pytest.raises(UserError, match="choose a timm ViT or DeiT"):
        cost(tiny(method, patch_size=None, model="shufflenet_v2_x0_5"), 10)


def test_a_model_comes_back_at_its_clients_width(tmp_path: Path) -> None:
    run = Run(finish(tiny("fedrolex"), tmp_path))
    assert [run.model(client).head.in_features for client in ("0", "1")] == [48, 24]


def test_a_client_tests_its_own_part_of_the_newest_model(tmp_path: Path) -> None:
    bench = Bench(tiny("fedrolex"), tmp_path)
    down = bench.net.plan.dispatch(bench.server, "1")
    client = bench.worker.client("1", 1, {}, Window(0.5))
    assert same_trees(bench.net.plan.views(client, down)["personal"], client.initial)
    assert same_trees(client.initial, cut(bench.net.initial, axes(bench.net.module), Window(0.5)))


def half_client(bench: Bench) -> Client:
    """Client 1 has rate 1/2, and lacks some class."""
    client = bench.worker.client("1", 1, {}, HALF)
    assert (client.data.class_counts == 0).any()
    return client


@pytest.mark.parametrize("scaler", [False, True])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_narrow_client_trains_as_a_bare_loop_over_a_small_model(
    scaler: bool, clip: float | None, tmp_path: Path
) -> None:
    method = "fedrolex" if clip else "heterofl"
    options = {"scaler": scaler, "optimizer": "sgd", **({"clip": clip} if clip else {})}
    bench = Bench(tiny(method, options, lr=0.05), tmp_path)
    client = half_client(bench)
    end = bench.net.plan.local(client, client.initial)

    model = VisionTransformer(**{**MICRO, "patch_size": 4, "embed_dim": 24}, num_classes=10)
    model.load_state_dict(client.initial)
    if scaler:
        for name, part in model.named_modules():
            if isinstance(part, nn.Linear | nn.Conv2d) and name != "head":
                part.register_forward_hook(lambda _, __, output: output * 2)
    owned = client.data.labels[client.data.train].unique()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, fused=True)
    for x, y in client.batches(1, "train"):
        logits = torch.zeros(len(y), 10)
        logits[:, owned] = model(x)[:, owned]
        optimizer.zero_grad()
        nn.functional.cross_entropy(logits, y).backward()
        if clip:
            norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
            for p in model.parameters():
                p.grad *= min(1.0, clip / norm)
        optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.allclose(end[name], parameter, atol=1e-6), name


def test_frozen_weights_lie_in_the_clients_window_too(tmp_path: Path) -> None:
    bench = Bench(tiny("fedrolex+bias"), tmp_path)
    net, codes = bench.net, axes(bench.net.module)
    for window in (Window(0.5, 2), Window(0.5, 7), Window(0.25, 7), Window(0.5, 2)):
        client = bench.worker.client("1", 1, {}, window)
        assert same_trees(client.frozen, cut(net.frozen, codes, window))
        assert same_trees(tree.pick(state(client.module), net.roles.frozen), client.frozen)
    assert bench.worker.client("1", 1, {}, Window(0.25, 9)).module is bench.net.narrower[0.25].module


def test_one_round_is_the_mean_over_the_holders(tmp_path: Path) -> None:
    bench = Bench(tiny("heterofl", {"masking": False}, rounds=1, cohort=3), tmp_path)
    done = next(federate(bench.net.plan, bench.server, bench.transport, bench.experiment, None, bench.test_samples))
    name, parts = "blocks.0.mlp.fc1.weight", []
    assert len({int(client) % 2 for client in done.row["cohort"]}) == 2, "both widths should be there"
    for client in done.row["cohort"]:
        down = bench.net.plan.dispatch(bench.server, client)
        owner = bench.worker.client(client, 1, {}, window_of(down))
        end = client_round(bench.net.plan, owner, down).trees["shared"][name]
        parts.append((list(range(len(end))), list(range(end.shape[1])), end))
    assert torch.equal(done.server.shared[name], slow_mean(bench.server.shared[name], parts))


def test_fedrolexs_second_round_reaches_the_window_one_further_on(tmp_path: Path) -> None:
    bench = Bench(tiny("fedrolex", {"rates": 0.5, "masking": False}, cohort=1), tmp_path)
    done = list(federate(bench.net.plan, bench.server, bench.transport, bench.experiment, None, bench.test_samples))
    for name, size in (("blocks.0.mlp.fc1.bias", 96), ("blocks.0.norm1.weight", 48)):
        trees = [server.shared[name] for server in (bench.server, done[0].server, done[1].server)]
        moved = [(new != old).nonzero().flatten().tolist() for old, new in itertools.pairwise(trees)]
        assert moved == [list(range(size // 2)), list(range(1, size // 2 + 1))], name


def test_a_class_that_nobody_in_the_cohort_has_keeps_its_row(tmp_path: Path) -> None:
    options = {"optimizer": "sgd", "weight_decay": 0.5}  # which would move every row that is averaged
    bench = Bench(tiny("heterofl", options, rounds=1, lr=0.05), tmp_path)
    done = next(federate(bench.net.plan, bench.server, bench.transport, bench.experiment, None, bench.test_samples))
    owned = {int(c) for name in done.row["cohort"] for c in bench.worker.labels[bench.split.clients[name].train]}
    assert 0 < len(owned) < 10
    for name in ("head.weight", "head.bias"):
        moved = done.server.shared[name] != bench.server.shared[name]
        assert {row for row in range(10) if moved[row].any()} == owned, name


def test_a_round_of_narrow_resnets_reaches_the_statistics(tmp_path: Path) -> None:
    flags = {"model": "resnet18", "image_size": 32, "patch_size": None, "rounds": 1, "cohort": 1}
    experiment = tiny("fedrolex", {"rates": 0.25}, **flags)
    bench = Bench(experiment, tmp_path)
    done = next(federate(bench.net.plan, bench.server, bench.transport, experiment, None, bench.test_samples))
    moved = done.server.shared["bn1.running_mean"] != bench.server.shared["bn1.running_mean"]
    assert moved.tolist() == [True] * 16 + [False] * 48
    assert cost(experiment, 10)["nbytes"] == {"down": done.row["nbytes_down"], "up": done.row["nbytes_up"]}


def test_clients_that_never_train_have_the_first_rate(tmp_path: Path) -> None:
    run = Run(finish(tiny("heterofl", {"rates": "0.5,1", "unseen": 2}), tmp_path))
    assert set(run.summary["unseen"]) == {"personal", "finetuned"}


def test_testing_inside_the_round_works_on_parts_too(tmp_path: Path) -> None:
    assert Run(finish(tiny("fedrolex", {"evaluate": "in_round", "rates": 0.5}), tmp_path)).finished
