"""Studies: every one runs in a tiny form, says what its table asks, survives a kill, and has the published settings."""

import io
import json
import logging
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from fedvit.cli.main import app
from fedvit.config.load import load_experiment
from fedvit.config.resolve import to_tables
from fedvit.engine.worker import load_data
from fedvit.models.build import ModelSettings, build
from fedvit.models.groups import NORMS
from fedvit.runs.folder import Run
from fedvit.runs.write import nbytes_of_run
from fedvit.studies import run as studying
from fedvit.studies.cells import choose_grid, default_seeds
from fedvit.studies.definitions import PAPERS, STUDIES, paper_of, plain_name, size_in_words
from fedvit.studies.drawing import measured_seconds
from fedvit.studies.features import picture
from fedvit.studies.measure import estimates
from fedvit.studies.published import fedpeft, fedperfix
from fedvit.studies.published.common import method, rows_of, settings_of
from fedvit.studies.tables import study_tables
from tests.conftest import finish, tiny
from tests.contract.test_killed import started

ROOT = Path(__file__).parents[3]
DOCS = (ROOT / "docs" / "studies.md").read_text()
TINY = {"patch_size": 4, "rounds": 1, "epochs": 1, "samples": 600, "data": "digits"}
FEW = {**TINY, "clients": 8, "cohort": 2}
TEN = {**TINY, "clients": 10, "cohort": 4}
FLAGS: dict[str, dict[str, Any]] = {  # what a study varies may not be set
    "sensitivity": FEW,
    "fedperfix-table2": FEW,
    "fedperfix-figure3": FEW,
    "fedperfix-lambda": FEW,
    "backbones": {"rounds": 1, "epochs": 1, "samples": 400, "image_size": 16, "clients": 4, "cohort": 1},
    "settings": TINY,
    "sizes": {**FEW, "samples": 240, "clients": 4},
    "designs": FEW,
    "communication": {**TINY, "clients": 24, "rounds": 2},
    "convergence": {**TEN, "rounds": 2},
    "capability": TINY,
    "domain-gap": FEW,
    "scarcity": {**FEW, "samples": None},
    "pretraining": FEW,
    "lr": FEW,
    "dh": {**TEN, "cohort": 2},
    "edit": {**TEN, "rounds": 2},
    **{f"pfededit-table{number}": {**TEN, "rounds": 2} for number in (3, 4, 5, 7)},
    "pfededit-table6": {**TEN, "cohort": 2},
    "pfededit-table8": {**TEN, "rounds": 3},
    "pfededit-table9": {"rounds": 2, "samples": 60},
    "choice": {**TEN, "rounds": 2},
    "split": {**TINY, "epochs": None, "rounds": None},
    "fedv-table2": FEW,
    "fedv-table5": FEW,
    "fedv-ditto": FEW,
    "pits": FEW,
    "features": FEW,
}
Content = Mapping[str, Any]  # study.json


