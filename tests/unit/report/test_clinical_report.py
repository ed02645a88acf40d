"""Clinical scores in the report and the terminal, and tests of two runs on the same test images."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest
from typer.testing import CliRunner

from fedvit.cli.main import app
from fedvit.core.paired_tests import delong, mcnemar
from fedvit.report import svg
from fedvit.report.load import read_record
from fedvit.report.paired import EVERY_CLASS, EVERYONE, against_local, paired_tests
from fedvit.runs.clinical import PREDICTIONS, read_predictions
from fedvit.runs.folder import Run
from tests.conftest import finish, tiny

WANTED = {"run.clinical": True, "run.predictions": True, "data.val": 0.2, "partition.name": "iid"}
SMALL = ["--clients", "3", "--samples", "300", "--patch-size", "4", "--rounds", "2", "--epochs", "1", "--lr", "0.003"]


def call(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, re.sub(r"\s+", " ", result.stdout), result.stderr.replace("\n", " ")


def sets(**more: Any) -> list[str]:
    return [word for key, value in {**WANTED, **more}.items() for word in ("--set", f"{key}={json.dumps(value)}")]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A comparison of ten classes, and what it printed."""
    folder = tmp_path_factory.mktemp("compared") / "c"
    status, shown, message = call("compare", "fedper", "fedavg", "--seeds", "0", *SMALL, *sets(), "--out", folder)
    assert status == 0, message
    return folder, shown


def words_of(page: str) -> str:
    part = page[page.index('id="g0-clinical"') :]
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", part[: part.index("</section>")]))


def test_a_comparison_shows_clinical_scores_and_tests_against_local(compared: tuple[Path, str]) -> None:
    folder, shown = compared
    assert re.search(r"test images: mean of the same \d+ classes", shown)
    assert "against Local on the same test images" in shown
    entries = {entry["label"]: entry for entry in json.loads((folder / "compare.json").read_text())}
    (mine,) = entries["fedper"]["clinical"]
    assert mine["macro"] == Run(folder / "fedper" / "seed0").summary["clinical"]["macro"]
    assert mine["untested"] is None
    everyone = [test for test in mine["against_local"] if test["client"] is None]
    assert len(everyone) == 11, "each class, and all of them together"
    assert entries["local"]["clinical"][0]["against_local"] is None
    said = words_of((folder / "report.html").read_text())
    for words in ("Means are over ", "Against Local, image by image", "AUROC of each class", "DeLong"):
        assert words in said


def test_tests_are_those_of_the_two_files_of_predictions(compared: tuple[Path, str]) -> None:
    folder, _ = compared
    one, other = (read_record(folder / name / "seed0") for name in ("fedper", "local"))
    found = {(test.client, test.name): test for test in paired_tests(one, other)}
    mine, theirs = (read_predictions(record.folder) for record in (one, other))
    assert one.clinical is not None
    assert other.clinical is not None
    for client in mine:
        truth = mine[client].truth["3"]
        scores = [own[client].probability["3"] for own in (mine, theirs)]
        cuts = [
            next(s.threshold for s in record.clinical.clients[client].classes if s.number == 3)
            for record in (one, other)
            if record.clinical is not None
        ]
        right = [(p >= cut) == truth for p, cut in zip(scores, cuts, strict=True)]
        images = np.arange(len(truth))
        assert found[client, "3"].delong == delong(*scores, truth, images)
        assert found[client, "3"].mcnemar == mcnemar(*right, images)
    guesses = [
        np.concatenate([np.stack(list(p.probability.values())).argmax(0) for p in own.values()])
        for own in (mine, theirs)
    ]
    labels = np.concatenate([np.stack(list(p.truth.values())).argmax(0) for p in mine.values()])
    first, second = (int(((a == labels) & (b != labels)).sum()) for a, b in (guesses, guesses[::-1]))
    whole = found[EVERYONE, EVERY_CLASS]
    assert (whole.mcnemar.first_only, whole.mcnemar.second_only) == (first, second)
    assert whole.mcnemar.p == pytest.approx(binomtest(first, first + second).pvalue)
    assert whole.delong is None


