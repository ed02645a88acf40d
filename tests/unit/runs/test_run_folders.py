"""Default folders never collide, and a disk that cannot be written is a message that comes before the work."""

import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedvit.cli.main import app
from fedvit.config.hashing import NO_RESULT, settings_hash
from fedvit.config.resolve import to_tables
from fedvit.core.errors import UserError
from fedvit.core.files import check_writable
from fedvit.runs.folder import Run
from tests.conftest import finish, tiny

QUICK = ["--patch-size", "4", "--rounds", "1", "--epochs", "1", "--cohort", "2", "--clients", "12", "--quiet"]
SMALL_FILES = 20_000  # bytes, less than a checkpoint of the smallest model


def call(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stderr.replace("\n", " ")


def runs() -> list[str]:
    return sorted(path.name for path in Path("runs").iterdir())


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finish(tiny(rounds=1), tmp_path_factory.mktemp("run") / "r")


def test_settings_that_change_a_result_change_the_hash_and_others_do_not() -> None:
    plain = settings_hash(tiny())
    assert len(plain) == 64
    assert plain == settings_hash(to_tables(tiny()))
    assert plain != settings_hash(tiny(lr=0.5))
    assert plain != settings_hash(tiny(threads=3))
    assert plain != settings_hash(tiny(seed=1))
    assert settings_hash(tiny(seed=1), without=["run.seed"]) == settings_hash(tiny(), without=["run.seed"])
    assert settings_hash(tiny("fedper"), without=["method"]) == settings_hash(tiny(), without=["method"])
    values = {"data.dir": "/somewhere", "data.cache": "/somewhere", "run.cache_mb": 7, "run.track": "tensorboard"}
    assert set(values) == set(NO_RESULT)
    for key, value in values.items():
        assert settings_hash(tiny(sets={key: value})) == plain, key


def test_runs_with_other_settings_get_other_default_folders(here: Path) -> None:
    assert call("run", *QUICK)[0] == 0
    assert call("run", *QUICK, "--lr", "0.5")[0] == 0
    assert call("run", *QUICK, "--seed", "1")[0] == 0
    names = runs()
    assert len(names) == 3
    assert [name.rpartition("-")[0] for name in names] == ["fedavg-digits-seed0"] * 2 + ["fedavg-digits-seed1"]
    status, message = call("run", *QUICK)
    assert status == 2
    assert "already holds a run with these settings, which is finished" in message
    assert "--resume" in message


def test_resume_without_a_folder_finds_the_run_it_can_mean(here: Path) -> None:
    assert call("run", *QUICK, "--lr", "0.5")[0] == 0
    (name,) = runs()
    assert call("run", *QUICK, "--resume", "--rounds", "2")[0] == 0  # keeps the rate, which is not given
    assert runs() == [name]
    run = Run(Path("runs") / name)
    assert (run.summary["rounds"], run.summary["lr"]) == (2, 0.5)
    status, message = call("run", *[flag for flag in QUICK if flag != "--quiet"], "--resume", "--lr", "0.1")
    assert status == 0
    assert "train.lr was 0.5, now 0.1" in message
    assert len(runs()) == 2


def test_resume_that_could_mean_two_runs_asks_which(here: Path) -> None:
    assert call("run", *QUICK, "--lr", "0.5")[0] == 0
    assert call("run", *QUICK, "--lr", "0.6")[0] == 0
    status, message = call("run", *QUICK, "--resume")
    assert status == 2
    assert all(name in message for name in runs())


def test_a_stopped_run_is_told_from_a_finished_one(run_folder: Path, tmp_path: Path) -> None:
    half = shutil.copytree(run_folder, tmp_path / "half")
    (half / "summary.json").unlink()
    flags = ["--patch-size", 4, "--epochs", 1, "--cohort", 2, "--clients", 12, "--rounds", 1]
    status, message = call("run", *flags, "--out", half)
    assert status == 2
    assert "stopped after round 1 of 1: continue it with --resume" in message
    status, message = call("run", *flags, "--lr", "0.5", "--out", half)
    assert "with other settings: train.lr was 0.002, now 0.5" in message


def test_a_mistake_in_the_data_comes_before_one_about_the_folder(run_folder: Path, tmp_path: Path) -> None:
    for folder in (run_folder, tmp_path / "file" / "r"):
        (tmp_path / "file").touch()
        assert "unknown dataset" in call("run", "--data", "nowhere", "--out", folder)[1]
        assert "unknown method" in call("run", "--method", "nothing", "--out", folder)[1]
    (tmp_path / "images" / "a").mkdir(parents=True)
    assert "is empty" in call("run", "--data", tmp_path / "images", "--out", run_folder)[1]


PLACES = ["/proc/fedvit/r", "file/r"]  # nobody may write to the first, and the second is below a file


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "command",
    [
        ["run", *QUICK, "--out", "PLACE"],
        ["compare", "fedavg", *QUICK, "--out", "PLACE"],
        ["study", "designs", "--data", "digits", *QUICK, "--out", "PLACE"],
        ["report", "RUN", "--out", "PLACE/report.html"],
        ["export", "RUN", "--all", "--out", "PLACE"],
        ["export", "RUN", "--server", "--out", "PLACE/m.safetensors"],
        ["predict", "RUN", "image.png", "--server", "--csv", "PLACE/p.csv"],
        ["partition", "--out", "PLACE/p.png"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_a_place_that_cannot_be_written_is_one_message(
    command: list[str], place: str, run_folder: Path, here: Path
) -> None:
    (here / "file").touch()
    status, message = call(*[word.replace("PLACE", place).replace("RUN", str(run_folder)) for word in command])
    assert status == 2
    assert message.startswith("error: ")
    assert place in message
    assert "Traceback" not in message


def test_a_place_is_checked_without_leaving_anything_behind(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="choose another place, or change its permissions"):
        check_writable(Path("/proc/fedvit"))


@pytest.mark.parametrize(
    "command",
    [
        ["run", *QUICK, "--out", "new"],
        ["export", "RUN", "--server", "--out", "m"],
        ["report", "RUN", "--out", "r.html"],
    ],
    ids=lambda words: words[0],
)
def test_a_disk_that_becomes_full_is_one_message(command: list[str], run_folder: Path, tmp_path: Path) -> None:
    words = [word.replace("RUN", str(run_folder)) for word in command]
    done = subprocess.run(
        [sys.executable, "-m", "fedvit", *words],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_FILES, SMALL_FILES)),
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "cannot be written" in done.stderr
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("*.partial"))


def test_names_that_a_spreadsheet_would_calculate_are_escaped_in_every_table_and_read_back(tmp_path: Path) -> None:
    from fedvit.core.files import as_written, no_formula
    from fedvit.runs.folder import read_clients
    from fedvit.runs.write import Holding, _write_clients_csv

    names = ["=1+1", "+x", "-x", "@x", "'=x", "''=x", "'x", "x", "x=1"]
    assert [as_written(no_formula(name)) for name in names] == names
    assert len({no_formula(name) for name in names}) == len(names)
    assert no_formula(-1.5) == -1.5
    scores = {name: {"personal_accuracy": -0.5, "personal_balanced_accuracy": 1, "personal_loss": 2} for name in names}
    roster, trained = dict.fromkeys(names, Holding(1, 2, 3)), dict.fromkeys(names, 1)
    _write_clients_csv(tmp_path / "clients.csv", roster, scores, trained, None, ("accuracy", "loss"))
    cells = [line.split(",")[0] for line in (tmp_path / "clients.csv").read_text().splitlines()[1:]]
    assert not [cell for cell in cells if cell.startswith(("=", "+", "-", "@"))]
    assert [row["client"] for row in read_clients(tmp_path / "clients.csv")] == names
    assert {row["personal_accuracy"] for row in read_clients(tmp_path / "clients.csv")} == {-0.5}