def call(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def prepared(name: str, sets: Mapping[str, Any] | None = None, target: str | None = None) -> studying.Prepared:
    """The study in its tiny form."""
    items = [f"{key}={value}" for key, value in (sets or {}).items()]
    return studying.prepare_study(
        name, paper=False, seeds="0", target=target, flags=FLAGS[name], sets=items, out=Path("out")
    )


def carried_out(plan: studying.Prepared, folder: Path) -> dict[str, Any]:
    """Run a study and give its study.json."""
    plan = replace(plan, home=folder, folder=folder)
    assert list(studying.carry_out(plan, 1, Console(quiet=True), quiet=True))
    content: dict[str, Any] = json.loads((folder / "study.json").read_text())
    return content


def narrowed(plan: studying.Prepared) -> studying.Prepared:
    """The first and the last column of a wide grid, and some rows of a long one; all where columns have their own."""
    if plan.study.costs is not None or plan.study.kind == "gains":
        rows = ("local", "fedavg", "fedperfix", "fedperfix_last_block")
        return replace(plan, cells=[cell for cell in plan.cells if cell.case.row in rows])
    columns = list(dict.fromkeys(cell.case.column for cell in plan.cells))
    if plan.study.kind == "time":
        columns = columns[:2]  # the others are large networks
        return replace(plan, cells=[cell for cell in plan.cells if cell.case.column in columns])
    if plan.study.kind == "choose" or len(columns) < 3:
        return plan
    return replace(plan, cells=[cell for cell in plan.cells if cell.case.column in (columns[0], columns[-1])])


def figures(content: Content, row: str, column: str = "") -> dict[str, Any]:
    found: dict[str, Any] = cell(content, row, column)["figures"]
    return found


def cell(content: Content, row: str, column: str = "") -> dict[str, Any]:
    return next(r for r in content["rows"] if (r["row"], r["column"]) == (row, column))


def run_of(folder: Path, row: Mapping[str, Any]) -> Run:
    return Run(folder / row["runs"] / "seed0")


# What each study must show.


def check_sensitivity(folder: Path, content: Content) -> None:
    """Each part alone and with the head."""
    alone, both = (figures(content, "attn", column) for column in ("alone", "with head"))
    head = figures(content, "head", "alone")["params"]["personal"]
    assert both["params"]["personal"] == alone["params"]["personal"] + head
    assert set(content["overall"]) == {"patch_embed", "pos_embed", "norm", "attn", "mlp"}
    assert content["overall"]["attn"] == pytest.approx((alone["accuracy"] + both["accuracy"]) / 2)
    assert figures(content, "mlp", "alone")["gain_over_local"] is not None  # all_local is Local


def check_table2(folder: Path, content: Content) -> None:
    """Accuracies with the cost of every row; the authors' last block stays at home."""
    sent = {}
    for row in content["rows"]:
        f = row["figures"]
        assert 4 * f["costs"]["communication"] == f["nbytes"]["up"]
        assert f["costs"]["storage"] >= f["params"]["total"]
        sent[row["row"]] = f["nbytes"]["up"]
    assert sent["local"] == 0 < sent["fedperfix_last_block"] < sent["fedperfix"] < sent["fedavg"]
    assert {row["settings"].get("partition.alpha") for row in content["rows"]} == {0.3, 0.1}


def check_gains(folder: Path, content: Content) -> None:
    """What every client gains over Local, as its own files say."""
    for row in content["rows"]:
        run, local = run_of(folder, row), run_of(folder, cell(content, "local"))
        alone = {client["client"]: client["personal_accuracy"] for client in local.clients}
        gains = sorted(client["personal_accuracy"] - alone[client["client"]] for client in run.clients)
        assert row["figures"]["gains"] == ([] if row["row"] == "local" else pytest.approx(gains))
        assert len(gains) == 8


def check_shares(folder: Path, content: Content) -> None:
    """A share for each of the four blocks; at the start it is near one half, because there are as many prefix rows."""
    for row in content["rows"]:
        shares = row["figures"]["prefix_share"]
        assert len(shares) == 4
        assert all(0.2 < share < 0.8 for share in shares)
    first, *_, last = (row["figures"]["prefix_share"] for row in content["rows"])
    assert first != last


def check_backbones(folder: Path, content: Content) -> None:
    assert {row["settings"]["model.name"] for row in content["rows"]} == {"resnet18", "vit_micro"}


def check_sizes(folder: Path, content: Content) -> None:
    sizes = [figures(content, "fedavg", column)["params"]["total"] for column in ("4 blocks of 48", "12 blocks of 192")]
    assert sizes[1] > 50 * sizes[0]


def check_settings(folder: Path, content: Content) -> None:
    sizes = {(row["settings"]["partition.clients"], row["settings"]["train.cohort"]) for row in content["rows"]}
    assert sizes == {(16, 2), (32, 8)}
    assert len(run_of(folder, content["rows"][0]).clients) == 16


def check_designs(folder: Path, content: Content) -> None:
    """A rerun finds finished rows and writes the same bytes; the estimate of bytes is what really crossed."""
    before = {p: p.read_bytes() for p in (folder / "study.json", folder / "study.png")}
    stamps = {p: p.stat().st_mtime_ns for p in folder.rglob("summary.json")}
    plan = prepared("designs")
    carried_out(plan, folder)
    assert len(stamps) == 6
    assert {p: p.stat().st_mtime_ns for p in stamps} == stamps
    assert {p: p.read_bytes() for p in before} == before
    for row, estimate in zip(content["rows"], estimates(plan.cells), strict=True):
        sent = row["figures"]["nbytes_run"]
        assert estimate["nbytes"] == sent["down"] + sent["up"]


def check_targets(folder: Path, content: Content) -> None:
    """Bytes to a target are those of the rounds until then."""
    assert "fixed before" in content["targets"]
    for row in content["rows"]:
        lines, view = run_of(folder, row).rounds, row["figures"]["view"]
        by = "micro" if content["study"] == "convergence" else "mean"  # PFedEdit's targets are of all images
        for found in row["figures"]["to_target"]:
            reached = [line["round"] for line in lines if line["views"][view][by] >= found["target"]]
            assert found["rounds"] == (reached[0] if reached else None)
            if reached:
                sent = nbytes_of_run(lines[: reached[0]])
                assert found["nbytes"] == sent["down"] + sent["up"] > 0
                assert found["paper_mb"] == sent["down"] / 2**20
            else:
                assert found["nbytes"] is found["paper_mb"] is None


def check_convergence(folder: Path, content: Content) -> None:
    """A target that every row reaches at once, one that none ever does, and how they are shown."""
    check_targets(folder, content)
    plan = prepared("convergence", target="0,100")
    table, *_ = studying.carry_out(replace(plan, home=folder, folder=folder), 1, Console(quiet=True), quiet=True)
    content = json.loads((folder / "study.json").read_text())
    for row in content["rows"]:
        first, never = row["figures"]["to_target"]
        sent, cohort = row["figures"]["nbytes"], content["settings"]["train.cohort"]
        assert (first["rounds"], first["nbytes"]) == (1, cohort * (sent["down"] + sent["up"]))
        assert (never["rounds"], never["nbytes"]) == (None, None)
    written = io.StringIO()
    Console(width=120, file=written).print(table)
    line = next(text for text in written.getvalue().splitlines() if text.split()[:1] == ["pfededit"])
    assert line.split()[-2:] == ["-", "-"]  # the second target, and no published figure


def check_capability(folder: Path, content: Content) -> None:
    rules = {(row["settings"]["partition.alpha"], row["settings"]["partition.clients"]) for row in content["rows"]}
    assert rules == {(1000.0, 8), (0.3, 24)}
    few, all_ = (figures(content, tune, "N=8 M=8 iid")["nbytes"]["up"] for tune in ("bias", "full"))
    assert few < all_ / 10


def check_tunes(folder: Path, content: Content) -> None:
    trained = {row["row"]: row["figures"]["params"]["trainable"] for row in content["rows"]}
    assert set(trained) == {"full", "head", "bias", "adapter", "prompt"}
    assert max(trained, key=lambda tune: trained[tune]) == "full"
    assert min(trained, key=lambda tune: trained[tune]) == "head"


def check_scarcity(folder: Path, content: Content) -> None:
    for row in content["rows"]:
        clients = run_of(folder, row).clients
        assert sum(c["train_samples"] + c["test_samples"] for c in clients) == row["settings"]["data.samples"]
        wanted = int(row["column"].split()[0])  # K counts training images, as in the paper
        assert sum(c["train_samples"] for c in clients) == pytest.approx(wanted, abs=len(clients) / 2)


def check_lr(folder: Path, content: Content) -> None:
    """The rate with the best val accuracy is chosen, and the test accuracy of that rate stated."""
    assert set(content["chosen"]) == {"full", "head", "bias", "adapter", "prompt"}
    misled = []
    for tune, pick in content["chosen"].items():
        rows = {row["row"]: row for row in content["rows"] if row["column"] == tune}
        vals = {rate: run_of(folder, row).summary["views"]["personal"]["val"] for rate, row in rows.items()}
        assert len(vals) == 5
        assert pick["val"] == max(vals.values()) == vals[pick["row"]]
        assert pick["accuracy"] == rows[pick["row"]]["figures"]["accuracy"]
        misled.append(pick["accuracy"] < max(row["figures"]["accuracy"] for row in rows.values()))
    assert any(misled), "here val and test never disagree, so this cannot tell which one chooses"


def check_dh(folder: Path, content: Content) -> None:
    classes = {
        column: {client["classes"] for client in run_of(folder, cell(content, "fedavg", column)).clients}
        for column in ("DH 0 %", "DH 100 %")
    }
    assert classes == {"DH 0 %": {10}, "DH 100 %": {1}}


def check_edit(folder: Path, content: Content) -> None:
    """A row for every value, and one chosen on val in every column."""
    rows: dict[str, list[str]] = {}
    for row in content["rows"]:
        rows.setdefault(row["column"], []).append(row["row"])
    assert rows["layers k"] == ["0", "1", "2", "3", "5", "8"]
    assert rows["metric"] == ["accuracy", "loss", "te", "prediction_list"]
    assert rows["choice"] == ["fixed", "flexible"]
    assert len(rows["probe p"]) == 4
    assert set(content["chosen"]) == set(rows)
    for k in (1, 2, 3, 5, 8):
        last = run_of(folder, cell(content, f"{k}", "layers k")).rounds[-1]["choice"]
        edited = {len(layers) for layers in last.values()}
        assert k in edited <= {0, k}  # none by clients that train for the first time
    shared = {row["runs"] for row in content["rows"]}
    assert len(shared) == len(content["rows"]) - 2  # the default stands in three columns and is run once


def check_parameter(folder: Path, content: Content) -> None:
    """A study of one parameter asks what the study of all four asks, so both find the same runs."""
    check_best(folder, content)
    whole = {(cell.case.column, cell.case.row): cell.row.first for cell in prepared("edit").cells}
    for cell in prepared(content["study"]).cells:
        assert whole[cell.case.column, cell.case.row] == cell.row.first


def check_probe(folder: Path, content: Content) -> None:
    """The images to try layers on vary, and those to train on do not."""
    check_parameter(folder, content)
    trained = {tuple(client["train_samples"] for client in run_of(folder, row).clients) for row in content["rows"]}
    assert len(trained) == 1
    parts = [load_data(run_of(folder, row).experiment)[1].clients["0"] for row in content["rows"]]
    assert len({len(part.probe) for part in parts}) == len(parts) == 4
    assert len({tuple(part.train) for part in parts}) == 1


def check_best(folder: Path, content: Content) -> None:
    """The best round over all images stands beside the last one, which stays the headline."""
    for row in content["rows"]:
        curve = [line["views"]["personal"]["micro"] for line in run_of(folder, row).rounds]
        figure = row["figures"]
        assert figure["best_micro"] == max(curve)
        assert figure["micro"] == curve[-1]
        assert curve[int(figure["converged"]) - 1] >= max(curve) - 0.5
        assert all(micro < max(curve) - 0.5 for micro in curve[: int(figure["converged"]) - 1])
    shown = shown_tables(folder, content)
    assert "best round" in shown
    assert f"{content['rows'][0]['figures']['best_micro']:.1f}" in shown


def shown_tables(folder: Path, content: Content) -> str:
    """What the terminal shows of a study that has run."""
    study, written = STUDIES[content["table"]], io.StringIO()
    seconds = measured_seconds(content, folder) if study.kind == "time" else None
    for table in study_tables(content, study, "title", seconds):
        Console(width=160, file=written).print(table)
    return written.getvalue()


def check_seconds(folder: Path, content: Content) -> None:
    """Seconds are those of training, checking and averaging after the first round, and study.json has none."""
    for name, found in measured_seconds(content, folder).items():
        timings = Run(folder / name / "seed0").timings
        assert found == pytest.approx(sum(timings[1]["seconds"][phase] for phase in ("train", "updates", "aggregate")))
        assert f"{found:.3g}" in shown_tables(folder, content)
    assert "seconds" not in json.dumps([row["figures"] for row in content["rows"]])


def check_choice(folder: Path, content: Content) -> None:
    """Among norms only norms are edited, and a choice at random stays."""
    model = build(ModelSettings(patch_size=4), 10, (), 0)
    kinds = {name: isinstance(module, NORMS) for name, module in model.named_modules()}
    norms = run_of(folder, cell(content, "norms", "k=9")).summary["layers"]
    assert len(norms) == 9
    assert all(kinds[layer] for layer in norms)
    for name in ("random", "norms"):
        run = run_of(folder, cell(content, name, "k=1"))
        assert len({tuple(layers) for line in run.rounds for layers in line["choice"].values() if layers}) == 1


def check_fedv(folder: Path, content: Content) -> None:
    """The federated rows are those that the paper compares with, and only the split rows keep a body at the server."""
    rows = {row["row"]: row for row in content["rows"]}
    assert rows["fedavg, then local"]["settings"]["method.name"] == "fedavg_ft"
    assert rows["fed_rod"]["settings"]["method.hyper"] is True
    assert {"local", "ditto", "festa", "fedv", "fedvz"} <= set(rows)
    assert len({row["column"] for row in content["rows"]}) == 2


def check_ditto(folder: Path, content: Content) -> None:
    assert set(content["chosen"]) == {"Dir(0.1)", "Dir(0.3)", "Path-2", "Path-5"}
    assert {row["settings"]["method.lam"] for row in content["rows"]} == {0.1, 0.4, 0.75, 1.0}


def check_split(folder: Path, content: Content) -> None:
    epochs = [f"local epochs K, T={t}" for t in (4, 12)]
    assert set(content["chosen"]) == {*epochs, "clients M", "fedround"}
    assert {row["settings"].get("train.rounds") for row in content["rows"] if row["column"] in epochs} == {4, 12}
    assert content["settings"]["method.name"] == "fedv"
    one, five = (figures(content, k, epochs[0])["nbytes"]["up"] for k in ("1", "5"))
    assert five > 2 * one  # activations cross at every step, weights once


def check_pits(folder: Path, content: Content) -> None:
    assert {row["settings"]["method.name"] for row in content["rows"]} == {"fedv", "fedvz"}
    assert {row["settings"]["model.name"] for row in content["rows"]} == {"vit_micro", "test_vit"}


def check_features(folder: Path, content: Content) -> None:
    """Points of test images by class, the same again for the same seed."""
    check_tunes(folder, content)
    with np.load(folder / "features.npz") as arrays:
        points, labels = arrays["full.points"], arrays["full.labels"]
        assert np.array_equal(labels, arrays["bias.labels"])  # every panel shows the same images
        assert not np.array_equal(points, arrays["bias.points"])
    assert points.shape == (len(labels), 2)
    assert set(labels) == set(range(10))
    assert all(-1 <= row["figures"]["silhouette"] <= 1 for row in content["rows"])
    again = picture(run_of(folder, cell(content, "full")))
    assert np.array_equal(again.points, points)  # t-SNE is seeded


CHECKS: dict[str, Callable[[Path, Content], None]] = {
    "sensitivity": check_sensitivity,
    "fedperfix-table2": check_table2,
    "fedperfix-figure3": check_gains,
    "fedperfix-lambda": check_shares,
    "backbones": check_backbones,
    "settings": check_settings,
    "sizes": check_sizes,
    "designs": check_designs,
    "communication": check_targets,
    "convergence": check_convergence,
    "capability": check_capability,
    "domain-gap": check_tunes,
    "scarcity": check_scarcity,
    "pretraining": check_tunes,
    "lr": check_lr,
    "dh": check_dh,
    "edit": check_edit,
    **{f"pfededit-table{number}": check_parameter for number in (3, 5, 7)},
    "pfededit-table4": check_probe,
    "pfededit-table6": check_best,
    "pfededit-table8": check_best,
    "pfededit-table9": check_seconds,
    "choice": check_choice,
    "split": check_split,
    "fedv-table2": check_fedv,
    "fedv-table5": check_fedv,
    "fedv-ditto": check_ditto,
    "pits": check_pits,
    "features": check_features,
}


@pytest.mark.parametrize("name", FLAGS)
def test_a_study_runs_and_its_figures_are_those_of_its_runs(name: str, tmp_path: Path) -> None:
    folder, study = tmp_path / "study", STUDIES[name]
    content = carried_out(narrowed(prepared(name)), folder)
    assert {"study", "source", "grid", "seeds", "settings", "versions", "rows", "command"} <= set(content)
    assert (content["grid"], content["seeds"]) == ("digits", [0])
    assert (folder / "study.png").stat().st_size > 10_000
    assert json.loads((folder / "timings.json").read_text())["total"] > 0
    assert len({(row["row"], row["column"]) for row in content["rows"]}) == len(content["rows"]) > 1
    for row in content["rows"]:
        run, figure = run_of(folder, row), row["figures"]
        assert figure["view"] == study.view  # not another one for want of it
        assert figure["accuracy"] == run.summary["views"][study.view]["mean"] == figure["by_seed"][0]
        assert figure["nbytes_run"] == run.summary["nbytes_run"]
        settings = {**content["settings"], **row["settings"]}
        saved = {f"{t}.{k}": v for t, own in to_tables(run.experiment).items() for k, v in own.items()}
        saved.pop("run.seed")
        assert settings == saved
    CHECKS[name](folder, content)


def test_every_study_of_the_papers_is_there() -> None:
    tried = {plain_name(name) for name in ("resources", *FLAGS)}
    assert tried == {plain for studies in PAPERS.values() for plain in studies}


def test_old_and_new_names_are_the_same_studies() -> None:
    """No name occurs twice; a study of one table is named after it, and the names of earlier versions still hold."""
    names = [name for studies in PAPERS.values() for plain, study in studies.items() for name in (plain, *study.aka)]
    assert len(names) == len(set(names)) == len(STUDIES)
    for paper, studies in PAPERS.items():
        for plain, study in studies.items():
            assert paper_of(plain) == paper
            assert all(STUDIES[name] is study and plain_name(name) == plain for name in study.aka)
            number = re.fullmatch(r"\w+, (Table|Figure) (\d+)", study.source)
            if number:
                assert plain == f"{paper}-{number[1].lower()}{number[2]}"
    older = "sensitivity backbones settings sizes designs resources communication capability domain-gap scarcity "
    older += "pretraining lr features dh convergence edit choice pits split"
    assert set(older.split()) <= set(STUDIES)
    assert plain_name("sensitivity") == "fedperfix-table1"
    assert STUDIES["communication"] is STUDIES["fedpeft-table2"] is STUDIES["fedpeft-table1"]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("fedperfix-tabel1", "did you mean 'fedperfix-table1'?"),
        ("sensitivty", "did you mean 'sensitivity'?"),
        ("fedperfix", "or all with --all fedperfix"),
    ],
)
def test_an_unknown_name_suggests_the_nearest(name: str, told: str) -> None:
    status, _, message = call("study", name)
    assert status == 2
    assert told in " ".join(message.split())