def test_images_of_a_patient_count_together(compared: tuple[Path, str]) -> None:
    folder, _ = compared
    one, other = (read_record(folder / name / "seed0") for name in ("fedper", "local"))
    images = max(index for part in one.split["clients"].values() for index in part["test"]) + 1
    same = replace(one, split={**one.split, "patients": ["just one"] * images})
    by_image, by_patient = paired_tests(one, other), paired_tests(same, other)
    assert {test.mcnemar.p for test in by_patient} != {test.mcnemar.p for test in by_image}
    assert {test.delong for test in by_patient} == {None}, "one patient tells nothing about others"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("no predictions", "local wrote no predictions.csv (run.predictions=true)"),
        ("no clinical", "local was run without clinical scores (run.clinical=true)"),
        ("network", "every site can test its own images with `fedvit paired-tests`"),
        ("other images", "they tested other images"),
        ("no local", "Local was not run with the same seed"),
    ],
)
def test_without_a_test_against_local_the_reason_is_given(
    change: str, why: str, compared: tuple[Path, str], tmp_path: Path
) -> None:
    folder, _ = compared
    one, local = (read_record(folder / name / "seed0") for name in ("fedper", "local"))
    changed = {
        "no predictions": replace(local, folder=tmp_path),
        "no clinical": replace(local, clinical=None),
        "network": replace(local, split={**local.split, "network": True}),
        "other images": replace(local, split={**local.split, "source": "elsewhere"}),
        "no local": replace(local, tables={**local.tables, "run": {**local.tables["run"], "seed": 7}}),
    }[change]
    tests, said = against_local(one, [one, changed])
    assert tests == []
    assert why in said


def test_a_report_without_predictions_says_why_it_has_no_tests(compared: tuple[Path, str], tmp_path: Path) -> None:
    import shutil

    folder = shutil.copytree(compared[0], tmp_path / "c")
    for path in folder.glob(f"*/seed0/{PREDICTIONS}"):
        path.unlink()
    assert call("report", folder, "--quiet")[0] == 0
    said = words_of((folder / "report.html").read_text())
    assert "Not tested: fedper: fedper and local wrote no predictions.csv" in said


def test_a_run_with_local_shows_both_and_the_test_between_them(tmp_path: Path) -> None:
    status, shown, message = call(
        "run", "--method", "fedper", *SMALL, *sets(), "--out", tmp_path / "r", "--also", "local"
    )
    assert status == 0, message
    assert re.search(r"every client: mean of the same \d+ classes", shown)
    assert "only Local" in shown
    assert "Against Local, image by image" in words_of((tmp_path / "r" / "report.html").read_text())


def test_a_run_without_clinical_scores_has_no_such_section(tmp_path: Path) -> None:
    folder = finish(tiny("fedper"), tmp_path / "r")
    assert call("report", folder, "--quiet")[0] == 0
    page = (folder / "report.html").read_text()
    assert 'id="g0-result"' in page
    assert 'id="g0-clinical"' not in page


def test_two_runs_can_be_tested_by_a_command(compared: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = compared
    places = folder / "fedavg" / "seed0", folder / "local" / "seed0"
    status, shown, _ = call("paired-tests", *places, "--json")
    assert status == 0
    assert {test["client"] for test in json.loads(shown)} == {None, "0", "1", "2"}
    status, shown, _ = call("paired-tests", *places)
    assert "only second" in shown
    status, _, message = call("paired-tests", places[0], tmp_path)
    assert (status, "expected a folder with run.toml" in message) == (2, True)
    plain = finish(tiny("fedper"), tmp_path / "plain")
    status, _, message = call("paired-tests", places[0], plain)
    assert (status, "was run without clinical scores" in message) == (2, True)


def test_a_reliability_plot_has_a_dot_for_every_bin_with_images() -> None:
    plot = str(svg.reliability_plot([(10, 0.15, 0.2), (40, 0.85, 0.9)], "a plot"))
    assert plot.count("<circle") == 2
    assert "40 images: mean probability 0.85, 90 % positive" in plot
    sizes = [float(size) for size in re.findall(r' r="([\d.]+)"', plot)]
    assert sizes[0] < sizes[1]
