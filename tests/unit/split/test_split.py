"""Split learning: parts that make the whole, a body that learns when it should, and messages that say no more."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from fedvit.core import randomness, tree
from fedvit.core.errors import UserError
from fedvit.core.payload import Payload
from fedvit.core.training import descend
from fedvit.engine.cost import cost
from fedvit.engine.loop import Round, federate
from fedvit.engine.split_loop import LocalClients, Loopback, evaluate_split, federate_split
from fedvit.methods import METHODS
from fedvit.methods.tunes import TUNES
from fedvit.models.cuts import Cut, Parts, Stage
from fedvit.models.groups import state
from fedvit.runs.folder import Run
from fedvit.split import spsa
from fedvit.split.messages import Message, pack, unpack
from fedvit.split.plan import SplitPlan
from fedvit.split.server import ServerSide
from tests.conftest import Bench, assert_close_trees, finish, same_trees, tiny
from tests.unit.cli.test_command_line import call

SPLIT = [name for name, plan in METHODS.items() if isinstance(plan(), SplitPlan)]
U_SHAPED = [name for name in SPLIT if not METHODS[name]().labels_leave]
SMALL = {"img_size": 8, "patch_size": 2, "embed_dim": 48, "depth": 3, "num_heads": 3, "num_classes": 10}
MODELS = {
    "ViT": lambda: VisionTransformer(**SMALL),
    "ViT with registers": lambda: VisionTransformer(**SMALL, reg_tokens=2),
    "average-pooled ViT": lambda: VisionTransformer(**SMALL, global_pool="avg", class_token=False),
    "distilled DeiT": lambda: VisionTransformerDistilled(**SMALL),
}


class Overheard(Loopback):
    """A channel that keeps every message."""

    kept: list[Message] = []  # noqa: RUF012, one list for all channels of a test

    def call(self, request: bytes) -> bytes:
        reply = super().call(request)
        Overheard.kept += [Message.from_bytes(request), Message.from_bytes(reply)]
        return reply


@pytest.fixture
def overheard(monkeypatch: pytest.MonkeyPatch) -> list[Message]:
    monkeypatch.setattr("fedvit.engine.split_loop.Loopback", Overheard)
    Overheard.kept = []
    return Overheard.kept


def trained(label: str, folder: Path, sets: Mapping[str, Any] | None = None, **flags: Any) -> tuple[list[Round], Bench]:
    bench = Bench(tiny(label, sets, **flags), folder)
    here = LocalClients(bench.net, bench.transport)
    rounds = federate_split(bench.net, bench.server, here, bench.experiment, bench.test_samples)
    return list(rounds), bench


@pytest.mark.parametrize("kind", [Cut("B"), Cut("A"), Cut("after", 0), Cut("after", 2)], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_head_body_and_tail_are_the_whole_model(name: str, kind: Cut) -> None:
    model = MODELS[name]().eval()
    parts, x = Parts(model, kind), torch.randn(4, 3, 8, 8)
    weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    out = x
    for part in ("client_head", "body", "client_tail"):
        out = parts.run(part, weights, out)  # type: ignore[arg-type]
    assert torch.allclose(out, model(x), atol=1e-6)
    out.square().sum().backward()
    model(x).square().sum().backward()
    for n, p in model.named_parameters():
        expected = torch.zeros_like(p) if p.grad is None else p.grad
        found = weights[n].grad
        assert torch.allclose(torch.zeros_like(p) if found is None else found, expected, atol=1e-4), n
    assert {kind.part_of(n) for n in weights} == (
        {"client_head", "body"} if kind.kind == "after" else {"client_head", "body", "client_tail"}
    )


def test_one_client_and_one_step_are_plain_sgd(tmp_path: Path) -> None:
    sets = {"optimizer": "sgd", "server_lr": 0.1, "partition.name": "iid"}
    flags = {"clients": 1, "cohort": 1, "rounds": 1, "batch": 2000, "lr": 0.1}
    (done,), bench = trained("fedv", tmp_path, sets, **flags)
    plain = Bench(tiny("fedavg", {"optimizer": "sgd", "partition.name": "iid"}, **flags), tmp_path / "b")
    end = descend(plain.worker.client("0", 1, {}), plain.net.initial)
    own = bench.store.get("0")["personal"]
    assert isinstance(own, dict)
    assert own.keys() | done.server.shared.keys() == end.keys()
    for name, tensor in {**own, **done.server.shared}.items():
        assert torch.allclose(tensor, end[name], atol=1e-6), name
        assert not torch.equal(tensor, plain.net.initial[name]) or "attn.qkv.bias" in name


def test_one_client_and_many_steps_of_minibatch_sfl_are_plain_sgd(tmp_path: Path) -> None:
    sets = {"optimizer": "sgd", "partition.name": "iid"}
    flags = {"clients": 1, "cohort": 1, "rounds": 1, "batch": 300, "lr": 0.1}
    (done,), bench = trained("minibatch_sfl", tmp_path, sets, **flags)
    plain = Bench(tiny("fedavg", sets, **flags), tmp_path / "b")
    end = descend(plain.worker.client("0", 1, {}), plain.net.initial)
    own = bench.store.get("0")["personal"]
    assert isinstance(own, dict)
    for name, tensor in {**own, **done.server.shared}.items():
        assert torch.allclose(tensor, end[name], atol=1e-5), name


@pytest.mark.parametrize(
    ("method", "still"), [("fedv", True), ("fedvz", True), ("festa", False), ("splitfed_v2", False)]
)
def test_the_body_learns_once_a_round_or_at_every_step(
    method: str, still: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies: list[dict[str, torch.Tensor]] = []
    whole = ServerSide.answer

    def watched(self: ServerSide, message: Message) -> Message:
        if message.kind in ("forward", "labelled", "probe"):
            bodies.append({name: tensor.detach().clone() for name, tensor in self.body.items()})
        return whole(self, message)

    monkeypatch.setattr(ServerSide, "answer", watched)
    sets = {"server_lr": 1e-3}
    rounds, bench = trained(method, tmp_path, sets, rounds=1, epochs=2)
    assert len(bodies) > 4
    assert all(same_trees(body, bodies[0]) for body in bodies) == still
    assert same_trees(bodies[0], bench.net.shared)
    assert not same_trees(rounds[-1].server.shared, bench.net.shared)


def test_fedvs_step_is_the_mean_gradient_of_the_last_batches(tmp_path: Path) -> None:
    sets = {"server_lr": 0.5, "optimizer": "sgd"}
    (done,), bench = trained("fedv", tmp_path, sets, rounds=1, lr=1e-30)  # heads and tails do not move
    mean = {name: torch.zeros_like(t) for name, t in bench.net.shared.items()}
    for name in done.row["cohort"]:
        client = bench.worker.client(name, 1, {})
        x, y = list(client.batches(1, "train"))[-1]
        weights = {n: t.clone().requires_grad_() for n, t in bench.net.initial.items()}
        F.cross_entropy(torch.func.functional_call(bench.net.module.eval(), weights, (x,)), y).backward()
        for n in mean:
            gradient = weights[n].grad
            assert gradient is not None
            mean[n] += gradient / len(done.row["cohort"])
    for n, tensor in done.server.shared.items():
        assert torch.allclose(tensor, bench.net.shared[n] - 0.5 * mean[n], atol=1e-6), n


class Quadratic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, -2.0, 0.5, 3.0]))


class QuadraticParts:
    """A body whose output is half the squared distance of its weights from the input."""

    def __init__(self) -> None:
        self.model = Quadratic()
        self.stage = Stage(self.model, lambda x: 0.5 * (self.model.w - x).square().sum(-1), ["w"])

    def stages(self, part: str, depth: int | None = None) -> list[Stage]:
        return [self.stage]

    def rows_of(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def run(self, part: str, weights: dict[str, torch.Tensor], x: torch.Tensor, *, depth: int | None = None) -> Any:
        return self.stage.under(weights, x)


def test_the_mean_of_many_spsa_draws_tends_to_the_gradient() -> None:
    parts, draws, lr = QuadraticParts(), 4000, 0.1
    split = SplitPlan(name="spsa", gradient="spsa", draws=draws, epsilon=1e-2, server_lr=lr, black_box=True)
    body = {"w": parts.model.w.detach().clone()}
    side = ServerSide(split, parts, body, {}, 1, 0, lr, torch.device("cpu"), autocast=torch.no_grad)  # type: ignore[arg-type]
    x = torch.zeros(1, 4)

    def ask(kind: str, trees: Any = None, **scalars: float) -> Payload:
        message = Message(1, "c", 0, kind, Payload(trees or {}, scalars))
        return Message.from_bytes(side.call(message.to_bytes())).payload

    ask("forward", {"h": pack(x, "fp32")}, last=1.0)
    for draw in range(draws):
        plus, minus = (float(unpack(ask("probe", draw=draw, sign=s).trees["b"], side.device)) for s in (1.0, -1.0))
        ask("losses", draw=draw, plus=plus, minus=minus)
        assert torch.equal(side.body["w"], body["w"]), "the weights did not come back"
    moved, _ = side.end_of_round()
    estimate = (body["w"] - moved["w"]) / lr
    assert torch.allclose(estimate, body["w"], atol=0.25)  # the gradient of the quadratic at 0 is w itself
    generator = randomness.generator(0, 1, "c", "direction 0 w")
    found = spsa.direction(side.key_of("c", 0), "w", body["w"])
    assert torch.equal(found, torch.randn(4, generator=generator))


@pytest.mark.parametrize("method", SPLIT)
def test_what_crosses_is_counted_and_says_no_more_than_it_must(
    method: str, overheard: list[Message], tmp_path: Path
) -> None:
    rounds, bench = trained(method, tmp_path)
    kinds = {m.kind for m in overheard}
    names = list(bench.split.clients)
    for message in overheard:
        for group in message.payload.trees.values():
            for tensor in group.values():
                if method in U_SHAPED and message.kind != "parts" and "average" not in message.payload.trees:
                    assert tensor.is_floating_point(), "labels are whole numbers, and nothing else here should be"
                    assert tensor.ndim == 3, "only activations and their gradients cross: (image, token, width)"
        assert set(message.payload.trees) <= {
            "h",
            "b",
            "parts",
            "average",
            *(() if method in U_SHAPED else ("labels",)),
        }
    assert ("labelled" in kinds) == (method not in U_SHAPED)
    for done in rounds:
        cohort = done.row["cohort"]
        mine = [m for m in overheard if m.round == done.row["round"] and m.kind not in ("infer", "start")]
        sent = {name: sum(m.payload.nbytes for m in mine if m.client == name) for name in cohort}
        starts = [m for m in overheard if m.round == done.row["round"] and m.kind == "start" and m.client in cohort]
        first = {name: [m for m in starts if m.client == name][:2] for name in cohort}
        total = sum(sent.values()) + sum(m.payload.nbytes for pair in first.values() for m in pair)
        if "parts" in {m.kind for m in mine} and bench.net.split.receives == "sampled":
            total += len(cohort) * tree.nbytes(done.server.memory["average"])
        assert total == sum(done.ledger.up) + sum(done.ledger.down)
        assert set(done.scores or {}) == set(names), "a client was not evaluated"


@pytest.mark.parametrize("tune", [*TUNES, "norm,blocks.1"])
@pytest.mark.parametrize("method", SPLIT)
def test_a_split_plan_runs_under_every_tune(method: str, tune: str, tmp_path: Path) -> None:
    sets = {"tune.per_layer": True} if tune == "adapter" else {}
    rounds, bench = trained(f"{method}+{tune}", tmp_path, sets)
    net = bench.net
    assert same_trees(tree.pick(state(net.module), net.roles.frozen), net.frozen), "a frozen weight moved"
    for name in bench.store.versions:
        own = bench.store.get(name).get("personal", {})
        assert isinstance(own, dict)
        assert set(own) == set(net.roles.personal)
    assert set(rounds[-1].server.shared) == set(net.roles.shared)
    costs = cost(bench.experiment, 10)
    kept = list(map(bench.store.get, bench.store.versions))
    largest = max(sum(tree.nbytes(t) for t in memory.values() if isinstance(t, dict)) for memory in kept)
    assert largest <= costs["memory_nbytes"]
    here, names = LocalClients(net, bench.transport), list(bench.split.clients)
    again, _ = evaluate_split(net, rounds[-1].server, here, bench.experiment, names, 2)
    assert again == rounds[-1].scores, "evaluation does not repeat"


def test_one_adapter_for_all_blocks_cannot_lie_on_both_sides(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="both sides of the cut"):
        Bench(tiny("splitfed_v1+adapter"), tmp_path)


def test_the_module_keeps_its_own_tensors(tmp_path: Path) -> None:
    _, bench = trained("fedvz", tmp_path, {"epsilon": 0.1}, rounds=1)
    net = bench.net
    assert all(tensor is net.live[name] for name, tensor in state(net.module).items())
    whole = {**net.initial, **net.frozen}
    assert same_trees({name: tensor.detach() for name, tensor in net.live.items()}, {n: whole[n] for n in net.live})


def test_splitfed_v1_is_fedavg_with_equal_weights_in_its_first_round(tmp_path: Path) -> None:
    (done,), _bench = trained("splitfed_v1", tmp_path, {"train.optimizer": "adam"}, rounds=1)
    plain = Bench(tiny("fedavg", {"train.optimizer": "adam", "weighting": "equal"}, rounds=1), tmp_path / "b")
    *_, last = federate(plain.net.plan, plain.server, plain.transport, plain.experiment, None, plain.test_samples)
    assert_close_trees({**done.server.shared, **done.server.memory["average"]}, last.server.shared)


def test_clients_that_drop_out_cost_nothing_and_stop_nothing(tmp_path: Path) -> None:
    run = Run(finish(tiny("fedv", {"train.dropout": 0.6}, rounds=4), tmp_path))
    kept = [row for row in run.rounds if len(row["failed"]) < len(row["cohort"])]
    assert any(row["failed"] for row in run.rounds)
    per_round = [row["nbytes_down"] * len(row["cohort"]) for row in kept]
    ups = [row["nbytes_up"] * (len(row["cohort"]) - len(row["failed"])) for row in kept]
    assert run.summary["nbytes_run"]["down"] == pytest.approx(sum(per_round))
    assert per_round == pytest.approx(ups)  # fp32 activations and gradients are as large both ways, but for averages


def test_a_distilled_deit_is_split_from_end_to_end(tmp_path: Path) -> None:
    flags = {"model": "deit_tiny_distilled_patch16_224", "image_size": 32, "patch_size": None, "rounds": 1}
    (done,), bench = trained("fedv", tmp_path, **flags)
    assert done.scores is not None
    assert isinstance(bench.net.plan, SplitPlan)
    assert {"head.weight", "head_dist.weight"} <= set(bench.net.roles.personal)


def test_a_weak_client_of_a_large_model() -> None:
    costs = cost(tiny("fedv", model="vit_base_patch16_224", image_size=224, patch_size=None, batch=64), 100)
    assert costs["client_weight_nbytes"] == 4 * 821_092 < 5e6
    assert costs["client_macs_per_example"] < 0.01 * costs["server_macs_per_example"]
    rows = 64 * (197 + 1) * 768 * 4  # all tokens up and the class token's row back, and the same for gradients
    assert costs["step_nbytes"] == {"down": rows, "up": rows}


def test_only_the_class_tokens_row_crosses(overheard: list[Message], tmp_path: Path) -> None:
    trained("fedv", tmp_path, rounds=1)
    shapes = {key: m.payload.trees[key]["x"].shape[1:] for m in overheard for key in m.payload.trees if key in "hb"}
    assert shapes == {"h": (5, 48), "b": (1, 48)}  # four patches and the class token


@pytest.mark.parametrize(("wire", "size"), [("fp32", 4.0), ("bf16", 2.0), ("int8", 1 + 4 / 48)])
def test_the_wire_halves_and_quarters(wire: str, size: float, overheard: list[Message], tmp_path: Path) -> None:
    (done,), _ = trained("fedv", tmp_path, {"wire": wire}, rounds=1)
    forward = [m for m in overheard if m.kind == "forward" and "h" in m.payload.trees]
    images = sum(m.payload.trees["h"]["x"].shape[0] for m in forward)
    assert sum(m.payload.nbytes for m in forward) == pytest.approx(images * 5 * 48 * size)
    assert done.row["loss"] < 3
    x = torch.randn(3, 5, 48)
    assert (unpack(pack(x, wire), torch.device("cpu")) - x).abs().max() < 0.03  # type: ignore[arg-type]


def test_averages_reach_all_clients_or_only_those_of_the_round(tmp_path: Path) -> None:
    for receives, everybody in (("all", True), ("sampled", False)):
        rounds, bench = trained("fedv", tmp_path / receives, {"fedround": 2, "receives": receives}, rounds=3)
        memory = rounds[-1].server.memory
        cohort = rounds[-1].row["cohort"]
        ends = [bench.store.get(name)["personal"] for name in cohort]
        assert same_trees(memory["average"], tree.mean((1.0, end) for end in ends))  # type: ignore[misc]
        folder = finish(bench.experiment, tmp_path / receives / "run")
        heads = {name: Run(folder).model(name).state_dict()["head.weight"] for name in bench.split.clients}
        same = [name for name, head in heads.items() if torch.equal(head, memory["average"]["head.weight"])]
        assert set(same) == (set(heads) if everybody else set(cohort))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_black_box_body_gives_no_gradient(frozen: bool, overheard: list[Message], tmp_path: Path) -> None:
    sets = {"black_box": True, "draws": 2, "server_lr": 1e-4, "fedround": 0} | ({"client_head_lr": 0} if frozen else {})
    rounds, bench = trained("fedvz", tmp_path, sets)
    assert not any(m.kind == "backward" for m in overheard)
    assert any(m.kind == "query" for m in overheard) != frozen
    patches = "patch_embed.proj.weight"
    for name in bench.store.versions:
        own = bench.store.get(name)["personal"]
        assert isinstance(own, dict)
        assert (patches in own) != frozen
        assert frozen or not torch.equal(own[patches], bench.net.initial[patches])
        assert not torch.equal(own["head.weight"], bench.net.initial["head.weight"])
    assert not same_trees(rounds[-1].server.shared, bench.net.shared)


def test_adam_goes_on_where_it_was(tmp_path: Path) -> None:
    rounds, bench = trained("fedv", tmp_path, rounds=3, cohort=12, epochs=1)
    steps = {name: bench.store.get(name)["optimizer step"]["head.weight"] for name in bench.store.versions}  # type: ignore[call-overload]
    for name, count in steps.items():
        batches = -(-len(bench.split.clients[name].train) // 32)
        assert int(count) == 3 * batches
    assert len(rounds) == 3


def test_a_message_is_told_apart_by_its_round(tmp_path: Path) -> None:
    bench = Bench(tiny("fedv"), tmp_path)
    parts = Parts(bench.net.module, Cut())
    args = (SplitPlan(name="fedv"), parts, bench.net.shared, {}, 3, 0, 0.1, torch.device("cpu"))
    side = ServerSide(*args, autocast=torch.no_grad)
    late = Message(2, "0", 0, "start", Payload({}, {"updated": 0.0}))
    assert Message.from_bytes(late.to_bytes()) == late
    with pytest.raises(ValueError, match="for round 2 arrived in round 3"):
        side.call(late.to_bytes())


def test_random_heads_around_a_pretrained_body(shared_data: Path, tmp_path: Path) -> None:
    flags = {"model": "vit_tiny_patch16_224", "image_size": 32, "patch_size": None}
    flags["weights"] = shared_data / "vit_tiny_patch16_224.fp16.safetensors"
    kept, drawn = (
        Bench(tiny("fedv", {"method.init": i, "client_head_lr": 1e-5}, **flags), tmp_path / i).net.initial
        for i in ("pretrained", "random")
    )
    assert torch.equal(kept["blocks.0.attn.qkv.weight"], drawn["blocks.0.attn.qkv.weight"])
    assert not torch.equal(kept["patch_embed.proj.weight"], drawn["patch_embed.proj.weight"])


CASES = {
    "more blocks than there are": (["fesvibs", "blocks=99"], [], "choose 1 to 4"),
    "a setting of the other loop": (["fedv", "run.before_after=true"], [], "leave them out"),
    "a network that is no chain of blocks": (
        ["fedv", "server_lr=0.1"],
        ["--model", "resnet18", "--image-size", "32"],
        "timm ViT or DeiT",
    ),
    "a cut after a block that is not there": (["splitfed_v1", "block=99"], [], "choose 0 to 3"),
    "an epsilon of 0": (["fedvz", "epsilon=0"], [], "greater than 0"),
    "no draws": (["fedvz", "draws=0"], [], "greater than or equal to 1"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_cut_or_drawn_is_refused(case: str, tmp_path: Path) -> None:
    (method, option), flags, expected = CASES[case]
    status, _, errors = call("run", "--method", method, "--set", option, *flags, "--out", tmp_path / "r")
    assert status == 2, errors
    assert expected in " ".join(errors.split())
    assert not (tmp_path / "r").exists()


def test_a_client_with_less_than_a_batch_trains_on_what_it_has(tmp_path: Path) -> None:
    rounds, bench = trained("fedv", tmp_path, batch=512, rounds=1)
    assert rounds[0].row["loss"] is not None
    assert all(len(part.train) < 512 for part in bench.split.clients.values())
