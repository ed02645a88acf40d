"""Private gradients: clipped, noised, of batches that are drawn by chance."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedvit.core.client import Client
from fedvit.core.plan import Plan, client_round
from fedvit.engine.loop import for_round
from fedvit.engine.private import gradients_in_a_round
from fedvit.methods import METHODS
from fedvit.privacy.gradients import PrivateGradients, per_image
from tests.conftest import Bench, tiny

PLANS = {name: plan() for name, plan in METHODS.items()}
POSSIBLE = [name for name, plan in PLANS.items() if isinstance(plan, Plan) and plan.not_private is None]


def bench_of(folder: Path, label: str = "fedavg+bias", **flags: object) -> tuple[Bench, Client]:
    bench = Bench(tiny(label, {"train.optimizer": "sgd"}, clients=6, samples=300, **flags), folder)
    return bench, bench.worker.client(bench.split.seen[0], 1, {})


def joined(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in gradients.values()])


def one_gradient(client: Client, private: PrivateGradients, x: Tensor, y: Tensor) -> Tensor:
    private.share = 0.5
    weights = {name: client.live[name] for name in client.roles.trainable}
    _, found = private.gradient(client, weights, list(weights), x, y, client.loss)
    return joined(found) * private.share * len(client.data.train)  # the sum, not the mean


def images_of(client: Client, count: int) -> tuple[Tensor, Tensor]:
    return next(client.batches(1, "train", count))


def test_no_image_adds_more_than_the_bound(tmp_path: Path) -> None:
    _, client = bench_of(tmp_path)
    x, y = images_of(client, 8)
    weights = {name: client.live[name] for name in client.roles.trainable}
    _, each = per_image(client, weights, list(weights), x, y, client.loss)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
    bound = float(norms.median())
    silent = PrivateGradients(bound, 0.0, b"key")
    whole = one_gradient(client, silent, x, y)
    for number in range(len(y)):
        others = torch.arange(len(y)) != number
        added = float((whole - one_gradient(client, silent, x[others], y[others])).norm())
        assert added == pytest.approx(min(bound, float(norms[number])), rel=1e-3)


def test_noise_has_the_stated_deviation_and_belongs_to_its_key(tmp_path: Path) -> None:
    _, client = bench_of(tmp_path)
    x, y = images_of(client, 4)
    silent = one_gradient(client, PrivateGradients(0.5, 0.0, b"key"), x, y)
    noises = [one_gradient(client, PrivateGradients(0.5, 3.0, key), x, y) - silent for key in (b"key", b"other")]
    for noise in noises:
        assert float(noise.std()) == pytest.approx(1.5, rel=0.1)
        assert abs(float(noise.mean())) < 5 * 1.5 / len(noise) ** 0.5
    assert abs(float(torch.corrcoef(torch.stack(noises))[0, 1])) < 0.2
    again = one_gradient(client, PrivateGradients(0.5, 3.0, b"key"), x, y) - silent
    assert torch.equal(again, noises[0])


def test_every_image_is_in_a_batch_by_chance_and_a_batch_may_be_empty() -> None:
    private = PrivateGradients(1.0, 1.0, b"key")
    orders = list(private.orders(40, 4, 200))
    assert len(orders) == 200 * 10
    sizes = torch.tensor([float(len(order)) for order in orders])
    assert float(sizes.mean()) == pytest.approx(4, rel=0.05)
    assert float(sizes.var()) == pytest.approx(40 * 0.1 * 0.9, rel=0.1)
    assert sizes.min() == 0
    counts = torch.bincount(torch.cat(orders), minlength=40)
    assert counts.min() > 150
    assert counts.max() < 250
    again = [order.tolist() for order in PrivateGradients(1.0, 1.0, b"key").orders(40, 4, 1)]
    assert again == [order.tolist() for order in orders[:10]]
    other = [order.tolist() for order in PrivateGradients(1.0, 1.0, b"other").orders(40, 4, 1)]
    assert other != again


def test_an_empty_batch_is_a_step_of_noise(tmp_path: Path) -> None:
    _, client = bench_of(tmp_path)
    private = PrivateGradients(1.0, 2.0, b"key")
    found = one_gradient(client, private, torch.empty(0), torch.empty(0, dtype=torch.int64))
    assert float(found.std()) == pytest.approx(2.0, rel=0.1)
    assert private.counted == [0.5]


def test_few_images_at_once_give_the_same_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, client = bench_of(tmp_path)
    x, y = images_of(client, 8)
    whole = one_gradient(client, PrivateGradients(0.1, 0.0, b"key"), x, y)
    monkeypatch.setattr(
        "fedvit.privacy.gradients.MOST_NUMBERS", 3 * sum(client.live[n].numel() for n in client.roles.trainable)
    )
    torch.testing.assert_close(
        one_gradient(client, PrivateGradients(0.1, 0.0, b"key"), x, y), whole, rtol=1e-4, atol=1e-6
    )


class Uncomputed(PrivateGradients):
    """Draws batches as in a run, but computes nothing."""

    def __init__(self) -> None:
        super().__init__(1.0, 1.0, None)


@pytest.mark.parametrize("method", POSSIBLE)
def test_the_gradients_of_a_round_are_known_in_advance(method: str, tmp_path: Path) -> None:
    bench, _ = bench_of(tmp_path, method, epochs=2)
    plan = bench.net.federated
    name = "/pooled" if plan.pooled else bench.split.seen[0]
    down = for_round(plan.dispatch(bench.server, name), 1)
    client = bench.worker.client(name, 1, {})
    expected = gradients_in_a_round(client, plan, down)
    client.private = used = Uncomputed()
    client_round(plan, client, down)
    counted = Counter(used.counted)
    assert counted.keys() == expected.keys()
    for share, count in counted.items():  # Per-FedAvg leaves out the last batch of an odd number
        assert count == expected[share] or (method == "per_fedavg" and count == expected[share] - 1)
