"""All studies of a paper: runs are shared between studies, also between commands, and the cost is known in advance."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from filelock import FileLock

from fedvit.config.load import load_experiment
from fedvit.engine.cost import cost
from fedvit.report.load import collect
from fedvit.studies import definitions, small
from fedvit.studies import run as studying
from fedvit.studies.cases import grid
from fedvit.studies.definitions.study import Study
from fedvit.studies.measure import estimates
from fedvit.studies.published.common import method
from fedvit.studies.rows import Row, run_rows
from tests.unit.studies.test_studies import FEW, call, prepared

FLAGS = [f"--{key.replace('_', '-')}={value}" for key, value in FEW.items()]
FIRST = Study(
    asks="Do runs without Local serve others?",
    source="Ours",
    kind="accuracy",
    view="personal",
    columns="",
    digits=grid(small.DIGITS, small.methods("fedavg", "fedper")),
    paper=grid({**small.DIGITS, "run": {"seed": 5}}, small.methods("fedavg", "fedper")),
    minutes=(1, None),
    seeds=(0, 1),
)
SECOND = replace(
    FIRST,
    digits=grid(small.DIGITS, small.methods("local", "fedper", "fedbn")),
    paper=grid({**small.DIGITS, "run": {"seed": 5}}, {"fedper": method("fedper")}),
    seeds=(0,),
)


@pytest.fixture
def paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A paper of two studies, of which one has Local and both have FedPer."""
    own = {"ours-table1": FIRST, "ours-table2": SECOND}
    monkeypatch.setitem(definitions.PAPERS, "ours", own)
    for name, study in own.items():
        monkeypatch.setitem(definitions.STUDIES, name, study)
    monkeypatch.chdir(tmp_path)
    return "ours"


def finished(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("rounds.jsonl")}


def test_the_studies_of_a_paper_share_their_runs(paper: str, tmp_path: Path) -> None:
    """Five runs fill seven cells; each study has its table, and its figures are those that it has on its own."""
    status, shown, message = call("study", "--all", paper, *FLAGS)
    assert status == 0, message
    assert "ours-table1" in shown
    assert "ours-table2" in shown
    runs = finished(tmp_path / "runs")
    assert len(runs) == 2 * 2 + 3 - 1
    assert len({path.parent for path in runs}) == 6
    contents = {p: json.loads(p.read_text()) for p in sorted(tmp_path.rglob("study.json"))}
    assert [content["table"] for content in contents.values()] == ["ours-table1", "ours-table2"]
    by_row = {row["row"]: row for path, c in contents.items() for row in c["rows"] if c["table"] == "ours-table1"}
    for path, content in contents.items():
        alone = tmp_path / "alone" / content["table"]
        assert call("study", content["table"], *FLAGS, "--quiet", "--out", alone)[0] == 0
        lone = json.loads((alone / "study.json").read_text())
        assert [row["figures"] for row in content["rows"]] == [row["figures"] for row in lone["rows"]]
        assert all((path.parent / row["runs"] / "seed0" / "summary.json").is_file() for row in content["rows"])
    assert by_row["fedper"]["figures"]["gain_over_local"] is None  # the first study has no Local
    second = {row["row"]: row["figures"] for row in list(contents.values())[1]["rows"]}
    assert second["fedper"]["gain_over_local"] is not None  # though its run was trained without one

    status, _, _ = call("study", "ours-table2", *FLAGS, "--quiet")  # alone, it finds the runs of before
    assert status == 0
    assert finished(tmp_path / "runs") == runs


def test_the_cost_is_told_in_advance_with_shared_runs_counted_once(paper: str, tmp_path: Path) -> None:
    status, shown, message = call("study", "--all", paper, *FLAGS, "--dry-run")
    assert status == 0, message
    assert not (tmp_path / "runs").exists()
    assert "6 runs, " in shown
    assert "1 of 7 are shared" in " ".join(shown.split())
    plans = [
        studying.prepare_study(name, paper=False, seeds=None, target=None, flags=FEW, sets=None)
        for name in ("ours-table1", "ours-table2")
    ]
    first, second = ([one["nbytes"] for one in estimates(plan.cells)] for plan in plans)
    total = sum(first) + sum(second) - second[1]  # FedPer of seed 0 is in both
    assert f"{total / 1e9:.3g} GB" in shown
    assert call("study", "--all", paper, *FLAGS, "--quiet")[0] == 0
    assert "6 runs (6 of them have finished)" in " ".join(call("study", "--all", paper, *FLAGS, "--dry-run")[1].split())


def test_paper_all_means_full_size(paper: str) -> None:
    """The published grid with the published seed, by either spelling, and not the small one."""
    for words in (("--paper-all", paper), ("--all", paper, "--paper")):
        status, shown, message = call("study", *words, *FLAGS, "--dry-run")
        assert status == 0, message
        assert "at full size" in shown
        assert "2 runs, " in shown
    assert "in small" in call("study", "--all", paper, *FLAGS, "--dry-run")[1]


