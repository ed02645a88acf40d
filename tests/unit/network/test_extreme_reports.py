"""Whatever report passes the boundary, the server's arithmetic survives it: no error, and only finite weights."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fedvit.core.payload import Failure, Payload
from fedvit.engine.inprocess import InProcess
from fedvit.engine.ledger import Ledger
from fedvit.engine.loop import choose, train_round
from fedvit.engine.net import Net
from fedvit.network.boundary import read_report
from fedvit.network.payload_check import up_of
from fedvit.runs.write import Holding
from tests.conftest import Bench, tiny

pytestmark = pytest.mark.attack
NUMBERS = {"large": 9e8, "negative": -9e8, "zero": 0.0, "tiny": 1e-300}
WHOLE = {"large": 2**62, "negative": -(2**62), "zero": 0, "tiny": 1}


def extreme(tensor: torch.Tensor, how: str) -> torch.Tensor:
    """A tensor of values that the boundary allows, or whole numbers beyond any index."""
    if tensor.dtype == torch.bool:
        return torch.full_like(tensor, how == "large")
    if not tensor.is_floating_point():
        return torch.full_like(
            tensor, max(torch.iinfo(tensor.dtype).min, min(torch.iinfo(tensor.dtype).max, WHOLE[how]))
        )
    most = min(9e5, 900 / math.sqrt(max(1, tensor.numel())))
    return torch.full_like(tensor, {"large": most, "negative": -most, "zero": 0.0, "tiny": 1e-40}[how])


class Evil:
    """A transport whose first client reports extreme values, which are checked as a server checks them."""

    def __init__(self, inner: InProcess, net: Net, how: str):
        self.inner, self.net, self.how = inner, net, how

    def clients(self) -> Any:
        return self.inner.clients()

    def exchange(self, task: Any, messages: Mapping[str, Payload]) -> Iterator[tuple[str, Payload | Failure]]:
        first = next(iter(messages))
        for name, answer in self.inner.exchange(task, messages):
            if name == first and isinstance(answer, Payload):
                yield name, self.spoilt(answer, messages[name])
            else:
                yield name, answer

    def spoilt(self, up: Payload, down: Payload) -> Payload | Failure:
        trees = {group: {name: extreme(t, self.how) for name, t in tree.items()} for group, tree in up.trees.items()}
        numbers = {**dict.fromkeys(up.scalars, NUMBERS[self.how]), "examples": 1e300 if self.how == "large" else 1e-300}
        try:
            wanted = up_of(self.net, down, int(down.scalars["round"]))
            return read_report(Payload(trees, numbers), wanted, Holding(100, 10, 10))
        except ValueError as problem:
            return Failure(str(problem))

    def commit(self, round_: int) -> None:
        self.inner.commit(round_)


@pytest.mark.parametrize("how", NUMBERS)
@pytest.mark.parametrize(
    "label", ["fedavg", "fedavg+bias", "fedadam", "scaffold", "fed_lamb", "fedfa", "heterofl", "pfededit", "cd2_pfed"]
)
def test_a_report_within_bounds_leaves_finite_weights(label: str, how: str, tmp_path: Path) -> None:
    bench = Bench(tiny(label, clients=3, cohort=3, samples=90), tmp_path)
    evil, server, plan = Evil(bench.transport, bench.net, how), bench.server, bench.net.federated
    for number in (1, 2):
        cohort = choose(plan, list(evil.clients()), bench.experiment, number)
        server, _, _ = train_round(plan, server, evil, bench.experiment, cohort, number, Ledger(), {})
        evil.commit(number)
    for tree in (server.shared, *server.memory.values()):
        assert all(tensor.isfinite().all() for tensor in tree.values())
