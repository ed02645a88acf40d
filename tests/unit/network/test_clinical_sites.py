"""Clinical scores over sites: the numbers of one process, and nothing about a single image leaves."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedvit.config.load import load_experiment
from fedvit.core.clinical_message import FEW, PATIENTS, PREFIX, from_scalars
from fedvit.core.payload import Payload
from fedvit.network.flower.template import for_sites, write_app
from fedvit.network.handshake import common
from fedvit.network.policy import Policy
from fedvit.report.load import read_record
from fedvit.report.paired import paired_tests, why_untested
from fedvit.runs.clinical import CLINICAL, PREDICTIONS, read_predictions
from fedvit.runs.folder import Run
from tests.conftest import Bench, almost, finish, tiny
from tests.grid import Federated, Wires
from tests.unit.network.test_channel import client_of, task_of
from tests.unit.network.test_sites import write_manifests

WANTED = {"run.clinical": True, "run.predictions": True, "data.val": 0.2, "partition.name": "iid"}
THREE = {"clients": 3, "samples": 300}


def numbers_that_crossed(federated: Federated) -> dict[str, list[float]]:
    """Every number in every message, by name."""
    found: dict[str, list[float]] = {}
    for content in federated.wires.contents():
        for record in content.metric_records.values():
            for key, value in record.items():
                found.setdefault(key, []).append(float(value))  # type: ignore[arg-type]
    return found


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Federated]:
    """The same run in one process and over sites."""
    folder = tmp_path_factory.mktemp("clinical")
    experiment = tiny("fedper", WANTED, **THREE)
    alone = finish(experiment, folder / "alone")
    federated = Federated(experiment, folder)
    federated.finish()
    return alone, federated


def test_sites_send_the_clinical_scores_of_one_process(both: tuple[Path, Federated]) -> None:
    alone, federated = both
    mine, theirs = (json.loads((place / CLINICAL).read_text()) for place in (alone, federated.out))
    assert theirs["clients"] == mine["clients"]
    assert (mine["pooled_from"], theirs["pooled_from"]) == ("images", "counts")
    for one, other in zip(mine["pooled"]["classes"], theirs["pooled"]["classes"], strict=True):
        same = ("tp", "fp", "tn", "fn", "sensitivity", "ppv", "threshold", "auroc_within_clients")
        assert {key: one[key] for key in same} == {key: other[key] for key in same}
        assert other["brier"] == pytest.approx(one["brier"])
        assert other["auroc"] is None
        assert other["intervals"] == {}
    assert Run(federated.out).summary["clinical"]["pooled_from"] == "counts"


def test_predictions_stay_at_the_site_that_has_the_images(both: tuple[Path, Federated]) -> None:
    alone, federated = both
    assert not (federated.out / PREDICTIONS).exists()
    whole = read_predictions(alone)
    for name in federated.federation.sites:
        (place,) = federated.state_of(name).glob("runs/*")
        mine = read_predictions(place)
        assert list(mine) == [name]
        for label, values in whole[name].probability.items():
            assert mine[name].probability[label].tolist() == values.tolist()


def test_a_site_can_test_two_runs_on_its_own_images(both: tuple[Path, Federated], tmp_path: Path) -> None:
    """The folder that a site keeps of a run is one for `fedvit paired-tests`; it finds what one process finds."""
    alone, federated = both
    other = Federated(tiny("local", WANTED, **THREE), tmp_path)
    other.finish()
    places = [next(one.state_of("1").glob("runs/*")) for one in (federated, other)]
    records = [read_record(place) for place in places]
    assert why_untested(*records) == ""
    mine = [test for test in paired_tests(*records) if test.client == "1"]
    here = read_record(finish(tiny("local", WANTED, **THREE), tmp_path / "alone"))
    assert mine == [test for test in paired_tests(read_record(alone), here) if test.client == "1"]
    assert "every site can test its own images" in why_untested(read_record(federated.out), read_record(other.out))


def test_nothing_about_a_single_image_crosses(both: tuple[Path, Federated]) -> None:
    """Neither a probability as a number, nor tensors in a reply with scores, nor the text of a line."""
    alone, federated = both
    single = {
        value
        for own in read_predictions(alone).values()
        for values in own.probability.values()
        for value in values.tolist()
    }
    assert len(single) > 100
    crossed = numbers_that_crossed(federated)
    assert any(key.startswith(PREFIX) for key in crossed)
    assert not single & {value for values in crossed.values() for value in values}
    bins = [key for key in crossed if "_bin_images" in key]
    assert any(value < FEW for key in bins for value in crossed[key]), "such bins are the ones that could tell"
    for message in federated.wires.crossed:
        if message.metadata.message_type == "evaluate" and message.metadata.reply_to_message_id:
            assert not message.content.array_records
    words = " ".join(str(dict(record)) for c in federated.wires.contents() for record in c.config_records.values())
    assert "probability" not in words


@pytest.mark.parametrize("rule", ["class_counts = false", "clinical = false", 'scores = "rounded"'])
def test_a_policy_can_keep_clinical_scores_at_the_site(rule: str, tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(f"{rule}\nleast_images = 1\n")
    federated = Federated(tiny("fedper", WANTED, **THREE), tmp_path, policy=str(tmp_path / "policy.toml"))
    federated.finish()
    crossed = numbers_that_crossed(federated)
    assert "personal_accuracy" in crossed
    assert not [key for key in crossed if key.startswith(PREFIX)]
    assert not (federated.out / CLINICAL).exists()
    assert Run(federated.out).summary["clinical"] is None
    assert list(tmp_path.glob(f"sites/0/runs/*/{PREDICTIONS}")), "the site may still look at its own images"


@pytest.mark.parametrize("change", [{f"{PREFIX}tn_1": 5.0}, {PATIENTS: 10_000.0}])
def test_scores_of_more_images_than_a_site_has_are_refused(change: dict[str, float], tmp_path: Path) -> None:
    federated = Federated(tiny("fedper", WANTED, **THREE), tmp_path)

    def lie(site: str, reply: Any) -> Any:
        record = reply.content.metric_records.get("numbers", {})
        if site == "1" and f"{PREFIX}tn_1" in record:
            for key, value in change.items():
                if key == PATIENTS:
                    record[key] = value
                    continue
                for number in range(10):  # every class has one more negative image
                    name = key.replace("_1", f"_{number}")
                    record[name] += value
                    record[f"{PREFIX}bin_images0_{number}"] = record.get(f"{PREFIX}bin_images0_{number}", 0.0) + value
        return reply

    federated.wires.meddle = lie
    federated.finish()
    assert set(json.loads((federated.out / CLINICAL).read_text())["clients"]) == {"0", "2"}
    assert "images, but the site has" in Run(federated.out).rounds[-1]["failures_evaluation"]["1"]


def test_intervals_by_patient_are_the_same_at_a_site_with_its_own_manifest(sites_folder: Path, tmp_path: Path) -> None:
    flags = {"method": "fedper", "rounds": 1, "epochs": 1, "image_size": 16, "patch_size": 4}
    wanted = {"run.clinical": True, "data.val": 0.2}
    write_manifests(sites_folder)
    sets = {"data.cache": str(tmp_path / "cache"), **wanted}
    alone = finish(
        load_experiment(None, sets, {**flags, "data": str(sites_folder / "*" / "manifest.csv")}), tmp_path / "alone"
    )
    experiment, federation = for_sites(load_experiment(None, wanted, flags), ["south", "north"], ["ill", "well"])
    federated = Federated.__new__(Federated)
    federated.federation, federated.folder, federated.out = federation, tmp_path, tmp_path / "out"
    write_app(tmp_path / "app", experiment, federation, "unused")
    nodes = {
        100 + n: {
            "site": name,
            "state": str(tmp_path / "sites" / name),
            "data": str(sites_folder / name / "manifest.csv"),
        }
        for n, name in enumerate(federation.sites)
    }
    federated.wires = Wires(tmp_path / "app", nodes)
    federated.finish(min_sites=2)
    mine, theirs = (json.loads((place / CLINICAL).read_text()) for place in (alone, federated.out))
    assert mine["intervals_by"] == theirs["intervals_by"] == "patient"
    assert all(site["patients"] < site["images"] for site in mine["clients"].values())
    assert theirs["clients"] == almost(mine["clients"])


def test_rounds_must_agree_where_clinical_scores_are_measured_after_the_last(tmp_path: Path) -> None:
    """Not predictions.csv, which each machine writes or not."""
    plain, clinical, silent = (
        common(one, Bench(one, tmp_path).net, ("a",))["settings"]
        for one in (
            tiny("fedper", **THREE),
            tiny("fedper", WANTED, **THREE),
            tiny("fedper", {**WANTED, "run.predictions": False}, **THREE),
        )
    )
    assert "train.rounds" not in plain
    assert clinical["train.rounds"] == 2
    assert clinical == silent


def test_a_split_client_sends_scores_and_keeps_its_predictions(tmp_path: Path) -> None:
    sets = {"run.clinical": True, "run.predictions": True, "data.val": 0.2, "partition.name": "iid"}
    client, answering = client_of("fedv", tmp_path, sets)
    memory = client.worker.client("0", 1, {}).memory
    found = client.evaluate(answering(2, lambda message: message), task_of("evaluate", 2, 1), dict(memory))
    score = from_scalars(found)
    assert score is not None
    assert score.images == client.hello["test"]
    mine = read_predictions(tmp_path / "state")["0"]
    assert len(mine.truth["3"]) == client.hello["test"]
    single = {value for values in mine.probability.values() for value in values.tolist()}
    assert not single & set(found.values())
    client.policy = Policy(clinical=False)
    assert not [key for key in client.policy.release(Payload(scalars=found)).scalars if key.startswith(PREFIX)]
