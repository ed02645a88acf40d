"""What the server notes about the updates of a round, how it shortens them, and which methods it can protect."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedvit.config.load import load_experiment
from fedvit.core.errors import UserError
from fedvit.core.payload import Failure, Payload
from fedvit.core.plan import Plan
from fedvit.core.settings import Experiment
from fedvit.core.updates import clip_update, flat, length, update_in
from fedvit.engine import updates
from fedvit.engine.aggregate import check_aggregate, uncombined
from fedvit.engine.ledger import Ledger
from fedvit.engine.updates import AUTO, Updates
from fedvit.methods import METHODS
from fedvit.runs.folder import Run
from tests.conftest import Bench, finish, same_trees, tiny

FEDERATED = [name for name, plan in METHODS.items() if isinstance(plan(), Plan)]
SENDING = [name for name in FEDERATED if name not in ("local", "centralized")]
SPECIAL = ["scaffold", "fed_lamb", "cd2_pfed", "fedfed", "heterofl", "fedfa", "fedperfix"]  # reports of their own form
CANNOT = {  # the groups of a report that a robust aggregate would not protect
    "heterofl": ["shared"],
    "fedrolex": ["shared"],
    "fedfa": ["statistics"],
}
DOWN = Payload({"shared": {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[3.0]])}, "control": {"a": torch.ones(2)}})


def report(*numbers: float, **trees: dict[str, torch.Tensor]) -> Payload:
    a, b = torch.tensor(numbers[:2]), torch.tensor([[numbers[2]]])
    return Payload({"shared": {"a": a, "b": b}, **trees}, {"examples": 5.0})


def numbers(payload: Payload) -> list[float]:
    return [x for tensor in payload.trees["shared"].values() for x in tensor.flatten().tolist()]


# An update and its length.


def test_an_update_is_what_a_report_changes_in_what_the_server_sent() -> None:
    up = report(4.0, 2.0, 7.0, statistics={"x": torch.ones(3)}, choice={"y": torch.ones(3, dtype=torch.uint8)})
    found = update_in(up, DOWN)
    assert {name: tensor.flatten().tolist() for name, tensor in found.items()} == {
        "shared/a": [3.0, 0.0],
        "shared/b": [4.0],
    }
    assert length(flat(found)) == 5.0


def test_a_group_of_changes_is_measured_as_it_is() -> None:
    up = report(1.0, 2.0, 3.0, control={"a": torch.tensor([3.0, 4.0])})
    assert length(flat(update_in(up, DOWN))) == pytest.approx(np.hypot(2, 3))
    assert length(flat(update_in(up, DOWN, ["control"]))) == 5.0
    short = clip_update(up, DOWN, 1.0, ["control"])
    assert short.trees["control"]["a"].tolist() == pytest.approx([0.6, 0.8])
    assert numbers(short) == [1.0, 2.0, 3.0]


def test_an_update_beyond_the_bound_keeps_its_direction_and_has_the_bounds_length() -> None:
    up = report(4.0, 2.0, 7.0)
    short = clip_update(up, DOWN, 2.5)
    assert numbers(short) == pytest.approx([2.5, 2.0, 5.0])
    assert short.scalars == up.scalars
    assert clip_update(up, DOWN, 5.0) is up
    assert numbers(up) == [4.0, 2.0, 7.0], "the report itself was modified"
    endless = report(float("inf"), 2.0, 7.0)
    assert not np.isfinite(length(flat(update_in(endless, DOWN))))


# The updates of a round.


def watch(setting: object, past: list[float], *ups: Payload | Failure) -> tuple[Updates, list[Payload | Failure]]:
    found = Updates(METHODS["fedavg"](), setting, past)  # type: ignore[arg-type]
    names = [str(i) for i in range(len(ups))]
    answers = found.bounded(zip(names, ups, strict=True), dict.fromkeys(names, DOWN), Ledger())  # type: ignore[arg-type]
    return found, [answer for _, answer in answers]


def along(*change: float) -> Payload:
    return report(*(a + b for a, b in zip((1.0, 2.0, 3.0), change, strict=True)))


def test_a_round_tells_every_length_and_the_cosine_with_the_direction_of_the_others() -> None:
    changes = [(3.0, 4.0, 0.0), (0.0, 1.0, 1.0), (-20.0, 0.0, 0.0), (0.0, 0.0, 0.0)]
    found, answers = watch("off", [], *(along(*change) for change in changes), Failure("is offline"))
    assert isinstance(answers[-1], Failure)
    units = [np.array(change) / np.linalg.norm(change) for change in changes[:3]]
    expected = {}
    for i, own in enumerate(units):
        others = sum(unit for j, unit in enumerate(units) if j != i)
        expected[str(i)] = own @ others / np.linalg.norm(others)
    row = found.row()
    assert row["update_norms"] == pytest.approx({"0": 5.0, "1": 2**0.5, "2": 20.0, "3": 0.0})
    assert row["update_cosines"] == pytest.approx(expected, abs=1e-6)
    assert row.keys() == {"update_norms", "update_cosines"}
    assert found.lengths() == ()


def test_the_bound_may_be_a_number() -> None:
    found, answers = watch(2.0, [], along(3.0, 4.0, 0.0), along(0.0, 1.0, 0.0))
    assert numbers(answers[0]) == pytest.approx([2.2, 3.6, 3.0])  # type: ignore[arg-type]
    assert numbers(answers[1]) == [1.0, 3.0, 3.0]  # type: ignore[arg-type]
    assert found.row()["update_bound"] == 2.0
    assert found.row()["clipped"] == ["0"]
    assert found.row()["update_norms"] == pytest.approx({"0": 5.0, "1": 1.0}), "lengths are those before"


def test_auto_is_a_multiple_of_the_median_of_the_past() -> None:
    found, answers = watch("auto", [1.0, 2.0, 1000.0], along(0.0, 50.0, 0.0))
    assert found.bound == 2 * AUTO
    assert numbers(answers[0])[1] == pytest.approx(2 + 2 * AUTO)  # type: ignore[arg-type]
    assert found.lengths() == (1.0, 2.0, 1000.0, 50.0)


def test_the_first_round_of_auto_is_bounded_by_its_own_median(monkeypatch: pytest.MonkeyPatch) -> None:
    for in_memory in (0, 10**6):
        monkeypatch.setattr(updates.Spool.__init__, "__defaults__", (in_memory,))
        found, answers = watch("auto", [], along(0.0, 900.0, 0.0), Failure("is late"), along(0, 1, 0), along(0, 0, 2))
        assert found.bound == 2 * AUTO
        assert found.shortened == ["0"]
        assert numbers(answers[0])[1] == pytest.approx(2 + 2 * AUTO)  # type: ignore[arg-type]
        assert isinstance(answers[1], Failure)
        assert numbers(answers[3]) == [1.0, 2.0, 5.0]  # type: ignore[arg-type]


def test_past_lengths_are_forgotten_one_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "REMEMBERED", 3)
    assert watch("auto", [1.0, 2.0, 3.0], along(0.0, 4.0, 0.0))[0].lengths() == (2.0, 3.0, 4.0)


# Runs.


@pytest.mark.parametrize("method", SPECIAL)
def test_a_bound_that_is_never_reached_changes_no_bit(method: str, tmp_path: Path) -> None:
    plain, bounded = (
        finish(tiny(method, {"clip_update": value}, clients=4), tmp_path / str(value)) for value in ("off", 1e9)
    )
    assert _weights(plain) == _weights(bounded)
    assert (plain / "clients.csv").read_bytes() == (bounded / "clients.csv").read_bytes()


@pytest.mark.parametrize("method", SPECIAL)
def test_a_short_bound_holds_for_reports_of_every_form(method: str, tmp_path: Path) -> None:
    run = Run(finish(tiny(method, {"clip_update": 1e-3}, clients=4), tmp_path / "run"))
    for row in run.rounds:
        assert row["update_bound"] == 1e-3
        assert sorted(row["clipped"]) == sorted(row["cohort"]) == sorted(row["update_norms"])


def _weights(folder: Path) -> bytes:
    return max((folder / "checkpoint").glob("server-*.safetensors")).read_bytes()


def test_auto_remembers_lengths_in_the_checkpoint_and_a_run_without_it_has_none(tmp_path: Path) -> None:
    from fedvit.core.payload import from_bytes

    auto = from_bytes(_weights(finish(tiny("fedavgm", {"clip_update": "auto"}), tmp_path / "auto")))
    rows = Run(tmp_path / "auto").rounds
    lengths = [norm for row in rows for norm in row["update_norms"].values()]
    assert auto.trees["update_norms"]["update_norms"].tolist() == lengths
    assert set(from_bytes(_weights(finish(tiny("fedavgm"), tmp_path / "off"))).trees) == {"shared", "memory:momentum"}


# Which methods a robust aggregate protects.


@pytest.mark.parametrize("method", SENDING)
def test_every_number_of_a_report_is_combined_or_the_method_is_refused_by_name(method: str, tmp_path: Path) -> None:
    bench = Bench(tiny(method, {"aggregate": "median"}, cohort=3), tmp_path)
    assert uncombined(bench.net, bench.split.seen) == CANNOT.get(method, [])
    if method not in CANNOT:
        check_aggregate(bench.experiment, bench.net, bench.split.seen)
        return
    with pytest.raises(UserError, match=rf"^{method} does not combine the {CANNOT[method][0]} of its clients"):
        finish(bench.experiment, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("label", "sets", "said"),
    [
        ("local", {}, "local sends nothing to combine"),
        ("centralized", {}, "centralized sends nothing to combine"),
        ("distrans", {"offsets": "server"}, "distrans does not combine the offset and the classes of its clients"),
        ("fedv", {}, "fedv is split learning"),
    ],
)
def test_what_a_robust_aggregate_cannot_protect_is_refused_by_name(
    label: str, sets: dict[str, str], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=said):
        finish(tiny(label, {"aggregate": "median", **sets}, cohort=3), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", [name for name in SPECIAL if name not in CANNOT])
def test_other_methods_run_with_the_median(method: str, tmp_path: Path) -> None:
    run = Run(finish(tiny(method, {"aggregate": "median"}, cohort=3, clients=4), tmp_path / "run"))
    assert [row["loss"] is not None for row in run.rounds] == [True, True]


def settled(**sets: object) -> Experiment:
    return load_experiment(None, sets, {"clients": 12, "cohort": 4})


def test_a_cohort_too_small_for_the_aggregate_is_an_error_before_any_work() -> None:
    assert settled(aggregate="median").train.byzantine == 1
    with pytest.raises(UserError, match=r"krum with train.byzantine=1 needs .* 5 clients .*cohort is 4.*median"):
        settled(aggregate="krum")
    with pytest.raises(UserError, match=r"median with train.byzantine=2 needs .* 5 clients .*or choose mean"):
        settled(aggregate="median", byzantine=2)
    for bad in ({"clip_update": 0}, {"clip_update": "on"}, {"clip_update": True}, {"byzantine": 0}):
        with pytest.raises(UserError, match=r"clip_update|byzantine"):
            settled(**bad)


def test_a_round_with_too_few_reports_leaves_the_server_as_it_was(tmp_path: Path) -> None:
    experiment = tiny("fedavgm", {"aggregate": "median", "dropout": 0.4}, cohort=3, clients=3, rounds=6)
    rows = Run(finish(experiment, tmp_path / "run")).rounds
    kept = [row for row in rows if "not_aggregated" in row]
    assert 0 < len(kept) < len(rows), "the seed gives no such round"
    assert all(0 < len(row["failed"]) < 3 for row in kept)
    assert kept[0]["not_aggregated"].endswith("median with train.byzantine=1 needs 3")
    before = rows[kept[0]["round"] - 2]["views"]["personal"] if kept[0]["round"] > 1 else None
    assert before in (None, kept[0]["views"]["personal"])


def test_a_run_in_which_no_round_can_be_aggregated_stops(tmp_path: Path) -> None:
    bench = Bench(tiny("fedavg", {"aggregate": "median"}, cohort=3, clients=3, rounds=5), tmp_path)
    experiment = bench.experiment.model_copy(
        update={"train": bench.experiment.train.model_copy(update={"byzantine": 2})}  # as if a site were always offline
    )
    with pytest.raises(UserError, match=r"no client has trained in 3 rounds.*3 reports arrived, but median.* needs 5"):
        finish(experiment, tmp_path / "run")


def test_a_servers_own_state_does_not_change_what_servers_are_equal() -> None:
    from fedvit.core.robust import combine_by
    from fedvit.core.server import Server

    server = Server(0, {})
    assert replace(server, combine=combine_by("median", 1)) == server
    assert same_trees(server.combine([(1.0, {"a": torch.ones(1)})]), {"a": torch.ones(1)})
