"""The command line as a contract: files, fields, exit statuses, and what a mistake is told."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import fedvit
from fedvit.cli.inspect import catalogue
from fedvit.cli.main import app
from fedvit.cli.settings_page import settings_markdown
from fedvit.engine import net
from fedvit.methods import METHODS
from fedvit.methods.tunes import TUNES
from fedvit.models.build import ModelSettings, build
from fedvit.report.plots import draw_comparison
from fedvit.runs import models
from fedvit.runs.folder import Run
from tests.conftest import finish, tiny

QUICK = ["--patch-size", "4", "--rounds", "2", "--epochs", "1", "--cohort", "2", "--clients", "12"]


def call(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "fedper"
    status, _, message = call("run", "--method", "fedper", *QUICK, "--out", folder)
    assert status == 0, message
    return folder


def test_seeds_that_stop_at_other_rounds_make_one_picture(tmp_path: Path) -> None:
    runs = [Run(finish(tiny("fedavg", seed=seed, rounds=3 - seed), tmp_path / str(seed))) for seed in (0, 1)]
    draw_comparison({"fedavg, of $a_{$": runs}, tmp_path / "c.png", "seeds $_{")
    assert (tmp_path / "c.png").is_file()


def test_a_run_writes_the_files_of_the_contract(run_folder: Path) -> None:
    names = {path.name for path in run_folder.iterdir()}
    assert names == {
        "run.toml",
        "split.json",
        "rounds.jsonl",
        "timings.jsonl",
        "clients.csv",
        "confusion.json",
        "summary.json",
        "checkpoint",
        "lock",
        "log.txt",
        "report.html",
    }
    summary = Run(run_folder).summary
    expected = "method tune label model data partition clients cohort rounds seed lr views server_accuracy gain_over_local params nbytes macs_per_example seconds peak_rss_mb epsilon"  # fmt: skip  # noqa: E501
    assert set(expected.split()) <= set(summary)
    assert {"mean", "std", "micro", "worst_decile", "best_decile", "best_round"} <= set(summary["views"]["personal"])
    assert summary["server_accuracy"] is None  # the heads are personal: there is no model of the server's own
    assert summary["gain_over_local"] is None
    assert summary["epsilon"] is None
    assert summary["nbytes"]["down"] == 4 * summary["params"]["shared"]
    header = (run_folder / "clients.csv").read_text().splitlines()[0]
    assert header == "client,train_samples,test_samples,classes,rounds_trained,personal_accuracy,personal_balanced_accuracy,personal_loss,local_accuracy,gain"  # fmt: skip  # noqa: E501
    rows = Run(run_folder).rounds
    assert [row["round"] for row in rows] == [1, 2]
    assert {"round", "cohort", "loss", "nbytes_down", "nbytes_up", "views"} <= set(rows[0])
    assert "versions" in tomllib.loads((run_folder / "run.toml").read_text())
    split = json.loads((run_folder / "split.json").read_text())
    assert len(split["hash"]) == 64
    used = [i for client in split["clients"].values() for part in client.values() for i in part]
    assert sorted(used) == list(range(1797))


def test_the_same_settings_give_the_same_bytes(run_folder: Path, tmp_path: Path) -> None:
    status, _, message = call("run", run_folder / "run.toml", "--out", tmp_path / "again")
    assert status == 0, message
    for name in ("run.toml", "split.json", "rounds.jsonl", "clients.csv"):
        assert (run_folder / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


def test_resuming_a_finished_run_prints_its_summary(run_folder: Path) -> None:
    before = (run_folder / "summary.json").read_bytes()
    status, shown, _ = call("run", "--resume", "--out", run_folder)
    assert status == 0
    assert "fedper" in shown
    assert (run_folder / "summary.json").read_bytes() == before


def test_resuming_without_a_checkpoint_starts_at_round_one(tmp_path: Path) -> None:
    status, _, _ = call("run", *QUICK, "--resume", "--out", tmp_path / "new", "--quiet")
    assert status == 0
    assert len(Run(tmp_path / "new").rounds) == 2


def test_resuming_with_changed_settings_names_them(run_folder: Path) -> None:
    status, _, message = call("run", "--resume", "--out", run_folder, "--lr", "0.5", "--seed", "4")
    assert status == 2
    assert "train.lr" in message
    assert "run.seed was 0, now 4" in message


def test_a_run_may_be_resumed_where_data_and_weights_lie_elsewhere(run_folder: Path, tmp_path: Path) -> None:
    assert call("run", "--resume", "--out", run_folder, "--set", f"data.dir={tmp_path}")[0] == 0


def test_eval_every_leaves_views_null_between(tmp_path: Path) -> None:
    assert call("run", *QUICK, "--rounds", "3", "--eval-every", "2", "--out", tmp_path / "r", "--quiet")[0] == 0
    assert [row["views"] is None for row in Run(tmp_path / "r").rounds] == [True, False, False]


def test_until_accuracy_stops_early(tmp_path: Path) -> None:
    assert call("run", *QUICK, "--rounds", "9", "--until-accuracy", "1", "--out", tmp_path / "r", "--quiet")[0] == 0
    assert Run(tmp_path / "r").summary["rounds"] < 9


def test_clients_that_drop_out_are_named_and_the_round_goes_on(tmp_path: Path) -> None:
    flags = [*QUICK, "--cohort", "6", "--set", "train.dropout=0.6", "--set", "method.schedule=sampled"]
    assert call("run", "--method", "local", *flags, "--out", tmp_path / "r", "--quiet")[0] == 0
    run = Run(tmp_path / "r")
    failed = [name for row in run.rounds for name in row["failed"]]
    assert failed
    trained = sum(client["rounds_trained"] for client in run.clients)
    assert trained == 12 - len(failed)


@pytest.mark.parametrize("schedule", ["cosine", "step", "exp"])
def test_schedules_change_the_rate_over_rounds(schedule: str) -> None:
    from fedvit.core.settings import TrainSettings
    from fedvit.engine.net import rate_factor

    train = TrainSettings(rounds=8, schedule=schedule)  # type: ignore[arg-type]
    factors = [rate_factor(train, number) for number in range(1, 9)]
    assert factors[0] == 1
    assert factors == sorted(factors, reverse=True)
    assert factors[-1] < 1


SETTINGS = [
    ["--precision", "bf16"],
    ["--set", "augment=crop"],
    ["--set", "augment=flip"],
    ["--set", "optimizer=adam", "--set", "weight_decay=0.1"],
    ["--set", "optimizer=sgd"],
    ["--set", "weight_decay=0.5"],
    ["--set", "weighting=equal"],
    ["--set", "train.schedule=exp", "--set", "decay=0.5"],
    ["--set", "val=0.2"],
    ["--set", "data.test=0.5"],
    ["--partition", "iid"],
    ["--partition", "dirichlet_train"],
    ["--partition", "pathological", "--set", "classes=3"],
    ["--samples", "900"],
    ["--seed", "1"],
]


@pytest.mark.parametrize("flags", SETTINGS, ids=" ".join)
def test_every_setting_has_an_effect(flags: list[str], run_folder: Path, tmp_path: Path) -> None:
    status, _, message = call("run", "--method", "fedper", *QUICK, *flags, "--out", tmp_path / "r", "--quiet")
    assert status == 0, message
    plain, changed = ([row["personal_loss"] for row in Run(folder).clients] for folder in (run_folder, tmp_path / "r"))
    assert plain != changed
    if "val=0.2" in flags:
        assert "val" in Run(tmp_path / "r").summary["views"]["personal"]


def test_views_before_and_after_local_training_on_request(tmp_path: Path) -> None:
    arguments = ["--method", "fedbabu", *QUICK, "--set", "before_after=true", "--out", tmp_path / "r", "--quiet"]
    assert call("run", *arguments)[0] == 0
    views = Run(tmp_path / "r").summary["views"]
    assert set(views) == {"personal", "before", "after", "server"}
    assert views["before"]["micro"] == pytest.approx(views["server"]["mean"])
    assert views["after"]["loss"] < views["before"]["loss"]


@pytest.mark.parametrize("method", ["fedbabu", "fedavg_ft", "fedperfix"])
def test_a_runs_model_is_the_one_that_was_scored(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (net, models):  # a model that is handed out gives all tokens, so that sums may round differently
        monkeypatch.setattr(place, "skip_unread_tokens_", lambda model: None)
    from fedvit.core.metrics import score
    from tests.conftest import Bench, finish, tiny

    experiment = tiny(method, {"steps": 9, "finetune": "all"} if method == "fedbabu" else None)
    run = Run(finish(experiment, tmp_path / "r"))
    bench = Bench(experiment, tmp_path)
    for row in run.clients[:3]:
        client = bench.worker.client(row["client"], 1, {})
        found = score(run.model(row["client"]), client.data, client.data.test, bench.net.inputs, torch.device("cpu"))
        assert found["loss"] == row["personal_loss"]


def test_resume_needs_no_other_flag_and_takes_the_runs_own_keys(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    flags = ["--patch-size", "4", "--epochs", "1", "--clients", "30", "--cohort", "28", "--eval-every", "0"]
    assert call("run", "--method", "fedperfix", *flags, "--rounds", "1", "--set", "s=0.5", "--out", folder)[0] == 0
    status, _, message = call("run", "--resume", "--cohort", "28", "--set", "s=0.5", "--rounds", "2", "--out", folder)
    assert status == 0, message
    assert (
        call("run", "--method", "fedperfix", *flags, "--rounds", "2", "--set", "s=0.5", "--out", tmp_path / "w")[0] == 0
    )
    for name in ("rounds.jsonl", "clients.csv", "run.toml"):
        assert (folder / name).read_bytes() == (tmp_path / "w" / name).read_bytes(), name
    assert fedvit.run(out=folder, resume=True).summary["rounds"] == 2
    status, _, message = call("run", "--resume", "--set", "s=0.6", "--out", folder)
    assert status == 2
    assert "method.s was 0.5, now 0.6" in message


def test_a_cosine_schedule_cannot_be_extended(tmp_path: Path) -> None:
    assert call("run", *QUICK, "--set", "train.schedule=cosine", "--out", tmp_path / "r", "--quiet")[0] == 0
    status, _, message = call("run", "--resume", "--rounds", "5", "--out", tmp_path / "r")
    assert status == 2
    assert "plans its learning rates over 2 rounds" in message.replace("\n", " ")


def test_changed_data_is_noticed_on_resume(run_folder: Path, tmp_path: Path) -> None:
    import shutil

    folder = shutil.copytree(run_folder, tmp_path / "r")
    split = (folder / "split.json").read_text()
    (folder / "split.json").write_text(split.replace('"hash": "', '"hash": "0'))
    status, _, message = call("run", "--resume", "--rounds", "3", "--out", folder)
    assert status == 2
    assert "has changed since the run began" in message.replace("\n", " ")


def test_a_pair_that_equals_a_simpler_one_says_so(tmp_path: Path) -> None:
    for label, simpler in (
        ("fedper+head", "local+head"),
        ("fedbn+head", "fedavg+head"),
        ("vanilla_attention+lora", "fedper+lora"),
    ):
        method, tune = label.split("+")
        assert call("run", "--method", method, "--tune", tune, *QUICK, "--out", tmp_path / label, "--quiet")[0] == 0
        assert f"{label} equals {simpler}" in (tmp_path / label / "log.txt").read_text()
    assert call("run", "--method", "fedrep", "--tune", "head", *QUICK, "--out", tmp_path / "r", "--quiet")[0] == 0
    assert " equals " not in (tmp_path / "r" / "log.txt").read_text()


def test_compare_takes_settings_of_some_rows_and_names_rows_by_their_tune(tmp_path: Path) -> None:
    flags = [*QUICK, "--rounds", "1", "--seeds", "0", "--quiet", "--out"]
    assert (
        call("compare", "fedper", "fedperfix", "--set", "s=0.5", "--set", "partition.name=iid", *flags, tmp_path / "a")[
            0
        ]
        == 0
    )
    assert Run(tmp_path / "a" / "fedperfix" / "seed0").experiment.method["s"] == 0.5
    assert call("compare", "local+full", "fedper", *flags, tmp_path / "b")[0] == 0
    assert call("compare", "fedper", "--tune", "bias", *flags, tmp_path / "c")[0] == 0
    labels = [entry["label"] for entry in json.loads((tmp_path / "c" / "compare.json").read_text())]
    assert labels == ["local+bias", "fedper+bias"]
    (tmp_path / "mine.toml").write_text('[method]\nname = "fedper"\n[train]\nlr = 0.004\n')
    assert call("compare", tmp_path / "mine.toml", "--save", tmp_path / "t.json", *flags, tmp_path / "d")[0] == 0
    saved = json.loads((tmp_path / "t.json").read_text())
    assert [(row["label"], row["lr"]) for row in saved["rows"]] == [("local", 0.002), ("mine", 0.004)]
    assert saved["settings"]["train"]["rounds"] == 1
    assert saved["rows"][1]["settings"]["method.name"] == "fedper"
    assert saved["rows"][1]["settings"]["train.lr"] == 0.004
    assert "train.rounds" not in saved["rows"][1]["settings"]
    status, _, message = call("compare", "fedper", "--set", "method.mu=1", *flags, tmp_path / "e")
    assert (status, "no row has this key" in message) == (2, True)


def test_compare_includes_local_and_skips_finished_rows(tmp_path: Path) -> None:
    arguments = ["compare", "fedper", "fedavg+bias", "--seeds", "0,1", *QUICK, "--out", tmp_path / "c"]
    status, shown, message = call(*arguments)
    assert status == 0, message
    assert "fedavg+bias" in shown
    entries = json.loads((tmp_path / "c" / "compare.json").read_text())
    assert [entry["label"] for entry in entries] == ["local", "fedper", "fedavg+bias"]
    fields = [
        "label",
        "method",
        "tune",
        "lr",
        "seeds",
        "view",
        "mean",
        "std",
        "seed_std",
        "gain_mean",
        "hurt",
        "nbytes_down",
        "nbytes_up",
        "seconds",
    ]
    assert all(list(entry) == fields for entry in entries)
    local, fedper, bias = entries
    assert fedper["gain_mean"] == pytest.approx(fedper["mean"] - local["mean"])
    assert (fedper["lr"], bias["lr"]) == (0.002, 0.002)
    assert bias["nbytes_up"] < fedper["nbytes_up"] / 10
    run = Run(tmp_path / "c" / "fedper" / "seed1")
    alone = {
        client["client"]: client["personal_accuracy"] for client in Run(tmp_path / "c" / "local" / "seed1").clients
    }
    assert all(client["gain"] == client["personal_accuracy"] - alone[client["client"]] for client in run.clients)
    hurt = sum(client["gain"] < 0 for client in run.clients)
    assert run.summary["gain_over_local"] == {
        "mean": pytest.approx(sum(c["gain"] for c in run.clients) / 12),
        "hurt": hurt,
        "schedule": "sampled",
    }
    assert (tmp_path / "c" / "compare.png").stat().st_size > 10_000

    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "c").rglob("summary.json")}
    status, _, _ = call(*arguments[:2], "fedbn", *arguments[2:])
    assert status == 0
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items()), "a finished row ran again"
    assert len(json.loads((tmp_path / "c" / "compare.json").read_text())) == 4


def test_partition_shows_a_split(tmp_path: Path) -> None:
    arguments = ["partition", "--clients", "10", "--seed", "3"]
    status, shown, message = call(*arguments, "--json", "--out", tmp_path / "x.png")
    assert status == 0, message
    content = json.loads(shown)
    assert sum(sum(parts["train"]) + sum(parts["test"]) for parts in content["clients"].values()) == 1797
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert "classes" in call(*arguments)[1]
    status, _, message = call(*arguments, "--out", tmp_path / "missing" / "x.png")
    assert (status, "a folder that exists" in message.replace("\n", " ")) == (2, True)
    status, shown, _ = call("datasets", "--json")
    assert status == 0
    assert {"name": "digits", "kind": "embedded", "images": 1797, "classes": 10, "present": True} in json.loads(shown)


def test_methods_lists_every_method() -> None:
    status, shown, _ = call("methods", "--json")
    assert status == 0
    listed = json.loads(shown)
    assert [entry["name"] for entry in listed] == list(METHODS)
    assert all(len(entry["summary"]) > 20 for entry in listed)
    assert call("methods")[0] == 0


def test_every_method_file_says_how_it_departs_from_its_paper() -> None:
    for function in METHODS.values():
        assert "Departs from the paper:" in (sys.modules[function.__module__].__doc__ or "")


def test_every_tune_says_how_it_departs_from_its_paper_and_shows_it() -> None:
    tunes = {entry["name"]: entry["departs"] for entry in catalogue("tunes")}
    assert list(tunes) == list(TUNES)
    assert all(tunes.values())
    shown, page = call("methods")[1], settings_markdown()
    for name, word in (("adapter", "up-projection"), ("prompt", "pseudo-code")):
        assert word in tunes[name]
        assert word in " ".join(shown.split())
        assert tunes[name] in page


def test_the_defaults_that_help_names_are_the_real_ones() -> None:
    from fedvit.cli.flags import Flags
    from fedvit.config.load import FLAGS, load_experiment

    tables = load_experiment().model_dump()
    for flag in ("method", "tune", "data", "model", "rounds", "epochs", "batch", "seed", "threads", "precision"):
        table, key = FLAGS[flag].split(".")
        assert f"(default: {tables[table][key]})" in Flags.__annotations__[flag].__metadata__[0].help, flag


def test_help_does_not_import_torch() -> None:
    code = "import sys; sys.argv=['fedvit','--help']\nfrom fedvit.cli.main import app\ntry: app()\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"  # noqa: E501
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_python_runs_the_same_thing(run_folder: Path, tmp_path: Path) -> None:
    settings = {"patch_size": 4, "rounds": 2, "epochs": 1, "cohort": 2, "clients": 12}
    run = fedvit.run(method="fedper", out=tmp_path / "r", **settings)
    assert (tmp_path / "r" / "clients.csv").read_bytes() == (run_folder / "clients.csv").read_bytes()
    assert fedvit.load_run(tmp_path / "r").summary["label"] == "fedper"
    model = run.model("3")
    assert model(torch.zeros(1, 3, 8, 8)).shape == (1, 10)
    with pytest.raises(ValueError, match="no client '99'"):
        run.model("99")
    with pytest.raises(TypeError, match="did you mean 'rounds'"):
        fedvit.run(round=3)


MISTAKES = [
    (["--method", "fedprefix"], "did you mean 'fedperfix'"),
    (["--tune", "biass"], "did you mean 'bias'"),
    (["--tune", "norm,attm"], "did you mean 'attn'"),
    (["--data", "digit"], "did you mean 'digits'"),
    (["--model", "vit_tinny_patch16_224"], "vit_tiny_patch16_224"),
    (["--partition", "dirichlett"], "did you mean 'dirichlet'"),
    (["--set", "train.epoch=3"], "did you mean 'epochs'"),
    (["--set", "aplha=3"], "did you mean 'alpha'"),
    (["--set", "trian.epochs=3"], "did you mean 'train'"),
    (["--set", "method.mu=3"], "unknown key method.mu of fedavg"),
    (["--set", "rounds"], "table.key=value"),
    (["--cohort", "13", "--clients", "12"], "a cohort of 13 cannot be sampled from 12 clients"),
    (["--rounds", "0"], "train.rounds"),
    (["--epochs", "0"], "train.epochs"),
    (["--batch", "-1"], "train.batch"),
    (["--lr", "0"], "train.lr"),
    (["--lr", "nan"], "train.lr"),
    (["--lr", "-0.1"], "train.lr"),
    (["--set", "alpha=0"], "partition.alpha"),
    (["--set", "alpha=-1"], "partition.alpha"),
    (["--clients", "2000"], "clients are possible"),
    (["--clients", "100", "--set", "min_samples=17", "--set", "alpha=0.01"], "possible"),
    (["--weights", "nowhere.safetensors", "--model", "vit_tiny_patch16_224"], "no weights at nowhere.safetensors"),
    (["--device", "quantum"], "quantum"),
    (["--precision", "fp8"], "run.precision"),
    (["--image-size", "8", "--patch-size", "4", "--method", "custom", "--set", "personal=blocks.77"], "blocks.77"),
    (["--method", "fedbabu", "--tune", "head"], "trains nothing"),
    (["--method", "fedperfix", "--set", "combine=multiply"], "method.combine"),
    (["--method", "fedperfix", "--set", "bottleneck=0"], "method.bottleneck"),
    (["--method", "prompts", "--set", "method.dropout=2"], "method.dropout"),
    (["--tune", "lora", "--set", "rank=0"], "tune.rank"),
    (["--tune", "scale"], "'scale' matches no weight"),
    (["--tune", "norm,blocks.77"], "'blocks.77' matches no weight"),
    (["--method", "custom", "--set", "personal=head,blocks.77"], "'blocks.77' matches no weight"),
    (["--set", "lr=true"], "train.lr"),
    (["--set", "momentum=0.9"], "train.optimizer=sgd"),
    (["--model", "vit_small_patch16_rope_224", "--image-size", "32", "--tune", "prompt"], "plain attention"),
    (["--model", "resnet18", "--image-size", "32", "--method", "fedperfix"], "needs a timm ViT or DeiT"),
    (["--model", "resnet18", "--image-size", "32", "--method", "vanilla_attention"], "'attn' matches no weight"),
    (["--partition", "site"], "has no domains or sites"),
    (["--data", "organamnist"], "MedMNIST publishes it"),
    (["--samples", "5000"], "--samples 5000 of 1797"),
    (["--set", "unseen=24"], "leaves no client to train"),
    (["nowhere.toml"], "no experiment file at nowhere.toml"),
]


@pytest.mark.parametrize(
    ("arguments", "told"), MISTAKES, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_a_mistake_gets_status_2_and_says_what_to_do(arguments: list[str], told: str, tmp_path: Path) -> None:
    status, shown, message = call("run", "--out", tmp_path / "r", *arguments)
    assert status == 2, message
    assert told in message.replace("\n", " ")
    assert "Traceback" not in shown + message
    assert not (tmp_path / "r").exists(), "a run that cannot start leaves nothing behind"


def test_an_option_without_its_method_is_not_dropped_silently(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text("[method]\nmu = 0.1\n")
    status, _, message = call("run", tmp_path / "e.toml", "--out", tmp_path / "r")
    assert status == 2
    assert "unknown key method.mu of fedavg" in message.replace("\n", " ")


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    status, _, message = call("run", "--method", "nothing", "--debug", "--out", tmp_path / "r")
    assert status == 2
    assert "Traceback" in message


def test_an_output_folder_with_another_run_is_refused(run_folder: Path) -> None:
    before = {path: path.read_bytes() for path in run_folder.rglob("*") if path.is_file()}
    status, _, message = call("run", *QUICK, "--out", run_folder)
    assert status == 2
    assert "already holds a run" in message
    assert before == {path: path.read_bytes() for path in run_folder.rglob("*") if path.is_file()}


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    status, _, message = call("run", *QUICK, "--out", tmp_path)
    assert status == 2
    assert "does not hold a run" in message


def test_a_loss_that_turns_nan_is_told_and_the_last_checkpoint_stays_good(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    assert call("run", *QUICK, "--out", folder, "--quiet")[0] == 0
    good = {path.name: path.read_bytes() for path in (folder / "checkpoint").iterdir() if path.is_file()}
    toml = (folder / "run.toml").read_text()
    (folder / "run.toml").write_text(toml.replace("lr = 0.002", "lr = 1e30"))
    status, _, message = call("run", "--resume", "--rounds", "4", "--out", folder)
    assert status == 2
    assert "became nan in round 3" in message or "became inf in round 3" in message
    assert "smaller --lr" in message
    assert all((folder / "checkpoint" / name).read_bytes() == blob for name, blob in good.items() if "000002" in name)


def test_weights_that_break_in_the_only_step_are_not_written_down(tmp_path: Path) -> None:
    flags = ["--batch", "1500", "--epochs", "1", "--lr", "1e30", "--clients", "6", "--cohort", "2", "--patch-size", "4"]
    status, _, message = call("run", *flags, "--set", "optimizer=sgd", "--out", tmp_path / "r")
    assert status == 2
    assert "in round 1" in message
    assert not list((tmp_path / "r").glob("checkpoint/*"))


def test_weights_must_be_safetensors_that_fit(tmp_path: Path) -> None:
    flags = ["--model", "vit_tiny_patch16_224", "--image-size", "32", "--patch-size", "4", *QUICK[2:]]
    pickled = tmp_path / "model.safetensors"
    torch.save({"a": torch.zeros(1)}, pickled)
    status, _, message = call("run", *flags, "--weights", pickled, "--out", tmp_path / "r")
    assert status == 2
    assert "is not a safetensors file" in message.replace("\n", " ")
    save_file(build(ModelSettings(), 10, (), 0).state_dict(), pickled)
    status, _, message = call("run", *flags, "--weights", pickled, "--out", tmp_path / "r")
    assert status == 2
    assert "does not fit" in message.replace("\n", " ")
    assert "blocks." in message


def test_weights_for_other_classes_get_a_fresh_head(tmp_path: Path) -> None:
    settings = ModelSettings(name="vit_tiny_patch16_224", image_size=32, patch_size=8)
    source = build(settings, 7, (), 5)
    file = tmp_path / "w.safetensors"
    save_file(source.state_dict(), file)
    other = ModelSettings(name="vit_tiny_patch16_224", image_size=48, patch_size=8, weights=file)
    model = build(other, 10, (), 0)
    assert torch.equal(model.blocks[0].attn.qkv.weight, source.blocks[0].attn.qkv.weight)
    assert model.head.weight.shape == (10, 192)
    assert model.pos_embed.shape[1] == 37  # resampled from 17


ENDS = {  # how a program ends: its status and what it has written
    "raise SystemExit(3)": (3, ""),
    "raise SystemExit": (0, ""),
    "raise SystemExit('words')": (1, ""),
    "raise ValueError": (1, ""),
    "atexit.register(print, 'last')": (0, "last\n"),
    "threading.Thread(target=lambda: (time.sleep(0.3), print('thread'))).start()": (0, "thread\n"),
}


@pytest.mark.parametrize("line", ENDS)
def test_a_command_that_stops_at_once_ends_as_any_other(line: str) -> None:
    code = (
        "import atexit, threading, time\n"
        f"from fedvit.engine.processes import end_at_once\nwith end_at_once():\n    {line}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == ENDS[line]
    assert ("ValueError" in done.stderr) == ("ValueError" in line)