def test_a_study_that_fails_does_not_stop_the_others_and_the_command_continues(
    paper: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first study has data that are not there; the second still ends, and only what failed is run again."""
    broken = replace(FIRST, digits=grid({**small.DIGITS, "data": {"name": "nowhere"}}, small.methods("fedavg")))
    flags = [flag for flag in FLAGS if not flag.startswith("--data")]
    monkeypatch.setitem(definitions.PAPERS[paper], "ours-table1", broken)
    monkeypatch.setitem(definitions.STUDIES, "ours-table1", broken)
    status, _, message = call("study", "--all", paper, *flags, "--quiet")
    assert status == 2
    assert "1 of 2 studies have not finished" in message
    assert "nowhere" in message
    (done,) = tmp_path.rglob("study.json")
    assert json.loads(done.read_text())["table"] == "ours-table2"
    runs = finished(tmp_path / "runs")
    monkeypatch.setitem(definitions.PAPERS[paper], "ours-table1", FIRST)
    monkeypatch.setitem(definitions.STUDIES, "ours-table1", FIRST)
    assert call("study", "--all", paper, *flags, "--quiet")[0] == 0
    assert len(list(tmp_path.rglob("study.json"))) == 2
    again = finished(tmp_path / "runs")
    assert len(runs) == 3 < len(again)
    assert {path: again[path] for path in runs} == runs


def test_a_report_of_a_study_finds_its_shared_runs(paper: str, tmp_path: Path) -> None:
    assert call("study", "--all", paper, *FLAGS, "--quiet", "--out", "all")[0] == 0
    for name, labels in (("ours-table1", {"fedavg", "fedper"}), ("ours-table2", {"local", "fedper", "fedbn"})):
        (folder,) = (tmp_path / "all").glob(f"{name}-*")
        (rows,) = collect([folder])
        assert {row.label for row in rows} == labels
        status, _, message = call("table", folder, "--figure", tmp_path / "again.svg", "--out", tmp_path / "t.md")
        assert status == 0, message
    (rows,) = collect([tmp_path / "all"])
    assert {row.label for row in rows} == {"fedavg", "fedper", "local", "fedbn"}


def test_two_commands_do_not_train_one_run_at_the_same_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A shared run whose lock another command holds is waited for."""
    row = Row("fedavg", {0: load_experiment(None, {}, {**FEW, "method": "fedavg", "seed": 0})}, place="runs/x/fedavg")
    (tmp_path / "runs/x/fedavg").mkdir(parents=True)
    with FileLock(tmp_path / "runs/x/fedavg/seed0.lock"):
        steps = run_rows([row], tmp_path, lambda *_: None, lambda *_: None, 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FileLock, "release", lambda self: None)
            patch.setattr(FileLock, "acquire", _refuse_to_wait)
            with pytest.raises(_WouldWaitError):
                next(steps)
    assert "waiting for another command" in caplog.text
    assert not (tmp_path / "runs/x/fedavg/seed0").exists()
    assert len(list(run_rows([row], tmp_path, lambda *_: None, lambda *_: None, 1))) == 1


class _WouldWaitError(Exception):
    """Raised instead of waiting for a lock."""


_acquire = FileLock.acquire


def _refuse_to_wait(self: FileLock, timeout: float | None = None) -> None:
    if timeout is None:
        raise _WouldWaitError
    _acquire(self, timeout=timeout)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--all", "fedprefix"], "unknown paper 'fedprefix'; did you mean 'fedperfix'?"),
        (["designs", "--all", "fedperfix"], "exclude each other"),
        (["--all", "fedperfix", "--target", "3"], "--target is for a single study"),
    ],
)
def test_a_mistake_is_told(words: list[str], told: str) -> None:
    status, _, message = call("study", *words)
    assert status == 2
    assert told in " ".join(message.split())


def test_multiply_adds_count_all_training_images_of_an_official_split() -> None:
    """CIFAR-100 has 50,000 training images. A partition of pooled images holds data.test of all 60,000 out."""

    def images(partition: str, **data: float) -> float:
        plan = prepared("designs", {"partition.name": partition})
        e = plan.cells[0].row.first
        tables = {"data": e.data.model_copy(update={"name": "cifar100", "samples": None, "test": 0.25, **data})}
        cell = replace(plan.cells[0], row=replace(plan.cells[0].row, experiments={0: e.model_copy(update=tables)}))
        (found,) = estimates([cell])
        assert e.train.cohort
        assert e.partition.clients
        macs = cost(e, 100)["macs_per_example"]
        per_image = 3 * e.train.epochs * macs * e.train.rounds * e.train.cohort
        return float(found["macs"] / per_image * e.partition.clients)

    assert images("dirichlet_train") == pytest.approx(50_000)
    assert images("pathological", samples=1000) == pytest.approx(1000)
    assert images("iid", val=0.2) == pytest.approx(40_000)
    assert images("dirichlet") == pytest.approx(45_000)
