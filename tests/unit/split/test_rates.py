"""Every part of a split model at its own rate, what is averaged, and a head that learns from losses alone."""

import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w
import torch
import torch.nn.functional as F
from torch import nn

from fedvit.config.load import load_experiment
from fedvit.core import tree
from fedvit.core.errors import UserError
from fedvit.core.payload import Payload
from fedvit.core.tree import Tree
from fedvit.engine.cost import cost
from fedvit.engine.loop import Round
from fedvit.engine.net import make_net
from fedvit.engine.split_loop import server_side
from fedvit.methods import METHODS
from fedvit.models.cuts import Parts
from fedvit.network.grpc.channel import GarbageError, LateError
from fedvit.network.grpc.checks import Checks, Progress
from fedvit.runs.folder import Run
from fedvit.runs.resume import start_or_resume
from fedvit.split import spsa
from fedvit.split.client import ClientSide
from fedvit.split.messages import Message, pack
from fedvit.split.plan import SplitPlan
from fedvit.split.server import ServerSide
from tests.conftest import Bench, finish, same_trees, tiny
from tests.unit.split.test_split import SPLIT, Overheard, overheard, trained

__all__ = ["overheard"]
ONE_STEP = {"rounds": 1, "batch": 2000, "cohort": 2}
HEAD, TAIL = "patch_embed.proj.weight", "head.weight"
PRETRAINED = {"model": "vit_tiny_patch16_224", "image_size": 32, "patch_size": None, "pretrained": True}


def own(bench: Bench, name: str) -> Tree:
    kept = bench.store.get(name)["personal"]
    assert isinstance(kept, dict)
    return kept


def steps_of(method: str, folder: Path, **sets: Any) -> tuple[Tree, list[Round]]:
    """How far a client's weights went in one step of plain SGD."""
    never = {} if METHODS[method]().labels_leave else {"fedround": 0}
    rounds, bench = trained(method, folder, {"optimizer": "sgd", **never, **sets}, **ONE_STEP, lr=0.1)
    after = own(bench, rounds[0].row["cohort"][0])
    return {name: after[name] - bench.net.initial[name] for name in after}, rounds


def test_the_heads_rate_moves_the_head_and_nothing_else(tmp_path: Path) -> None:
    one, _ = steps_of("fedv", tmp_path / "a")
    other, _ = steps_of("fedv", tmp_path / "b", client_head_lr=0.02)
    assert torch.allclose(other[HEAD], one[HEAD] / 5, atol=1e-7)
    assert one[HEAD].abs().max() > 1e-5
    assert torch.equal(other[TAIL], one[TAIL])


@pytest.mark.parametrize("method", SPLIT)
def test_one_rate_for_all_parts_is_training_with_one_rate_to_the_bit(method: str, tmp_path: Path) -> None:
    plain, a = trained(method, tmp_path / "a", {"server_lr": 0.01}, lr=0.002)
    sets = {"server_lr": 0.01, "client_head_lr": 0.002, "server_decay": 1.0}
    parts, b = trained(method, tmp_path / "b", sets, lr=0.002)
    old = replace(b.net.split, client_head_lr=None)  # as it was before heads had a rate
    assert old.roles[-1] == b.net.split.roles[-1]
    assert same_trees(plain[-1].server.shared, parts[-1].server.shared)
    for name in a.store.versions:
        assert same_trees(own(a, name), own(b, name))
        assert a.store.get(name).keys() == b.store.get(name).keys()


@pytest.mark.parametrize("method", SPLIT)
def test_no_gradient_of_a_frozen_head_is_asked_for_or_sent(
    method: str, overheard: list[Message], tmp_path: Path
) -> None:
    _, bench = trained(method, tmp_path, {"client_head_lr": 0}, rounds=1)
    patches = bench.net.frozen[HEAD]
    assert torch.equal(dict(bench.net.module.named_parameters())[HEAD], patches)
    assert all(HEAD not in own(bench, name) for name in bench.store.versions)
    assert not any(m.payload.scalars.get("wanted") for m in overheard)
    down = [m for m in overheard if m.kind in ("backward", "labelled")][1::2]
    assert not any("h" in m.payload.trees for m in down)


