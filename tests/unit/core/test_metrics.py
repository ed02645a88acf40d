"""Scores of the server's model: from its clients' counts where they are the same thing, measured where not."""

from pathlib import Path
from typing import Any

import pytest

from fedvit.core.metrics import score
from fedvit.core.training import holding
from fedvit.engine.ledger import Ledger
from fedvit.engine.loop import evaluate
from fedvit.engine.net import POOLED
from tests.conftest import Bench, tiny


@pytest.mark.parametrize(
    ("label", "sets", "from_clients"),
    [
        ("fedavg", {}, True),
        ("fedprox+bias", {}, True),
        ("fedavg_ft", {}, False),  # clients fine-tune before their test
        ("heterofl", {}, False),  # clients have parts of the model
        ("fedavg", {"run.evaluate": "in_round"}, False),  # clients test what they trained
        ("fedavg", {"partition.name": "dirichlet_train"}, True),
        ("fedavg", {"data.unseen": 2}, False),  # some images belong to clients that are not asked
    ],
)
def test_the_servers_score_is_that_of_its_model(
    label: str, sets: dict[str, Any], from_clients: bool, tmp_path: Path
) -> None:
    bench = Bench(tiny(label, sets), tmp_path)
    seen = list(bench.split.seen)
    scores = evaluate(bench.net.plan, dict.fromkeys(seen, bench.server), bench.transport, 1, Ledger())
    measured = bench.worker.evaluate_server(bench.server.shared, 1)
    told = bench.worker.evaluate_server(bench.server.shared, 1, scores)
    assert bench.worker.clients_score_the_server == from_clients
    assert told == measured
    client = bench.worker.client(POOLED, 1, {})
    with holding(client, bench.server.shared) as predict:
        at_once = score(predict, client.data, client.data.test, client.inputs, client.settings.device)
    assert told == pytest.approx(at_once, rel=1e-5)
    if from_clients:  # a client that did not answer leaves a gap
        del scores[seen[0]]
        assert bench.worker.evaluate_server(bench.server.shared, 1, scores) == measured
