"""FedFA, CD2-pFed and FedFed against slow, obvious versions."""

from pathlib import Path

import pytest
import torch

from fedvit.core import tree
from fedvit.core.batches import prepare
from fedvit.core.metrics import score
from fedvit.core.plan import client_round
from fedvit.core.training import descend
from fedvit.engine import net
from fedvit.engine.cost import cost
from fedvit.engine.loop import federate
from fedvit.methods import cd2_pfed, fedfed, residuals
from fedvit.models import channels
from fedvit.models.build import ModelSettings, build
from fedvit.models.plugins.modules import StatisticNoise
from fedvit.models.plugins.specs import FeatureNoise
from fedvit.report.tables import cost_table
from fedvit.runs.folder import Run
from tests.conftest import Bench, Recorder, finish, same_trees, tiny


def test_fedfas_layer_is_its_formula() -> None:
    x = torch.randn(6, 5, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 2.0, 3.0]) + 1
    layer = StatisticNoise(3, (1,), prob=1.0, momentum=0.9)
    layer.spread = torch.tensor([[0.1, 0.2, 0.4], [1.0, 0.0, 3.0]])
    layer.seen = torch.ones(2, 3)
    torch.manual_seed(7)
    found = layer(x)

    torch.manual_seed(7)
    torch.rand(())  # whether the layer acts
    mean, std = x.mean(1), x.std(1, correction=0)
    drawn = []
    for statistic, spread in ((mean, layer.spread[0]), (std, layer.spread[1])):
        w = 1 / (1 + 1 / (spread + 1e-6))
        gamma = 3 * w / w.sum()
        s = statistic.var(0, correction=0)
        drawn.append(statistic + torch.randn(6, 1, 3)[:, 0] * ((1 + gamma) * s).sqrt())
    expected = torch.stack([drawn[1][i] * (x[i] - mean[i]) / std[i] + drawn[0][i] for i in range(6)])
    assert torch.allclose(found, expected, atol=1e-4)
    assert torch.allclose(layer.seen, 0.9 + 0.1 * torch.stack([mean.mean(0), std.mean(0)]), atol=1e-5)
    assert layer.eval()(x) is x


