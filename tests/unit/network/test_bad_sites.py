"""What one bad site can do to a run, over the real messages of Flower: the attacks of a review, and the defences."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from torch import Tensor

from fedvit.config.load import load_experiment
from fedvit.core.errors import UserError
from fedvit.core.payload import Payload, from_bytes
from fedvit.core.settings import Experiment
from fedvit.core.training import all_finite
from fedvit.network.flower.records import from_records, to_records
from fedvit.report.load import collect
from fedvit.report.page import page
from fedvit.runs.folder import Run
from fedvit.runs.updates import about_updates
from tests.conftest import finish
from tests.grid import Federated

pytestmark = pytest.mark.attack
BAD = "2"
DIGITS = {
    "method": "fedavg", "model": "mlp", "samples": 300, "partition": "iid", "rounds": 4, "epochs": 3, "batch": 16,
    "lr": 0.005, "threads": 1, "eval_every": 0,
}  # fmt: skip
Change = Callable[[Tensor, Tensor], Tensor]  # from what the server sent and what the site trained


def turned(factor: float) -> Change:
    return lambda sent, trained: sent - factor * (trained - sent)


def nothing(sent: Tensor, trained: Tensor) -> Tensor:
    return torch.zeros_like(trained)


def three(sets: dict[str, Any], sites: int = 3, **flags: Any) -> Experiment:
    return load_experiment(None, {"optimizer": "adamw", **sets}, {**DIGITS, "clients": sites, "cohort": sites, **flags})


def attacked(experiment: Experiment, folder: Path, change: Change, **claims: float) -> Federated:
    """A federation whose site BAD sends something else than it trained."""
    federated = Federated(experiment, folder)
    wires = federated.wires

    def meddle(site: str, reply: Message) -> Message:
        up, about = from_records(reply.content)
        if site != BAD or not up.trees:
            return reply
        question = wires.crossed[-2]
        sent = from_records(question.content)[0].trees["shared"]
        trees = {"shared": {name: change(sent[name], tensor) for name, tensor in up.trees["shared"].items()}}
        return Message(to_records(Payload(trees, {**up.scalars, **claims}), about), reply_to=question)

    wires.meddle = meddle
    return federated


def accuracy(folder: Path) -> float:
    return float(Run(folder).rounds[-1]["views"]["personal"]["mean"])


def server_tensors(folder: Path) -> dict[str, Tensor]:
    newest = max((folder / "checkpoint").glob("server-*.safetensors"))
    return dict(from_bytes(newest.read_bytes()).trees["shared"])


def test_a_false_number_of_images_counts_for_nothing_and_is_named(tmp_path: Path) -> None:
    """999,999,999 images with zero weights took over the mean: now the bits are those of an honest number."""
    experiment = three({}, rounds=2)
    liar = attacked(experiment, tmp_path / "liar", nothing, examples=999_999_999.0)
    honest = attacked(experiment, tmp_path / "honest", nothing)
    liar.finish()
    honest.finish()
    a, b = server_tensors(liar.out), server_tensors(honest.out)
    assert all(torch.equal(a[name], b[name]) for name in b)
    assert [row["claimed"] for row in Run(liar.out).rounds] == [{BAD: 999_999_999.0}] * 2
    assert not any("claimed" in row for row in Run(honest.out).rounds)
    assert "site 2 reports 1e+09 training images, but said 75 when it connected" in (liar.out / "log.txt").read_text()
    text = page(collect([liar.out]))
    assert "More training images than agreed on: client 2 reported 999,999,999" in text


@pytest.mark.parametrize(
    ("sites", "sets", "factor"),
    [
        (3, {"aggregate": "median"}, 5.0),
        (3, {"aggregate": "median"}, 20.0),
        (3, {"aggregate": "trimmed_mean"}, 5.0),
        (5, {"aggregate": "krum"}, 5.0),
        (5, {"aggregate": "multi_krum"}, 20.0),
    ],
)
def test_a_robust_aggregate_learns_in_spite_of_turned_updates(
    sites: int, sets: dict[str, Any], factor: float, tmp_path: Path
) -> None:
    """The mean is at chance after -5 times the update (100 -> 0 % in the review); -20 times came with a false count."""
    federated = attacked(three(sets, sites), tmp_path, turned(factor), examples=1e9)
    federated.finish()
    assert accuracy(federated.out) > 45


def test_the_mean_does_not_and_the_report_says_whose_updates_stand_out(tmp_path: Path) -> None:
    federated = attacked(three({}, 5), tmp_path, turned(5.0))
    federated.finish()
    assert accuracy(federated.out) < 35
    about = about_updates(Run(federated.out).rounds)
    assert [name for name, one in about.items() if one.long] == [BAD]
    assert [name for name, one in about.items() if one.away] == [BAD]
    text = page(collect([federated.out]))
    assert "fedavg: 1 of 5 stands out" in text
    assert "The updates of client 2 are 5." in text
    assert Run(federated.out).summary["updates"][BAD]["long"] is True


def test_weights_beyond_every_bound_are_never_stored_and_the_run_resumes_without_the_site(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """1e15 with eval_every=0 was checkpointed, and resuming without the bad site failed for ever."""
    federated = attacked(three({}), tmp_path, lambda sent, trained: torch.full_like(trained, 1e15))
    rounds = federated.rounds()
    with caplog.at_level(logging.WARNING):
        first = next(rounds)
    assert first.row["failed"] == [BAD]
    assert "larger than 1,000,000" in first.row["failures"][BAD]
    rounds.close()  # type: ignore[attr-defined]
    assert all_finite(server_tensors(federated.out))
    del federated.wires.nodes[102]
    federated.finish(resume=True)
    assert [row["failed"] for row in Run(federated.out).rounds] == [[BAD]] * 4
    assert accuracy(federated.out) > 45


@pytest.mark.parametrize("sets", [{}, {"aggregate": "median", "clip_update": "auto"}, {"clip_update": 0.5}])
def test_sites_measure_and_bound_updates_with_the_bits_of_one_process(sets: dict[str, Any], tmp_path: Path) -> None:
    experiment = three(sets, rounds=2)
    alone = finish(experiment, tmp_path / "alone")
    federated = Federated(experiment, tmp_path)
    federated.finish()
    fields = ("update_norms", "update_cosines", "update_bound", "clipped", "loss")
    here, there = ([{key: row.get(key) for key in fields} for row in Run(out).rounds] for out in (alone, federated.out))
    assert here == there
    a, b = server_tensors(alone), server_tensors(federated.out)
    assert all(torch.equal(a[name], b[name]) for name in b)


def test_a_method_that_a_robust_aggregate_would_not_protect_is_refused_before_the_sites_are_asked(
    tmp_path: Path,
) -> None:
    experiment = load_experiment(
        None, {"aggregate": "median"}, {"method": "heterofl", "clients": 3, "cohort": 3, "samples": 120}
    )
    federated = Federated(experiment, tmp_path)
    with pytest.raises(UserError, match="heterofl does not combine the shared of its clients"):
        federated.finish()
    assert not federated.wires.crossed
