"""What a server may ask of a site, and what it learns, is what the site's policy says."""

import random
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from typer.testing import CliRunner

from fedvit.cli.main import app
from fedvit.config.load import load_experiment, read_tables
from fedvit.core.errors import UserError
from fedvit.core.settings import Experiment
from fedvit.network.flower.apps import read_app
from fedvit.network.flower.records import ABOUT, NUMBERS
from fedvit.network.grpc.client import SplitClient
from fedvit.network.policy import Policy, PolicyError, rounded
from fedvit.report.page import write_report
from fedvit.runs.folder import Run
from tests.conftest import tiny
from tests.grid import Federated

pytestmark = pytest.mark.attack
SMALL = {"method": "fedper", "rounds": 2, "epochs": 1, "image_size": 16, "patch_size": 4, "batch": 8}
THREE = {"clients": 3, "samples": 120, "cohort": 3}


def sites_of(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in folder.iterdir()}


def federated_of(sites_folder: Path, tmp_path: Path, sets: dict[str, Any] | None = None, **flags: Any) -> Federated:
    experiment = load_experiment(None, sets or {}, {**SMALL, **flags})
    return Federated.of_folders(experiment, tmp_path, sites_of(sites_folder))


def change_app(federated: Federated, change: Callable[[dict[str, Any]], None]) -> None:
    """Do what a bad server can do: send an app with other settings."""
    file = federated.folder / "app" / "fedvit_app" / "experiment.toml"
    tables = read_tables(file)
    change(tables)
    file.write_text(tomli_w.dumps(tables))


# What a server may ask.


def test_without_a_policy_a_server_cannot_leave_a_site_one_image_to_train_on(
    sites_folder: Path, tmp_path: Path
) -> None:
    federated = federated_of(sites_folder, tmp_path, {"data.test": 0.9})
    with pytest.raises(UserError, match=r"the policy allows data.test from 0.1 to 0.5, but this run has 0.9"):
        federated.finish()
    assert not list(tmp_path.glob("sites/*/states/*/*"))


def test_without_a_policy_a_site_with_few_images_does_not_train(sites_folder: Path, tmp_path: Path) -> None:
    federated = federated_of(sites_folder, tmp_path, {"data.val": 0.9})  # leaves each class one or two
    with pytest.raises(UserError, match="the policy requires at least 10 training images"):
        federated.finish()


def test_a_site_without_a_policy_says_so_and_which_rules_hold(sites_folder: Path, tmp_path: Path) -> None:
    federated = federated_of(sites_folder, tmp_path, rounds=1)
    federated.finish()
    told = (federated.state_of("north") / "log.txt").read_text()
    assert "there is no policy file, so the defaults hold: at least 10 training images" in told
    (tmp_path / "rules.toml").write_text("least_images = 5\n")
    other = Federated.of_folders(
        load_experiment(None, {}, {**SMALL, "rounds": 1}),
        tmp_path / "with", sites_of(sites_folder), policy=str(tmp_path / "rules.toml"),
    )  # fmt: skip
    other.finish()
    assert "no policy file" not in (other.state_of("north") / "log.txt").read_text()


RUN = {"model.name": "vit_micro", "train.rounds": 3, "train.batch": 8}


@pytest.mark.parametrize(
    ("rules", "sets", "said"),
    [
        ({}, {}, None),
        ({"least_batch": 9}, {}, "batches of at least 9 images, but this run has train.batch=8"),
        ({}, {"train.batch": 1}, "batches of at least 8 images, but this run has train.batch=1"),
        ({"most_rounds": 2}, {}, "at most 2 rounds, but this run asks for round 3"),
        ({}, {"train.rounds": 10**6}, "at most 1000 rounds"),
        ({"most_epochs": 1}, {"train.epochs": 2}, "at most 1 epochs in a round, but this run asks for 2"),
        ({"most_epochs": 2}, {"run.finetune": 3}, "asks for 3"),
        ({"most_epochs": 2}, {"method.name": "fedrep", "method.head_epochs": 5}, "asks for 5"),
        ({"models": ["vit_tiny_patch16_224"]}, {}, "vit_tiny_patch16_224 as model, but this run uses vit_micro"),
        ({"models": ["vit_micro"]}, {}, None),
        ({"tunes": ["head", "bias"]}, {}, "head, bias as tune, but this run uses full"),
        ({"tunes": ["bias"]}, {"tune.name": "bias"}, None),
        ({"methods": []}, {}, "the policy allows no method, but this run uses fedavg"),
        ({"methods": ["fedavg+bias"]}, {"tune.name": "bias"}, None),
        ({"test_share": 0.3}, {}, "data.test=0.3, but this run has 0.25"),
        ({"test_share": 0.3}, {"data.test": 0.3}, None),
        ({}, {"data.test": 0.01}, "data.test from 0.1 to 0.5, but this run has 0.01"),
        ({"settings_sha256": "0" * 64}, {}, "only settings with the SHA-256 0{64}, but this run has ab"),
        ({"settings_sha256": ["0" * 64, "ab"]}, {}, None),
        ({"settings_sha256": []}, {}, "SHA-256 of none"),
    ],
)
def test_every_rule_stops_the_run_that_it_forbids_and_no_other(
    rules: dict[str, Any], sets: dict[str, Any], said: str | None
) -> None:
    experiment = load_experiment(None, {**RUN, **sets}, {})
    if said is None:
        Policy(**rules).allow(experiment, "ab")
        return
    with pytest.raises(PolicyError, match=said):
        Policy(**rules).allow(experiment, "ab")