def test_fedfas_layer_draws_statistics_with_the_variance_it_should() -> None:
    layer = StatisticNoise(2, (1,), prob=1.0, momentum=0.99)
    layer.spread = torch.zeros(2, 2)  # gamma is then 1, and all is drawn with twice the batch's variance
    x = torch.randn(4000, 20, 2, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(3)
    moved = layer(x).mean(1) - x.mean(1)
    assert torch.allclose(moved.var(0), 2 * x.mean(1).var(0), rtol=0.1)


def test_fedfa_sends_four_numbers_a_channel_and_keeps_two(tmp_path: Path) -> None:
    plain, noisy = cost(tiny("fedavg"), 10), cost(tiny("fedfa"), 10)
    for direction in ("down", "up"):
        assert (
            noisy["nbytes"][direction] - plain["nbytes"][direction] == 4 * 2 * 48 * 4
        )  # float32, 48 channels, 4 layers
    assert noisy["memory_nbytes"] == 4 * 2 * 48 * 4
    assert noisy["params"] == plain["params"]


def test_fedfas_server_returns_the_variance_per_channel(tmp_path: Path) -> None:
    bench = Bench(tiny("fedfa", rounds=2, cohort=3), tmp_path)
    recorder = Recorder(bench.transport)
    done = list(federate(bench.net.plan, bench.server, recorder, bench.experiment, None, bench.test_samples))
    crossed = [p for task, _, p in recorder.crossed if task == "train"]
    first_up, second_down = crossed[1:6:2], crossed[6]
    reported = torch.stack([p.trees["statistics"]["feature_noise.2"] for p in first_up])
    assert torch.allclose(second_down.trees["spread"]["feature_noise.2"], ((reported - reported.mean(0)) ** 2).mean(0))
    for name in done[-1].row["cohort"]:
        assert set(bench.store.get(name)) == {"statistics"}


def test_fedfa_that_never_acts_is_fedavg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(net, "skip_unread_tokens_", lambda model: None)  # FedFA looks at all of them
    a, b = finish(tiny("fedfa", {"prob": 0.0}), tmp_path / "a"), finish(tiny("fedavg"), tmp_path / "b")
    assert (a / "clients.csv").read_bytes() == (b / "clients.csv").read_bytes()
    c = finish(tiny("fedfa"), tmp_path / "c")
    assert Run(c).summary["views"] != Run(b).summary["views"]


def test_fedfa_has_four_stages_in_any_vit_and_in_a_resnet() -> None:
    resnet = build(ModelSettings(name="resnet18", image_size=32), 10, (FeatureNoise(),), 0)
    assert [layer.channels for layer in resnet.feature_noise] == [64, 128, 256, 512]
    for layer in resnet.feature_noise:
        layer.spread = torch.zeros(2, layer.channels)
    resnet.train()(torch.randn(2, 3, 32, 32))
    assert [tuple(layer.seen.shape) for layer in resnet.feature_noise] == [(2, 64), (2, 128), (2, 256), (2, 512)]
    assert len(build(ModelSettings(), 10, (FeatureNoise(),), 0).feature_noise) == 4


def test_cd2_shares_what_its_masks_say(tmp_path: Path) -> None:
    bench = Bench(tiny("cd2_pfed"), tmp_path)
    net = bench.net
    place = channels.places(net.module, net.initial)
    shared = {name: (place[name] < 1 - 0.25).expand_as(tensor) for name, tensor in net.initial.items()}
    qkv = shared["blocks.1.attn.qkv.weight"]  # 3 * 48 rows: 36 of each 48 are shared
    assert [bool(row.all()) for row in qkv] == ([True] * 36 + [False] * 12) * 3
    assert [bool(row.any()) for row in qkv] == ([True] * 36 + [False] * 12) * 3
    assert shared["pos_embed"][0, :, :36].all()
    assert not shared["pos_embed"][0, :, 36:].any()
    assert shared["head.weight"][:, :36].all()
    assert not shared["head.weight"][:, 36:].any()
    assert shared["head.bias"].all()
    cuts = channels.cut(net.initial, place, 0.25)
    for name, part in cuts.items():
        assert torch.equal(part.flatten(), net.initial[name][shared[name]]), name
    zeros = {name: torch.zeros_like(tensor) for name, tensor in net.initial.items()}
    masked = {name: tensor * shared[name] for name, tensor in net.initial.items()}
    assert same_trees(channels.paste(zeros, cuts, place, 0.25), masked)


def test_cd2s_loss_is_the_formula_on_two_masked_networks(tmp_path: Path) -> None:
    client = Bench(tiny("cd2_pfed"), tmp_path).worker.client("3", 1, {})
    x, y = next(client.batches(1, "look"))
    found = cd2_pfed.two_way_loss(client, 0.5, weight=0.3, temperature=2.0)(client.module, x, y)

    place = channels.places(client.module, client.initial)
    halves = [
        {name: torch.where(place[name] < 0.5, t, 0 * t) for name, t in client.initial.items()},
        {name: torch.where(place[name] < 0.5, 0 * t, t) for name, t in client.initial.items()},
    ]
    s, p = (torch.softmax(client.net(half)(x) / 2.0, 1) for half in halves)
    divergence = 0.5 * ((s * (s / p).log()).sum(1) + (p * (p / s).log()).sum(1))
    entropy = -torch.log_softmax(client.net(client.initial)(x), 1)[torch.arange(len(y)), y]
    assert torch.allclose(found, entropy.mean() + 0.3 * divergence.mean(), atol=1e-6)
    assert divergence.mean() > 0


def test_cd2s_private_channels_never_cross_and_the_payload_shrinks(tmp_path: Path) -> None:
    bench = Bench(tiny("cd2_pfed", {"ramp": 1, "share": 0.5}, rounds=3, cohort=6), tmp_path)
    net, recorder = bench.net, Recorder(bench.transport)
    done = list(federate(net.plan, bench.server, recorder, bench.experiment, None, bench.test_samples))
    for weight, axis in (("head.weight", 1), ("blocks.0.attn.qkv.weight", 0), ("pos_embed", 2)):
        crossed = {row for _, _, p in recorder.crossed for g in p.trees.values() for row in rows(g[weight], axis)}
        private = channels.places(net.module, net.initial)[weight].flatten() >= 0.5
        for name in bench.store.versions:
            own = rows(bench.store.get(name)["own"][weight], axis)
            assert not crossed & {row for row, mine in zip(own, private, strict=True) if mine}
            assert {row for row, mine in zip(own, private, strict=True) if not mine} <= crossed
    assert done[-1].row["nbytes_up"] == (tree.nbytes(net.shared) + 10 * 4) // 2  # only the head's 10 biases are whole

    grows = Bench(tiny("cd2_pfed", {"ramp": 3}, rounds=4), tmp_path)
    done = list(federate(grows.net.plan, grows.server, grows.transport, grows.experiment, None, grows.test_samples))
    sizes = [d.row["nbytes_up"] for d in done]
    assert sizes == [d.row["nbytes_down"] for d in done]
    assert sizes[0] == tree.nbytes(net.shared) > sizes[1] > sizes[2] == sizes[3]


def rows(tensor: torch.Tensor, axis: int) -> list[tuple[float, ...]]:
    return [tuple(row.flatten().tolist()) for row in tensor.unbind(axis)]


@pytest.mark.parametrize("sets", [{}, {"evaluate": "in_round"}, {"before_after": True}], ids=str)
def test_cd2_without_private_channels_is_fedavg(sets: dict[str, object], tmp_path: Path) -> None:
    a, b = (
        finish(tiny("cd2_pfed", {**sets, "share": 0.0}), tmp_path / "a"),
        finish(tiny("fedavg", sets), tmp_path / "b"),
    )
    assert (a / "clients.csv").read_bytes() == (b / "clients.csv").read_bytes()
    for key in ("loss", "nbytes_down", "nbytes_up", "views"):
        assert [row[key] for row in Run(a).rounds] == [row[key] for row in Run(b).rounds]


def test_cd2_with_private_channels_only_is_local_but_for_the_shared_bias(tmp_path: Path) -> None:
    a, b = Bench(tiny("cd2_pfed", {"share": 1.0, "ramp": 1}), tmp_path), Bench(tiny("local"), tmp_path)
    down = a.net.plan.dispatch(a.server, "3")
    assert down.nbytes == 10 * 4
    mine, alone = a.worker.client("3", 1, {}), b.worker.client("3", 1, {})
    client_round(a.net.plan, mine, down)
    client_round(b.net.plan, alone, b.net.plan.dispatch(b.server, "3"))
    assert same_trees(mine.memory["own"], alone.memory["personal"])
    view = a.net.plan.views(mine, down)["personal"]
    assert torch.equal(view.pop("head.bias"), a.server.shared["head.bias"])
    assert same_trees(view, {name: t for name, t in alone.memory["personal"].items() if name != "head.bias"})


def test_cd2s_weight_average_over_local_epochs(tmp_path: Path) -> None:
    bench = Bench(tiny("cd2_pfed", {"beta": 0.25, "optimizer": "sgd"}, epochs=2), tmp_path)
    client = bench.worker.client("3", 1, {})
    end = bench.net.plan.local(client, bench.net.initial)
    w = bench.net.initial
    for epoch in range(2):
        trained = descend(client, w, epochs=1, tag=f"train {epoch}")
        w = {name: 0.25 * trained[name] + 0.75 * w[name] for name in w}
    assert all(torch.allclose(end[name], w[name], atol=1e-6) for name in w)


def test_cd2s_model_is_the_one_that_was_scored(tmp_path: Path) -> None:
    run = Run(finish(tiny("cd2_pfed", {"ramp": 2}), tmp_path))
    bench = Bench(run.experiment, tmp_path / "bench")
    for row in run.clients[:3]:
        client = bench.worker.client(row["client"], 2, {})
        model = run.model(row["client"])
        found = score(model, client.data, client.data.test, client.inputs, torch.device("cpu"))
        assert found["accuracy"] == row["personal_accuracy"]
        assert found["loss"] == pytest.approx(row["personal_loss"], rel=1e-5)  # the run skips unread tokens


def test_fedfeds_first_loss_is_its_formula(tmp_path: Path) -> None:
    bench = Bench(tiny("fedfed", rounds=30), tmp_path)
    for round_, emphasis in ((1, 10), (11, 5), (21, 1)):  # one local epoch a round
        client = bench.worker.client("3", round_, {})
        x, y = next(client.batches(1, "look"))
        module = client.module.train()
        torch.manual_seed(5)
        found = residuals.splitting_loss(client, mild=0.2, strong=0.3)(module, x, y)

        torch.manual_seed(5)
        mean, log_variance = module.splitter.encode(x).chunk(2, 1)
        robust = module.splitter.decode(mean + torch.randn(mean.shape) * torch.exp(log_variance / 2))
        noisy = [x - robust + level * torch.randn(x.shape) for level in (0.2, 0.3)]
        entropies = [-torch.log_softmax(module(z), 1)[torch.arange(len(y)), y].mean() for z in (*noisy, x)]
        divergence = -0.5 * (1 + log_variance - mean**2 - torch.exp(log_variance)).sum() / (len(x) * 3 * 8 * 8)
        expected = emphasis * 5 * ((x - robust) ** 2).mean() + 2 * (entropies[0] + entropies[1]) / 2
        assert torch.allclose(found, expected + 0.4 * entropies[2] + 0.005 * divergence, rtol=1e-5)


def test_fedfed_trains_the_splitter_first_and_the_classifier_only_then(tmp_path: Path) -> None:
    bench = Bench(tiny("fedfed", {"distill_rounds": 2}, rounds=3), tmp_path)
    before = fedfed.parts(bench.net.shared)
    steps = federate(bench.net.plan, bench.server, bench.transport, bench.experiment, None, bench.test_samples)
    servers = [done.server for done in steps]
    for server in servers[:2]:
        splitter, classifier = fedfed.parts(server.shared)
        assert same_trees(classifier, before[1])
        assert not any(torch.equal(splitter[name], before[0][name]) for name in before[0])
        assert not same_trees(server.memory["auxiliary"], classifier)
    splitter, classifier = fedfed.parts(servers[2].shared)
    assert same_trees(splitter, fedfed.parts(servers[1].shared)[0])
    assert not same_trees(classifier, before[1])
    assert set(bench.net.plan.dispatch(servers[2], "none").trees) == {"shared", "features"}


def test_fedfed_sends_every_residual_up_once_and_down_once_a_client(tmp_path: Path) -> None:
    bench = Bench(tiny("fedfed", {"distill_rounds": 1}, rounds=6, cohort=3, clients=5), tmp_path)
    recorder = Recorder(bench.transport)
    done = list(federate(bench.net.plan, bench.server, recorder, bench.experiment, None, bench.test_samples))
    trained = [(name, payload) for task, name, payload in recorder.crossed if task == "train"]
    declared = cost(bench.experiment, 10)
    assert declared["nbytes_once_per_image"] == 2 * 3 * 8 * 8 * 2 + 2
    assert "770 B" in list(cost_table(declared, "fedfed", "vit_micro").columns[1].cells)
    owners: dict[str, int] = {}
    got: dict[str, list[str]] = {}
    for (name, down), (_, up) in zip(trained[0::2], trained[1::2], strict=True):
        got.setdefault(name, []).extend(down.trees.get("features", {}))
        if "features" in up.trees:
            owners[name] = owners.get(name, 0) + 1
            count = len(bench.split.clients[name].train)
            assert {k: tuple(t.shape) for k, t in up.trees["features"].items()} == {
                "mild": (count, 3, 8, 8), "strong": (count, 3, 8, 8), "labels": (count,),
            }  # fmt: skip
            assert up.trees["features"]["mild"].dtype == torch.float16
            assert tree.nbytes(up.trees["features"]) == count * declared["nbytes_once_per_image"]
    sampled = {name for d in done[1:] for name in d.row["cohort"]}
    assert owners == dict.fromkeys(sampled, 1)
    last = set(done[-1].row["cohort"])
    for name in sampled:
        assert len(got[name]) == len(set(got[name]))
        kept = bench.store.get(name)["features"]
        assert set(kept) == set(got[name]) | {f"{name}:{kind}" for kind in ("mild", "strong", "labels")}
    for name in last:  # whoever is up to date knows all that was there before the last round
        assert {n.rpartition(":")[0] for n in got[name]} >= {n for d in done[1:-1] for n in d.row["cohort"]} - {name}


def test_fedfeds_residual_is_the_image_less_its_robust_part(tmp_path: Path) -> None:
    bench = Bench(tiny("fedfed"), tmp_path)
    client = bench.worker.client("3", 5, {})
    sent = residuals.residuals(client, fedfed.parts(bench.net.initial)[0], mild=0.0, strong=0.25)
    images = prepare(client.data.images[client.data.train], client.inputs)
    with torch.no_grad():
        robust = client.module.splitter.decode(client.module.splitter.encode(images)[:, :8])
    assert torch.allclose(sent["mild"].float(), images - robust, atol=2e-3)
    assert abs((sent["strong"].float() - (images - robust)).std().item() - 0.25) < 0.01
    assert torch.equal(sent["labels"].long(), client.data.labels[client.data.train])


def test_fedfed_draws_every_class_as_often(tmp_path: Path) -> None:
    labels = torch.tensor([0] * 90 + [2] * 9 + [5])
    drawn = labels[residuals.balanced(labels, 9000, torch.Generator().manual_seed(0))]
    assert all(abs(int((drawn == label).sum()) - 3000) < 200 for label in (0, 2, 5))
