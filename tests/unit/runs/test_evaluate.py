"""`fedvit evaluate` scores a folder with the run's own metrics, and says what it could not use."""

import csv
import io
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support, roc_auc_score

import fedvit
from fedvit.core.files import csv_line
from fedvit.report.evaluation import evaluation_tables
from fedvit.runs.evaluate import Evaluation, evaluate
from fedvit.runs.folder import Run
from tests.conftest import finish, tiny
from tests.unit.cli.test_command_line import call
from tests.unit.runs.test_export import digits, small, written
from tests.unit.runs.test_predict import save_images

NAMES = ["zero", "one", "two"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    experiment = small("fedper", {"data.auroc": True}, rounds=4)
    return Run(finish(experiment, tmp_path_factory.mktemp("run") / "fedper", dataset=digits()))


@pytest.fixture(scope="module")
def folder(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("labeled") / "test"
    save_images(run, "2", place)
    return place


@pytest.mark.parametrize("form", ["run", "timm", "onnx"])
def test_the_scores_are_those_of_the_run(run: Run, folder: Path, tmp_path: Path, form: Any) -> None:
    if form == "run":
        model = ["evaluate", run.folder, folder, "--client", "2"]
    else:
        (one,) = written(run, tmp_path, "2", form=form)
        model = ["evaluate", one.path, folder]
    status, shown, message = call(*model, "--json")
    assert status == 0, message
    found, row = json.loads(shown), run.clients[2]
    assert found["images"] == row["test_samples"]
    assert found["accuracy"] == pytest.approx(row["personal_accuracy"], abs=1e-9)
    assert found["balanced_accuracy"] == pytest.approx(row["personal_balanced_accuracy"], abs=1e-9)
    assert found["auroc"] == pytest.approx(row["personal_auroc"], abs=1e-4)
    low, high = found["accuracy_interval"]
    assert low < found["accuracy"] < high
    cells = {(a, b): n for a, b, n in run.confusion["2"]}
    table = np.array(found["confusion"])
    assert {(int(a), int(b)): int(table[a, b]) for a, b in np.argwhere(table)} == cells


def test_one_line_per_image_agrees_with_the_scores_and_with_scikit_learn(
    run: Run, folder: Path, tmp_path: Path
) -> None:
    status, shown, message = call(
        "evaluate", run.folder, folder, "--client", "2", "--json", "--csv", tmp_path / "x.csv"
    )
    assert status == 0, message
    found = json.loads(shown)
    with (tmp_path / "x.csv").open(newline="") as stream:
        lines = list(csv.DictReader(stream))
    assert len(lines) == found["images"]
    classes = [one["name"] for one in found["classes"]]
    for line in lines:
        assert (folder / line["image"]).is_file()
        assert line["image"].split("/")[0] == line["class"]
        assert line["right"] == str(int(line["class"] == line["predicted"]))
        chances = {name: float(line[f"probability {name}"]) for name in classes}
        assert sum(chances.values()) == pytest.approx(1, abs=1e-5)
        assert chances[line["predicted"]] == max(chances.values())
    truth, guess = [line["class"] for line in lines], [line["predicted"] for line in lines]
    assert found["confusion"] == confusion_matrix(truth, guess, labels=classes).tolist()
    present = sorted(set(truth))
    recall = np.diag(confusion_matrix(truth, guess, labels=present)) / [truth.count(name) for name in present]
    assert found["balanced_accuracy"] == pytest.approx(100 * recall.mean())
    precision, _, _, _ = precision_recall_fscore_support(truth, guess, labels=classes, zero_division=0)
    for one, expected in zip(found["classes"], precision, strict=True):
        assert one["precision"] == (pytest.approx(100 * expected) if one["name"] in guess else None)
        assert (one["recall"] is None) == (one["name"] not in truth)


def answers(labels: list[int], logits: list[list[float]]) -> Evaluation:
    files = tuple(Path(f"f/{number}.png") for number in range(len(labels)))
    outputs = torch.tensor(logits)
    names = tuple(NAMES[: outputs.shape[1]])
    return Evaluation(Path("f"), names, files, torch.tensor(labels), outputs, (), ())


def test_scores_of_known_answers() -> None:
    logits = [[2.0, 0, 1], [0, 2, 1], [2, 1, 0], [0, 1, 2], [1, 2, 0]]
    found = answers([0, 1, 1, 1, 0], logits)
    assert found.confusion.tolist() == [[1, 1, 0], [1, 1, 1], [0, 0, 0]]
    assert found.accuracy == pytest.approx(40)
    assert found.recall == [pytest.approx(50), pytest.approx(100 / 3), None]
    assert found.precision == [pytest.approx(50), pytest.approx(50), pytest.approx(0)]
    assert found.balanced_accuracy == pytest.approx((50 + 100 / 3) / 2)
    assert found.absent == ["two"]
    two = answers([0, 1, 1, 0], [[1.0, 0], [0, 3], [1, 2], [0, 2]])
    chances = torch.tensor([[1.0, 0], [0, 3], [1, 2], [0, 2]]).softmax(1)[:, 1].tolist()
    assert two.auroc == pytest.approx(roc_auc_score([0, 1, 1, 0], chances))


def test_an_interval_is_not_empty_when_every_answer_is_right() -> None:
    perfect = answers([0, 1] * 10, [[1.0, 0], [0, 1]] * 10)
    low, high = perfect.interval
    assert high == 100
    assert 80 < low < 90
    wrong = answers([1, 0] * 10, [[1.0, 0], [0, 1]] * 10)
    assert wrong.interval == pytest.approx((0, 100 - low))
    mixed = answers([0, 0] * 50, [[1.0, 0], [0, 1]] * 50)
    assert mixed.interval == pytest.approx((40, 60), abs=2)
    assert mixed.interval == answers([0, 0] * 50, [[1.0, 0], [0, 1]] * 50).interval


def test_the_terminal_shows_the_scores_and_the_matrix(run: Run, folder: Path) -> None:
    status, shown, message = call("evaluate", run.folder, folder, "--client", "2")
    assert status == 0, message
    for words in ("accuracy % (95 % interval)", "balanced accuracy %", "AUROC", "recall %", "precision %", "confusion"):
        assert words in shown
    present = {path.name for path in folder.iterdir()}
    if len(present) < 10:
        assert "no images of" in message


@pytest.mark.parametrize(
    "names", [("normal", "pneumonia"), ("a very long name of a class", "another one just as long")]
)
def test_long_names_do_not_break_the_matrix(names: tuple[str, str]) -> None:
    found = replace(answers([0, 1, 1], [[1.0, 0], [0, 1], [1, 0]]), classes=names)
    console = Console(width=60, file=io.StringIO())
    for table in evaluation_tables(found):
        console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    lines = [line for line in text[text.index("confusion") :].splitlines()[1:] if line.strip(" ─")]
    assert len(lines) == 3, "a head and a line per class, none of them folded"
    assert all(name in text for name in names)


def test_files_that_cannot_be_read_are_listed_at_the_end(run: Run, folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "t"
    shutil.copytree(folder, place)
    first = sorted(path for path in place.iterdir())[0]
    (first / "broken.png").write_bytes(b"no image")
    (first / "notes.txt").write_text("ignored")
    status, shown, message = call("evaluate", run.folder, place, "--client", "2", "--json")
    assert status == 2
    assert "1 files could not be read" in message
    assert "broken.png is not an image" in message.replace("\n", " ")
    found = json.loads(shown)
    assert found["images"] == run.clients[2]["test_samples"]
    assert len(found["unreadable"]) == 1


def test_folders_of_other_names_are_mapped_or_skipped(run: Run, folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "t"
    shutil.copytree(folder, place)
    first = sorted(path for path in place.iterdir())[0]
    first.rename(place / "strange")
    missing = [name for name in digits().class_names if not (place / name).is_dir()]
    plain = ["evaluate", run.folder, place, "--client", "2", "--json"]
    status, _, message = call(*plain)
    assert status == 2
    told = message.replace("\n", " ")
    assert "no class of the model: strange" in told
    assert f"classes without a folder: {', '.join(missing)}" in told
    assert "--classes strange=CLASS" in told
    status, shown, message = call(*plain, "--classes", f"strange={first.name}")
    assert status == 0, message
    assert json.loads(shown)["accuracy"] == pytest.approx(run.clients[2]["personal_accuracy"], abs=1e-9)
    status, shown, message = call(*plain, "--skip-unknown")
    assert status == 0, message
    found = json.loads(shown)
    assert found["skipped"] == ["strange"]
    assert found["images"] == run.clients[2]["test_samples"] - len(list((place / "strange").iterdir()))
    assert "skipped folders: strange" in message


MISTAKES = [
    (["{run}", "{here}/t", "--client", "2", "--classes", "x"], "--classes expects FOLDER=CLASS pairs"),
    (["{run}", "{here}/t", "--client", "2", "--classes", "a=77"], "the model has no class '77'"),
    (["{run}", "{here}/t", "--client", "2", "--classes", "none=1"], "has no folder 'none'"),
    (["{run}", "{here}/none", "--client", "2"], "is not a folder"),
    (["{run}", "{here}/t/a", "--client", "2"], "has no subfolders"),
    (["{run}", "{here}/t", "--client", "2", "--classes", "a=1", "--csv", "{here}/no/x.csv"], "--csv expects a file"),
    (["{run}", "{here}/empty", "--client", "2"], "no images in the class folders"),
    (["{run}", "{here}/t"], "say whose model"),
    (["{run}", "{here}/broken", "--client", "2"], "could be read"),
]


@pytest.mark.parametrize(("arguments", "told"), MISTAKES, ids=[told for _, told in MISTAKES])
def test_a_mistake_is_told(arguments: list[str], told: str, run: Run, tmp_path: Path) -> None:
    for name in ("t/a", "empty/1", "broken/1"):
        (tmp_path / name).mkdir(parents=True)
    Image.fromarray(digits().images[0][..., 0]).save(tmp_path / "t" / "a" / "x.png")
    (tmp_path / "broken" / "1" / "x.png").write_bytes(b"no image")
    filled = [text.replace("{run}", str(run.folder)).replace("{here}", str(tmp_path)) for text in arguments]
    status, _, message = call("evaluate", *filled)
    assert status == 2
    assert told in message.replace("\n", " ")


def test_no_cell_of_a_csv_is_a_formula(run: Run, tmp_path: Path) -> None:
    assert csv_line(["=1", "+1", "-x", "@x", "\tx", "a=1", -1.5, 2]) == "'=1,'+1,'-x,'@x,'\tx,a=1,-1.5,2\n"
    (tmp_path / "t" / "1").mkdir(parents=True)
    for name in ("=cmd.png", "-1.png"):
        Image.fromarray(digits().images[0][..., 0]).save(tmp_path / "t" / "1" / name)
    here = tmp_path / "found.csv"
    assert call("evaluate", run.folder, tmp_path / "t", "--client", "2", "--csv", here)[0] == 0
    with here.open(newline="") as stream:
        assert [row["image"] for row in csv.DictReader(stream)] == ["1/-1.png", "1/=cmd.png"]


def test_a_csv_names_files_whose_names_are_no_text(run: Run, tmp_path: Path) -> None:
    (tmp_path / "t" / "1").mkdir(parents=True)
    Image.fromarray(digits().images[0][..., 0]).save(tmp_path / "t" / "1" / "x.png")
    name = os.fsdecode(b"caf\xe9.png")
    (tmp_path / "t" / "1" / "x.png").rename(tmp_path / "t" / "1" / name)
    here = tmp_path / "found.csv"
    status, _, message = call("evaluate", run.folder, tmp_path / "t", "--client", "2", "--csv", here)
    assert status == 0, message
    assert b"1/caf\xe9.png,1," in here.read_bytes()


def test_the_csv_of_predictions_has_no_formulas_either(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.fromarray(digits().images[0][..., 0]).save(tmp_path / "=cmd.png")
    status, _, message = call("predict", run.folder, "=cmd.png", "--client", "2", "--csv", "x.csv")
    assert status == 0, message
    assert Path("x.csv").read_text().splitlines()[1].startswith("'=cmd.png,")


def test_images_that_the_run_trained_on_are_counted(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for label in ("calm", "wild"):
        (tmp_path / "data" / label).mkdir(parents=True)
        for number in range(20):
            pixels = rng.integers(0, 256, (9, 9, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / label / f"{number}.png")
    sets = {"data.cache": str(tmp_path / "cache"), "min_samples": 2}
    experiment = tiny("fedavg", sets, data=str(tmp_path / "data"), clients=2, partition="iid", rounds=1)
    run = Run(finish(experiment, tmp_path / "run"))
    trained = sum(len(part["train"]) for part in run.split["clients"].values())
    status, _, message = call("evaluate", run.folder, tmp_path / "data", "--client", "0")
    assert status == 0, message
    assert f"{trained} of 40 images were used in training" in message.replace("\n", " ")
    for part in run.split["clients"].values():
        for number in part["train"]:
            (tmp_path / "data" / run.split["files"][number]).unlink()
    status, _, message = call("evaluate", run.folder, tmp_path / "data", "--client", "0")
    assert status == 0, message
    assert "used in training" not in message


def test_python_scores_a_loaded_model_too(run: Run, folder: Path, tmp_path: Path) -> None:
    (one,) = written(run, tmp_path, "2")
    found = evaluate(fedvit.load_model(one.path), folder)
    assert found.accuracy == pytest.approx(run.clients[2]["personal_accuracy"], abs=1e-9)


# Clinical scores.


def test_clinical_scores_of_a_folder_are_those_of_scikit_learn(run: Run, folder: Path, tmp_path: Path) -> None:
    words = ["evaluate", run.folder, folder, "--client", "2"]
    status, shown, message = call(*words, "--clinical", "--threshold", "0.3", "--json", "--csv", tmp_path / "x.csv")
    assert status == 0, message
    with (tmp_path / "x.csv").open() as stream:
        lines = list(csv.DictReader(stream))
    for one in json.loads(shown)["clinical"]:
        truth = np.array([line["class"] == one["class"] for line in lines])
        p = np.array([float(line[f"probability {one['class']}"]) for line in lines])
        assert (one["threshold"], one["threshold_from"]) == (0.3, "given")
        assert (one["tp"], one["fp"]) == (int((truth & (p >= 0.3)).sum()), int((~truth & (p >= 0.3)).sum()))
        assert one["auroc"] == (pytest.approx(roc_auc_score(truth, p), abs=1e-4) if truth.any() else None)
        assert one["brier"] == pytest.approx(np.mean((p - truth) ** 2), abs=1e-6)
    status, shown, _ = call(*words, "--clinical")
    assert "spec." in shown
    status, shown, _ = call(*words, "--json")
    assert "clinical" not in json.loads(shown)


def test_thresholds_are_by_default_those_that_the_run_chose_on_val(tmp_path: Path) -> None:
    experiment = small("fedper", {"run.clinical": True, "data.val": 0.3}, rounds=2)
    done = Run(finish(experiment, tmp_path / "r", dataset=digits()))
    place = tmp_path / "test"
    save_images(done, "2", place)
    status, shown, message = call("evaluate", done.folder, place, "--client", "2", "--clinical", "--json")
    assert status == 0, message
    wanted = json.loads((done.folder / "clinical.json").read_text())["clients"]["2"]["classes"]
    same = ("class", "threshold", "threshold_from", "tp", "fp", "tn", "fn")
    found = json.loads(shown)["clinical"]
    assert [[one[key] for key in same] for one in found] == [[one[key] for key in same] for one in wanted]
    assert "val" in {one["threshold_from"] for one in found}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--threshold", "0.5"], "belong to --clinical"),
        (["--clinical", "--threshold", "1"], "a threshold is a number between 0 and 1"),
        (["--clinical", "--positive", "2"], "--positive names one of two classes, but there are"),
    ],
)
def test_clinical_options_that_make_no_sense_are_refused(words: list[str], said: str, run: Run, folder: Path) -> None:
    status, _, message = call("evaluate", run.folder, folder, "--client", "2", *words)
    assert status == 2
    assert said in " ".join(message.split())
