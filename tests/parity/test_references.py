"""The arithmetic of each method against a few lines by hand, on a model of two weights with plain SGD.

The model: logits (a x, b x) for the mean pixel x. Its gradient is written out below.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedvit.core.batches import ClientData, InputSettings
from fedvit.core.client import Client, LocalSettings
from fedvit.core.losses import balanced_softmax
from fedvit.core.payload import Payload
from fedvit.core.plan import Plan, Report, client_round
from fedvit.core.roles import assign
from fedvit.core.server import Server
from fedvit.methods import make_plan
from fedvit.methods.apfl import stepped
from fedvit.methods.fed_lamb import Lamb
from fedvit.methods.fed_rod import made as made_head
from fedvit.methods.fed_rod import teach_maker
from fedvit.methods.layer_editing import Size, probe_batches, ranking
from fedvit.methods.moon import contrast, features
from fedvit.models.groups import state
from fedvit.models.plugins.attach import attach
from fedvit.models.plugins.specs import HeadMaker, Offset, Projection, SecondHead

LR, START = 0.5, np.array([0.3, -0.2])
PIXELS, LABELS = np.array([10, 60, 90, 120, 200, 250]), np.array([0, 1, 0, 0, 1, 1])
NAME = "fc.weight"


class TwoWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(1, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc(x.mean((1, 2, 3))[:, None])
        return out


def tree_of(weights: np.ndarray) -> dict[str, torch.Tensor]:
    return {NAME: torch.tensor(weights, dtype=torch.float32)[:, None]}


class Hidden(nn.Module):
    """Three colours, two features, two classes: features that differ between models."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.hidden, self.fc = nn.Linear(3, 2, bias=False), nn.Linear(2, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc(self.hidden(x.mean((2, 3))))
        return out