def test_a_frozen_head_costs_only_what_crosses() -> None:
    flags = {"model": "vit_tiny_patch16_224", "image_size": 96, "patch_size": None, "batch": 32}
    frozen, whole = (cost(tiny("fedv", {"client_head_lr": rate}, **flags), 100) for rate in (0, 1e-3))
    tokens, row = 32 * 37 * 192 * 4, 32 * 192 * 4
    assert frozen["step_nbytes"] == {"up": tokens, "down": row}
    assert whole["step_nbytes"] == {"up": tokens + row, "down": row + tokens}
    embedding = 192 * 3 * 16 * 16 + 192 + 37 * 192 + 192
    assert frozen["params"]["frozen"] == embedding
    assert frozen["params"]["personal"] == 2 * 192 + 192 * 100 + 100
    assert whole["memory_nbytes"] - frozen["memory_nbytes"] == 4 * (3 * embedding + 4)  # Adam's counts of four tensors
    labels = cost(tiny("splitfed_v1", {"client_head_lr": 0}, **flags), 100)["step_nbytes"]
    assert labels == {"up": tokens + 32 * 4, "down": 0}
    assert cost(tiny("fedv+head", **flags), 100)["step_nbytes"]["down"] == row, "a gradient for a head that is frozen"


@pytest.mark.parametrize("method", SPLIT)
def test_the_bodys_rate_decays(method: str, tmp_path: Path) -> None:
    rates = {}
    for decay in (1.0, 0.5):
        bench = Bench(tiny(method, {"server_lr": 0.01, "server_decay": decay}, rounds=300), tmp_path)
        parts = Parts(bench.net.module, bench.net.split.cut)
        rates[decay] = [
            server_side(bench.net, parts, bench.server, bench.experiment, number).lr for number in (1, 100, 101, 201)
        ]
    assert rates[1.0] == [0.01] * 4
    assert rates[0.5] == [0.01, 0.01, 0.005, 0.0025]


def test_fedvzs_decay_has_an_interval(tmp_path: Path) -> None:
    sets = {"server_lr": 1.0, "server_decay": 0.5, "decay_every": 2}
    bench = Bench(tiny("fedvz", sets, rounds=6), tmp_path)
    parts = Parts(bench.net.module, bench.net.split.cut)
    sides = [server_side(bench.net, parts, bench.server, bench.experiment, number) for number in range(1, 7)]
    assert [side.lr for side in sides] == [1, 1, 0.5, 0.5, 0.25, 0.25]


@pytest.mark.parametrize(
    ("average", "who"), [("both", {HEAD, TAIL}), ("head", {HEAD}), ("tail", {TAIL}), ("none", set())]
)
def test_heads_or_tails_are_averaged(average: str, who: set[str], overheard: list[Message], tmp_path: Path) -> None:
    rounds, bench = trained("fedv", tmp_path, {"average": average, "fedround": 1}, rounds=1)
    sent = [set(m.payload.trees["parts"]) for m in overheard if "parts" in m.payload.trees]
    assert all({HEAD, TAIL} & names == who for names in sent)
    assert bool(sent) == bool(who)
    a, b = (own(bench, name) for name in rounds[0].row["cohort"])
    for name in (HEAD, TAIL):
        assert torch.equal(a[name], b[name]) == (name in who)
    assert set(Checks(bench.net, 32).own) == set().union(*sent)


def test_noise_on_what_is_averaged_is_relative_to_each_tensor(overheard: list[Message], tmp_path: Path) -> None:
    def parts_of(folder: str, **sets: Any) -> list[Tree]:
        Overheard.kept.clear()
        trained("fedvz", tmp_path / folder, {"fedround": 1, **sets}, rounds=1)
        return [m.payload.trees["parts"] for m in Overheard.kept if "parts" in m.payload.trees]

    plain, off, noisy, again = (
        parts_of("a"), parts_of("b", perturb=0.0), parts_of("c", perturb=0.1), parts_of("d", perturb=0.1),
    )  # fmt: skip
    assert len(plain) == 2
    for a, b, c, d in zip(plain, off, noisy, again, strict=True):
        assert same_trees(a, b)
        assert same_trees(c, d)
        for name in (HEAD, TAIL):
            ratio = (c[name] - a[name]).square().mean().sqrt() / a[name].square().mean().sqrt()
            assert 0.08 < float(ratio) < 0.12


def answering(x: torch.Tensor) -> Payload:
    return Payload({"b": pack(x, "fp32")})