def test_both_names_of_a_study_find_the_same_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [f"--{key.replace('_', '-')}={value}" for key, value in FEW.items()]
    assert call("study", "designs", *words, "--seeds", 0, "--quiet")[0] == 0
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("summary.json")}
    (first,) = tmp_path.rglob("study.json")
    old = json.loads(first.read_text())
    assert call("study", "fedperfix-table6", *words, "--seeds", 0, "--quiet")[0] == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("summary.json")} == before != {}
    (second,) = tmp_path.rglob("study.json")
    assert (old["study"], old["table"]) == ("designs", "fedperfix-table6")
    assert first == second
    assert {**json.loads(second.read_text()), "command": old["command"]} == old


def test_the_published_grid_has_the_papers_seeds() -> None:
    """Three seeds where a paper averages over runs, the published seed where it names one."""
    for paper, seeds in (("fedpeft", [0, 1, 2]), ("fedv", [0, 1, 2]), ("fedperfix", [1]), ("pfededit", [2023])):
        for study in PAPERS[paper].values():
            if study.kind != "features":
                assert default_seeds(study, "paper") == seeds
    plan = studying.prepare_study("fedpeft-table4", paper=True, seeds=None, target=None, flags={}, sets=None)
    assert [list(cell.row.experiments) for cell in plan.cells] == [[0, 1, 2]] * 10


