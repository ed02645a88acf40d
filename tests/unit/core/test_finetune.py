"""run.finetune: any method, and before each client's test some epochs of local training."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fedvit.core.errors import UserError
from fedvit.core.finetune import BEFORE
from fedvit.core.training import descend
from fedvit.engine.cost import cost
from fedvit.engine.estimate import estimate_run
from fedvit.engine.ledger import Ledger
from fedvit.engine.loop import evaluate, federate, for_round
from fedvit.engine.net import make_net, window_of
from fedvit.engine.worker import load_data
from fedvit.runs.folder import Run
from fedvit.runs.resume import start_or_resume
from tests.conftest import Bench, finish, same_trees, tiny
from tests.unit.runs.test_export import scored

LABELS = (
    "fedavg", "fedavg+bias", "fedper", "ditto+bias", "apfl", "fed_rod+lora", "fedbabu", "per_fedavg", "fedala",
    "pfededit", "heterofl", "fedfa", "cd2_pfed", "distrans+bias", "local", "centralized", "scaffold+norm,blocks.1",
)  # fmt: skip


def test_fedavg_ft_is_fedavg_with_finetuning_to_the_bit(tmp_path: Path) -> None:
    flags: dict[str, Any] = {"epochs": 2}
    known = finish(tiny("fedavg_ft", {"method.epochs": 1}, **flags), tmp_path / "known")
    family = finish(tiny("fedavg", {"finetune": 1}, **flags), tmp_path / "family")
    assert Run(known).rounds == Run(family).rounds
    assert (known / "clients.csv").read_bytes() == (family / "clients.csv").read_bytes()
    plain = finish(tiny("fedavg", **flags), tmp_path / "plain")
    views = Run(family).rounds[-1]["views"]
    assert views[BEFORE]["mean"] == Run(plain).rounds[-1]["views"]["personal"]["mean"], "the model before is FedAvg's"
    assert views["personal"]["mean"] != views[BEFORE]["mean"]
    assert Run(family).rounds[-1]["loss"] == Run(plain).rounds[-1]["loss"], "fine-tuning went into a round"


@pytest.mark.parametrize("label", LABELS)
def test_finetuning_composes_with_every_method_and_leaves_no_trace(label: str, tmp_path: Path) -> None:
    bench, plain = (Bench(tiny(label, sets, rounds=1), tmp_path / str(len(sets))) for sets in ({"run.finetune": 2}, {}))
    for each in (bench, plain):
        for done in federate(each.net.plan, each.server, each.transport, each.experiment, None, each.test_samples):
            each.server = done.server
    assert same_trees(bench.server.shared, plain.server.shared), "fine-tuning went into a round"

    everybody = dict.fromkeys(bench.split.clients, bench.server)
    first = evaluate(bench.net.plan, everybody, bench.transport, 1, Ledger())
    assert evaluate(bench.net.plan, everybody, bench.transport, 1, Ledger()) == first, "it does not repeat"
    for name, file in bench.store.versions.items():
        assert file == plain.store.versions[name] or file["file"].endswith("-000001.safetensors")
    base = evaluate(plain.net.plan, everybody, plain.transport, 1, Ledger())
    for name, scores in base.items():
        assert first[name][f"{BEFORE}_accuracy"] == scores["personal_accuracy"]
    assert any(first[name]["personal_loss"] != scores["personal_loss"] for name, scores in base.items())

    # By hand: the method's own model, and then plain training of everything trainable.
    name = bench.split.seen[0]
    down = for_round(plain.net.plan.dispatch(plain.server, name), 1)
    client = plain.worker.client(name, 1, dict(plain.store.get(name)), window_of(down))
    by_hand = descend(client, plain.net.plan.views(client, down)["personal"], epochs=2, tag="finetune")
    other = bench.worker.client(name, 1, dict(bench.store.get(name)), window_of(down))
    assert same_trees(bench.net.plan.views(other, down)["personal"], by_hand)


@pytest.mark.parametrize("label", ["fedavg", "fedper+bias", "apfl"])
def test_the_exported_model_is_the_finetuned_one_that_was_scored(label: str, tmp_path: Path) -> None:
    run = Run(finish(tiny(label, {"run.finetune": 2}), tmp_path / "run"))
    row = run.clients[1]
    model = run.model(row["client"])
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert scored(model, run, row["client"])["loss"] == pytest.approx(row["personal_loss"], abs=1e-5)
    assert row["personal_loss"] != pytest.approx(row[f"{BEFORE}_loss"], abs=1e-3)
    assert same_trees(run.model(row["client"]).state_dict(), kept), "the export does not repeat"


def test_a_bare_key_keeps_its_older_meaning() -> None:
    experiment = tiny("fedbabu", {"finetune": "all", "run.finetune": 1})
    assert (experiment.method["finetune"], experiment.run.finetune) == ("all", 1)
    assert tiny("fedper", {"finetune": 3}).run.finetune == 3


def test_a_resumed_run_finetunes_as_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = finish(tiny("fedper", {"finetune": 1}, rounds=2), tmp_path / "whole")
    part = finish(tiny("fedper", {"finetune": 1}, rounds=1), tmp_path / "part")
    for _ in start_or_resume(tiny("fedper", {"finetune": 1}, rounds=2), part, resume=True):
        pass
    assert Run(part).rounds[-1]["views"] == Run(whole).rounds[-1]["views"]


@pytest.mark.parametrize(
    ("label", "sets", "words"),
    [("fedv", {}, "split learning"), ("fedavg_ft", {}, r"set method\.epochs=2")],
)
def test_finetuning_is_refused_where_it_cannot_be_or_is(label: str, sets: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make_net(tiny(label, {**sets, "finetune": 2}), 10, torch.device("cpu"))


def test_the_cost_of_finetuning_is_counted_and_estimated() -> None:
    assert cost(tiny("fedavg"), 10)["finetune_epochs"] == 0
    assert cost(tiny("fedper", {"finetune": 3}), 10)["finetune_epochs"] == 3
    assert cost(tiny("fedavg_ft", epochs=2), 10)["finetune_epochs"] == 2

    def minutes(label: str, sets: dict[str, Any], **flags: Any) -> float:
        experiment = tiny(label, sets, cohort=12, **flags)
        dataset, split = load_data(experiment)
        net = make_net(experiment, dataset.classes, torch.device("cpu"))
        found = estimate_run(experiment, net, dataset, split, 1)
        return found.minutes - found.once

    plain, once = minutes("fedavg", {"eval_every": 0}), minutes("fedavg", {"eval_every": 0, "finetune": 1})
    round_ = (minutes("fedavg", {"eval_every": 0}, rounds=6) - plain) / 4  # every client trains for one epoch
    assert once - plain == pytest.approx(round_, rel=0.5)
    assert minutes("fedavg_ft", {"eval_every": 0, "method.epochs": 1}) == pytest.approx(once)
    twice = minutes("fedavg", {"eval_every": 1, "finetune": 1})
    assert twice - minutes("fedavg", {"eval_every": 1}) == pytest.approx(2 * (once - plain), rel=0.2)