def client_of(
    plan: Plan, memory: dict[str, Any] | None = None, batch: int = 6, epochs: int = 1, module: nn.Module | None = None
) -> Client:
    module = module or TwoWeights()
    roles = assign(module, plan.roles)
    images = torch.tensor(PIXELS, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 1, 3).clone()
    if not isinstance(module, TwoWeights):
        images[..., 1] = 255 - images[..., 1]
        images[::2, ..., 2] = 30
    everything, nothing = torch.arange(6), torch.zeros(0, dtype=torch.int64)
    data = ClientData(images, torch.tensor(LABELS), everything, nothing, everything, nothing, 2)
    settings = LocalSettings(lr=LR, epochs=epochs, batch=batch)
    inputs = InputSettings(1, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    start = {name: tensor.detach().clone() for name, tensor in state(module).items()}
    if isinstance(module, TwoWeights):
        start = tree_of(START)
    return Client("c", 3, roles, start, {}, data, memory or {}, settings, module, inputs, state(module))


def slope(weights: np.ndarray, x: np.ndarray = PIXELS / 255, y: np.ndarray = LABELS) -> np.ndarray:
    """The gradient of the mean cross-entropy."""
    logits = np.outer(x, weights)
    chance = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return ((chance - np.eye(2)[y]) * x[:, None]).mean(0)


def numbers(tree: Any) -> np.ndarray:
    return np.asarray(tree[NAME].detach()).flatten()


def down(weights: np.ndarray = START, **groups: Any) -> Payload:
    return Payload({"shared": tree_of(weights), **groups})


def made(name: str, **options: Any) -> Plan:
    return make_plan({"name": name, **options})


def test_fedprox_adds_mu_times_the_way_from_the_received_weights() -> None:
    plan = made("fedprox", mu=0.7)
    up = client_round(plan, client_of(plan, epochs=2), down())
    first = START - LR * slope(START)
    second = first - LR * (slope(first) + 0.7 * (first - START))
    assert numbers(up.trees["shared"]) == pytest.approx(second, abs=1e-6)


def test_scaffold_corrects_gradients_and_renews_controls_by_option_two() -> None:
    plan, c, own = made("scaffold"), np.array([0.02, -0.01]), np.array([-0.03, 0.05])
    client = client_of(plan, {"control": tree_of(own)}, epochs=2)
    up = client_round(plan, client, down(control=tree_of(c)))
    end = START
    for _ in range(2):
        end = end - LR * (slope(end) - own + c)
    renewed = own - c + (START - end) / (2 * LR)
    assert numbers(up.trees["shared"]) == pytest.approx(end, abs=1e-6)
    assert numbers(client.memory["control"]) == pytest.approx(renewed, abs=1e-6)
    assert numbers(up.trees["control"]) == pytest.approx(renewed - own, abs=1e-6)

    server = Server(1, tree_of(START), {"control": tree_of(c)}, clients=("c", "d", "e", "f"))
    after = plan.aggregate(server, [Report("c", 1.0, up), Report("d", 1.0, down(control=tree_of(own)))])
    assert numbers(after.shared) == pytest.approx((end + START) / 2, abs=1e-6)
    change = (renewed - own + own) / 2
    assert numbers(after.memory["control"]) == pytest.approx(c + 2 / 4 * change, abs=1e-6)


def test_scaffolds_server_rate_scales_the_weights_step_and_averages_statistics() -> None:
    plan, statistic = made("scaffold", server_lr=2.0), "bn.running_mean"
    start, end = ({**tree_of(w), statistic: torch.tensor([s])} for w, s in ((START, 1.0), (START + 1, 4.0)))
    server = Server(1, start, plan.start(TwoWeights(), start), clients=("c",))
    control = plan.start(TwoWeights(), start)["control"]
    after = plan.aggregate(server, [Report("c", 1.0, Payload({"shared": end, "control": control}))])
    assert numbers(after.shared) == pytest.approx(START + 2, abs=1e-6)
    assert after.shared[statistic].item() == 4.0


def test_a_scaffold_client_without_a_step_keeps_its_control() -> None:
    plan, own = made("scaffold"), np.array([-0.03, 0.05])
    client = client_of(plan, {"control": tree_of(own)}, epochs=0)
    up = client_round(plan, client, down(control=tree_of(np.array([0.02, -0.01]))))
    assert numbers(client.memory["control"]) == pytest.approx(own)
    assert numbers(up.trees["control"]) == pytest.approx(np.zeros(2))


def two_rounds(plan: Plan) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Two rounds in which clients end one away from the server, and then two; the changes and the server's weights."""
    server = Server(0, tree_of(START), plan.start(TwoWeights(), tree_of(START)))
    changes, found = [np.array([1.0, -1.0]), np.array([2.0, 0.5])], []
    for change in changes:
        ends = [Report(str(i), w, down(numbers(server.shared) + change)) for i, w in enumerate((1.0, 3.0))]
        server = plan.aggregate(server, ends)
        found.append(numbers(server.shared))
    return changes, found


def test_fedavgm_carries_momentum_over() -> None:
    (a, b), (first, second) = two_rounds(made("fedavgm", beta=0.6, server_lr=0.5))
    assert first == pytest.approx(START + 0.5 * a, abs=1e-6)
    assert second == pytest.approx(START + 0.5 * a + 0.5 * (0.6 * a + b), abs=1e-6)


def test_fedadam_steps_by_both_moments_without_correcting_their_bias() -> None:
    (a, b), found = two_rounds(made("fedadam", beta1=0.8, beta2=0.9, tau=0.01, server_lr=0.1))
    m, v, x = np.zeros(2), np.full(2, 0.01**2), START
    for change, weights in zip((a, b), found, strict=True):
        m, v = 0.8 * m + 0.2 * change, 0.9 * v + 0.1 * change**2
        x = x + 0.1 * m / (np.sqrt(v) + 0.01)
        assert weights == pytest.approx(x, abs=1e-6)


def test_ditto_pulls_its_own_model_to_the_received_one() -> None:
    plan, own = made("ditto", lam=0.4), np.array([1.0, 0.5])
    client = client_of(plan, {"own": tree_of(own)})
    up = client_round(plan, client, down())
    assert numbers(client.memory["own"]) == pytest.approx(own - LR * (slope(own) + 0.4 * (own - START)), abs=1e-6)
    assert numbers(up.trees["shared"]) == pytest.approx(START - LR * slope(START), abs=1e-6)


def test_apfl_trains_through_the_mixture_and_steps_alpha_once_a_round() -> None:
    plan, v, alpha = made("apfl"), np.array([1.0, 0.5]), 0.6
    client = client_of(plan, {"own": tree_of(v), "alpha": alpha}, epochs=2)
    up = client_round(plan, client, down())
    w = START - LR * slope(START)
    g = slope(alpha * v + (1 - alpha) * w)
    stepped = alpha - LR * (float((v - w) @ g) + 0.02 * alpha)
    v = v - LR * alpha * g
    w = w - LR * slope(w)
    v = v - LR * stepped * slope(stepped * v + (1 - stepped) * w)
    assert numbers(up.trees["shared"]) == pytest.approx(w, abs=1e-6)
    assert client.memory["alpha"] == pytest.approx(stepped, abs=1e-6)
    assert numbers(client.memory["own"]) == pytest.approx(v, abs=1e-6)
    newest = np.array([0.9, 0.9])
    view = plan.views(client, down(newest))["personal"]
    assert numbers(view) == pytest.approx(stepped * v + (1 - stepped) * newest, abs=1e-6)


def test_apfl_as_the_fork_trains_alone_and_bakes_the_mixture_in() -> None:
    plan, v, alpha = made("apfl", mode="fork"), np.array([1.0, 0.5]), 0.6
    client = client_of(plan, {"own": tree_of(v), "alpha": alpha})
    client_round(plan, client, down())
    gw, gv = slope(START), slope(v)
    w, v = START - LR * gw, v - LR * gv
    g = float((v - w) @ (alpha * gv + (1 - alpha) * gw)) + 0.02 * alpha
    alpha = min(1.0, max(0.0, alpha - LR * g))
    assert client.memory["alpha"] == pytest.approx(alpha, abs=1e-6)
    assert numbers(client.memory["own"]) == pytest.approx((1 - alpha) * w + alpha * v, abs=1e-6)


def test_apfl_as_the_fork_steps_alpha_at_every_batch_and_is_tested_with_its_own_model() -> None:
    plan, v, w, alpha = made("apfl", mode="fork"), np.array([1.0, 0.5]), START, 0.6
    client = client_of(plan, {"own": tree_of(v), "alpha": alpha}, batch=3)
    batches = [(np.asarray(x.mean((1, 2, 3))), np.asarray(y)) for x, y in client.batches(1, "train")]
    assert len(batches) == 2
    client_round(plan, client, down())
    for x, y in batches:
        gw, gv = slope(w, x, y), slope(v, x, y)
        w, v = w - LR * gw, v - LR * gv
        alpha = alpha - LR * (float((v - w) @ (alpha * gv + (1 - alpha) * gw)) + 0.02 * alpha)
    own = (1 - alpha) * w + alpha * v
    assert client.memory["alpha"] == pytest.approx(alpha, abs=1e-6)
    assert numbers(client.memory["own"]) == pytest.approx(own, abs=1e-6)
    assert numbers(plan.views(client, down(np.array([9.0, 9.0])))["personal"]) == pytest.approx(own, abs=1e-6)


@pytest.mark.parametrize(("way", "end"), [(10.0, 0.0), (-10.0, 1.0), (0.1, 0.5 - 0.1 - 0.02 * 0.5)])
def test_apfls_alpha_stays_between_zero_and_one(way: float, end: float) -> None:
    own, shared, slopes = ({"w": torch.tensor([value])} for value in (way, 0.0, 1.0))
    assert stepped(0.5, 1.0, own, shared, slopes) == pytest.approx(end, abs=1e-6)


def test_per_fedavg_moves_by_the_second_halfs_gradient_after_a_step_on_the_first() -> None:
    plan = made("per_fedavg", beta=0.2)
    client = client_of(plan, batch=2)  # six images: one batch of 2 + 2, then one of 2 without a second half
    x, y = next(client.batches(1, "train", 4))
    x, y = np.asarray(x.mean((1, 2, 3))), np.asarray(y)
    up = client_round(plan, client, down())
    ahead = START - LR * slope(START, x[:2], y[:2])
    assert numbers(up.trees["shared"]) == pytest.approx(START - 0.2 * slope(ahead, x[2:], y[2:]), abs=1e-6)
    x, y = next(client.batches(1, "finetune"))
    after = START - LR * slope(START, np.asarray(x.mean((1, 2, 3))), np.asarray(y))
    assert numbers(plan.views(client, down())["personal"]) == pytest.approx(after, abs=1e-6)


def test_per_fedavg_is_tested_after_its_own_number_of_steps_at_its_own_rate() -> None:
    plan, after = made("per_fedavg", eval_lr=0.3, eval_steps=4), START
    client = client_of(plan, batch=2)  # three batches an epoch: the fourth is of a second one
    for x, y in list(client.batches(2, "finetune"))[:4]:
        after = after - 0.3 * slope(after, np.asarray(x.mean((1, 2, 3))), np.asarray(y))
    assert numbers(plan.views(client, down())["personal"]) == pytest.approx(after, abs=1e-6)


def test_fedala_steps_each_number_between_its_own_and_the_global_value() -> None:
    plan, last, mix = made("fedala", eta=2.0, p=1, share=100), np.array([1.0, 0.5]), np.array([0.9, 0.4])
    client = client_of(plan, {"last": tree_of(last), "mix": tree_of(mix)})
    start = plan.merge(client, down())
    merged = last + (START - last) * mix
    renewed = np.clip(mix - 2.0 * slope(merged) * (START - last), 0, 1)
    assert numbers(client.memory["mix"]) == pytest.approx(renewed, abs=1e-6)
    assert numbers(start) == pytest.approx(last + (START - last) * renewed, abs=1e-6)


def test_fedala_takes_all_over_before_its_first_training_and_learns_until_losses_settle() -> None:
    plan = made("fedala", p=1)
    assert numbers(plan.merge(client_of(plan), down())) == pytest.approx(START)
    ends = {}
    for most in (1, 11, 50):  # losses settle at once here, but are watched for ten epochs before they may
        client = client_of(made("fedala", p=1, eta=0.1, most_epochs=most), {"last": tree_of(np.array([1.0, 0.5]))})
        made("fedala", p=1, eta=0.1, most_epochs=most).merge(client, down())
        ends[most] = numbers(client.memory["mix"])
    assert ends[11] == pytest.approx(ends[50])
    assert ends[1] != pytest.approx(ends[11])


def test_moons_contrast_is_its_formula() -> None:
    z, near, far = torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0)).unbind(0)

    def weight(a: torch.Tensor, b: torch.Tensor) -> float:
        return math.exp(float(a @ b / a.norm() / b.norm()) / 0.5)

    rows = [weight(a, b) / (weight(a, b) + weight(a, c)) for a, b, c in zip(z, near, far, strict=True)]
    assert float(contrast(z, near, far, 0.5)) == pytest.approx(-np.log(rows).mean(), abs=1e-6)