def test_without_a_name_the_studies_are_listed_with_their_cost() -> None:
    status, shown, _ = call("study")
    assert status == 0
    for paper, studies in PAPERS.items():
        for name, study in studies.items():
            assert all(one in shown for one in (name, *study.aka))
            assert study.minutes[0] <= 30
            assert (study.minutes[1] is None) is (study.pretrained is None)
            names = ", ".join(f"`{one}`" for one in (name, *study.aka))
            assert f"| {names} | {study.asks} | {study.source} | {' | '.join(size_in_words(study))} |" in DOCS
        listed = [re.search(rf"^ {name}\b", shown, re.MULTILINE).start() for name in studies]  # type: ignore[union-attr]
        assert listed == sorted(listed), f"the studies of {paper} do not stand together"


def test_listing_the_studies_does_not_import_torch() -> None:
    code = "import sys\nfrom fedvit.cli.main import app\ntry: app(['study'])\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"  # noqa: E501
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "fedperfix-table1" in done.stdout


def test_resources_equal_the_exact_counts_and_the_papers_units(tmp_path: Path) -> None:
    status, shown, message = call("study", "resources", "--out", tmp_path / "s")
    assert status == 0, message
    content = json.loads((tmp_path / "s" / "study.json").read_text())
    assert len(content["rows"]) == 9
    for row in content["rows"]:
        figure, (storage, flops, sent) = row["figures"], map(float, row["published"].split())
        assert figure["paper_units"]["storage"] == pytest.approx(storage, abs=0.005)
        assert figure["paper_units"]["communication"] == pytest.approx(sent, abs=0.005)
        assert figure["training_passes"] == round(flops / 65.65)
        assert figure["nbytes"] == {"down": 4 * figure["communication"], "up": 4 * figure["communication"]}
    exact = {row["row"]: (row["figures"]["storage"], row["figures"]["communication"]) for row in content["rows"]}
    assert exact["fedavg"] == (21_704_164, 21_704_164)
    assert exact["apfl"] == (2 * 21_704_164, 21_704_164)
    assert exact["fedper"] == (21_704_164, 21_704_164 - 38_500)
    assert exact["fedperfix"] == (21_704_164 + 3_551_232, 21_665_664)
    assert exact["vanilla_attention"] == (21_704_164, 14_569_344)
    assert "21.03" in shown
    assert (tmp_path / "s" / "study.png").is_file()


