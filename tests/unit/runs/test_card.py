"""The model card: every number in it stands in the run's files, and what nobody stated says so."""

import re
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

import fedvit
from fedvit.runs.execute import run_rounds
from fedvit.runs.export import Exported
from fedvit.runs.folder import Run
from tests.conftest import finish, tiny
from tests.unit.cli.test_command_line import call
from tests.unit.runs.test_export import digits, small

SECTIONS = ["Intended use", "Limits", "Data", "Method", "Scores", "Privacy", "License"]


def exported(run: Run, out: Path, **options: Any) -> Exported:
    options = {"clients": ["1"], **options}
    (one,) = fedvit.export(run, out=out, **options)
    return one


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    sets = {"run.keep": "best", "data.val": 0.3}
    return Run(
        finish(small("fedper", sets, rounds=3, eval_every=1), tmp_path_factory.mktemp("card") / "r", dataset=digits())
    )


def test_the_file_and_its_card_have_the_same_text(run: Run, tmp_path: Path) -> None:
    one = exported(run, tmp_path / "out")
    assert one.card == tmp_path / "out" / "client-1.card.md"
    with safe_open(one.path, "pt") as file:
        assert file.metadata()["model_card"] == one.card.read_text()
    assert re.findall(r"^## (.*)$", one.card.read_text(), re.MULTILINE) == SECTIONS
    again = exported(run, tmp_path / "m.safetensors")
    assert again.card.name == "m.card.md"
    assert again.card.read_text() == one.card.read_text()


def test_its_numbers_are_those_of_the_round_in_the_file(run: Run, tmp_path: Path) -> None:
    kept = run.summary["kept"]["round"]
    for last, rows, views in (
        (False, run.kept_clients, run.summary["kept"]["views"]),
        (True, run.clients, run.summary["views"]),
    ):
        one = exported(run, tmp_path / str(last), last=last)
        text = one.card.read_text()
        assert one.description.round == (3 if last else kept)
        assert f"after round {one.description.round}, {'the last one' if last else 'the best on validation'}" in text
        assert f"Mean accuracy: {views['personal']['mean']:.1f} % ± {views['personal']['std']:.1f}" in text
        for row in rows:
            name = f"**{row['client']}**" if row["client"] == "1" else row["client"]
            start = f"| {name} | {row['train_samples']} | {row['test_samples']} | {row['personal_accuracy']:.1f} % |"
            assert start in text
    parts = run.split["clients"].values()
    images = ", ".join(
        f"{sum(len(part[key]) for part in parts)} {word}"
        for key, word in (("train", "training"), ("val", "validation"), ("test", "test"))
    )
    assert f"Images: {images}" in text
    for words in ("fedper", "vit\\_micro", "4 clients", "0, 1, 2, 3, 4, 5, 6, 7, 8, 9"):
        assert words in text, words


def test_what_nobody_said_is_not_stated_and_what_somebody_said_is_quoted(run: Run, tmp_path: Path) -> None:
    silent = exported(run, tmp_path / "a").card.read_text()
    assert "## Intended use\n\nnot stated\n" in silent
    assert "- Of this model: not stated." in silent
    assert "none spent; the run was not differentially private" in silent
    assert "Images and labels did not leave their clients" in silent
    flags = ["--license", "CC-BY-4.0", "--intended-use", "a second opinion\n# for residents | and <b>no</b> others"]
    status, shown, message = call("export", run.folder, "--client", "1", *flags, "--out", tmp_path / "b")
    assert status == 0, message
    assert "client-1.card.md" in shown
    text = (tmp_path / "b" / "client-1.card.md").read_text()
    assert "- Of this model: CC-BY-4.0." in text
    assert "a second opinion \\# for residents \\| and \\<b\\>no\\</b\\> others" in text
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == SECTIONS


def test_a_run_that_is_not_finished_has_no_scores_to_quote(tmp_path: Path) -> None:
    steps = run_rounds(tiny("fedavg"), tmp_path / "r")
    next(steps)
    steps.close()
    text = exported(Run(tmp_path / "r"), tmp_path / "out", clients=[], server=True).card.read_text()
    assert "Not stated: the folder of this run has no scores of this model." in text
    assert "after round 1, the last one so far, of 2 planned" in text


def test_the_servers_card_says_how_the_server_scored(tmp_path: Path) -> None:
    run = Run(finish(small("fedavg", rounds=1), tmp_path / "r", dataset=digits()))
    text = exported(run, tmp_path / "out", clients=[], server=True).card.read_text()
    assert f"Mean accuracy: {run.summary['server_accuracy']:.1f} %" in text
    assert "the server's model of a fedavg run" in text
    assert "one person's images may be among both" in text  # nobody said whose the digits are


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("centralized", "Images, or what is made of them, left their clients: centralized pools all images"),
        ("fedfed", "Images, or what is made of them, left their clients: fedfed sends residuals"),
        ("fedv", "Activations of images and their gradients left the clients"),
    ],
)
def test_a_method_that_sends_more_than_weights_says_so(method: str, words: str, tmp_path: Path) -> None:
    run = Run(finish(small(method, rounds=1), tmp_path / "r", dataset=digits()))
    text = exported(run, tmp_path / "out").card.read_text()
    assert words in text
    assert "did not leave" not in text


def test_patients_are_counted_and_no_name_of_theirs_or_path_of_the_disk_is_in_a_card(tmp_path: Path) -> None:
    from tests.unit.data.test_manifest import hospital

    manifest = hospital(tmp_path / "images")
    sets = {"data.cache": str(tmp_path / "cache"), "data.val": 0.3, "min_samples": 2}
    run = Run(finish(tiny("fedper", sets, data=str(manifest), clients=None), tmp_path / "r"))
    client = next(iter(run.split["clients"]))
    text = exported(run, tmp_path / "out", clients=[client]).card.read_text()
    counts = run.split["patient_counts"].values()
    assert f"Patients: {sum(own['train'] for own in counts)} training" in text
    assert "one person's images may be" not in text
    assert str(tmp_path) not in text
    assert not any(name in text for name in run.split["patients"])
