"""Clipping, warm-up and learning rates per part, for every method."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedvit.config.load import load_experiment, read_tables
from fedvit.config.resolve import to_toml
from fedvit.core.errors import DivergedError, UserError
from fedvit.core.plan import client_round
from fedvit.core.settings import CLIP_BIAS, CLIP_GRAD, FromPython
from fedvit.core.training import clip_, clipped
from fedvit.engine.net import local_settings, make_net, parts_of
from fedvit.methods import METHODS
from fedvit.methods.local import plan as local
from fedvit.models.plugins.specs import Lora, SecondHead
from fedvit.runs.folder import Run
from fedvit.runs.resume import start_or_resume
from tests.conftest import TINY, Bench, finish, same_trees, tiny
from tests.parity.test_references import LR, START, Hidden, client_of, down, made, numbers, slope, tree_of

CPU = torch.device("cpu")
OWN_LOOPS = (
    "apfl",
    "ditto",
    "fed_lamb",
    "fed_rod",
    "fedrep",
    "per_fedavg",
    "scaffold",
    "distrans",
    "cd2_pfed",
    "fedbabu",
)
HUGE = 1e9


def shortened(gradient: np.ndarray, largest: float) -> np.ndarray:
    return gradient * min(1.0, largest / np.linalg.norm(gradient))


def test_a_gradient_is_shortened_to_the_norm_over_all_tensors() -> None:
    pair = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])}
    short = clipped(pair, 0.5)
    assert short["a"].tolist() == pytest.approx([0.3, 0.0], rel=1e-5)
    assert short["b"].tolist() == [[pytest.approx(0.4, rel=1e-5)]]
    assert pair["a"].tolist() == [3.0, 0.0], "the original changed"
    clip_(list(pair.values()), 6.0)
    assert pair["a"].tolist() == [3.0, 0.0], "a short gradient changed"
    assert clipped(pair, 0.0) is pair
    clip_([], 1.0)


def test_fedavg_steps_along_clipped_gradients() -> None:
    plan, largest = made("fedavg"), 0.6 * float(np.linalg.norm(slope(START)))
    client = client_of(plan, epochs=2)
    client.settings = replace(client.settings, clip_grad=largest)
    up = client_round(plan, client, down())
    end = START
    for _ in range(2):
        end = end - LR * shortened(slope(end), largest)
    assert numbers(up.trees["shared"]) == pytest.approx(end, abs=1e-6)


def test_the_pull_of_fedprox_is_part_of_what_is_clipped() -> None:
    plan, far = made("fedprox", mu=50.0), 0.3
    client = client_of(plan, epochs=2)
    client.settings = replace(client.settings, clip_grad=far)
    up = client_round(plan, client, down())
    first = START - LR * shortened(slope(START), far)
    second = first - LR * shortened(slope(first) + 50.0 * (first - START), far)
    assert numbers(up.trees["shared"]) == pytest.approx(second, abs=1e-6)


def test_a_control_of_scaffold_is_the_mean_of_clipped_gradients() -> None:
    plan, c, own = made("scaffold"), np.array([0.02, -0.01]), np.array([-0.03, 0.05])
    largest = 0.5 * float(np.linalg.norm(slope(START)))
    client = client_of(plan, {"control": tree_of(own)})
    client.settings = replace(client.settings, clip_grad=largest)
    up = client_round(plan, client, down(control=tree_of(c)))
    short = shortened(slope(START), largest)
    assert numbers(client.memory["control"]) == pytest.approx(short, abs=1e-6)
    assert numbers(up.trees["shared"]) == pytest.approx(START - LR * shortened(short - own + c, largest), abs=1e-6)


def trained(sets: dict[str, Any], folder: Path) -> Run:
    return Run(finish(tiny(sets=sets), folder))


def one_visit(label: str, sets: dict[str, Any], folder: Path, **flags: Any) -> dict[str, torch.Tensor]:
    """What one client sends after its first training, and the model that it is tested with."""
    bench = Bench(tiny(label, {"lr": 0.002, **sets}, **flags), folder)
    name = bench.split.seen[0]
    payload = bench.net.plan.dispatch(bench.server, name)
    payload = replace(payload, scalars={**payload.scalars, "round": 1.0})
    up, memory = bench.worker.train(name, payload, {})
    views = bench.net.plan.views(bench.worker.client(name, 1, memory), payload)
    return {**views["personal"], **{f"sent {n}": t for tree in up.trees.values() for n, t in tree.items()}}


@pytest.mark.parametrize("method", ["fedavg", *OWN_LOOPS])
def test_a_huge_limit_is_none_and_a_small_one_acts_in_every_method(method: str, tmp_path: Path) -> None:
    off, huge, small = (
        one_visit(method, {"optimizer": "sgd", "clip_grad": limit}, tmp_path) for limit in (0.0, HUGE, 1e-3)
    )
    assert same_trees(off, huge)
    assert not same_trees(off, small)


@pytest.mark.parametrize("method", ["fedavg", *OWN_LOOPS])
@pytest.mark.parametrize("part", ["lr_classifier", "lr_plugins"])
def test_a_part_at_the_runs_rate_changes_nothing_and_one_at_its_own_does(
    method: str, part: str, tmp_path: Path
) -> None:
    """The limit: every weight trains at the run's rate, whichever setting names it."""
    if method == "distrans" and part == "lr_plugins":
        pytest.skip("its offset has a fifth of the run's rate unless told otherwise")
    plain, same, other = (one_visit(f"{method}+lora", sets, tmp_path) for sets in ({}, {part: 0.002}, {part: 0.05}))
    assert same_trees(plain, same)
    assert not same_trees(plain, other)


