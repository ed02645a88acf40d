"""Robust aggregates against slow, obvious versions in NumPy, and the limits in which they are a plain mean."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from fedvit.core import robust, tree
from fedvit.core.robust import Spool, TooFewReportsError, closest, combine_by, fewest_reports
from fedvit.core.tree import Tree
from fedvit.runs.execute import run_rounds
from tests.conftest import Bench, finish, same_trees, tiny

Rows = list[np.ndarray]


def reports(count: int, seed: int = 0) -> list[Tree]:
    """Trees with a matrix, a vector and a single number, around a common center."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"matrix": (5, 7), "vector": (11,), "number": ()}
    center = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return [{n: t + 0.1 * torch.randn(t.shape, generator=generator) for n, t in center.items()} for _ in range(count)]


def combined(aggregate: robust.Aggregate, trees: list[Tree], byzantine: int = 1) -> Tree:
    return combine_by(aggregate, byzantine)((7.0 * i + 1, one) for i, one in enumerate(trees))


def slow_median(rows: Rows) -> np.ndarray:
    return np.median(np.stack(rows).astype(np.float64), axis=0)


def slow_trimmed_mean(rows: Rows, trim: int) -> np.ndarray:
    flat = np.stack([row.reshape(-1) for row in rows]).astype(np.float64)
    found = np.array([np.mean(sorted(flat[:, i])[trim : len(rows) - trim]) for i in range(flat.shape[1])])
    return found.reshape(rows[0].shape)


def slow_krum(trees: list[Tree], byzantine: int) -> list[int]:
    """The numbers of the trees, best score first."""
    whole = [np.concatenate([t.double().numpy().reshape(-1) for t in one.values()]) for one in trees]
    scores = []
    for i, own in enumerate(whole):
        distances = sorted(np.sum((own - other) ** 2) for j, other in enumerate(whole) if j != i)
        scores.append(sum(distances[: len(trees) - byzantine - 2]))
    return sorted(range(len(trees)), key=lambda i: scores[i])


