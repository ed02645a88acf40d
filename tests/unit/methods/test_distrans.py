"""DisTrans with offsets that the server makes."""

from pathlib import Path

import torch
from torch import nn

from fedvit.core.payload import Payload
from fedvit.core.plan import Report, client_round
from fedvit.core.server import Server
from fedvit.models.offset_maker import IMAGE, first_maker, made_offset, taught
from tests.conftest import Bench, assert_close_trees, same_trees, tiny

SERVER = {"offsets": "server"}


def slow_maker(weights: dict[str, torch.Tensor]) -> nn.Sequential:
    """The same network as torch's own layers."""
    sizes = [weights[f"{i}.weight"].shape[::-1] for i in range(3)]
    layers = [nn.Linear(*size) for size in sizes]
    for number, layer in enumerate(layers):
        layer.load_state_dict({"weight": weights[f"{number}.weight"], "bias": weights[f"{number}.bias"]})
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2], nn.Tanh())


def test_the_maker_takes_steps_of_sgd_on_the_mean_squared_error(tmp_path: Path) -> None:
    weights = first_maker(Bench(tiny("distrans", SERVER), tmp_path).net.module)
    generator = torch.Generator().manual_seed(3)
    proportions, offset = torch.softmax(torch.randn(10, generator=generator), 0), torch.rand(3, 8, 8)
    slow = slow_maker(weights)
    assert torch.allclose(made_offset(weights, proportions).flatten(), slow(proportions), atol=1e-6)
    optimizer = torch.optim.SGD(slow.parameters(), lr=0.5)
    for _ in range(2):
        weights = taught(weights, proportions, offset, 0.5)
        optimizer.zero_grad()
        nn.functional.mse_loss(slow(proportions).view(3, 8, 8), offset).backward()
        optimizer.step()
    names = [f"{i}.{key}" for i in range(3) for key in ("weight", "bias")]
    assert_close_trees(weights, dict(zip(names, [p.detach() for p in slow.parameters()], strict=True)))


def test_clients_train_the_offset_that_the_server_makes_for_them(tmp_path: Path) -> None:
    bench = Bench(tiny("distrans", SERVER), tmp_path)
    plan, server = bench.net.plan, bench.server
    down = plan.dispatch(server, "0")
    even = made_offset(server.memory["maker"], torch.full((10,), 0.1))
    assert torch.equal(down.trees["offset"][IMAGE], even), "nothing is known about this client yet"

    client = bench.worker.client("0", 1, {})
    assert torch.equal(plan.merge(client, down)[IMAGE], even)
    up = client_round(plan, client, down)
    counts = client.data.class_counts
    assert up.trees.keys() == {"shared", "offset", "classes"}
    assert torch.equal(up.trees["classes"]["proportions"], counts / counts.sum())
    assert not torch.equal(up.trees["offset"][IMAGE], even), "the offset was not trained"
    assert IMAGE not in up.trees["shared"]

    after = plan.aggregate(server, [Report("0", 1.0, up)])
    stepped = taught(server.memory["maker"], counts / counts.sum(), up.trees["offset"][IMAGE], 0.01)
    assert same_trees(after.memory["maker"], stepped)
    assert same_trees(after.shared, up.trees["shared"])
    again = plan.dispatch(after, "0").trees["offset"][IMAGE]
    assert torch.equal(again, made_offset(stepped, counts / counts.sum()))
    assert not torch.equal(again, plan.dispatch(after, "1").trees["offset"][IMAGE])
    view = plan.views(bench.worker.client("0", 2, client.memory), plan.dispatch(after, "0"))
    assert torch.equal(view["personal"][IMAGE], again), "a client is tested with what the server made"


def test_the_maker_approaches_what_clients_return(tmp_path: Path) -> None:
    bench = Bench(tiny("distrans", {**SERVER, "maker_lr": 1.0}), tmp_path)
    plan = bench.net.plan
    server = Server(0, {"w": torch.ones(1)}, bench.server.memory, ("a", "b"))
    generator = torch.Generator().manual_seed(5)
    own = {name: torch.rand(3, 8, 8, generator=generator) - 0.5 for name in server.clients}
    classes = {"a": torch.eye(10)[0], "b": torch.eye(10)[1]}

    def distance(server: Server) -> float:
        return sum(float((plan.dispatch(server, n).trees["offset"][IMAGE] - own[n]).square().mean()) for n in own)

    def reports() -> list[Report]:
        return [
            Report(
                n,
                1.0,
                Payload({"shared": server.shared, "offset": {IMAGE: own[n]}, "classes": {"proportions": classes[n]}}),
            )
            for n in own
        ]

    server = plan.aggregate(server, reports())
    before = distance(server)
    for _ in range(200):
        server = plan.aggregate(server, reports())
    assert distance(server) < before / 3