def test_moon_takes_one_step_on_both_losses() -> None:
    plan = made("moon", mu=0.8, tau=0.5, projection=0)
    client = client_of(plan, module=Hidden())
    generator = torch.Generator().manual_seed(5)
    start, last = client.initial, {n: torch.randn(t.shape, generator=generator) for n, t in client.initial.items()}
    client.memory["last"] = last
    x, y = next(client.batches(1, "train"))
    up = client_round(plan, client, Payload({"shared": start}))

    images = x.mean((2, 3))
    w = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}
    z, near, far = (images @ weights["hidden.weight"].T for weights in (w, start, last))
    similar = [F.cosine_similarity(z, other, dim=1) / 0.5 for other in (near, far)]
    contrastive = -(similar[0].exp() / (similar[0].exp() + similar[1].exp())).log().mean()
    (F.cross_entropy(z @ w["fc.weight"].T, y) + 0.8 * contrastive).backward()
    for name, leaf in w.items():
        assert leaf.grad is not None
        assert torch.allclose(up.trees["shared"][name], start[name] - LR * leaf.grad, atol=1e-6), name
    assert torch.equal(client.memory["last"]["hidden.weight"], up.trees["shared"]["hidden.weight"])


def test_moons_other_features_are_seen_through_the_projection_and_without_dropout() -> None:
    module = Hidden()
    attach(module, Projection(5))
    plan = made("moon", mu=0.8, tau=0.5, projection=5)
    client = client_of(plan, module=module)
    generator = torch.Generator().manual_seed(5)
    start, last = client.initial, {n: torch.randn(t.shape, generator=generator) for n, t in client.initial.items()}
    client.memory["last"] = last
    x, y = next(client.batches(1, "train"))
    up = client_round(plan, client, Payload({"shared": start}))

    def projected(w: dict[str, torch.Tensor]) -> torch.Tensor:
        h = x.mean((2, 3)) @ w["hidden.weight"].T
        h = torch.relu(h @ w["projection.0.0.weight"].T + w["projection.0.0.bias"])
        return h @ w["projection.0.2.weight"].T + w["projection.0.2.bias"]

    w = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}
    z = projected(w)
    supervised = F.cross_entropy(z @ w["fc.weight"].T + w["fc.bias"], y)
    (supervised + 0.8 * contrast(z, projected(start), projected(last), 0.5)).backward()
    for name, leaf in w.items():
        assert leaf.grad is not None
        assert torch.allclose(up.trees["shared"][name], start[name] - LR * leaf.grad, atol=1e-6), name

    module.hidden.register_forward_hook(lambda part, _, output: output * (0 if part.training else 1))
    module.train()
    assert torch.allclose(features(client, client.net(start), x), projected(start), atol=1e-6)
    assert module.hidden.training