def test_a_message_for_a_round_beyond_the_policy_is_refused_whatever_the_app_says() -> None:
    Policy(most_rounds=5).allow_round(5)
    with pytest.raises(PolicyError, match="at most 5 rounds"):
        Policy(most_rounds=5).allow_round(6)


def test_a_site_takes_part_only_with_the_settings_that_it_has_agreed_to(sites_folder: Path, tmp_path: Path) -> None:
    words = ["--sites", "north,south", "--classes", "ill,well", "--method", "fedper", "--rounds", "1", "--epochs", "1"]
    words += ["--image-size", "16", "--patch-size", "4", "--batch", "8"]
    done = CliRunner().invoke(app, ["flower", str(tmp_path / "app"), *words])
    assert done.exit_code == 0, done.output
    (told,) = [line.split(": ")[1] for line in done.output.splitlines() if line.startswith("settings_sha256")]
    rules = tmp_path / "rules.toml"
    rules.write_text(f'settings_sha256 = "{told}"\n')
    federated = Federated.of_folders(
        load_experiment(None, {}, {**SMALL, "rounds": 1}), tmp_path / "run", sites_of(sites_folder), policy=str(rules)
    )
    experiment, federation = read_app(tmp_path / "app" / "fedvit_app")
    assert federation.hash_with(experiment) == told, "what a site computes from the app it got"
    federated.finish()

    changed = Federated.of_folders(
        load_experiment(None, {}, {**SMALL, "rounds": 1}), tmp_path / "bad", sites_of(sites_folder), policy=str(rules)
    )
    change_app(changed, lambda tables: tables["train"].update(lr=1.0))
    with pytest.raises(UserError, match=f"only settings with the SHA-256 {told}, but this run has"):
        changed.finish()


def test_the_hash_of_an_agreement_depends_on_settings_sites_and_classes_but_not_on_a_machine() -> None:
    from fedvit.network.site import Federation

    def digest(sites: str = "ab", classes: str = "xy", **flags: Any) -> str:
        return Federation(tuple(sites), tuple(classes)).hash_with(tiny("fedper", **flags))

    assert digest() == digest(threads=2)
    assert len({digest(), digest(lr=0.5), digest(sites="ac"), digest(classes="xz"), digest(rounds=9)}) == 5


# Paths are the site's own.


def test_a_server_does_not_choose_where_a_site_reads_or_writes(sites_folder: Path, tmp_path: Path) -> None:
    federated = federated_of(sites_folder, tmp_path, rounds=1)
    elsewhere = tmp_path / "elsewhere"
    change_app(federated, lambda tables: tables["data"].update(cache=str(elsewhere), dir=str(elsewhere)))
    federated.finish()
    assert not elsewhere.exists()
    assert (federated.state_of("north") / "cache").is_dir()
    experiment, _ = read_app(federated.folder / "app" / "fedvit_app")
    assert experiment.data.dir is None


@pytest.mark.parametrize("path", ["/etc/weights.safetensors", "../weights.safetensors"])
def test_weights_outside_the_data_folder_are_refused(path: str, sites_folder: Path, tmp_path: Path) -> None:
    federated = federated_of(sites_folder, tmp_path)
    change_app(federated, lambda tables: tables["model"].update(weights=path))
    assert hello_of(federated) == "refused"
    assert "model.weights must name a file inside" in (federated.state_of("north") / "log.txt").read_text()


def test_a_node_without_images_of_its_own_does_not_use_the_servers_choice(sites_folder: Path, tmp_path: Path) -> None:
    federated = federated_of(sites_folder, tmp_path)
    for told in federated.wires.nodes.values():
        del told["data"]
    change_app(federated, lambda tables: tables["data"].update(name=str(sites_folder / "north")))
    assert hello_of(federated) == "mistake"
    assert "--node-config must contain data=" in (federated.state_of("north") / "log.txt").read_text()


