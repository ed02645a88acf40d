"""Rounds over Flower with real processes: the same bits as in one process, and faults that cost one round."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from fedvit.engine.client_store import memory_to_bytes
from fedvit.network.flower.template import for_trial, write_app
from fedvit.network.site_state import SiteState
from fedvit.runs.folder import Run
from tests.conftest import finish, tiny
from tests.grid import newest
from tests.network.field import MAY_FALL_SILENT, Field, field, until
from tests.unit.network.test_sites import memories, server_files

THREE = {"clients": 3, "samples": 120}
LAST = {**THREE, "eval_every": 0}  # tested after the last round only
SITES = ["0", "1", "2"]
pytestmark = MAY_FALL_SILENT


def states(made: Field, out: Path) -> dict[str, bytes]:
    """The newest state of every site in one run."""
    run = json.loads((out / "network.json").read_text())["run"]
    kept = {s: memory_to_bytes(newest(SiteState(made.state_of(s) / "states"), run)) for s in made.sites}
    return {site: blob for site, blob in kept.items() if blob != memory_to_bytes({})}


# Roles only, memory, PEFT, a learned merge, extra groups.
@pytest.mark.parametrize("label", ["fedperfix", "ditto", "fedper+bias", "fedala", "scaffold"])
def test_one_method_of_each_kind_ends_with_the_same_bits(label: str, tmp_path: Path) -> None:
    experiment = tiny(label, **THREE)
    alone, out = finish(experiment, tmp_path / "alone"), tmp_path / "out"
    with field(tmp_path, SITES) as made:
        run = made.finish(experiment, out)
        assert run.finished, (out / "error.txt").read_text()
        assert server_files(out) == server_files(alone)
        assert states(made, out) == memories(alone)
        keys = ("cohort", "failed", "loss", "nbytes_down", "nbytes_up", "nbytes_evaluation")
        views = Run(alone).rounds[-1]["views"]
        if label in ("ditto", "fedala"):  # sites test their own models, and a server without images cannot test its own
            del views["server"]
        assert run.rounds[-1]["views"] == views
        assert [[row[k] for k in keys] for row in run.rounds] == [[row[k] for k in keys] for row in Run(alone).rounds]


def test_a_policy_is_shown_at_the_server(tmp_path: Path) -> None:
    """A site whose rules forbid the method ends the run before its first round."""
    rules = tmp_path / "policy.toml"
    rules.write_text('methods = ["local"]')
    with field(tmp_path, ["0", "2"]) as made:
        made.start("1", policy=str(rules))
        number = made.submit(tiny("fedavg", **THREE), tmp_path / "out")
        made.wait(tmp_path / "out")
        said = "the policy allows local, but this run uses fedavg"
        assert f"site 1 does not take part: {said}" in (tmp_path / "out" / "error.txt").read_text()
        ended = f"the run ended: site 1 does not take part: {said}"
        until(lambda: ended in made.flower_log(number), "the server's sentence")
        for text in (made.flower_log(number), made.said("1")):  # one sentence each, and no traceback
            assert text.count(said) == 1
            assert "Traceback" not in text


def into_round_2(made: Field) -> Path:
    """A run of four rounds, whose second has begun at site 2; its folder."""
    out = made.folder / "out"
    made.submit(tiny("fedper", **LAST, cohort=3, rounds=4), out, min_sites=2, round_timeout=60.0)
    until(lambda: "round 2: train" in made.said("2"), "round 2 at site 2")
    return out


def test_a_node_killed_in_mid_round_comes_back_with_its_own_state(tmp_path: Path) -> None:
    with field(tmp_path, SITES) as made:
        out = into_round_2(made)
        made.kill("2")
        until(lambda: len(Run(out).rounds) == 2, "round 2")
        assert Run(out).rounds[1]["failed"] == ["2"]
        made.start("2")
        run = made.wait(out)
        assert run.finished
        assert run.rounds[-1]["failed"] == []
        assert "client 2" in (out / "log.txt").read_text()
        assert sorted(rounds_at(made, out, "2"))[-1] == 4


def test_a_node_that_answers_late_is_left_out_and_goes_on_from_what_counted(tmp_path: Path) -> None:
    with field(tmp_path, SITES) as made:
        out = into_round_2(made)
        made.signal("2", signal.SIGSTOP)
        until(lambda: len(Run(out).rounds) == 2, "round 2 without site 2")
        made.signal("2", signal.SIGCONT)
        run = made.wait(out)
        assert run.finished
        assert run.rounds[1]["failed"] == ["2"]
        assert run.rounds[-1]["failed"] == []
        assert "2 did not answer" in (out / "log.txt").read_text()
        assert sorted(rounds_at(made, out, "2"))[-1] == 4


GARBAGE = """
from pathlib import Path