def test_the_heads_estimate_tends_to_its_gradient() -> None:
    w = nn.Parameter(torch.tensor([[1.0, -2.0, 0.5, 3.0]]))
    side: Any = SimpleNamespace(
        split=SplitPlan(name="spsa", epsilon=1e-2),
        client=SimpleNamespace(settings=SimpleNamespace(seed=0), round=1, id="c"),
        weights={"w": w}, head=["w"], leaves={"w": w},
        parts=SimpleNamespace(run=lambda part, weights, x: weights["w"]),
        address=lambda step, part: (0, 1, "c", step, part),
        message=lambda step, kind, trees: Message(1, "c", step, kind, Payload(trees)),
        loss_of=lambda step, features, y: 0.5 * features["x"].double().square().sum().item(),
    )  # fmt: skip
    total, steps = torch.zeros(1, 4), 3000
    for step in range(steps):
        requests = ClientSide.probe_head(side, step, torch.zeros(1), torch.zeros(1))
        message = next(requests)
        for last in (False, True):
            assert message is not None
            assert message.kind == "query"
            reply = message.answered(answering(message.payload.trees["h"]["x"]))
            if last:
                with pytest.raises(StopIteration):
                    requests.send(reply)
            else:
                message = requests.send(reply)
        total += w.grad
    assert torch.allclose(total / steps, w.detach(), atol=0.3)  # the gradient of half the squared norm is w
    assert torch.equal(w.detach(), torch.tensor([[1.0, -2.0, 0.5, 3.0]])), "the weights did not come back"


def test_a_black_box_moves_the_head_along_one_direction_by_the_true_slope(tmp_path: Path) -> None:
    sets = {"black_box": True, "draws": 1, "epsilon": 1e-3, "server_lr": 0.0}
    moved, rounds = steps_of("fedvz", tmp_path, **sets)
    name = rounds[0].row["cohort"][0]
    bench = Bench(tiny("fedvz", {"optimizer": "sgd", **sets}, **ONE_STEP, lr=0.1), tmp_path / "b")
    ((x, y),) = list(bench.worker.client(name, 1, {}).batches(1, "train"))
    head = [n for n in bench.net.split.cut.names(bench.net.module, "client_head") if n in bench.net.roles.personal]
    weights = {n: t.clone().requires_grad_() for n, t in bench.net.initial.items()}
    F.cross_entropy(torch.func.functional_call(bench.net.module.eval(), weights, (x,)), y).backward()
    z = {n: spsa.direction((bench.experiment.run.seed, 1, name, "head 0"), n, weights[n]) for n in head}
    slope = sum(float((weights[n].grad * z[n]).sum()) for n in head if weights[n].grad is not None)
    for n in head:
        assert torch.allclose(moved[n], -0.1 * slope * z[n], rtol=0.02, atol=1e-5), n


def test_spsa_moves_only_what_the_tune_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: set[str] = set()
    direction = spsa.direction

    def watched(key: spsa.Key, name: str, like: torch.Tensor) -> torch.Tensor:
        drawn.add(name)
        return direction(key, name, like)

    for module in ("spsa", "server", "client"):
        monkeypatch.setattr(f"fedvit.split.{module}.direction", watched)
    rounds, bench = trained("fedvz+bias", tmp_path, {"server_lr": 0.1, "epsilon": 1e-2}, rounds=1)
    assert drawn == set(bench.net.roles.shared)
    assert all(name.endswith(".bias") for name in drawn)
    assert not same_trees(rounds[0].server.shared, bench.net.shared)
    assert bench.net.roles.frozen


def test_a_head_without_a_rate_is_not_trained_beside_a_pretrained_body() -> None:
    def resolved(method: str, **sets: Any) -> tuple[Any, ...]:
        experiment = load_experiment(
            None, {f"method.{k}": v for k, v in sets.items()}, {**PRETRAINED, "method": method}
        )
        return experiment.train.lr, experiment.method["client_head_lr"], experiment.method["server_lr"]

    assert resolved("fedv") == (0.005, 0.0, 0.01)
    assert resolved("festa") == (0.005, 0.0, 2e-4)
    assert resolved("festa", init="random") == (2e-4, 2e-4, 2e-4)
    assert resolved("festa", client_head_lr=1e-5) == (0.005, 1e-5, 2e-4)
    assert resolved("splitfed_v1") == (2e-4, 2e-4, 2e-4)
    scratch = tiny("festa")
    assert scratch.train.lr == scratch.method["client_head_lr"] == scratch.method["server_lr"] == 0.002


def test_a_random_head_is_not_frozen(shared_data: Path) -> None:
    flags = PRETRAINED | {"pretrained": None, "weights": shared_data / "vit_tiny_patch16_224.fp16.safetensors"}
    experiment = load_experiment(None, {"init": "random", "client_head_lr": 0}, {**flags, "method": "fedv"})
    with pytest.raises(UserError, match="client_head_lr=0 freezes the head, and init=random"):
        make_net(experiment, 10, torch.device("cpu"))