def test_a_classifier_with_its_own_rate_steps_like_two_optimizers() -> None:
    """Two layers by hand: each weight moves by its own rate along the same gradient, with momentum."""
    plan = local()
    client = client_of(plan, epochs=3, module=Hidden())
    client.settings = replace(client.settings, lr=0.1, lr_classifier=0.7, momentum=0.5)
    client.parts = {"fc.weight": "classifier"}
    reference = Hidden()
    x = next(client.batches(1, "train"))
    body, head = reference.hidden.weight, reference.fc.weight
    speeds = [torch.zeros_like(body), torch.zeros_like(head)]
    for _ in range(3):
        loss = torch.nn.functional.cross_entropy(reference(x[0]), x[1])
        gradients = torch.autograd.grad(loss, [body, head])
        with torch.no_grad():
            for weight, speed, gradient, lr in zip((body, head), speeds, gradients, (0.1, 0.7), strict=True):
                speed.mul_(0.5).add_(gradient)
                weight -= lr * speed
    end = plan.local(client, client.initial)
    torch.testing.assert_close(end["hidden.weight"], body.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(end["fc.weight"], head.detach(), rtol=1e-5, atol=1e-6)


def test_parts_are_the_classifier_and_what_is_added() -> None:
    net = make_net(tiny("fed_rod+lora"), 10, CPU)
    parts = parts_of(net.module, (SecondHead(), Lora()))
    assert parts == net.parts
    assert {name for name, part in parts.items() if part == "classifier"} == {"head.weight", "head.bias"}
    plugins = {name for name, part in parts.items() if part == "plugins"}
    assert plugins == {name for name in net.roles.of if {"second_head", "lora"} & set(name.split("."))}


def test_rates_warm_up_over_rounds_and_then_follow_the_schedule() -> None:
    sets = {"lr": 0.8, "lr_classifier": 0.4, "warmup": 3, "schedule": "exp", "decay": 0.5}
    experiment = tiny("fedavg", sets, rounds=6)
    rates = [local_settings(experiment, round_, CPU) for round_ in range(1, 7)]
    factors = [1 / 4, 2 / 4 * 0.5, 3 / 4 * 0.25, 0.125, 0.0625, 0.03125]
    assert [s.lr for s in rates] == [0.8 * f for f in factors]
    assert [s.lr_classifier for s in rates] == [0.4 * f for f in factors]
    assert {s.lr_plugins for s in rates} == {None}


def test_a_diverging_run_survives_with_clipping(tmp_path: Path) -> None:
    wild = {"optimizer": "sgd", "lr": 3.0, "momentum": 0.9}
    with pytest.raises(DivergedError, match=r"--set train\.clip_grad"):
        trained(wild, tmp_path / "unlimited")
    run = trained({**wild, "clip_grad": 0.01}, tmp_path / "clipped")
    assert run.rounds[-1]["loss"] < np.log(10) + 0.3, "about as good as a guess among ten classes"


LIMITS = ({"clip_grad": 0}, {"clip_grad": 10})
PRETRAINED = {"model": "vit_tiny_patch16_224", "image_size": 64, "pretrained": True, "patch_size": None}


def test_clipping_is_on_for_pretrained_weights_alone() -> None:
    assert tiny().train.clip_grad == 0
    assert tiny(**PRETRAINED).train.clip_grad == CLIP_GRAD
    assert tiny("fedavg+norm,attn", **PRETRAINED).train.clip_grad == CLIP_GRAD
    assert tiny("fedper+bias", **PRETRAINED).train.clip_grad == CLIP_BIAS
    assert tiny(sets={"clip_grad": 0}, **PRETRAINED).train.clip_grad == 0
    assert tiny("fedv", **PRETRAINED).train.clip_grad == 0


def test_ordinary_gradients_of_full_tuning_are_below_the_default_limit(shared_data: Path, tmp_path: Path) -> None:
    """A limit of 10, which suits biases, would shorten every one of them and slow training down."""
    flags = PRETRAINED | {"pretrained": None, "weights": shared_data / "vit_tiny_patch16_224.fp16.safetensors"}
    flags |= {"data": "cifar100_small", "data_dir": shared_data, "samples": 200, "clients": 2, "epochs": 1}
    sets = {"optimizer": "sgd", "lr": 0.005, "momentum": 0.9}
    chosen, off, low = (one_visit("fedavg", {**sets, **own}, tmp_path, **flags) for own in ({}, *LIMITS))
    assert same_trees(chosen, off)
    assert not same_trees(low, off)


def test_a_run_from_before_there_was_clipping_goes_on_without(tmp_path: Path) -> None:
    text = to_toml(tiny(**PRETRAINED))
    assert f"clip_grad = {CLIP_GRAD}" in text
    old = tmp_path / "run.toml"
    old.write_text("".join(f"{line}\n" for line in text.splitlines() if not line.startswith("clip_grad")))
    assert load_experiment(base=read_tables(old)).train.clip_grad == 0
    mine = tmp_path / "mine.toml"  # an experiment file is no run: it gets today's default
    mine.write_text(old.read_text().partition("[versions]")[0])
    assert load_experiment(mine).train.clip_grad == CLIP_GRAD


def test_a_warmed_up_run_may_get_more_rounds(tmp_path: Path) -> None:
    whole, first = (tiny(sets={"warmup": 1}, rounds=rounds) for rounds in (3, 2))
    finish(whole, tmp_path / "whole")
    finish(first, tmp_path / "longer")
    for _ in start_or_resume(whole, tmp_path / "longer", resume=True):
        pass
    losses = [Run(tmp_path / name).rounds[-1]["loss"] for name in ("whole", "longer")]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("label", "sets", "words"),
    [
        ("fedavg+bias", {"lr_plugins": 0.1}, "adds no module"),
        ("fedv", {"lr_classifier": 0.1}, r"train\.lr is the rate"),
        ("fedv", {"lr_plugins": 0.1}, "split learning"),
    ],
)
def test_a_rate_without_effect_is_refused(label: str, sets: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make_net(tiny(label, sets), 10, CPU)


def test_a_classifier_that_nothing_trains_has_no_rate() -> None:
    make_net(tiny("fedbabu", {"lr_classifier": 0.1}), 10, CPU)  # fine-tuning before a test trains it
    fixed = replace(METHODS["fedbabu"](), name="fixed", views=METHODS["fedavg"]().views)
    experiment = load_experiment(sets={"lr_classifier": 0.1}, flags=TINY, own=FromPython(plan=fixed))
    with pytest.raises(UserError, match="does not train the classifier"):
        make_net(experiment, 10, CPU)


def test_a_warm_up_must_end() -> None:
    with pytest.raises(UserError, match=r"none of train\.rounds=3 at the full learning rate"):
        tiny(sets={"warmup": 3}, rounds=3)