@pytest.mark.parametrize("label", ["fedper", "fedper+head"])
def test_features_of_personal_models_come_from_the_clients_own(label: str, tmp_path: Path) -> None:
    seen = picture(Run(finish(tiny(label, rounds=1), tmp_path / "run")))
    assert seen.model == "clients"
    assert len(seen.points) == len(seen.labels) > 100


# A study that is killed.


def test_a_killed_study_ends_with_the_same_bytes(tmp_path: Path) -> None:
    """A real SIGKILL in the middle of the grid, another from outside, and the same command again."""
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in {**FEW, "rounds": 2}.items()]
    words = ["study", "designs", *flags, "--seeds", "0", "--out", "out", "--quiet"]

    def start(folder: str, moment: tuple[str, str, int] | None = None) -> Any:
        (tmp_path / folder).mkdir(exist_ok=True)
        return started(words, moment, tmp_path / folder)

    def ended(process: Any) -> int:
        process.join()
        return int(process.exitcode)

    whole = start("whole")
    assert ended(start("killed", ("fedvit.core.plan", "descend", 14))) == -signal.SIGKILL
    out = tmp_path / "killed" / "out"
    assert not (out / "study.json").exists()
    assert 0 < len(list(out.rglob("summary.json"))) < 6

    again, begin = start("killed"), time.monotonic()
    while len(list(out.rglob("summary.json"))) < 4 and time.monotonic() - begin < 120:
        time.sleep(0.02)
    again.kill()
    assert ended(again) == -signal.SIGKILL
    assert not (out / "study.json").exists()

    assert ended(start("killed")) == 0
    assert ended(whole) == 0
    for name in ("study.json", "study.png"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / "out" / name).read_bytes(), name
    for path in out.rglob("clients.csv"):
        assert path.read_bytes() == (tmp_path / "whole" / "out" / path.relative_to(out)).read_bytes()


