"""What must hold for every method under every tune."""

from pathlib import Path

import pytest
import torch

from fedvit.core import tree
from fedvit.core.client import Memory
from fedvit.core.errors import UserError
from fedvit.core.plan import Plan
from fedvit.engine.cost import cost
from fedvit.engine.ledger import Ledger
from fedvit.engine.loop import evaluate, federate
from fedvit.engine.net import make_net
from fedvit.methods import METHODS
from fedvit.methods.tunes import TUNES
from fedvit.models.groups import state
from fedvit.runs.execute import run_rounds
from fedvit.runs.folder import Run
from tests.conftest import Bench, Recorder, finish, same_trees, tiny

PRIVATE = ("personal", "own")  # keys of a memory whose values must never leave
MORE_UP = {"scaffold", "fed_lamb", "pfededit", "fedfa"}  # send more than the shared weights
IMPOSSIBLE = {"fedbabu+head"}  # the method freezes the head, the tune everything else
PARTLY_SHARED = {
    "cd2_pfed"
}  # its own model holds shared channels too; tests/unit/methods/test_methods_rest.py minds the private ones
VARYING = {"cd2_pfed", "fedfed"}  # payloads that change over the rounds: `cost` is the first round's
GROWING = {"fedfed"}  # memory that grows with everybody's images, whose number `cost` is not told
LATER = {"fedala"}  # remembers more from a client's second training on
SETTINGS = {"cd2_pfed": {"ramp": 2}, "fedfed": {"distill_rounds": 1}}  # so that two rounds see all that the method does
FEDERATED = [name for name, plan in METHODS.items() if isinstance(plan(), Plan)]  # split plans have tests of their own
PAIRS = [f"{method}+{tune}" for method in FEDERATED for tune in [*TUNES, "norm,blocks.1"]]


@pytest.mark.parametrize("label", [pair for pair in PAIRS if pair not in IMPOSSIBLE])
def test_a_plan_keeps_its_promises(label: str, tmp_path: Path) -> None:
    method = label.partition("+")[0]
    bench = Bench(tiny(label, SETTINGS.get(method)), tmp_path)
    net, recorder = bench.net, Recorder(bench.transport)
    whole = bench.worker.evaluate_server if net.one_global_model else None
    done = list(federate(net.plan, bench.server, recorder, bench.experiment, whole, bench.test_samples))
    last = done[-1]

    frozen_now = tree.pick(state(net.module), net.roles.frozen)
    assert same_trees(frozen_now, net.frozen), "a frozen weight moved"

    sampled = {name for d in done for name in d.row["cohort"]}
    assert set(bench.store.versions) <= sampled, "a client that was not sampled has a memory"
    personal = [value for name in sampled for value in personal_tensors(bench.store.get(name), method)]
    own_copy = "own" in net.plan.remembers(net.module, net.initial) and method not in PARTLY_SHARED
    assert bool(personal) == bool(net.roles.personal or own_copy)
    for _, _, payload in recorder.crossed:
        for group in payload.trees.values():
            assert not set(group) & set(net.roles.personal), "a personal name crossed"
            for tensor in group.values():
                assert not any(same_values(tensor, own) for own in personal), "a personal value crossed"

    once = [name for name in done[0].row["cohort"] if name not in done[1].row["cohort"] and not net.plan.pooled]
    for name in once:
        if name in bench.store.versions:
            assert bench.store.versions[name]["file"].endswith("-000001.safetensors"), (
                "a client moved without being asked"
            )

    declared = cost(bench.experiment, 10)
    for name in () if method in GROWING else sampled:
        kept = memory_nbytes(bench.store.get(name))
        assert kept == declared["memory_nbytes"] or (method in LATER and kept < declared["memory_nbytes"])
    trained = [payload for task, _, payload in recorder.crossed if task == "train"]
    down, up = trained[0::2], trained[1::2]
    if net.plan.pooled:
        assert (last.ledger.down, last.ledger.up) == ([], [])
    else:
        assert [p.nbytes for p in down] == [n for d in done for n in d.ledger.down]
        assert [p.nbytes for p in up] == [n for d in done for n in d.ledger.up]
        if "rate" in down[0].scalars:  # clients differ in width: each sends what is declared for its rate
            for sent, answer in zip(down, up, strict=True):
                of_this_width = cost(tiny(label, {"method.rates": sent.scalars["rate"]}), 10)
                assert of_this_width["nbytes"] == {"down": sent.nbytes, "up": answer.nbytes}
                assert tree.nbytes(answer.trees["shared"]) == sent.nbytes
        else:
            row = done[0].row if method in VARYING else last.row
            assert declared["nbytes"] == {"down": row["nbytes_down"], "up": row["nbytes_up"]}
            if method not in VARYING:
                plain = tree.nbytes(net.shared)
                assert tree.nbytes(up[-1].trees["shared"]) == plain
                assert row["nbytes_up"] > plain if method in MORE_UP else row["nbytes_up"] == plain

    everybody = dict.fromkeys(bench.split.clients, last.server)
    before = {name: bench.store.get(name) for name in sampled}
    again = evaluate(net.plan, everybody, bench.transport, last.row["round"], Ledger())
    assert again == last.scores, "evaluation does not repeat"
    assert set(again) == set(bench.split.clients), "a client was not evaluated"
    for name, memory in before.items():
        after = bench.store.get(name)
        assert after.keys() == memory.keys()
        for key, value in after.items():
            old = memory[key]
            same = same_trees(value, old) if isinstance(value, dict) and isinstance(old, dict) else value == old
            assert same, "evaluation changed a memory"
    assert same_trees(tree.pick(state(net.module), net.roles.frozen), net.frozen), "evaluation moved a frozen weight"