def test_links_out_of_a_sites_folder_are_the_sites_decision(sites_folder: Path, tmp_path: Path) -> None:
    (sites_folder / "north" / "ill" / "secret.png").symlink_to(sites_folder / "south" / "ill" / "0.png")
    federated = federated_of(sites_folder, tmp_path)
    change_app(federated, lambda tables: tables["data"].update(follow_links=True, max_pixels=10**12))
    assert hello_of(federated) == "mistake"
    assert "secret.png is a link that leads out" in (federated.state_of("north") / "log.txt").read_text()
    (tmp_path / "rules.toml").write_text("follow_links = true")
    federated.wires.nodes[100]["policy"] = str(tmp_path / "rules.toml")
    assert hello_of(federated) == "welcome"


def hello_of(federated: Federated) -> str:
    """The code with which the site north answers a hello."""
    from flwr.app import Message

    from fedvit.core.payload import Payload
    from fedvit.network.flower.records import to_records

    content = to_records(Payload(), {"run": "x"})
    federated.wires.push_messages([Message(content, dst_node_id=100, message_type="query.hello", group_id="1")])
    return str(federated.wires.crossed[-1].content[ABOUT].get("code", "welcome"))


def modes(folder: Path) -> dict[bool, set[int]]:
    """The permissions of the folders (True) and files (False) in and including a folder."""
    found: dict[bool, set[int]] = {True: set(), False: set()}
    for path in [folder, *folder.rglob("*")]:
        found[path.is_dir()].add(path.stat().st_mode & 0o777)
    return found


def test_nobody_else_can_read_what_a_site_keeps(sites_folder: Path, tmp_path: Path) -> None:
    federated = federated_of(sites_folder, tmp_path)
    federated.state_of("north").mkdir(parents=True, mode=0o755)  # an administrator made it
    federated.finish()
    for name in ("north", "south"):
        assert modes(federated.state_of(name)) == {True: {0o700}, False: {0o600}}


# What a server learns.


def crossed_scores(federated: Federated) -> Iterator[dict[str, float]]:
    for message in federated.wires.crossed:
        if message.metadata.reply_to_message_id and message.metadata.message_type in ("train", "evaluate"):
            yield dict(message.content.metric_records[NUMBERS])


def with_rules(tmp_path: Path, text: str) -> Federated:
    (tmp_path / "policy.toml").write_text(text)
    return Federated(tiny("fedavg", **THREE), tmp_path, policy=str(tmp_path / "policy.toml"))


def test_rounded_scores_are_rounded_and_hold_no_counts(tmp_path: Path) -> None:
    federated = with_rules(tmp_path, 'scores = "rounded"')
    federated.finish()
    numbers = {key: value for scores in crossed_scores(federated) for key, value in scores.items()}
    assert {"loss", "examples", "personal_accuracy", "personal_balanced_accuracy", "personal_loss"} <= set(numbers)
    assert not [key for key in numbers if "confusion" in key]
    steps = {"accuracy": 5, "loss": 0.5}
    for scores in crossed_scores(federated):
        for key, value in scores.items():
            if key != "examples":
                step = steps["loss" if key.endswith("loss") else "accuracy"]
                assert value / step == round(value / step), key
    assert Run(federated.out).summary["views"]["personal"]["mean"] is not None
    told = (federated.state_of("0") / "log.txt").read_text()
    assert "personal_accuracy" in told, "the site itself sees its exact scores"


def test_a_site_that_keeps_its_scores_takes_part_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text('scores = "none"')
    federated = Federated(tiny("fedper", **THREE), tmp_path)
    federated.wires.nodes[101]["policy"] = str(tmp_path / "policy.toml")
    federated.finish(min_sites=3)
    mine = [
        dict(m.content.metric_records[NUMBERS])
        for m in federated.wires.crossed
        if m.metadata.reply_to_message_id and m.metadata.src_node_id == 101 and NUMBERS in m.content.metric_records
    ]
    assert {key for numbers in mine for key in numbers} == {"examples", "withheld"}
    rows = Run(federated.out).rounds
    assert [row["failed"] for row in rows] == [[], []]
    assert [row["failures_evaluation"] for row in rows] == [{"1": "keeps its scores"}] * 2
    assert [client["client"] for client in Run(federated.out).clients] == ["0", "2"]
    assert list(federated.state_of("1").glob("runs/*/checkpoint/clients/*")), "it still has its model"


