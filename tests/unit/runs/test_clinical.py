"""The clinical files of a run: equal bits on every engine, the scores of scikit-learn, and null where undefined."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, brier_score_loss, f1_score, roc_auc_score

from fedvit.config.load import load_experiment
from fedvit.core.cases import Cases
from fedvit.core.errors import UserError
from fedvit.core.settings import Experiment
from fedvit.runs.clinical import CLINICAL, PREDICTIONS, read_clinical, read_predictions, write_predictions
from fedvit.runs.folder import Run
from tests.conftest import THREADS, almost, finish, tiny
from tests.labels import write_manifest

WANTED = {"run.clinical": True, "run.predictions": True, "data.val": 0.2, "partition.name": "iid"}


def clinical(label: str = "fedper", sets: dict[str, Any] | None = None, **flags: Any) -> Experiment:
    return tiny(label, {**WANTED, **(sets or {})}, **{"samples": 300, "clients": 3, "cohort": 3, **flags})


def two_classes(folder: Path, images: int = 96) -> Path:
    """An npz file of sick and well images in which sick ones are brighter."""
    rng = np.random.default_rng(0)
    labels = np.arange(images) % 2
    pixels = np.clip(rng.normal(90 + 60 * labels[:, None, None], 40, (images, 8, 8)), 0, 255).astype(np.uint8)
    held = images * 3 // 4
    parts = {"train": slice(held), "test": slice(held, None)}
    arrays = {f"{part}_images": pixels[own] for part, own in parts.items()}
    arrays |= {f"{part}_labels": labels[own] for part, own in parts.items()}
    np.savez(folder / "two.npz", **arrays, class_names=np.array(["sick", "well"]))
    return folder / "two.npz"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finish(clinical(), tmp_path_factory.mktemp("clinical") / "run")


def test_two_workers_give_the_clinical_files_of_one(folder: Path, tmp_path: Path) -> None:
    two = finish(clinical(), tmp_path / "two", workers=2)
    for name in (CLINICAL, PREDICTIONS, "clients.csv"):
        assert (two / name).read_bytes() == (folder / name).read_bytes(), name


def test_a_resumed_run_has_the_clinical_files_of_an_uninterrupted_one(folder: Path, tmp_path: Path) -> None:
    shorter = finish(clinical(rounds=1), tmp_path / "run")
    before = (shorter / CLINICAL).read_bytes()
    finish(clinical(), tmp_path / "run", resume=True)
    assert before != (shorter / CLINICAL).read_bytes()
    for name in (CLINICAL, PREDICTIONS):
        assert (shorter / name).read_bytes() == (folder / name).read_bytes(), name


def test_nothing_else_of_a_run_changes_with_clinical_scores(folder: Path, tmp_path: Path) -> None:
    plain = finish(clinical(sets={"run.clinical": False, "run.predictions": False}), tmp_path / "plain")
    for name in ("rounds.jsonl", "clients.csv", "confusion.json", "split.json"):
        assert (plain / name).read_bytes() == (folder / name).read_bytes(), name
    assert not (plain / CLINICAL).exists()
    assert not (plain / PREDICTIONS).exists()
    assert Run(plain).summary["clinical"] is None


def test_scores_of_a_client_and_of_all_are_those_of_scikit_learn_on_the_predictions(folder: Path) -> None:
    found, lines = read_clinical(folder), read_predictions(folder)
    assert found is not None
    assert found.one_by_one
    for name, site in found.clients.items():
        for one in site.classes:
            truth, p = lines[name].truth[found.name(one.number)], lines[name].probability[found.name(one.number)]
            assert (one.images, one.positives) == (len(truth), truth.sum())
            assert one.brier == pytest.approx(brier_score_loss(truth, p))
            assert one.auroc == (pytest.approx(roc_auc_score(truth, p)) if one.positives else None)
            assert one.tp == (truth & (p >= one.threshold)).sum()
    for one in found.pooled.classes:
        both = [
            (each.truth[found.name(one.number)], each.probability[found.name(one.number)]) for each in lines.values()
        ]
        truth, p = (np.concatenate(parts) for parts in zip(*both, strict=True))
        assert one.auroc == pytest.approx(roc_auc_score(truth, p))
        low, high = one.intervals["auroc"]
        assert low < one.auroc < high


def test_predictions_name_positions_and_no_files(folder: Path) -> None:
    with (folder / PREDICTIONS).open() as stream:
        lines = list(csv.DictReader(stream))
    run = Run(folder)
    names = run.split["class_names"]
    assert list(lines[0]) == ["client", "index", "class", *(f"probability {name}" for name in names)]
    for client, part in run.split["clients"].items():
        own = [line for line in lines if line["client"] == client]
        assert [int(line["index"]) for line in own] == list(range(len(part["test"])))
    counts = run.split["class_counts"]["0"]["test"]
    mine = [line["class"] for line in lines if line["client"] == "0"]
    assert {name: mine.count(name) for name in set(mine)} == {names[int(number)]: n for number, n in counts.items()}
    assert sum(float(lines[0][f"probability {name}"]) for name in names) == pytest.approx(1)


def test_the_summary_has_the_pooled_scores_and_a_macro_mean_over_named_classes(folder: Path) -> None:
    content, summary = json.loads((folder / CLINICAL).read_text()), Run(folder).summary["clinical"]
    assert summary["macro_classes"] == content["macro_classes"]
    assert [one["auroc"] for one in summary["classes"]] == [one["auroc"] for one in content["pooled"]["classes"]]
    wanted = [one["auroc"] for one in content["pooled"]["classes"] if one["class"] in content["macro_classes"]]
    assert wanted
    assert summary["macro"]["auroc"] == pytest.approx(np.mean(wanted))


def test_thresholds_are_chosen_on_validation_images_and_say_so(folder: Path) -> None:
    found = read_clinical(folder)
    assert found is not None
    sources = {one.source for site in found.clients.values() for one in site.classes}
    assert "val" in sources
    assert sources <= {"val", "default"}


def test_a_given_threshold_is_everyones(tmp_path: Path) -> None:
    found = read_clinical(finish(clinical(sets={"run.threshold": 0.3}), tmp_path / "run"))
    assert found is not None
    assert {(one.threshold, one.source) for one in found.pooled.classes} == {(0.3, "given")}


def test_without_validation_images_the_threshold_is_a_half(tmp_path: Path) -> None:
    found = read_clinical(finish(clinical(sets={"data.val": 0.0}), tmp_path / "run"))
    assert found is not None
    assert {(one.threshold, one.source) for one in found.pooled.classes} == {(0.5, "default")}


def test_the_positive_one_of_two_classes_can_be_chosen(tmp_path: Path) -> None:
    data = str(two_classes(tmp_path))
    sets = {"run.threshold": 0.4}
    second = read_clinical(finish(clinical(sets=sets, data=data, samples=None), tmp_path / "second"))
    first = read_clinical(
        finish(clinical(sets={**sets, "run.positive": "sick", "run.threshold": 0.6}, data=data, samples=None),
               tmp_path / "first")
    )  # fmt: skip
    assert first is not None
    assert second is not None
    (sick,), (well,) = first.pooled.classes, second.pooled.classes
    assert (first.name(sick.number), second.name(well.number)) == ("sick", "well")
    assert (sick.tp, sick.fp, sick.tn, sick.fn) == (well.tn, well.fn, well.tp, well.fp)
    assert sick.auroc == pytest.approx(well.auroc)
    ours, theirs = (read_predictions(tmp_path / name) for name in ("first", "second"))
    for client, own in ours.items():
        assert (own.truth["sick"] == theirs[client].truth["sick"]).all()
        assert own.probability["sick"] == pytest.approx(theirs[client].probability["sick"])


def test_one_class_at_a_client_gives_null_and_not_0(tmp_path: Path) -> None:
    experiment = clinical(sets={"partition.classes": 1}, partition="pathological", clients=10, samples=None)
    folder = finish(experiment, tmp_path / "run")
    content = json.loads((folder / CLINICAL).read_text())
    missing = [
        one for site in content["clients"].values() for one in site["classes"] if one["positives"] in (0, one["images"])
    ]
    assert missing
    assert {one["auroc"] for one in missing} == {None}
    assert {one["sensitivity"] for one in missing if not one["positives"]} == {None}
    assert content["macro_classes"] == []
    assert {site["macro"]["auroc"] for site in content["clients"].values()} == {None}
    assert all(one["auroc"] is not None for one in content["pooled"]["classes"])


@pytest.mark.parametrize("method", ["fesvibs", "splitfed_v2"])
def test_split_learning_has_clinical_scores_too(method: str, tmp_path: Path) -> None:
    folder = finish(clinical(method, {"run.threshold": 0.5}), tmp_path / "run")
    found = read_clinical(folder)
    assert found is not None
    assert set(found.clients) == {"0", "1", "2"}
    assert len(read_predictions(folder)) == 3


def test_clients_that_never_train_are_left_out(tmp_path: Path) -> None:
    found = read_clinical(finish(clinical(sets={"data.unseen": 1}, cohort=2), tmp_path / "run"))
    assert found is not None
    assert len(found.clients) == 2


def test_a_run_that_stops_early_has_the_scores_of_its_last_round(tmp_path: Path) -> None:
    folder = finish(clinical(until_accuracy=0.001, rounds=4), tmp_path / "run")
    found = read_clinical(folder)
    assert found is not None
    assert found.round == Run(folder).summary["rounds"] < 4


def test_several_labels_per_image_have_a_column_of_truth_for_every_class(tmp_path: Path) -> None:
    truth, p = np.array([[True, True], [False, False], [True, False]]), np.array([[0.9, 0.4], [0.2, 0.1], [0.7, 0.6]])
    cases = Cases(
        (0, 1), np.array([7, 4, 9]), np.array([7, 4, 9]), False, truth, p, p >= 0.5, (0.5, 0.5), ("given",) * 2,
        several_labels=True,
    )  # fmt: skip
    write_predictions(tmp_path / PREDICTIONS, {"a, b": cases}, ["edema", "mass"])
    lines = (tmp_path / PREDICTIONS).read_text().splitlines()
    assert lines[0] == "client,index,true edema,true mass,probability edema,probability mass"
    assert lines[1] == '"a, b",0,1,1,0.9,0.4'
    found = read_predictions(tmp_path)["a, b"]
    assert found.truth["mass"].tolist() == [True, False, False]
    assert found.probability["edema"].tolist() == p[:, 0].tolist()


def test_a_run_with_several_labels_measures_each_of_them(tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path / "xray")
    sets = {"run.clinical": True, "run.predictions": True, "data.val": 0.3, "data.cache": str(tmp_path / "cache")}
    flags = {"image_size": 8, "patch_size": 4, "rounds": 4, "epochs": 1, "batch": 8, "lr": 3e-3, "method": "fedavg"}
    folder = finish(load_experiment(None, sets, {**flags, "data": str(manifest), "threads": THREADS}), tmp_path / "r")
    found, lines = read_clinical(folder), read_predictions(folder)
    assert found is not None
    assert len(found.pooled.classes) == 3
    truth, p = (
        np.concatenate([np.stack(list(getattr(own, part).values()), 1) for own in lines.values()])
        for part in ("truth", "probability")
    )
    assert (truth.sum(1) != 1).any(), "an image may have no label, or several"
    for one in found.pooled.classes:
        assert one.auroc == pytest.approx(roc_auc_score(truth[:, one.number], p[:, one.number]))
        assert one.average_precision == pytest.approx(average_precision_score(truth[:, one.number], p[:, one.number]))
    site = next(iter(found.clients.values()))
    own = lines[next(iter(found.clients))]
    for one in site.classes:
        name = found.name(one.number)
        if one.positives and one.threshold is not None:
            assert one.f1 == pytest.approx(f1_score(own.truth[name], own.probability[name] >= one.threshold))
    assert "val" in {one.source for one in site.classes}


# Mistakes, before anything is trained.


@pytest.mark.parametrize("value", [0, 1, 1.5, -0.2, "best"])
def test_a_threshold_outside_0_and_1_is_refused(value: Any) -> None:
    with pytest.raises(UserError, match=r"run\.threshold: a threshold is a number between 0 and 1"):
        clinical(sets={"run.threshold": value})


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        ({"run.clinical": False}, "set run.clinical=true too"),
        ({"run.threshold": "youden", "data.val": 0.0}, "set data.val, such as data.val=0.2"),
        ({"run.positive": "3"}, "there are 10, each of which is measured against the rest"),
    ],
)
def test_settings_that_cannot_be_met_are_refused(sets: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=said.replace(".", r"\.")):
        finish(clinical(sets=sets), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_positive_class_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'sic' is no class of the data; did you mean 'sick'\?"):
        finish(clinical(sets={"run.positive": "sic"}, data=str(two_classes(tmp_path)), samples=None), tmp_path / "run")


def test_predictions_with_a_line_missing_are_refused(folder: Path, tmp_path: Path) -> None:
    lines = (folder / PREDICTIONS).read_text().splitlines()
    (tmp_path / PREDICTIONS).write_text("\n".join([lines[0], *lines[2:]]) + "\n")
    with pytest.raises(UserError, match="not those of its test images"):
        read_predictions(tmp_path)


def test_the_scores_of_a_file_are_those_that_were_written(folder: Path) -> None:
    found, content = read_clinical(folder), json.loads((folder / CLINICAL).read_text())
    assert found is not None
    assert almost(found.to_json()) == content