@pytest.mark.parametrize(
    ("method", "options", "epochs", "expected"),
    [
        ("fedavg", {}, 2, 1),
        ("per_fedavg", {}, 2, 1),  # two gradients a step, each of half its images
        ("apfl", {}, 2, 2),
        ("ditto", {}, 2, 2),
        ("ditto", {"epochs": 1}, 2, 1.5),
        ("moon", {}, 2, 5 / 3),  # 3 for training, and a forward pass of two more models
        ("fedrep", {}, 2, 1 / 6 + 1),  # one epoch of the head on top, whose body only goes forward
        ("fedala", {"share": 60.0}, 2, 1.1),
        ("cd2_pfed", {}, 2, 3),
        ("cd2_pfed", {"share": 0.0}, 2, 1),
        ("fedfed", {}, 2, 3),
    ],
)
def test_training_passes_are_counted_per_image_and_epoch(
    method: str, options: dict[str, float], epochs: int, expected: float
) -> None:
    assert METHODS[method](**options).passes(epochs) == pytest.approx(expected)


RESNET = {"model": "resnet18", "image_size": 32, "patch_size": None}


@pytest.mark.parametrize(
    ("sets", "flags", "expected"),
    [
        ({}, {}, 1 + 27),  # the own model, and every layer
        ({"flexible": False}, {}, 1 + 27),
        ({"k": 0}, {}, 0),
        ({"metric": "random"}, {}, 0),
        ({"layers": "resnet54"}, RESNET, 1 + 43),  # 11 of the 54 have no weights
        ({"layers": "norms"}, RESNET, 1 + 20),
    ],
)
def test_probe_passes_are_those_of_the_own_model_and_of_edits_that_change_something(
    sets: dict[str, object], flags: dict[str, object], expected: int
) -> None:
    net = make_net(tiny("pfededit", sets, **flags), 10, torch.device("cpu"))
    assert net.plan.costs(net.bare_client())["probe_passes"] == expected


def personal_tensors(memory: Memory, method: str) -> list[torch.Tensor]:
    trees = [memory[key] for key in PRIVATE if key in memory and (key == "personal" or method not in PARTLY_SHARED)]
    return [tensor for own in trees if isinstance(own, dict) for tensor in own.values()]


def memory_nbytes(memory: Memory) -> int:
    return sum(tree.nbytes(value) for value in memory.values() if isinstance(value, dict))


def same_values(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool((a != a.flatten()[0]).any()) and torch.equal(a, b)


@pytest.mark.parametrize("label", sorted(IMPOSSIBLE))
def test_a_pair_that_trains_nothing_is_refused(label: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="trains nothing"):
        Bench(tiny(label), tmp_path)


@pytest.mark.parametrize(
    "label", [*METHODS, "fedv+bias", "fedper+bias", "fedperfix+bias", "fedbn+bias", "prompts+prompt", "fedrep+lora"]
)
def test_interrupted_and_resumed_equals_uninterrupted(label: str, tmp_path: Path) -> None:
    experiment = tiny(label, SETTINGS.get(label), rounds=3, cohort=3)
    whole = finish(experiment, tmp_path / "whole")
    steps = run_rounds(experiment, tmp_path / "parts")
    next(steps)
    next(steps)
    steps.close()
    parts = finish(experiment, tmp_path / "parts", resume=True)
    for name in ("rounds.jsonl", "clients.csv", "confusion.json", "split.json", "run.toml"):
        assert (whole / name).read_bytes() == (parts / name).read_bytes(), name
    assert weights(whole) == weights(parts)
    assert comparable(Run(whole)) == comparable(Run(parts))


def weights(folder: Path) -> dict[str, bytes]:
    newest = max((folder / "checkpoint").glob("server-*.safetensors"))
    clients = sorted((folder / "checkpoint" / "clients").glob("*.safetensors"))
    latest = {path.name.rpartition("-")[0]: path for path in clients}  # sorted, so the newest version wins
    return {path.name: path.read_bytes() for path in [newest, *latest.values()]}


def comparable(run: Run) -> dict[str, object]:
    return {key: value for key, value in run.summary.items() if key not in ("seconds", "peak_rss_mb")}