def test_a_run_whose_sites_all_keep_their_scores_finishes(tmp_path: Path) -> None:
    federated = with_rules(tmp_path, 'scores = "none"')
    federated.finish(min_sites=3)
    summary = Run(federated.out).summary
    assert (summary["views"], summary["rounds"], summary["clients"]) == ({}, 2, 3)
    write_report([federated.out], tmp_path / "report.html")
    assert "keeps its scores" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("kind", ["confusion_0_1", "clinical_tp_1"])
def test_nothing_that_counts_classes_leaves_without_class_counts(kind: str) -> None:
    from fedvit.core.payload import Payload

    scores = Payload(scalars={"personal_accuracy": 50.0, f"personal_{kind}": 3.0})
    assert set(Policy(class_counts=False).release(scores).scalars) == {"personal_accuracy"}
    assert set(Policy(scores="rounded").release(scores).scalars) == {"personal_accuracy"}
    assert Policy().release(scores) == scores


def class_sizes(test: int, fits: Callable[[float, float], bool]) -> set[tuple[int, ...]]:
    """The sizes of two classes, in any order, with which some hits give scores that fit."""
    found = set()
    for first in range(1, test):
        second = test - first
        for a, b in product(range(first + 1), range(second + 1)):
            if fits(100 * (a + b) / test, 50 * (a / first + b / second)):
                found.add(tuple(sorted((first, second))))
                break
    return found


def test_class_sizes_follow_from_exact_scores_and_not_from_rounded_ones() -> None:
    rng, sites = random.Random(0), 30
    known = {"full": 0, "rounded": 0}
    for _ in range(sites):
        first, second = rng.randint(3, 20), rng.randint(3, 20)
        a, b = rng.randint(1, first), rng.randint(1, second)
        accuracy, balanced = 100 * (a + b) / (first + second), 50 * (a / first + b / second)

        for setting, step in (("full", lambda x: round(x, 9)), ("rounded", lambda x: rounded("accuracy", x))):
            seen = step(accuracy), step(balanced)
            known[setting] += (
                len(class_sizes(first + second, lambda x, y, step=step, seen=seen: (step(x), step(y)) == seen)) == 1
            )
    assert known["full"] > 0.5 * sites
    assert known["rounded"] <= 0.1 * sites


def test_no_choice_of_weights_makes_a_rounded_loss_finer() -> None:
    assert rounded("personal_loss", 1e6 + 0.1234) == 10.0
    assert rounded("personal_auroc_12", 0.8312) == 0.85
    assert rounded("loss", -1e6) == -10.0
    assert rounded("personal_auroc", 0.9349) == 0.95
    assert rounded("before_val_accuracy", 71.0) == 70.0


# Split learning has the same rules.


def split_experiment(**flags: Any) -> Experiment:
    return tiny("fedv", **THREE, **flags)


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"least_images": 1000}, "at least 1000 training images"),
        ({"least_batch": 33}, "batches of at least 33"),
        ({"most_rounds": 1}, "at most 1 rounds"),
        ({"most_epochs": 1}, "at most 1 epochs"),
        ({"models": ["resnet18"]}, "resnet18 as model"),
        ({"tunes": ["bias"]}, "bias as tune"),
        ({"settings_sha256": "0"}, "only settings with the SHA-256 0"),
        ({"test_share": 0.5}, "data.test=0.5"),
    ],
)
def test_a_split_client_has_the_same_rules(rules: dict[str, Any], said: str, tmp_path: Path) -> None:
    client = SplitClient(split_experiment(epochs=2), "0", tmp_path / "state", policy=Policy(**rules))
    with pytest.raises(PolicyError, match=said):
        client.check_policy()


def test_a_split_client_with_images_of_its_own_has_safe_defaults(sites_folder: Path, tmp_path: Path) -> None:
    sets = {"data.class_names": "ill,well", "data.test": 0.9}
    experiment = load_experiment(None, sets, {**SMALL, "method": "fedv"})
    client = SplitClient(experiment, "north", tmp_path / "state", sites_folder / "north")
    with pytest.raises(PolicyError, match=r"data.test from 0.1 to 0.5"):
        client.check_policy()
    assert modes(tmp_path / "state") == {True: {0o700}, False: {0o600}}
    trial = SplitClient(split_experiment(batch=1), "0", tmp_path / "trial")
    trial.check_policy()


def test_a_policy_file_is_checked_for_unknown_rules(tmp_path: Path) -> None:
    from fedvit.network.policy import read_policy

    (tmp_path / "p.toml").write_text("least_image = 3\n")
    with pytest.raises(UserError, match="the valid keys are methods, tunes, models"):
        read_policy(tmp_path / "p.toml")
    (tmp_path / "p.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="not valid TOML"):
        read_policy(tmp_path / "p.toml")
