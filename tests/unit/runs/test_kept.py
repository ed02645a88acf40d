"""run.keep and run.patience: the round chosen on validation images, what is saved of it, and what takes it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fedvit.core.errors import UserError
from fedvit.core.settings import Experiment, RunSettings
from fedvit.engine.net import make_net
from fedvit.runs.evaluate import evaluate
from fedvit.runs.execute import run_rounds
from fedvit.runs.export import export, load_model
from fedvit.runs.folder import Run
from fedvit.runs.kept import best_round, is_over
from tests.conftest import finish, same_trees, tiny
from tests.unit.cli.test_command_line import QUICK, call

# Rates so large that a round before the last two is the best, by several points: see `best_of`.
VAL: dict[str, Any] = {"data.val": 0.3, "train.warmup": 5}
BEST = {**VAL, "run.keep": "best"}
WILD: dict[str, Any] = {"lr": 0.02, "rounds": 6, "clients": 6, "cohort": 3}
OF_METHOD: dict[str, dict[str, Any]] = {
    "fedper": WILD,
    "local": {**WILD, "cohort": 6},
    "fedrolex": WILD,
    "fedv": {**WILD, "lr": 0.12, "rounds": 7},
}


def row(number: int, val: float | None, **more: Any) -> dict[str, Any]:
    views = None if val is None else {"personal": {"mean": 50.0, "val": val}}
    return {"round": number, "views": views, **more}


def test_the_best_round_is_the_first_with_the_highest_score_on_validation_images() -> None:
    assert best_round([]) is None
    assert best_round([row(1, 60), row(2, None), row(3, 70), row(4, 70), row(5, 65)]) == 3
    assert best_round([{"round": 1, "views": {"personal": {"mean": 99.0}}}]) is None  # test images choose nothing


def test_a_round_that_a_client_missed_is_not_better_than_a_whole_one() -> None:
    missed = row(2, 90, failures_evaluation={"north": "is not connected"})
    assert best_round([row(1, 60), missed, row(3, 61)]) == 3
    assert best_round([missed]) == 2


def test_patience_counts_evaluations_without_a_better_score() -> None:
    run = RunSettings(patience=2)
    rows = [row(1, 60), row(2, 70), row(3, 70), row(4, None), row(5, 69), row(6, 71)]
    assert [is_over(rows[:n], run) for n in range(7)] == [False, False, False, False, False, True, False]
    assert not is_over(rows, RunSettings())


def wild(method: str, sets: dict[str, Any]) -> Experiment:
    flags = OF_METHOD[method]
    rates = {f"method.{key}": flags["lr"] for key in ("client_head_lr", "server_lr")} if method == "fedv" else {}
    return tiny(method, {**sets, **rates}, **flags)


@pytest.fixture(scope="module", params=OF_METHOD)
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(finish(wild(request.param, BEST), tmp_path_factory.mktemp("kept") / request.param))


def method_of(run: Run) -> str:
    return str(run.settings["method"]["name"])


def best_of(run: Run) -> int:
    number = best_round(run.rounds)
    assert number is not None
    assert number < len(run.rounds) - 1, "choose other settings: this run cannot show what is kept"
    return number


def test_every_model_of_a_run_is_the_one_it_had_in_its_best_round(kept: Run, tmp_path: Path) -> None:
    best = best_of(kept)
    steps = run_rounds(wild(method_of(kept), VAL), tmp_path / "r")
    for _ in range(best):
        next(steps)
    steps.close()
    stopped = Run(tmp_path / "r")  # the same run, stopped after that round
    for client in kept.split["clients"]:
        mine = kept.model(client)
        found = {name: tensor.clone() for name, tensor in mine.state_dict().items()}
        assert mine.description.round == best  # type: ignore[union-attr]
        assert same_trees(found, stopped.model(client).state_dict())
        last = kept.model(client, last=True)
        assert last.description.round == len(kept.rounds)  # type: ignore[union-attr]
        if client in kept.rounds[-1]["cohort"]:
            assert not same_trees(found, last.state_dict())


def test_the_summary_tells_of_the_kept_round_beside_the_last(kept: Run) -> None:
    best = best_of(kept)
    told = kept.summary["kept"]
    assert (told["rule"], told["round"]) == ("best", best)
    assert told["views"] == kept.rounds[best - 1]["views"]
    assert told["val"] == max(row["views"]["personal"]["val"] for row in kept.rounds)
    views = kept.rounds[-1]["views"]["personal"]
    assert {key: kept.summary["views"]["personal"][key] for key in views} == views
    mean = sum(client["personal_accuracy"] for client in kept.kept_clients) / len(kept.kept_clients)
    assert mean == pytest.approx(told["views"]["personal"]["mean"])
    assert [row["client"] for row in kept.kept_clients] == [row["client"] for row in kept.clients]


def test_the_checkpoint_holds_two_generations_and_the_best_and_no_litter(kept: Run) -> None:
    folder, best = kept.folder / "checkpoint", best_of(kept)
    manifests = {int(path.stem[-6:]): json.loads(path.read_text()) for path in folder.glob("manifest-*.json")}
    assert set(manifests) == {best, len(kept.rounds) - 1, len(kept.rounds)}
    needed = {path.name for path in folder.glob("manifest-*.json")}
    for manifest in manifests.values():
        versions = [manifest["server"], manifest["scores"], *manifest["clients"].values()]
        needed |= {version["file"] for version in versions}
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == needed


def test_a_run_that_keeps_the_last_round_has_the_same_bytes_as_ever(kept: Run, tmp_path: Path) -> None:
    plain = Run(finish(wild(method_of(kept), VAL), tmp_path / "plain"))
    for name in ("rounds.jsonl", "clients.csv", "confusion.json", "split.json"):
        assert (plain.folder / name).read_bytes() == (kept.folder / name).read_bytes()
    assert plain.summary["kept"] is None
    assert len([*(plain.folder / "checkpoint").glob("manifest-*")]) == 2
    assert not [*(plain.folder / "checkpoint").glob("scores-*")]
    assert not (plain.folder / "kept.csv").exists()


@pytest.mark.parametrize("stopped", [1, 3, 5])
def test_a_resumed_run_keeps_the_same_round_with_the_same_bytes(stopped: int, tmp_path: Path) -> None:
    experiment = tiny("fedper", BEST, **WILD)
    whole = finish(experiment, tmp_path / "whole")
    steps = run_rounds(experiment, tmp_path / "r")
    for _ in range(stopped):
        next(steps)
    steps.close()
    finish(experiment, tmp_path / "r", resume=True)
    same_files(tmp_path / "r", whole)


def test_an_extended_run_forgets_a_best_round_that_it_would_not_have_evaluated(tmp_path: Path) -> None:
    """With run.eval_every=2, the last of 3 rounds is evaluated too; a run of 6 does not evaluate round 3."""
    sets, settings = {"data.val": 0.3, "run.keep": "best"}, {**WILD, "lr": 0.005, "eval_every": 2}
    short = finish(tiny("fedper", sets, **{**settings, "rounds": 3}), tmp_path / "r")
    assert Run(short).summary["kept"]["round"] == 3, "choose other settings: the last round must be the best"
    finish(tiny("fedper", sets, **settings), tmp_path / "r", resume=True)
    same_files(tmp_path / "r", finish(tiny("fedper", sets, **settings), tmp_path / "whole"))


def test_after_damage_to_the_newest_generation_the_best_round_before_it_is_still_there(tmp_path: Path) -> None:
    experiment = tiny("fedper", BEST, **WILD)
    whole = finish(experiment, tmp_path / "whole")
    steps = run_rounds(experiment, tmp_path / "r")
    best = best_round(Run(whole).rounds)
    assert best is not None
    for _ in range(best):
        next(steps)
    steps.close()
    (tmp_path / "r" / "checkpoint" / f"manifest-{best:06d}.json").write_text("{")  # the newest is the best so far
    finish(experiment, tmp_path / "r", resume=True)
    same_files(tmp_path / "r", whole)


def same_files(folder: Path, whole: Path) -> None:
    for path in sorted(path for path in whole.rglob("*") if path.is_file()):
        name = path.relative_to(whole)
        if name.name not in ("summary.json", "timings.jsonl", "log.txt"):
            assert (folder / name).read_bytes() == path.read_bytes(), name
    assert Run(folder).summary["kept"] == Run(whole).summary["kept"]


def test_two_workers_keep_what_one_keeps(tmp_path: Path) -> None:
    experiment = tiny("fedper", BEST, **WILD)
    same_files(finish(experiment, tmp_path / "two", workers=2), finish(experiment, tmp_path / "one"))


def test_export_predict_and_evaluate_take_the_kept_round_unless_told_otherwise(tmp_path: Path) -> None:
    run = Run(finish(tiny("fedper", BEST, **WILD), tmp_path / "r"))
    best = best_of(run)
    (one,) = export(run, clients=["0"], server=False, everything=False, form="timm", out=tmp_path / "out")
    assert one.description.round == best
    assert load_model(one.path).description.round == best  # type: ignore[union-attr]
    assert call("export", tmp_path / "r", "--client", "0", "--last", "--out", tmp_path / "last")[0] == 0
    assert load_model(tmp_path / "last" / "client-0.safetensors").description.round == 6  # type: ignore[union-attr]
    images = tmp_path / "images"
    for number in (3, 7):
        (images / str(number)).mkdir(parents=True)
    from PIL import Image

    Image.new("L", (8, 8), 128).save(images / "3" / "a.png")
    Image.new("L", (8, 8), 30).save(images / "7" / "b.png")
    logits = {last: evaluate(run.model("0", last=last), images).logits for last in (False, True)}
    assert not torch.equal(logits[False], logits[True])
    for last, flags in ((False, []), (True, ["--last"])):
        status, text, message = call(
            "evaluate", tmp_path / "r", images, "--client", "0", "--csv", tmp_path / "a.csv", *flags
        )
        assert status == 0, message
        chances = [float(cell) for cell in (tmp_path / "a.csv").read_text().splitlines()[1].split(",")[4:]]
        assert chances == pytest.approx(torch.softmax(logits[last], 1)[0].tolist(), abs=1e-6)
        status, text, message = call("predict", tmp_path / "r", images, "--client", "0", *flags)
        assert status == 0, message
        assert f"{100 * torch.softmax(logits[last], 1)[0].max():.1f} %" in text
    status, _, message = call("predict", one.path, images, "--last")
    assert status == 2
    assert "--last" in message


def test_thresholds_of_the_last_round_are_not_used_for_the_models_of_another(tmp_path: Path) -> None:
    from PIL import Image

    run = Run(finish(tiny("fedper", {**BEST, "run.clinical": True}, **WILD), tmp_path / "r"))
    assert best_of(run) != len(run.rounds)
    for number in ("3", "7"):
        (tmp_path / "images" / number).mkdir(parents=True)
        Image.new("L", (8, 8), 128).save(tmp_path / "images" / number / "a.png")
    command = ["evaluate", tmp_path / "r", tmp_path / "images", "--client", "0", "--clinical"]
    status, _, message = call(*command)
    assert status == 2
    assert "give --threshold for these, or score those with --last" in " ".join(message.split())
    for more in (["--threshold", "0.4"], ["--last"]):
        status, _, message = call(*command, *more)
        assert status == 0, message


def test_a_damaged_kept_round_is_named_and_the_last_one_still_opens(tmp_path: Path) -> None:
    run = Run(finish(tiny("fedper", BEST, **WILD), tmp_path / "r"))
    best = best_of(run)
    (run.folder / "checkpoint" / f"server-{best:06d}.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=f"round {best}, which the run kept.*--last"):
        run.model("0")
    assert run.model("0", last=True) is not None


def test_a_run_that_is_not_finished_opens_at_its_best_round_so_far(tmp_path: Path) -> None:
    steps = run_rounds(tiny("fedper", BEST, **WILD), tmp_path / "r")
    for _ in range(4):
        next(steps)
    steps.close()
    with (tmp_path / "r" / "rounds.jsonl").open("a") as stream:  # killed before its checkpoint
        stream.write(json.dumps({**Run(tmp_path / "r").rounds[-1], "round": 5, "views": {"personal": {"val": 101.0}}}))
        stream.write("\n")
    model = Run(tmp_path / "r").model("0")
    assert model.description.round == best_round(Run(tmp_path / "r").rounds[:4])  # type: ignore[union-attr]


def test_the_terminal_and_the_report_say_which_round_was_kept(tmp_path: Path) -> None:
    sets = ["--set", "run.keep=best", "--set", "data.val=0.3"]
    status, text, message = call("run", *QUICK, *sets, "--rounds", "3", "--out", tmp_path / "r")
    assert status == 0, message
    told = Run(tmp_path / "r").summary["kept"]
    words = f"kept: round {told['round']}, the best on validation images ({told['val']:.1f} %)"
    assert words in " ".join(text.split())
    page = (tmp_path / "r" / "report.html").read_text()
    assert words in " ".join(page.split())
    assert "Models kept" in page


def test_patience_stops_a_run_and_a_resumed_one_in_the_same_round(tmp_path: Path) -> None:
    sets = {**VAL, "run.patience": 1}
    experiment = tiny("fedper", sets, **{**WILD, "rounds": 12})
    whole = finish(experiment, tmp_path / "whole")
    rows = Run(whole).rounds
    assert 1 < len(rows) < 12, "choose other settings: patience must run out"
    assert best_round(rows) == len(rows) - 1
    assert Run(whole).summary["rounds"] == len(rows)
    for stopped in (1, len(rows)):
        shutil.rmtree(tmp_path / "r", ignore_errors=True)
        steps = run_rounds(experiment, tmp_path / "r")
        for _ in range(stopped):
            next(steps)
        steps.close()
        finish(experiment, tmp_path / "r", resume=True)
        same_files(tmp_path / "r", whole)


def test_a_run_that_patience_stops_has_the_clinical_scores_of_its_last_round(tmp_path: Path) -> None:
    sets = {**VAL, "run.patience": 1, "run.clinical": True}
    run = Run(finish(tiny("fedper", sets, **{**WILD, "rounds": 12}), tmp_path / "r"))
    assert run.summary["rounds"] < 12
    assert run.summary["clinical"] is not None


def test_without_validation_images_nothing_is_chosen_and_nothing_written(tmp_path: Path) -> None:
    for setting in ("run.keep=best", "run.patience=3"):
        status, _, message = call("run", *QUICK, "--set", setting, "--out", tmp_path / "r")
        assert status == 2
        assert setting in message
        assert "data.val=0.2" in message
        assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        ({"data.val": 0.3, "run.keep": "best", "run.eval_every": 0}, "run.keep=best compares evaluated rounds"),
        ({"data.val": 0.3, "run.patience": 2, "run.eval_every": 0}, "run.patience=2 compares evaluated rounds"),
        ({"data.val": 0.3, "run.keep": "best", "run.evaluate": "in_round"}, "needs run.evaluate=after"),
        ({"run.keep": "worst"}, "run.keep"),
        ({"run.patience": 0}, "run.patience"),
    ],
)
def test_settings_that_leave_nothing_to_choose_are_refused(sets: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        tiny(sets=sets)


def test_keep_without_a_table_still_means_that_of_the_method() -> None:
    assert tiny("partialfed", {"keep": "norm"}).method["keep"] == "norm"
    assert tiny("fedper", {"keep": "best", "data.val": 0.3}).run.keep == "best"


# Over a network.


def test_over_a_network_the_best_round_is_refused_and_patience_needs_validation_images(tmp_path: Path) -> None:
    pytest.importorskip("grpc", reason="needs grpcio: pip install 'fedvit[split]'")
    from fedvit.network.grpc.server import serve_split
    from fedvit.network.server import check_servable

    experiment = tiny("fedper", {"data.val": 0.3, "run.keep": "best"})
    net = make_net(experiment, 10, torch.device("cpu"))
    with pytest.raises(UserError, match=r"run.keep=best works in one process only"):
        check_servable(experiment, net, ["a", "b"])
    with pytest.raises(UserError, match=r"run.patience=2 .*data.val=0.2"):
        check_servable(tiny("fedper", {"run.patience": 2}), net, ["a", "b"])
    for sets, words in (({"data.val": 0.3, "run.keep": "best"}, "one process only"), ({"run.patience": 2}, "data.val")):
        with pytest.raises(UserError, match=words):
            next(serve_split(tiny("fedv", sets), tmp_path / "s", "127.0.0.1:0", None, ["a"]))


def test_patience_stops_a_run_over_flower_in_the_same_round(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="needs flwr: pip install 'fedvit[flower]'")
    from tests.grid import Federated

    experiment = tiny("fedper", {**VAL, "run.patience": 1}, **{**WILD, "rounds": 12})
    alone = Run(finish(experiment, tmp_path / "alone"))
    sites = Federated(experiment, tmp_path / "f")
    sites.finish()
    assert 1 < len(alone.rounds) < 12
    assert [row["views"]["personal"] for row in Run(sites.out).rounds] == [
        row["views"]["personal"] for row in alone.rounds
    ]
    assert Run(sites.out).finished