def test_fed_rod_trains_body_and_generic_head_by_the_balanced_loss_and_the_own_head_by_the_rest() -> None:
    plan, module = made("fed_rod"), Hidden()
    attach(module, SecondHead())
    client = client_of(plan, module=module)
    client.data = replace(client.data, train=client.data.train[:5])  # three images of one class, two of the other
    own = torch.tensor([[0.3, -0.2], [0.1, 0.4]])
    client.memory["personal"] = {"second_head.0.weight": own, "second_head.0.bias": torch.tensor([0.2, -0.1])}
    x, y = next(client.batches(1, "train"))
    start = {name: client.initial[name] for name in ("hidden.weight", "fc.weight")}
    up = client_round(plan, client, Payload({"shared": start}))

    w = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}
    h = x.mean((2, 3)) @ w["hidden.weight"].T
    generic = h @ w["fc.weight"].T
    F.cross_entropy(generic + torch.bincount(y, minlength=2).log(), y).backward()
    for name, leaf in w.items():
        assert leaf.grad is not None
        assert torch.allclose(up.trees["shared"][name], start[name] - LR * leaf.grad, atol=1e-6), name
    p = own.clone().requires_grad_()
    both = generic.detach() + h.detach() @ p.T + torch.tensor([0.2, -0.1])
    F.cross_entropy(both, y).backward()
    assert p.grad is not None
    kept = client.memory["personal"]
    assert isinstance(kept, dict)
    assert torch.allclose(kept["second_head.0.weight"], own - LR * p.grad, atol=1e-6)