# The published settings.


def resolved(name: str) -> list[Any]:
    return [(case, load_experiment(base=case.settings)) for case in STUDIES[name].paper]


@pytest.mark.parametrize("name", STUDIES)
def test_paper_rows_resolve_and_differ(name: str) -> None:
    plan = studying.prepare_study(name, paper=True, seeds=None, target=None, flags={}, sets=None)
    assert plan.which == "paper"
    assert len(plan.cells) == len(STUDIES[name].paper)
    assert len({(cell.case.row, cell.case.column) for cell in plan.cells}) == len(plan.cells)


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("fedperfix-table2", "fedperfix/table2"),
        ("backbones", "fedperfix/table3"),
        ("settings", "fedperfix/table4"),
        ("sizes", "fedperfix/table5"),
        ("designs", "fedperfix/table6"),
        ("dh", "pfededit/table1"),
        ("pfededit-table6", "pfededit/table6"),
        ("pfededit-table8", "pfededit/table8"),
        ("pits", "fedv/table3"),
        ("fedv-table2", "fedv/table2"),
        ("fedv-table5", "fedv/table5"),
    ],
)
def test_paper_rows_are_those_of_the_experiment_files(name: str, table: str) -> None:
    paths = [p for p in (ROOT / "experiments" / table).glob("*/*.toml") if p.parent.name != "small"]
    files = {path: load_experiment(path) for path in paths}
    assert files
    found = [experiment for _, experiment in resolved(name)]
    for path, experiment in files.items():
        assert experiment in found, path


def test_fedpeft_settings_are_the_published_ones() -> None:
    for name in ("communication", "capability", "domain-gap", "scarcity", "pretraining", "lr", "features"):
        for case, e in resolved(name):
            assert (e.train.rounds, e.train.epochs, e.train.batch, e.train.weight_decay) == (50, 10, 64, 1e-4), case
            assert (e.train.optimizer, e.method["name"], e.model.image_size) == ("sgd", "fedavg", 224)
            assert e.model.pretrained is (case.row != "scratch")
    rates = {case.row: e.train.lr for case, e in resolved("features")}
    assert rates == {"full": 5e-4, "head": 1e-2, "bias": 1e-2, "adapter": 5e-3, "prompt": 1e-2}
    capability = {(case.row, case.column): e for case, e in resolved("capability")}
    assert len(capability) == 42
    assert capability["full", "N=64 M=8 skewed"].train.lr == 5e-4
    assert capability["full", "N=16 M=2 iid"].train.lr == 1e-3
    assert capability["full", "N=16 M=2 iid"].partition.name == "iid"
    communication = {(case.row, case.column): (case, e) for case, e in resolved("communication")}
    assert {e.train.cohort for _, e in communication.values()} == {1, 2, 4, 8, 64}
    assert communication["full_x8", "CIFAR-100"][0].targets == (85, 90)
    assert communication["shufflenet_x8", "PCam"][1].train.lr == 0.1
    scarcity = {case.column: e.data.samples for case, e in resolved("scarcity")}
    assert scarcity == {"1000 images": 1000, "1500 images": 1500, "2000 images": 2000}
    grid = {(case.column, e.train.lr): case for case, e in resolved("lr")}
    assert len(grid) == 330
    best = {column: rate for (column, rate), case in grid.items() if case.published == "best"}
    assert len(best) == 55
    assert best["N=64 M=8 skewed, full"] == 5e-4
    assert best["1000 images, adapter"] == 1e-3
    assert best["N=64 M=64 skewed, head"] == 5e-3
    assert communication["head_x64", "CIFAR-100"][1].train.lr == 5e-3  # as Table 8 says for 64 clients per round
    assert communication["head_x64", "PCam"][1].data.join_val is False
    assert {rate for _, rate in grid} == {1e-4, 5e-4, 1e-3, 5e-3, 1e-2, 5e-2}
    assert all(e.data.val > 0 for _, e in resolved("lr"))


def test_fedpefts_costs_stand_beside_ours_in_the_papers_units() -> None:
    cases = {(case.row, case.column): case for case, _ in resolved("fedpeft-table2")}
    assert cases["bias_x8", "CIFAR-100"].costs == ("5.49MB", "38.34MB (7 rounds)", "115.29MB (21 rounds)")
    assert cases["full_x1", "CIFAR-100"].costs == ("328MB", "-", "-")
    assert cases["head_x64", "PCam"].costs == ("19.53MB", "-", "-")
    reached = [{"target": 85.0, "rounds": 6.0, "nbytes": 84e6, "paper_mb": 40.05}]
    reached.append({"target": 90.0, "rounds": None, "nbytes": None, "paper_mb": None})  # type: ignore[dict-item]
    figures = {"view": "server", "accuracy": 89.0, "nbytes_run": {"down": 7e6, "up": 7e6}, "rounds": 1.0}
    row = {"row": "bias_x8", "column": "", "published": "91.02", "figures": {**figures, "to_target": reached}}
    costs = {"published_costs": cases["bias_x8", "CIFAR-100"].costs}
    study = STUDIES["fedpeft-table2"]
    console = Console(record=True, width=200, file=io.StringIO())
    for content in ({"rows": [row]}, {"rows": [{**row, **costs}]}):
        console.print(*study_tables(content, study, "a title"))
    plain, beside = console.export_text().split("a title")[1:]
    assert "published 5" not in plain
    for words in (
        "published 5.49MB",
        "one way 40.05MB, published 38.34MB (7 rounds)",
        "published 115.29MB (21 rounds)",
    ):
        assert words in beside
    assert "one way, in units of 2^20 bytes" in beside