@pytest.mark.parametrize("piece", [3, 2**20])
@pytest.mark.parametrize("count", [5, 6, 9])
def test_the_median_and_the_trimmed_mean_are_numpys(count: int, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(robust, "PIECE", piece)
    trees = reports(count)
    slow: dict[robust.Aggregate, Callable[[Rows], np.ndarray]] = {
        "median": slow_median,
        "trimmed_mean": lambda rows: slow_trimmed_mean(rows, 2),
    }
    for aggregate, expected in slow.items():
        found = combined(aggregate, trees, 2)
        assert found.keys() == trees[0].keys()
        for name, tensor in found.items():
            assert tensor.dtype == torch.float32
            np.testing.assert_allclose(tensor.numpy(), expected([t[name].numpy() for t in trees]), rtol=1e-6)


@pytest.mark.parametrize(("count", "byzantine"), [(5, 1), (8, 1), (9, 3)])
def test_krum_chooses_the_report_that_numpy_chooses(count: int, byzantine: int) -> None:
    for seed in range(5):
        trees = reports(count, seed)
        order = slow_krum(trees, byzantine)
        assert same_trees(combined("krum", trees, byzantine), trees[order[0]])
        kept = sorted(order[: count - byzantine - 2])
        assert closest(trees, byzantine, len(kept)) == kept
        expected = tree.mean((1.0, trees[i]) for i in kept)
        assert same_trees(combined("multi_krum", trees, byzantine), expected)


def test_a_trim_of_nothing_is_the_mean_with_equal_weights() -> None:
    trees = reports(6)
    assert same_trees(robust.trimmed_mean(trees, 0), tree.mean((1.0, one) for one in trees))


@pytest.mark.parametrize("aggregate", ["median", "trimmed_mean", "krum", "multi_krum"])
def test_equal_reports_give_that_report_bit_for_bit(aggregate: robust.Aggregate) -> None:
    (one,) = reports(1)
    assert same_trees(combined(aggregate, [dict(one) for _ in range(7)], 2), one)


@pytest.mark.parametrize("aggregate", ["median", "trimmed_mean", "krum", "multi_krum"])
def test_bad_reports_do_not_move_the_result_beyond_the_good_ones(aggregate: robust.Aggregate) -> None:
    good = reports(5)
    bad = [{n: torch.full_like(t, value) for n, t in good[0].items()} for value in (1e6, -1e6)]
    found = combined(aggregate, [bad[0], *good, bad[1]], 2)
    for name, tensor in found.items():
        stack = torch.stack([one[name] for one in good])
        assert bool((tensor >= stack.amin(0)).all() & (tensor <= stack.amax(0)).all())


@pytest.mark.parametrize("aggregate", ["median", "trimmed_mean", "krum", "multi_krum"])
def test_weights_do_not_count(aggregate: robust.Aggregate) -> None:
    trees = reports(5)
    claims = combine_by(aggregate, 1)((1e9 if i == 2 else 1.0, one) for i, one in enumerate(trees))
    assert same_trees(claims, combined(aggregate, trees))


def test_too_few_reports_are_an_error_that_says_how_many_it_takes() -> None:
    assert [fewest_reports(a, 2) for a in ("mean", "median", "trimmed_mean", "krum", "multi_krum")] == [1, 5, 5, 7, 7]
    with pytest.raises(TooFewReportsError, match=r"6 reports arrived, but krum with train.byzantine=2 needs 7"):
        combined("krum", reports(6), 2)


def test_a_spool_keeps_in_files_what_memory_may_not_hold() -> None:
    trees = reports(4)
    spool = Spool(in_memory=tree.nbytes(trees[0]))
    kept = [spool.keep(one) for one in trees]
    assert kept[0] is trees[0]
    assert not any(a is b for a, b in zip(kept[1:], trees[1:], strict=True))
    for before, after in zip(trees, kept, strict=True):
        assert list(before) == list(after)
        assert same_trees(before, after)


@pytest.mark.parametrize("aggregate", ["median", "multi_krum"])
def test_reports_in_files_give_the_bits_of_reports_in_memory(
    aggregate: robust.Aggregate, monkeypatch: pytest.MonkeyPatch
) -> None:
    trees = reports(5)
    whole = combined(aggregate, trees)
    monkeypatch.setattr(robust.Spool.__init__, "__defaults__", (0,))
    assert same_trees(combined(aggregate, trees), whole)


def test_equal_clients_make_every_aggregate_the_mean(tmp_path: Path) -> None:
    """A run in which all clients report the same ends with the mean's bits, whatever the aggregate."""
    settings = {"clients": 5, "cohort": 5, "rounds": 1}
    bench = Bench(tiny("fedavg", **settings), tmp_path)
    up = bench.net.bare_report(bench.net.federated.dispatch(bench.server, "0"), 1)
    ends = [combine_by(a, 1)([(1.0, up.trees["shared"])] * 5) for a in ("mean", "median", "trimmed_mean", "krum")]
    assert all(same_trees(a, b) for a, b in pairwise(ends))


@pytest.mark.parametrize("aggregate", ["median", "trimmed_mean", "krum", "multi_krum"])
def test_a_robust_run_ends_with_the_same_bits_on_two_workers_and_after_a_resume(aggregate: str, tmp_path: Path) -> None:
    experiment = tiny("fedavg", {"aggregate": aggregate, "clip_update": "auto"}, cohort=5, clients=6, rounds=3)
    alone = finish(experiment, tmp_path / "alone")
    pooled = finish(experiment, tmp_path / "pooled", workers=2)
    for number, _ in enumerate(run_rounds(experiment, tmp_path / "stopped"), start=1):
        if number == 2:
            break
    resumed = finish(experiment, tmp_path / "stopped", resume=True)
    for name in ("rounds.jsonl", "clients.csv", "checkpoint/server-000003.safetensors"):
        assert (alone / name).read_bytes() == (pooled / name).read_bytes() == (resumed / name).read_bytes()