def test_fed_rods_hypernetwork_steps_towards_the_head_that_was_trained() -> None:
    module = Hidden()
    attach(module, SecondHead())
    attach(module, HeadMaker())
    client = client_of(made("fed_rod", hyper=True), module=module)
    end = {name: t + 0.3 if name in client.roles.personal else t for name, t in client.initial.items()}
    guess, trained = made_head(client, end), torch.cat([end[name].flatten() for name in client.roles.personal])
    taught = teach_maker(client, end, 0.01)
    way = taught["head_maker.2.bias"] - end["head_maker.2.bias"]
    assert torch.allclose(way, 0.01 * (trained - guess).detach(), atol=1e-6)
    assert (made_head(client, taught) - trained).norm() < (guess - trained).norm()
    assert all(torch.equal(taught[name], end[name]) for name in end if not name.startswith("head_maker."))


@pytest.mark.parametrize(("given", "rate"), [({"offset_lr": 0.03}, 0.03), ({}, LR / 5)], ids=["given", "a fifth"])
def test_distrans_steps_network_and_offset_on_one_loss_at_two_rates(given: dict[str, Any], rate: float) -> None:
    module = Hidden()
    attach(module, Offset(0.3), size=1)
    plan = made("distrans", a=0.3, **given)
    client = client_of(plan, module=module)
    x, y = next(client.batches(1, "train"))
    shared = {name: tensor for name, tensor in client.initial.items() if name != "offset.image"}
    up = client_round(plan, client, Payload({"shared": shared}))

    w = {name: tensor.clone().requires_grad_() for name, tensor in client.initial.items()}
    seen = (0.7 * x + 0.3 * w["offset.image"], 1.3 * x - 0.3 * w["offset.image"])
    both = torch.cat([image.mean((2, 3)) @ w["hidden.weight"].T for image in seen], dim=1)
    F.cross_entropy(both @ w["fc.weight"].T + w["fc.bias"], y).backward()
    ends = {**up.trees["shared"], **client.memory["personal"]}
    assert ends.keys() == w.keys()
    for name, leaf in w.items():
        assert leaf.grad is not None
        step = rate if name == "offset.image" else LR
        assert torch.allclose(ends[name], client.initial[name] - step * leaf.grad, atol=1e-6), name


