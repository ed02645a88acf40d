"""Advice: what it sees in the data, which rules follow, and that its probe never looks at a test image."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fedvit.cli.main import app
from fedvit.core.errors import UserError
from fedvit.core.settings import Experiment, TrainSettings
from fedvit.data.dataset import Dataset
from fedvit.engine.worker import load_data
from fedvit.report.statistics import LOCAL
from fedvit.studies.advise import Look, Question, look, outcome_of, run_probe
from fedvit.studies.advise_answer import answer, save_answer, verdict
from fedvit.studies.advise_data import Profile, feature_skew, label_skew, probe_dataset, profile_data
from fedvit.studies.advise_probe import (
    CAUTION,
    HELD_OUT,
    ROWS,
    SHARE,
    Outcome,
    Probe,
    Probed,
    Rungs,
    believed_lead,
    choose,
    finalists,
    plan_rungs,
    slower,
)
from fedvit.studies.advise_rules import Candidate, candidates_for, evidence_for, rate_for, reasons_for, rounds_for
from tests.conftest import tiny

SGD = TrainSettings(optimizer="sgd", momentum=0.9)
PROFILE = Profile(
    clients=8, classes=10, images=800, smallest=50, median=100, largest=150, classes_per_client=6.0, label_skew=0.4,
    feature_skew=0.1, features_of=400, pretrained=True,
)  # fmt: skip
FLAGS: dict[str, Any] = {"patch_size": 4, "clients": 6, "cohort": 3, "epochs": 1, "rounds": 3, "threads": 1}


# What it sees.


def test_label_skew_is_the_mean_distance_from_the_pooled_mix() -> None:
    assert label_skew(np.array([[5, 5], [10, 10]])) == 0
    assert label_skew(np.array([[10, 0], [0, 10]])) == pytest.approx(0.5)
    assert label_skew(np.array([[10, 0, 0], [0, 10, 0], [0, 0, 10]])) == pytest.approx(2 / 3)
    assert label_skew(np.array([[30, 0], [5, 5]])) == pytest.approx((0.125 + 0.375) / 2)


def test_feature_skew_is_the_share_of_variance_between_clients() -> None:
    labels, clients = [0] * 4, [0, 0, 1, 1]
    apart = np.array([[0.0], [0.0], [1.0], [1.0]])
    assert feature_skew(apart, labels, clients) == pytest.approx(1)
    alike = np.array([[0.0], [1.0], [0.0], [1.0]])
    assert feature_skew(alike, labels, clients) == 0
    # Between: 4 * 1 = 4; within: 4 * 0.25 = 1, over 2 degrees of freedom; by chance 0.5.
    half = np.array([[-1.5], [-0.5], [0.5], [1.5]])
    assert feature_skew(half, labels, clients) == pytest.approx((4 - 0.5) / 5)


def test_feature_skew_ignores_what_differs_between_classes_and_may_be_unknown() -> None:
    labels, clients = [0, 0, 1, 1, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1, 1, 1]
    features = np.array([[0.0], [1.0], [100.0], [101.0], [0.0], [1.0], [100.0], [101.0]])
    assert feature_skew(features, labels, clients) == 0
    assert feature_skew(features, list(range(8)), clients) is None


def test_feature_skew_of_equal_clients_is_not_made_up_by_small_groups() -> None:
    rng = np.random.default_rng(0)
    labels, clients = np.repeat(np.arange(10), 60), np.tile(np.repeat(np.arange(20), 3), 10)
    found = feature_skew(rng.normal(size=(600, 8)), labels.tolist(), clients.tolist())
    assert found is not None
    assert found < 0.03


def test_a_profile_counts_training_images_only() -> None:
    experiment = tiny(partition="pathological", sets={"partition.classes": 3, "data.val": 0.2})
    dataset, partition = load_data(experiment)
    found = profile_data(experiment, dataset, partition)
    sizes = [len(part.train) + len(part.val) for part in partition.clients.values()]
    assert (found.images, found.smallest, found.largest) == (sum(sizes), min(sizes), max(sizes))
    assert found.classes_per_client == 3
    assert found.feature_skew is None  # random weights say nothing
    assert not found.pretrained


# Which rules follow.


def labels_of(profile: Profile, rounds: int = 16) -> list[str]:
    return [candidate.label for candidate in candidates_for(profile, SGD, rounds)]


def test_the_favourite_is_the_documented_one() -> None:
    assert labels_of(PROFILE)[0] == "fedavg_ft+bias"
    assert labels_of(PROFILE, rounds=4)[0] == "fed_rod+bias"  # too few steps to fine-tune at the end
    assert labels_of(replace(PROFILE, label_skew=0.9))[0] == "fedper"  # clients share hardly any class
    assert labels_of(replace(PROFILE, classes=2))[0] == "fed_rod+bias"
    assert labels_of(replace(PROFILE, pretrained=False))[0] == "fedrep"


def test_in_few_steps_the_probe_alone_decides_between_two_candidates_that_were_level() -> None:
    rod, tuned, alone = candidates_for(PROFILE, SGD, 4)
    assert (rod.label, tuned.label, alone.label) == ("fed_rod+bias", "fedavg_ft", LOCAL)
    found = {c.key: probed(c, [50.0 + lead, 60.0 + lead]) for c, lead in ((rod, 0.0), (tuned, 0.5), (alone, 0.5))}
    assert choose([rod, tuned], found, 8) == tuned
    assert choose([rod, replace(tuned, level=False)], found, 8) == rod  # as it would with a head start
    assert choose([rod, alone], found, 8) == rod
    assert not slower(tuned).level  # a smaller rate has no record


@pytest.mark.parametrize("change", [{}, {"classes": 2}, {"pretrained": False}, {"label_skew": 0.9}])
def test_training_alone_is_always_a_candidate_and_reasons_and_evidence_are_given(change: dict[str, Any]) -> None:
    profile = replace(PROFILE, **change)
    found = candidates_for(profile, SGD, 16)
    assert LOCAL in [candidate.label for candidate in found[:3]]
    assert reasons_for(profile, found[0])
    assert any(found[0].label in entry.accuracy for entry in evidence_for(profile))


def test_rates_are_the_measured_ones_where_these_apply() -> None:
    assert rate_for("fedavg_ft", "bias", PROFILE, SGD) == 1e-2
    assert rate_for("fedavg_ft", "bias", replace(PROFILE, classes=2), SGD) == 5e-3
    assert rate_for(LOCAL, "full", PROFILE, SGD) == 1e-3
    assert rate_for("fedavg_ft", "bias", replace(PROFILE, median=5000), SGD) == 5e-3  # many local steps
    assert rate_for("fedavg_ft", "bias", PROFILE, TrainSettings(optimizer="adamw")) is None
    assert rate_for("fedperfix", "full", replace(PROFILE, pretrained=False), SGD) is None


def test_rounds_let_every_client_train_several_times() -> None:
    assert rounds_for(replace(PROFILE, clients=16), 4) == 16
    assert rounds_for(replace(PROFILE, clients=4), 4) == 8
    assert rounds_for(replace(PROFILE, clients=24, pretrained=False), 8) == 24


@pytest.mark.parametrize(("rounds", "clients", "cohort"), [(4, 4, 4), (6, 8, 4), (8, 10, 4), (16, 12, 6), (100, 16, 8)])
def test_a_probe_is_planned_within_a_fifth_of_eight_runs(rounds: int, clients: int, cohort: int) -> None:
    candidates = candidates_for(PROFILE, SGD, 16)
    found = plan_rungs(candidates, rounds, clients, cohort)
    assert found is not None
    assert found.candidates >= 3
    tests = sum(c.method == "fedavg_ft" for c in candidates[: found.candidates]) * clients / cohort
    trained = found.candidates * found.first + 2 * (found.last - found.first) + found.rates * found.last
    assert (trained + tests) * (1 - HELD_OUT) <= CAUTION * SHARE * ROWS * rounds


def test_the_last_candidate_is_left_out_where_the_best_two_would_stop_too_early() -> None:
    fine_tuned, rod, alone = Candidate("fedavg_ft", "bias", 0.01), Candidate("fed_rod", "bias", 0.01), ALONE
    four = [fine_tuned, rod, alone, Candidate("fedavg_ft", "full", 0.005)]
    # 6 rounds of 4 of 8 clients allow 14.4. Four candidates cost 4 + 2 * 2 to score in the first round, and may cost
    # 2 + 2 * 2 up to the second, where the best two would stop. Three reach the fourth: 6 + 2, and then 4 + 2.
    assert plan_rungs(four, 6, 8, 4) == Rungs(3, 2, 4, rates=False)
    assert plan_rungs(four, 30, 8, 4) == Rungs(4, 7, 16, rates=True)  # long runs allow all
    assert plan_rungs([rod, Candidate("fedper", "bias", 0.01), alone, fine_tuned], 6, 8, 4) == Rungs(4, 2, 3, False)


def test_a_single_round_is_too_short_to_probe() -> None:
    assert plan_rungs(candidates_for(PROFILE, SGD, 16), 1, 100, 1) is None


# How a probe decides.

FIRST, SECOND = Candidate("fedavg_ft", "bias", 0.01), Candidate("fed_rod", "bias", 0.01)
ALONE = Candidate(LOCAL, "full", 0.001)


def probed(
    candidate: Candidate, accuracy: list[float], loss: float | None = 1.0, chance: float = 2.3, rounds: int = 4
) -> Probed:
    named = {str(number): value for number, value in enumerate(accuracy)}
    assert candidate.lr is not None
    return Probed(candidate.label, candidate.lr, rounds, named, loss, chance, 100.0, 1.0)


def test_what_is_believed_lies_between_other_data_and_the_probe() -> None:
    base = [50.0, 60.0, 70.0, 80.0]
    a, b = probed(FIRST, [61.0, 69.0, 81.0, 89.0]), probed(SECOND, base)
    # The lead is 10 with a variance of 4/3 over 4 clients; 4 of 8 rounds leave an error of 10 * 0.5 points.
    weight = 25 / (25 + 1 / 3 + 25)
    assert believed_lead(a, b, -2.0, 8) == pytest.approx(-2 + weight * 12)
    assert believed_lead(a, b, -2.0, 4) > believed_lead(a, b, -2.0, 8) > believed_lead(a, b, -2.0, 80)
    assert believed_lead(probed(FIRST, [90.0]), probed(SECOND, [10.0]), -2.0, 8) == -2.0  # one client says nothing


def test_the_favourite_stays_unless_another_is_believed_to_end_above_it() -> None:
    base = [50.0, 60.0, 70.0, 80.0]
    unclear = {FIRST.key: probed(FIRST, base), SECOND.key: probed(SECOND, [90.0, 50.0, 80.0, 65.0])}
    assert choose([FIRST, SECOND], unclear, 8) is FIRST
    clear = {**unclear, SECOND.key: probed(SECOND, [x + 6 + x / 100 for x in base])}
    assert choose([FIRST, SECOND], clear, 8) is SECOND
    assert choose([FIRST, SECOND], clear, 80) is FIRST  # 4 of 80 rounds say little about the end
    alone = {FIRST.key: probed(FIRST, base), ALONE.key: probed(ALONE, [x + 4 + x / 1000 for x in base])}
    assert choose([FIRST, ALONE], alone, 8) is FIRST  # training alone leads early, so it needs more
    alone[ALONE.key] = probed(ALONE, [x + 9 + x / 1000 for x in base])
    assert choose([FIRST, ALONE], alone, 8) is ALONE


def test_a_favourite_that_does_not_learn_loses_its_place() -> None:
    fine = probed(SECOND, [40.0, 41.0])
    for loss in (5.0, float("nan"), None):
        found = {FIRST.key: probed(FIRST, [50.0, 51.0], loss), SECOND.key: fine}
        assert choose([FIRST, SECOND], found, 4) is SECOND
        assert finalists([FIRST, SECOND], found) == [SECOND]
    begun = {FIRST.key: probed(FIRST, [50.0, 51.0], 5.0, rounds=1), SECOND.key: fine}
    assert finalists([FIRST, SECOND], begun) == [FIRST, SECOND]  # training has just begun
    both = probed(
        SECOND, [40.0, 41.0], loss=2 * 2.3, chance=2 * 2.3
    )  # it adds two losses, each near that of guessing among ten
    assert choose([SECOND, FIRST], {FIRST.key: probed(FIRST, [1.0, 2.0]), SECOND.key: both}, 4) is SECOND


def test_the_best_of_the_others_goes_on_with_the_favourite() -> None:
    found = {
        FIRST.key: probed(FIRST, [10.0, 20.0]),
        SECOND.key: probed(SECOND, [30.0, 40.0]),
        ALONE.key: probed(ALONE, [20.0, 30.0]),
    }
    assert finalists([FIRST, ALONE, SECOND], found) == [FIRST, SECOND]
    found[ALONE.key] = probed(ALONE, [60.0, 70.0])  # training alone never takes the place of another
    assert finalists([FIRST, ALONE, SECOND], found) == [FIRST, SECOND]


def test_the_verdict_says_when_training_alone_is_as_good(tmp_path: Path) -> None:
    seen = look(Question(None, {}, FLAGS), tmp_path / "a", probe=False)

    def says(mine: list[float], alone: list[float]) -> str:
        found = {FIRST.key: probed(FIRST, mine), ALONE.key: probed(ALONE, alone)}
        return verdict(seen, Outcome(FIRST, found, found))

    base = [50.0, 60.0, 70.0, 81.0]
    assert "cannot tell it from training alone" in says(base, [51.0, 60.5, 69.0, 80.0])
    assert "federating helps" in says([x + 10 + x / 50 for x in base], base)
    assert "training alone is better so far" in says(base, [x + 10 + x / 50 for x in base])
    chosen = verdict(seen, Outcome(ALONE, {}, {}))
    assert "against federating" in chosen


# That the probe is honest.


def sites(labels_of_test: int) -> Dataset:
    """Four owners with their own test images, whose labels are shifted by this number."""
    rng = np.random.default_rng(0)
    labels = np.tile(np.arange(4), 60)
    owners, test = np.repeat(np.arange(4), 60), np.tile(np.arange(60) >= 40, 4)
    pixels = rng.integers(0, 60, (240, 8, 8, 1)) + 40 * labels[:, None, None, None]
    shown = np.where(test, (labels + labels_of_test) % 4, labels)
    return Dataset(
        "python", pixels.astype(np.uint8), shown, tuple("abcd"), test, owners, ("north", "east", "south", "west")
    )  # fmt: skip


def advice_on(dataset: Dataset, folder: Path) -> dict[str, Any]:
    flags = {**FLAGS, "clients": 4, "cohort": 4, "partition": "site", "data": "python"}
    seen = look(Question(None, {}, flags), folder, dataset=dataset)
    for _ in run_probe(seen):
        pass
    outcome = outcome_of(seen)
    said = answer(seen, outcome)
    save_answer(seen, outcome, said)
    return said


def without_times(said: dict[str, Any]) -> dict[str, Any]:
    told = {key: value for key, value in said.items() if key not in ("machine", "commands")}
    told["probe"] = {**said["probe"], "seconds": None}
    told["recommendation"] = {**said["recommendation"], "minutes": None}
    return json.loads(json.dumps(told))  # type: ignore[no-any-return]


def test_other_test_labels_change_nothing_in_the_advice(tmp_path: Path) -> None:
    said, again = (advice_on(sites(shift), tmp_path / str(shift)) for shift in (0, 1))
    assert said["probe"]["rows"]
    assert without_times(said) == without_times(again)


def test_a_probe_holds_training_images_only() -> None:
    experiment = tiny(sets={"data.val": 0.1})
    dataset, partition = load_data(experiment)
    numbered = replace(dataset, images=np.arange(len(dataset)).astype(">u4").view(np.uint8).reshape(-1, 2, 2, 1))
    data = probe_dataset(numbered, partition, 0)
    used = set(np.ascontiguousarray(data.images).reshape(-1, 4).view(">u4").ravel().tolist())
    tested = {int(i) for part in partition.clients.values() for i in part.test}
    assert not used & tested
    assert len(used) == len(dataset) - len(tested)
    assert data.official_test is not None
    assert data.official_test.mean() == pytest.approx(HELD_OUT, abs=0.02)


def test_an_interrupted_probe_continues_and_ends_the_same(tmp_path: Path) -> None:
    def seen(folder: str) -> Look:
        return look(Question(None, {}, FLAGS), tmp_path / folder)

    for _ in run_probe(whole := seen("whole")):
        pass
    steps = run_probe(seen("parts"))
    for _ in range(4):
        next(steps)
    steps.close()
    left = list(run_probe(parts := seen("parts")))
    assert len(left) == whole.probe_rounds - 4
    a, b = (answer(one, outcome_of(one)) for one in (whole, parts))
    assert without_times(a) == without_times(b)
    assert not list(run_probe(parts))


def test_a_folder_with_advice_on_other_settings_is_refused(tmp_path: Path) -> None:
    look(Question(None, {}, FLAGS), tmp_path / "a", probe=False)
    with pytest.raises(UserError, match="holds advice on other settings: give another --out"):
        look(Question(None, {}, {**FLAGS, "clients": 8}), tmp_path / "a", probe=False)
    with pytest.raises(UserError, match="does not hold advice"):
        look(Question(None, {}, FLAGS), tmp_path, probe=False)


# The command.

QUICK = ["--patch-size", 4, "--clients", 6, "--cohort", 3, "--epochs", 1, "--rounds", 3, "--samples", 600]


def call(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_advice_on_digits_from_end_to_end(tmp_path: Path) -> None:
    status, shown, message = call("advise", *QUICK, "--out", tmp_path / "a")
    assert status == 0, message
    for words in ("Recommended:", "Why:", "probe:", "what we measured on other data", "fedvit run --method", "MB"):
        assert words in shown
    status, text, _ = call("advise", *QUICK, "--out", tmp_path / "a", "--json")
    assert status == 0
    said = json.loads(text)
    assert said == json.loads((tmp_path / "a" / "advice.json").read_text())
    assert said["data"]["clients"] == 6
    assert said["probe"]["share_of_eight_runs"] <= 0.2
    assert said["recommendation"]["rounds"] == 3
    command = said["commands"]["compare"].split()
    assert {Path(word).name for word in command if word.endswith(".toml")} >= {"local.toml"}
    assert all(Path(word).is_file() for word in command if word.endswith(".toml"))


def test_the_commands_that_it_prints_run(tmp_path: Path) -> None:
    status, text, _ = call("advise", *QUICK, "--no-probe", "--out", tmp_path / "a", "--json", "--set", "data.test=0.3")
    assert status == 0
    said = json.loads(text)
    assert said["probe"] is None
    assert said["recommendation"]["minutes"] > 0
    assert said["recommendation"]["how"] in ("table", "measured")
    assert any("no probe" in doubt for doubt in said["doubts"])
    for number, kind in enumerate(("run", "compare")):
        words = said["commands"][kind].split()
        extra = ["--quiet", "--rounds", 1, "--out", tmp_path / str(number)]
        status, _, message = call(*words[1:], *extra)
        assert status == 0, message


def test_a_limit_in_minutes_means_fewer_rounds(tmp_path: Path) -> None:
    limit = ["--max-minutes", 0.0001, "--json"]
    status, text, _ = call("advise", *QUICK, "--out", tmp_path / "a", *limit)
    assert status == 0
    said = json.loads(text)
    assert said["recommendation"]["rounds"] == 1
    assert any("--max-minutes" in doubt for doubt in said["doubts"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "no_such_data"], "no_such_data"),
        (["--clients", 1], "advice is about two clients or more, found 1"),
        (["--set", "train.lr=0.1"], "leave out --set train.lr"),
        (["--set", "method.mu=0.1"], "leave out --set method.mu"),
        (["--set", "run.finetune=1"], "leave out --set run.finetune"),
        (["--link-mbit", 0], "--link-mbit expects a number above 0"),
        (["--max-minutes", -1], "--max-minutes expects a number above 0"),
        (["--method", "fedper"], "No such option"),
    ],
)
def test_mistakes_end_with_status_2_and_say_what_to_do(tmp_path: Path, arguments: list[Any], words: str) -> None:
    status, _, message = call("advise", "--no-probe", "--out", tmp_path / "a", *arguments)
    assert status == 2
    assert words in " ".join(message.split())


def test_methods_begins_with_six_that_most_people_want() -> None:
    status, shown, _ = call("methods")
    assert status == 0
    first = shown.split("what it does")[0]
    for name in ("local", "fedavg", "fedavg_ft", "fedper", "fedrep", "fed_rod"):
        assert name in first
    assert "fedvit advise" in first


def test_candidates_that_send_too_much_for_the_link_are_left_out(tmp_path: Path) -> None:
    seen = look(Question(None, {}, FLAGS, link_mbit=0.01), tmp_path / "a")
    assert [candidate.label for candidate in seen.candidates] == ["fedrep", LOCAL]
    assert seen.too_large == ["fed_rod"]


def test_a_candidate_that_diverges_is_noted_and_cannot_be_chosen(tmp_path: Path) -> None:
    dataset, partition = load_data(tiny())
    data = probe_dataset(dataset, partition, 0)

    def experiment_of(candidate: Candidate) -> Experiment:
        return tiny(candidate.label, {"optimizer": "sgd"}, lr=candidate.lr)

    probe = Probe(tmp_path, data, experiment_of)
    wild, calm = Candidate("fedavg", "full", 1e9), Candidate(LOCAL, "full", 0.01)
    for candidate in (wild, calm):
        list(probe.run(candidate, 2, 1))
    found = {c.key: score for c in (wild, calm) if (score := probe.score(c, 2)) is not None}
    assert len(found) == 2
    assert choose([wild, calm], found, 4) is calm