def test_pfededit_settings_are_the_published_ones() -> None:
    for name in ("convergence", "edit", "choice", *(f"pfededit-table{n}" for n in (3, 4, 5, 7))):
        for _, e in resolved(name):
            assert (e.train.rounds, e.train.epochs, e.train.cohort, e.partition.clients) == (100, 1, 10, 10)
            assert e.partition.level == (50 if e.data.name == "lyme" else 80)
    edit = {(case.column, case.row): e.method for case, e in resolved("edit")}
    shares = (0, 1, 3, 5, 7, 9)
    assert edit["layers, CIFAR-10", "0%"]["name"] == "fedavg"
    for data in ("CIFAR-10", "CIFAR-100", "Lyme"):
        assert [edit[f"layers, {data}", f"{n}%"]["ratio"] for n in shares[1:]] == [n / 100 for n in shares[1:]]
    edited = [m for m in edit.values() if m["name"] == "pfededit"]
    assert all(m["layers"] == "paper" and m["k"] is None for m in edited), "k is a share of the layers that it counts"
    assert edit["probe, CIFAR-10", "0.025"]["probe"] == 0.025
    assert {m["held_out"] or m["probe"] for m in edited} == {0.1}, "500 of 5,000 images are never trained on"
    assert ("probe, CIFAR-100", "0.01") not in edit
    assert edit["choice, CIFAR-100", "fixed"]["flexible"] is False
    assert {e.method["k"] for _, e in resolved("choice")} == {1, 3, 5, 7, 10, 13, 17}
    chosen = {(case.row, e.method["layers"], e.method["flexible"]) for case, e in resolved("choice")}
    assert chosen == {("random", "paper", False), ("norms", "main_norms", False), ("ranked", "paper", True)}
    rounds = {(case.column, case.row): case.published for case, _ in resolved("pfededit-table7")}
    assert rounds["choice, CIFAR-100", "fixed"] == ".885±.019, round 30"
    assert rounds["choice, CIFAR-10", "flexible"] == ".962±.018, round 23"
    assert resolved("convergence")[0][0].targets == (60, 70, 75, 80, 85, 90)
    assert STUDIES["convergence"].target_by == "micro"
    skin = [e for case, e in resolved("pfededit-table8") if case.column == "Lyme, light and dark skin"]
    assert {(e.partition.name, e.partition.clients, e.data.layout) for e in skin} == {("domain", 10, "domain")}
    networks = {(case.column, e.model.name, e.model.image_size) for case, e in resolved("pfededit-table9")}
    assert networks == {
        ("MLP", "mlp", 32), ("ResNet18", "resnet18", 64), ("ResNet50", "resnet50", 64),
        ("DenseNet121", "densenet121", 64),
    }  # fmt: skip


def test_sensitivity_and_split_settings_are_the_published_ones() -> None:
    for _, e in resolved("sensitivity"):
        assert (e.model.name, e.partition.clients, e.train.cohort, e.train.lr) == ("vit_small_patch16_224", 64, 8, 0.01)
    split = {(case.column, case.row): e for case, e in resolved("split")}
    assert split["clients M", "200"].partition.clients == 10 * (split["clients M", "200"].train.cohort or 0) == 200
    assert split["fedround", "50"].method["fedround"] == 50
    assert all((e.train.optimizer, e.train.lr) == ("adam", 2e-4) for e in split.values())
    assert {e.partition.alpha for (column, _), e in split.items() if column == "clients M"} == {0.3}
    assert {e.partition.alpha for (column, _), e in split.items() if column != "clients M"} == {0.1}
    after = {column: e.train.rounds for (column, _), e in split.items() if column.startswith("local epochs")}
    assert after == {f"local epochs K, T={t}": t for t in (20, 40, 60, 80, 100)}


def test_fedvs_table_2_has_its_split_rows_with_kept_heads_too() -> None:
    rows = {case.row: e for case, e in resolved("fedv-table2") if case.column == "CIFAR-100, Path-10"}
    for name in ("fedv", "fedvz"):
        paper, kept = rows[name], rows[f"{name}, kept head"]
        assert (paper.method["init"], paper.method["client_head_lr"], paper.train.lr) == ("random", 2e-4, 2e-4)
        assert (kept.method["init"], kept.method["client_head_lr"], kept.train.lr) == ("pretrained", 0, 0.005)
        assert kept.method == paper.method | {"init": "pretrained", "client_head_lr": 0.0}
    assert {e.method["lam"] for _, e in resolved("fedv-ditto")} == {0.1, 0.4, 0.75, 1.0}