def test_balanced_softmax_weighs_every_class_by_its_count() -> None:
    logits, y, counts = torch.tensor([[1.0, 2.0, 5.0], [0.0, 1.0, 3.0]]), torch.tensor([0, 1]), torch.tensor([3, 1, 0])
    rows = [[3 * math.exp(1), math.exp(2)], [3 * math.exp(0), math.exp(1)]]
    expected = -(math.log(rows[0][0] / sum(rows[0])) + math.log(rows[1][1] / sum(rows[1]))) / 2
    assert float(balanced_softmax(logits, y, counts)) == pytest.approx(expected, abs=1e-6)


def test_lamb_scales_a_step_by_the_length_of_the_weights() -> None:
    theta, peak, m, v = np.array([3.0, 4.0]), np.array([0.04, 0.25]), np.zeros(2), np.array([0.04, 0.25])
    weight = nn.Parameter(torch.tensor(theta))
    lamb = Lamb({"w": weight}, {"w": 0.1}, (0.9, 0.99), 1e-8, 0.01, {"w": torch.tensor(peak)})
    for g in (np.array([1.0, -2.0]), np.array([0.5, 0.5])):
        weight.grad = torch.tensor(g)
        lamb.step()
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
        u = m / (np.sqrt(peak) + 1e-8) + 0.01 * theta
        theta = theta - 0.1 * np.linalg.norm(theta) * u / np.linalg.norm(u)
        assert weight.detach().numpy() == pytest.approx(theta, abs=1e-9)
    assert lamb.second["w"].numpy() == pytest.approx(v, abs=1e-9)
    still = nn.Parameter(torch.zeros(2))
    still.grad = torch.tensor([3.0, -4.0])
    Lamb({"w": still}, {"w": 0.1}, (0.9, 0.9), 1e-8, 0.0, {"w": torch.zeros(2)}).step()  # as in the first round
    assert still.detach().numpy() == pytest.approx([-0.06, 0.08], abs=1e-6)  # no length to scale by: a step of 0.1


def test_a_fed_lamb_client_starts_from_the_second_moments_it_is_sent_and_reports_its_own() -> None:
    plan, peak = made("fed_lamb", beta1=0.8, beta2=0.9), np.array([0.04, 0.25])
    client = client_of(plan, epochs=2)
    client.settings = replace(client.settings, weight_decay=0.1)
    up = client_round(plan, client, down(second=tree_of(peak)))
    theta, m, v = START, np.zeros(2), peak
    for _ in range(2):
        g = slope(theta)
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
        u = m / (np.sqrt(peak) + 1e-8) + 0.1 * theta
        theta = theta - LR * np.linalg.norm(theta) * u / np.linalg.norm(u)
    assert numbers(up.trees["shared"]) == pytest.approx(theta, abs=1e-6)
    assert numbers(up.trees["second"]) == pytest.approx(v, abs=1e-6)


def test_fed_lambs_server_keeps_the_largest_second_moment() -> None:
    plan = made("fed_lamb")
    old, mean = {"w": torch.tensor([1.0, 5.0])}, {"w": torch.tensor([3.0, 2.0])}
    server = Server(0, {"w": torch.zeros(2)}, {"second": old})
    after = plan.aggregate(server, [Report("a", 1.0, Payload({"shared": {"w": torch.ones(2)}, "second": mean}))])
    assert after.memory["second"]["w"].tolist() == [3.0, 5.0]


