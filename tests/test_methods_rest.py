"""FedFA, CD2-pFed and FedFed against slow, obvious versions."""

from pathlib import Path

import torch

from fedvit.cost import cost
from fedvit.experiment import Run
from fedvit.models.classifier import ModelSettings, build
from fedvit.models.plugins import FeatureNoise, StatisticNoise
from fedvit.rounds import federate
from tests.conftest import Bench, Recorder, finish, tiny


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


def test_fedfa_that_never_acts_is_fedavg(tmp_path: Path) -> None:
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