@pytest.mark.parametrize(("method", "head"), [("fedv", 0.002), ("festa", 0.002), ("fedvz", 0.0)])
def test_a_run_of_before_goes_on_as_it_began(method: str, head: float, tmp_path: Path) -> None:
    sets = {"client_head_lr": head, "receives": "all", **({"black_box": True} if method == "fedvz" else {})}
    whole = finish(tiny(method, sets, rounds=3), tmp_path / "whole")
    begun = tmp_path / "begun"
    steps = start_or_resume(tiny(method, sets, rounds=3), begun, resume=False)
    next(steps)
    steps.close()  # type: ignore[attr-defined]
    tables = tomllib.loads((begun / "run.toml").read_text())
    for key in ("client_head_lr", "server_decay", "average", "perturb", "decay_every"):
        tables["method"].pop(key, None)
    if method == "festa":
        del tables["method"]["server_lr"]  # it was left out where it was the clients' rate
    (begun / "run.toml").write_text(tomli_w.dumps(tables))
    experiment = load_experiment(begun / "run.toml")
    assert experiment.method["client_head_lr"] == head
    for _ in start_or_resume(experiment, begun, resume=True):
        pass
    assert Run(begun).rounds == Run(whole).rounds


@pytest.fixture
def black_box(tmp_path: Path) -> tuple[Checks, ServerSide, Progress]:
    bench = Bench(tiny("fedvz", {"black_box": True}), tmp_path)
    parts = Parts(bench.net.module, bench.net.split.cut)
    side = server_side(bench.net, parts, bench.server, bench.experiment, 1, ["c"])
    return Checks(bench.net, 32), side, Progress("train", 2)


def test_a_step_has_two_queries(black_box: tuple[Checks, ServerSide, Progress], tmp_path: Path) -> None:
    checks, side, progress = black_box
    x = {"h": pack(torch.zeros(4, *checks.h), "fp32")}

    def say(kind: str, step: int, trees: Any = None, **numbers: float) -> None:
        message = Message(1, "c", step, kind, Payload(trees or {}, numbers))
        checks.check(message, progress, side)
        checks.check_answer(message, side.answer(message), 4)

    with pytest.raises(LateError):
        say("query", -1, x)
    say("start", 0, updated=0.0)
    with pytest.raises(LateError):
        say("query", 0, x)
    for step, last in ((0, 0.0), (1, 1.0)):
        say("forward", step, x, last=last)
        with pytest.raises(GarbageError, match="expected h/x to be"):
            say("query", step, {"h": {"x": x["h"]["x"][:, :-1]}})
        with pytest.raises(GarbageError, match="query"):
            say("query", step, x, last=0.0)
        say("query", step, x)
        say("query", step, x)
        with pytest.raises(LateError):
            say("query", step, x)
    plain = Bench(tiny("fedvz"), tmp_path / "b")
    with pytest.raises(LateError, match="does not belong"):
        Checks(plain.net, 32).check(Message(1, "c", 0, "query", Payload(x)), Progress("train", 2), side)


def test_trees_of_a_frozen_head_are_no_ones(tmp_path: Path) -> None:
    rounds, bench = trained("fedv", tmp_path, {"client_head_lr": 0, "fedround": 1}, rounds=2)
    average = rounds[-1].server.memory["average"]
    assert set(average) == set(tree.pick(bench.net.initial, bench.net.roles.personal))
    assert all(bench.net.split.cut.part_of(name) == "client_tail" for name in average)


def test_the_gradient_of_every_side_is_clipped(tmp_path: Path) -> None:
    """With plain SGD, a step is at most as long as the rate times the limit; the body's is a mean of such steps."""
    limit, long = 1e-3, {}
    for method in ("fedv", "minibatch_sfl"):
        for clip in (0.0, 1e3, limit):
            sets = {"server_lr": 0.1, "clip_grad": clip}
            moved, rounds = steps_of(method, tmp_path / f"{method}{clip}", **sets)
            bench = Bench(tiny(method, {"server_lr": 0.1}), tmp_path / "b")
            body = {n: t - bench.net.initial[n] for n, t in rounds[0].server.shared.items()}
            long[method, clip] = [
                sum(float(t.square().sum()) for t in trees.values()) ** 0.5 for trees in (moved, body)
            ]
        assert long[method, 0.0] == long[method, 1e3]
        assert all(before > 10 * 0.1 * limit for before in long[method, 0.0])
        assert long[method, limit][0] == pytest.approx(0.1 * limit, rel=0.02)
        assert 0 < long[method, limit][1] <= 0.1 * limit * 1.02