def test_partialfed_loads_all_but_what_it_keeps() -> None:
    plan = made("partialfed", keep="head")
    client = client_of(plan)
    up = client_round(plan, client, down())
    assert torch.equal(up.trees["shared"][NAME], client.memory["kept"][NAME])  # kept, and still sent
    again = replace(client, scalars={})
    assert torch.equal(plan.merge(again, down(np.array([7.0, 7.0])))[NAME], client.memory["kept"][NAME])


CHANCES = {  # what each edit gives the right class of two images, and the own model
    "own": (0.4, 0.4),
    "both better and right": (0.9, 0.8),
    "one right": (0.9, 0.3),
    "right, but worse than the own model": (0.39, 0.35),
    "right and a little better": (0.45, 0.41),
}


def logits_of(chances: tuple[float, ...], wrong_classes: int = 2) -> torch.Tensor:
    """Logits with these chances of class 0; the rest is shared by the others."""
    rows = [[p, *[(1 - p) / wrong_classes] * wrong_classes] for p in chances]
    return torch.tensor(rows).log()


def test_pfededit_ranks_by_the_prediction_list() -> None:
    edits = [name for name in CHANCES if name != "own"]
    logits = torch.stack([logits_of(CHANCES[name]) for name in edits])
    y, own = torch.tensor([0, 0]), logits_of(CHANCES["own"])
    # With three classes 0.39 and 0.35 are right; 0.3 is wrong. Lists: (2,0,0,0), (1,0,0,1), (0,2,0,0), (2,0,0,0).
    by_list = [edits[i] for i in ranking(logits, own, y, "prediction_list")]
    assert by_list == [
        "both better and right",
        "right and a little better",
        "one right",
        "right, but worse than the own model",
    ]
    te = [np.mean([p / 0.4 - 1 for p in CHANCES[name]]) for name in edits]
    assert ranking(logits, own, y, "te") == sorted(range(4), key=lambda i: -te[i])
    loss = [-np.mean(np.log(CHANCES[name])) for name in edits]
    assert ranking(logits, own, y, "loss") == sorted(range(4), key=lambda i: loss[i])
    assert ranking(logits, own, y, "accuracy") == [0, 2, 3, 1]  # ties fall to the earlier layer


def test_pfededit_compares_every_edit_with_the_clients_last_model() -> None:
    plan, module = made("pfededit", k=1), Hidden()
    client = client_of(plan, module=module)
    client.data = replace(client.data, probe=torch.arange(6))
    generator = torch.Generator().manual_seed(24)
    received, last = (
        {n: torch.randn(t.shape, generator=generator) for n, t in client.initial.items()} for _ in range(2)
    )
    client.memory["last"] = last
    ((x, y),) = probe_batches(client)

    def chance(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.softmax(x.mean((2, 3)) @ weights["hidden.weight"].T @ weights["fc.weight"].T, 1)

    def best(reference: dict[str, torch.Tensor]) -> str:
        lists = {}
        for name in received:
            p, own = chance({**received, name: last[name]}), chance(reference)
            right, better = p.argmax(1) == y, p[range(6), y] > own[range(6), y]
            lists[name] = [int((r & b).sum()) for r in (right, ~right) for b in (better, ~better)]
        return max(lists, key=lambda name: lists[name])

    chosen = best(last)
    assert chosen != best(received), "this case would not tell the two apart"
    start = plan.merge(client, Payload({"shared": received}))
    assert [name for name in start if not torch.equal(start[name], received[name])] == [chosen]
    assert torch.equal(start[chosen], last[chosen])


@pytest.mark.parametrize(("layers", "expected"), [(54, 4), (100, 7), (111, 8), (41, 3)])
def test_pfededit_rounds_the_number_of_layers_up(layers: int, expected: int) -> None:
    assert Size(None, 0.07).of(layers) == expected
    assert [Size(None, ratio).of(54) for ratio in (0.01, 0.03, 0.05, 0.07, 0.09)] == [1, 2, 3, 4, 5]
    assert Size(0, 0.07).of(layers) == 0
