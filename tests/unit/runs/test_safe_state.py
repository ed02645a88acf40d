"""A run's folder: one process at a time, no checkpoint that cannot be continued, no file elsewhere touched."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedvit.core.errors import DivergedError, UserError
from fedvit.engine.checkpoint import load_checkpoint
from fedvit.engine.client_store import ClientStore
from fedvit.runs.execute import run_rounds
from fedvit.runs.folder import Run
from fedvit.runs.lock import only_run
from fedvit.runs.resume import start_or_resume
from tests.conftest import finish, tiny
from tests.grid import Federated

FEW = {"clients": 3, "samples": 120, "cohort": 3}


@pytest.mark.parametrize("method", ["fedper", "fedv"])
def test_two_runs_in_one_folder_do_not_interleave(method: str, tmp_path: Path) -> None:
    experiment = tiny(method, **FEW)
    steps = run_rounds(experiment, tmp_path / "r")
    next(steps)
    with pytest.raises(UserError, match="another process is running in"):
        list(start_or_resume(experiment, tmp_path / "r", resume=True))
    assert [row["round"] for row in Run(tmp_path / "r").rounds] == [1]
    list(steps)
    assert [row["round"] for row in Run(tmp_path / "r").rounds] == [1, 2]
    assert list(start_or_resume(experiment, tmp_path / "r", resume=True)) == [], "the lock ends with the run"


def test_a_run_that_another_process_began_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    experiment = tiny("fedper", **FEW)
    late = start_or_resume(experiment, tmp_path / "r", resume=False)  # it has found an empty folder
    finish(experiment, tmp_path / "r")
    summary = (tmp_path / "r" / "summary.json").read_bytes()
    with pytest.raises(UserError, match="another process has begun a run in"):
        next(late)
    assert (tmp_path / "r" / "summary.json").read_bytes() == summary


def test_a_trial_over_flower_is_alone_in_its_folder(tmp_path: Path) -> None:
    from fedvit.network.flower.trial import run_trial
    from fedvit.runs.lock import TRIAL_LOCK

    (tmp_path / "flower").mkdir()
    with only_run(tmp_path, TRIAL_LOCK), pytest.raises(UserError, match="another process is running in"):
        next(run_trial(tiny("fedper", **FEW), tmp_path))
    assert (tmp_path / "flower").is_dir(), "what the first one uses"


def test_a_manifest_that_names_a_file_elsewhere_deletes_and_reads_nothing(tmp_path: Path) -> None:
    experiment = tiny("fedper", **FEW, rounds=3)
    steps = run_rounds(experiment, tmp_path / "r")
    next(steps)
    next(steps)
    steps.close()
    victim = tmp_path / "r" / "mine.safetensors"
    newest = tmp_path / "r" / "checkpoint" / "manifest-000002.json"
    manifest = json.loads(newest.read_text())
    name = next(iter(manifest["clients"]))
    kept = tmp_path / "r" / "checkpoint" / manifest["clients"][name]["file"]
    victim.write_bytes(kept.read_bytes())
    manifest["clients"][name]["file"] = "../mine.safetensors"  # with the right hash
    newest.write_text(json.dumps(manifest))
    list(start_or_resume(experiment, tmp_path / "r", resume=True))
    assert victim.is_file()
    assert Run(tmp_path / "r").finished
    assert "it names a file that no checkpoint has" in (tmp_path / "r" / "log.txt").read_text()


@pytest.mark.parametrize("text", ["[]", "{}", '{"server": 3, "clients": []}', "[" * 100_000])
def test_a_manifest_that_is_none_is_damage(text: str, tmp_path: Path) -> None:
    experiment = tiny("fedper", **FEW)
    finish(experiment, tmp_path / "r")
    (tmp_path / "r" / "checkpoint" / "manifest-000003.json").write_text(text)
    found = load_checkpoint(tmp_path / "r" / "checkpoint", ClientStore(tmp_path / "r" / "checkpoint", in_ram=False))
    assert found is not None
    assert found.round == 2


def test_weights_with_which_nobody_can_go_on_are_not_saved(tmp_path: Path) -> None:
    experiment = tiny("fedavgm", {"method.server_lr": 1e35, "run.eval_every": 0}, **FEW, rounds=3)
    with pytest.raises(DivergedError, match=r"weights became .* in round 1. The run is saved up to round 0"):
        finish(experiment, tmp_path / "r")
    assert not Run(tmp_path / "r").rounds
    assert not list((tmp_path / "r" / "checkpoint").glob("manifest*"))


def test_weights_that_the_sites_would_refuse_are_not_saved(tmp_path: Path) -> None:
    sets = {"method.server_lr": 1e6, "run.eval_every": 0}
    federated = Federated(tiny("fedavgm", sets, **FEW, rounds=3), tmp_path)
    with pytest.raises(DivergedError, match="the sites would refuse the server's weights: group shared"):
        federated.finish(min_sites=3)
    assert not Run(federated.out).rounds


def test_a_server_that_wants_a_site_to_start_again_deletes_nothing(tmp_path: Path) -> None:
    federated = Federated(tiny("fedper", **FEW), tmp_path)
    federated.finish(min_sites=3)
    (run,) = (path.name for path in (federated.state_of("0") / "states").iterdir())
    before = {path.name: path.read_bytes() for path in (federated.state_of("0") / "states" / run).iterdir()}
    ask(federated, run, 1e5, continues=0, round_=1)  # weights that end in no training
    after = {path.name: path.read_bytes() for path in (federated.state_of("0") / "states" / run).iterdir()}
    assert after == before


def test_a_message_from_the_future_does_not_block_a_site(tmp_path: Path) -> None:
    federated = Federated(tiny("fedper", **FEW), tmp_path)
    assert "code" not in ask(federated, "r", 1.0, continues=0, round_=1, years=10)
    assert "code" not in ask(federated, "r", 1.0, continues=0, round_=1)


def ask(federated: Federated, run: str, scale: float, *, continues: int, round_: int, years: float = 0) -> Any:
    """The answer of site 0 to a training message with the initial weights times a number, dated in some years."""
    import torch
    from flwr.app import Message

    from fedvit.core.payload import Payload
    from fedvit.engine.net import make_net
    from fedvit.network.flower.apps import read_app
    from fedvit.network.flower.records import ABOUT, to_records

    experiment, federation = read_app(federated.folder / "app" / "fedvit_app")
    net = make_net(experiment, len(federation.classes), torch.device("cpu"))
    down = net.federated.dispatch(net.server(federation.sites), "0")
    trees = {group: {name: tensor * scale for name, tensor in members.items()} for group, members in down.trees.items()}
    content = to_records(Payload(trees, {**down.scalars, "round": round_}), {"run": run, "continues": continues})
    message = Message(content, dst_node_id=100, message_type="train", group_id=str(round_))
    message.metadata.created_at += years * 365 * 86400
    federated.wires.push_messages([message])
    return dict(federated.wires.crossed[-1].content[ABOUT])