from fedvit.network.flower import apps
from fedvit.network.flower.records import from_records, to_records

honest = apps.answer


def answer(folder, told, records, task, sent):
    found = honest(folder, told, records, task, sent)
    if told["site"] != "1" or task != "train":
        return found
    content, about = from_records(found)
    weights, number = content.trees["shared"], int(about["round"])
    name = next(iter(weights))
    if number == 1:
        weights[name] = weights[name] * float("nan")
    elif number == 2:
        weights[name] = weights[name].flatten()[:1]
    elif number == 3:
        about["round"] = 2
    return to_records(content, about)


apps.answer = answer
app = apps.client_app(Path(__file__).parent)
"""


def test_garbage_costs_its_sender_the_round(tmp_path: Path) -> None:
    """NaN, another shape and the reply of another round, by an app that is not ours."""
    out, app = tmp_path / "out", tmp_path / "out-app"
    experiment, federation, _, _ = for_trial(tiny("fedper", **LAST, cohort=3, rounds=4))
    write_app(app, experiment, federation, str(out))
    (app / "fedvit_app" / "client_app.py").write_text(GARBAGE)
    with field(tmp_path, SITES) as made:
        made.submit_app(experiment, federation, out, min_sites=2)
        run = made.wait(out)
    assert run.finished, (out / "error.txt").read_text()
    assert [row["failed"] for row in run.rounds] == [["1"], ["1"], ["1"], []]


def test_a_server_killed_in_mid_round_resumes_to_the_same_bits(tmp_path: Path) -> None:
    experiment = tiny("fedper", **LAST, rounds=3)
    alone = finish(experiment, tmp_path / "alone")
    with field(tmp_path, SITES) as made:
        out = tmp_path / "out"
        made.submit(experiment, out)
        until(lambda: len(Run(out).rounds) == 1, "round 1")
        cohort = finish_cohort(alone, 2)
        until(lambda: all(2 in rounds_at(made, out, site) for site in cohort), "all replies of round 2")
        subprocess.run(["pkill", "-KILL", "-f", f"flwr-serverapp.*{made.trial.port}"], check=False)
        made.kill("superlink")
        made.start("superlink")
        made.submit(experiment, out, resume=True)
        run = made.wait(out)
        assert run.finished
        assert server_files(out) == server_files(alone)
        assert states(made, out) == memories(alone)


def finish_cohort(folder: Path, round_: int) -> list[str]:
    return [str(name) for name in Run(folder).rounds[round_ - 1]["cohort"]]


def rounds_at(made: Field, out: Path, site: str) -> list[int]:
    """The rounds whose states a site has on disk."""
    saved = out / "network.json"
    if not saved.is_file():
        return []
    return list(SiteState(made.state_of(site) / "states").states(json.loads(saved.read_text())["run"]))


def test_a_trial_on_this_machine_ends_as_a_run_in_one_process(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "fedvit", "run", "--method", "fedper", "--clients", "2", "--cohort", "2"]
    words += ["--samples", "80", "--rounds", "1"]
    alone, out = tmp_path / "alone", tmp_path / "out"
    subprocess.run([*words, "--out", alone, "--quiet"], check=True)
    done = subprocess.run([*words, "--engine", "flower", "--out", out], check=True, capture_output=True, text=True)
    assert "fedper" in done.stdout
    assert (out / "report.html").is_file()
    for name in ("clients.csv", "confusion.json"):
        assert (out / name).read_bytes() == (alone / name).read_bytes()
    assert {path.name for path in (out / "sites").iterdir()} == {"0", "1"}


def test_ctrl_c_leaves_no_process_behind(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = [sys.executable, "-m", "fedvit.cli.main", "run", "--engine", "flower", "--clients", "2", "--cohort", "2"]
    words += ["--samples", "80", "--rounds", "50", "--out", str(out)]
    heard = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731, a background shell ignores it
    process = subprocess.Popen(words, stderr=subprocess.PIPE, start_new_session=True, preexec_fn=heard)
    until(lambda: len(Run(out).rounds) >= 1, "round 1")
    assert len(processes_of(out)) >= 3
    os.kill(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert b"--resume continues" in said
    assert not processes_of(out)


def processes_of(out: Path) -> list[str]:
    """The commands of all processes that Flower started for this folder, whatever their arguments."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"FLWR_HOME={out}" in (process / "environ").read_text(errors="replace"):
                found.append((process / "cmdline").read_text())
    return [command for command in found if command]  # those that have ended have none