def test_fedavg_beside_fedv_is_tested_after_local_training() -> None:
    """Appendix A.3 compares the models that FedAvg's clients have trained, not the one that the server sends."""
    for name in ("fedv-table2", "fedv-table5"):
        rows = [(case, e) for case, e in resolved(name) if case.row == "fedavg_ft"]
        assert rows
        for case, e in rows:
            assert case.published
            assert STUDIES[name].view == "personal"
            assert e.method == {"name": "fedavg_ft", "epochs": e.train.epochs}


def test_split_studies_in_small_have_a_pre_trained_body_if_there_is_one() -> None:
    for name in ("fedv-table2", "fedv-table3", "fedv-table5", "fedv-figure2"):
        cases = STUDIES[name].pretrained or []
        split = [case for case in cases if case.settings["method"]["name"] in ("fedv", "fedvz", "festa")]
        assert {case.settings["train"]["lr"] for case in split} == {0.005}, name
        weights = [case.settings["model"]["weights"] for case in split]
        assert weights.count("vit_tiny_patch16_224.fp16.safetensors") >= len(weights) * 2 / 3


def test_every_published_figure_is_with_its_row() -> None:
    for name, table in (("sensitivity", fedperfix.TABLE1), ("capability", fedpeft.TABLE3)):
        values = {(row, column.words): value for row, column, value, _, _ in rows_of(table)}
        assert {(c.row, c.column): c.published for c in STUDIES[name].paper} == values


def test_a_row_of_another_method_drops_the_options_of_the_one_below() -> None:
    below = {**method("fedv", lr=0.1, fedround=5), "data": {"name": "digits"}}
    assert settings_of(below, method("fedvz"), {"method": {"init": "random"}}) == {
        "data": {"name": "digits"},
        "train": {"lr": 0.1},
        "method": {"name": "fedvz", "init": "random"},
    }
    assert list(settings_of(below)) == ["data", "train", "method"]  # as an experiment file has them


# Which grid, before anything runs, and mistakes.


def test_pre_trained_weights_are_used_where_they_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "office_caltech10").mkdir()
    (tmp_path / "vit_tiny_patch16_224.fp16.safetensors").touch()
    study = STUDIES["scarcity"]
    assert choose_grid(study, paper=False, data=None, folder=tmp_path)[0] == "pretrained"
    assert choose_grid(study, paper=False, data="digits", folder=tmp_path)[0] == "digits"
    assert choose_grid(study, paper=False, data=None, folder=None)[0] == "digits"
    assert choose_grid(study, paper=True, data=None, folder=None)[0] == "paper"
    assert choose_grid(STUDIES["dh"], paper=False, data=None, folder=tmp_path)[0] == "digits"
    three = STUDIES["fedperfix-table2"]  # it needs two more files
    assert choose_grid(three, paper=False, data=None, folder=tmp_path)[0] == "digits"
    for name in ("cifar100_small.npz", "pneumoniamnist.npz"):
        (tmp_path / name).touch()
    assert choose_grid(three, paper=False, data=None, folder=tmp_path)[0] == "pretrained"
    prepared("fedperfix-table2")
    assert "from scratch" not in caplog.text  # as in the paper
    with caplog.at_level(logging.WARNING):
        prepared("scarcity")
    assert "from scratch" in caplog.text


def test_a_study_on_pre_trained_weights_runs(shared_data: Path, tmp_path: Path) -> None:
    flags = ["--data-dir", shared_data, "--rounds", 1, "--samples", 400, "--image-size", 32, "--clients", 4]
    status, _, message = call("study", "pretraining", *flags, "--cohort", 1, "--seeds", 0, "--out", tmp_path / "s")
    assert status == 0, message
    content = json.loads((tmp_path / "s" / "study.json").read_text())
    assert content["grid"] == "pretrained"
    weights = {row["column"]: row["settings"].get("model.weights") for row in content["rows"]}
    assert weights == {"ViT-Tiny, ImageNet": "vit_tiny_patch16_224.fp16.safetensors", "ViT-Tiny, random": None}


def test_a_dry_run_shows_the_grid_with_its_bytes_and_runs_nothing(tmp_path: Path) -> None:
    status, shown, message = call("study", "designs", "--dry-run", "--rounds", 2, "--out", tmp_path / "s")
    assert status == 0, message
    assert not (tmp_path / "s").exists()
    assert "fedperfix" in shown
    assert "18 runs" in shown
    plan = prepared("designs")
    found = dict(zip([c.case.row for c in plan.cells], estimates(plan.cells), strict=True))
    assert found["local"]["nbytes"] == 0
    assert found["fedperfix"]["nbytes"] == 2 * 2 * 4 * found["fedperfix"]["params"]["shared"]
    assert found["fedperfix"]["macs"] > found["local"]["macs"] > 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nothing"], "unknown study 'nothing'"),
        (["lr", "--lr", "0.1"], "this study varies train.lr"),
        (["sizes", "--seeds", "a"], "--seeds expects whole numbers"),
        (["sizes", "--target", "50"], "--target is only for fedpeft-table1, pfededit-table2"),
        (["communication", "--target", "much", "--data", "digits"], "--target expects numbers"),
        (["designs", "--set", "method.k=3"], "no row has this key"),
        (["designs", "--clients", "3", "--cohort", "9"], "cannot be sampled"),
    ],
)
def test_a_mistake_is_told(arguments: list[str], told: str, tmp_path: Path) -> None:
    status, _, message = call("study", *arguments, "--out", tmp_path / "s")
    assert status == 2
    assert told in " ".join(message.split())
    assert not (tmp_path / "s").exists()


def test_a_set_goes_to_the_rows_that_have_it() -> None:
    plan = prepared("designs", {"method.bottleneck": 8})
    assert {c.row.first.method.get("bottleneck") for c in plan.cells} == {8, None}
