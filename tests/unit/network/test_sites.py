"""Sites behind Flower's messages: the same bits as in one process, and nothing leaves that may not."""

import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import Result
from flwr.app import Array, ArrayRecord, Message, RecordDict
from safetensors.torch import load_file
from typer.testing import CliRunner

import fedvit
from fedvit.cli.main import app
from fedvit.config.load import load_experiment
from fedvit.core.errors import UserError
from fedvit.core.payload import Payload
from fedvit.core.plan import Plan
from fedvit.engine.client_store import ClientStore, memory_to_bytes
from fedvit.engine.net import make_net
from fedvit.methods import METHODS
from fedvit.network import site
from fedvit.network.flower.apps import read_app
from fedvit.network.flower.records import ABOUT, RAW, TENSORS, from_records, to_records
from fedvit.network.flower.trial import Trial, daemon, follow, free_port
from fedvit.network.handshake import common, differences
from fedvit.network.site_state import SiteState
from fedvit.report.page import write_report
from fedvit.runs.folder import Run
from fedvit.runs.lock import only_run
from tests.conftest import finish, tiny
from tests.grid import Federated, newest

THREE = {"clients": 3, "samples": 120}
LEFT_OUT = {"centralized", "fedfed"}  # one pools all images, the other sends what is left of them
METHODS_OVER_SITES = [name for name, plan in METHODS.items() if isinstance(plan(), Plan) and name not in LEFT_OUT]


def server_files(folder: Path) -> dict[str, bytes]:
    """The server's weights after the last round, and what the clients scored."""
    weights = max((folder / "checkpoint").glob("server-*.safetensors"))
    return {weights.name: weights.read_bytes(), "clients.csv": (folder / "clients.csv").read_bytes()}


def memories(folder: Path) -> dict[str, bytes]:
    """Every client's memory after a run in one process."""
    store = ClientStore(folder / "checkpoint", in_ram=False)
    newest = max((folder / "checkpoint").glob("manifest-*.json"))
    store.versions = json.loads(newest.read_text())["clients"]
    return {name: memory_to_bytes(store.get(name)) for name in store.versions}


def states(federated: Federated) -> dict[str, bytes]:
    """The newest state of every site that has one."""
    (run,) = {path.name for path in federated.folder.glob("sites/*/states/*")}
    kept = {
        name: memory_to_bytes(newest(SiteState(federated.state_of(name) / "states"), run))
        for name in federated.federation.sites
    }
    return {name: blob for name, blob in kept.items() if blob != memory_to_bytes({})}


@pytest.mark.parametrize("label", [*METHODS_OVER_SITES, "fedper+bias", "fedavg+adapter"])
def test_sites_end_with_the_bits_of_one_process_and_keep_their_own(label: str, tmp_path: Path) -> None:
    experiment = tiny(label, {"cd2_pfed": {"ramp": 2}}.get(label), **THREE)
    alone = finish(experiment, tmp_path / "alone")
    federated = Federated(experiment, tmp_path)
    federated.finish()
    assert server_files(federated.out) == server_files(alone)
    assert states(federated) == memories(alone)
    lines = Run(federated.out).rounds
    assert [line["nbytes_up"] for line in lines] == [line["nbytes_up"] for line in Run(alone).rounds]

    # The ledger is the sum of the bytes that were sent, and no personal value was among them.
    kinds = {"down": ("train", False), "up": ("train", True)}
    for way, (kind, is_reply) in kinds.items():
        sent = [
            tensor_nbytes(array.data)
            for message in federated.wires.crossed
            if message.metadata.message_type == kind and bool(message.metadata.reply_to_message_id) is is_reply
            for record in message.content.array_records.values()
            for array in record.values()
        ]
        assert sum(sent) == Run(federated.out).summary["nbytes_run"][way]
    private = {
        tensor.contiguous().view(torch.uint8).numpy().tobytes()
        for path in federated.folder.glob("sites/*/states/*/*.safetensors")
        for key, tensor in load_file(path).items()
        if key.split("/")[0] in ("personal", "own") and tensor.numel() > 4 and label != "cd2_pfed"
    }
    crossed = [
        a.data for content in federated.wires.contents() for r in content.array_records.values() for a in r.values()
    ]
    moved = private - initial_values(federated)
    assert not [value for value in moved if any(value in blob for blob in crossed)]
    trained = [
        m for m in federated.wires.crossed if m.metadata.message_type == "train" and not m.metadata.reply_to_message_id
    ]
    assert len(trained) == sum(len(line["cohort"]) for line in lines)


def test_offsets_that_the_server_makes_are_the_same_over_sites(tmp_path: Path) -> None:
    experiment = tiny("distrans", {"offsets": "server"}, **THREE)
    alone = finish(experiment, tmp_path / "alone")
    federated = Federated(experiment, tmp_path)
    federated.finish()
    assert server_files(federated.out) == server_files(alone)


def initial_values(federated: Federated) -> set[bytes]:
    """Values that everybody knows: the weights before round 1, and plain zeros."""
    from fedvit.engine.net import make_net
    from fedvit.network.flower.apps import read_app

    experiment, federation = read_app(federated.folder / "app" / "fedvit_app")
    net = make_net(experiment, len(federation.classes), torch.device("cpu"))
    known = {t.contiguous().view(torch.uint8).numpy().tobytes() for t in net.initial.values()}
    return known | {bytes(len(value)) for value in known}


def test_clients_that_drop_out_are_not_asked(tmp_path: Path) -> None:
    experiment = tiny("fedper", {"train.dropout": 0.6}, **THREE, cohort=3, rounds=4)
    alone = finish(experiment, tmp_path / "alone")
    federated = Federated(experiment, tmp_path)
    federated.finish(min_sites=3)
    failed = [row["failed"] for row in Run(federated.out).rounds]
    assert failed == [row["failed"] for row in Run(alone).rounds]
    assert any(failed)
    assert server_files(federated.out) == server_files(alone)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(2, 2).bfloat16(),
        torch.tensor(7),
        torch.zeros(0, 3),
        torch.tensor([True, False]),
        torch.arange(5, dtype=torch.int8),
        torch.randn(4, 6).t(),
    ],
)
def test_a_tensor_crosses_as_its_bytes(tensor: torch.Tensor) -> None:
    before = {"shared": {"first": torch.ones(3, dtype=torch.int8), "x": tensor}, "none": {}}
    records = to_records(Payload(before, {"loss": 0.5}), {"round": 2})
    assert tensor_nbytes(records[TENSORS][TENSORS].data) == 3 + tensor.numel() * tensor.element_size()
    after, about = from_records(records)
    assert (after.scalars, about) == ({"loss": 0.5}, {"round": 2})
    assert after.trees.keys() == before.keys()
    back = after.trees["shared"]["x"]
    assert back.dtype == tensor.dtype
    assert torch.equal(back, tensor)


def tensor_nbytes(blob: bytes) -> int:
    """The bytes of a message without its header."""
    return len(blob) - 8 - int.from_bytes(blob[:8], "little")


def written(header: Any, nbytes: int = 8) -> Array:
    """An array of ours with this header, and so many zeros for tensors."""
    text = json.dumps(header).encode()
    blob = len(text).to_bytes(8, "little") + text + bytes(nbytes)
    return Array("uint8", (len(blob),), RAW, blob)


def entry(dtype: str, shape: list[int], end: int) -> dict[str, Any]:
    return {"shared/x": {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}}


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (Array(np.zeros(3)), "unexpected array format"),
        (written(entry("F32", [3], 12)), "does not fit"),
        (written(entry("F32", [1], 4)), "8 bytes of tensors where 4"),
        (written(entry("OBJECT", [1], 8)), "OBJECT"),
        (written(entry("F32", [-2], 8)), "whole numbers"),
        (written({"shared/x": {"dtype": "F32", "shape": [2]}}), "data_offsets"),
        (written([1]), "not safetensors"),
    ],
)
def test_what_is_not_written_as_we_write_is_not_read(array: Array, said: str) -> None:
    records = to_records(Payload({"shared": {"x": torch.zeros(2)}}), {})
    assert from_records(records)
    records[TENSORS] = ArrayRecord({TENSORS: array})
    with pytest.raises(ValueError, match=said):
        from_records(records)


# A history.


def test_a_server_killed_after_the_replies_came_in_ends_with_the_same_bits(tmp_path: Path) -> None:
    experiment = tiny("fedper", **THREE, rounds=3)
    whole = Federated(experiment, tmp_path / "whole")
    whole.finish()
    killed = Federated(experiment, tmp_path / "killed")
    steps = killed.rounds()
    next(steps)
    answered = []

    def die(name: str, reply: Message) -> Message:
        if reply.metadata.message_type == "train":
            answered.append(name)
        if len(answered) == experiment.train.cohort:
            raise MemoryError
        return reply

    killed.wires.meddle = die
    with pytest.raises(MemoryError):
        next(steps)
    assert len(answered) == experiment.train.cohort, "all sites have trained round 2"
    killed.wires.meddle = lambda name, reply: reply
    killed.finish(resume=True)
    assert server_files(killed.out) == server_files(whole.out)
    assert states(killed) == states(whole)


def test_a_site_continues_from_the_last_round_that_counted(tmp_path: Path) -> None:
    federated = Federated(tiny("fedper", **THREE, rounds=3, cohort=3), tmp_path)
    lost = "1"
    federated.wires.meddle = lambda name, reply: (
        None if name == lost and (reply.metadata.message_type, reply.metadata.group_id) == ("train", "2") else reply
    )
    federated.finish()
    lines = Run(federated.out).rounds
    assert [line["failed"] for line in lines] == [[], [lost], []]
    continued = {
        (m.content[ABOUT]["continues"], m.metadata.group_id)
        for m in federated.wires.crossed
        if m.metadata.message_type == "train" and m.metadata.dst_node_id == 101
    }
    assert continued == {(0, "1"), (1, "2"), (1, "3")}


# Faults.


def first(content: Payload) -> tuple[dict[str, torch.Tensor], str]:
    weights = dict(content.trees["shared"])
    return weights, next(iter(weights))


def changed(content: Payload, weights: dict[str, torch.Tensor]) -> Payload:
    return Payload({**content.trees, "shared": weights}, content.scalars)


def other_shape(content: Payload, about: dict[str, Any]) -> RecordDict:
    weights, name = first(content)
    return to_records(changed(content, {**weights, name: torch.zeros(2, 2)}), about)


def not_a_number(content: Payload, about: dict[str, Any]) -> RecordDict:
    weights, name = first(content)
    return to_records(changed(content, {**weights, name: torch.full_like(weights[name], torch.nan)}), about)


def another_round(content: Payload, about: dict[str, Any]) -> RecordDict:
    return to_records(content, {**about, "round": 7})


def more_groups(content: Payload, about: dict[str, Any]) -> RecordDict:
    return to_records(Payload({**content.trees, "extra": {"x": torch.zeros(1)}}, content.scalars), about)


def fewer_names(content: Payload, about: dict[str, Any]) -> RecordDict:
    weights, name = first(content)
    del weights[name]
    return to_records(changed(content, weights), about)


def other_records(content: Payload, about: dict[str, Any]) -> RecordDict:
    records = to_records(content, about)
    records["arrays"] = ArrayRecord([np.zeros(3)])
    return records


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (other_shape, "expected torch.float32"),
        (not_a_number, "infinite or NaN"),
        (another_round, "answered for round 7"),
        (more_groups, "groups"),
        (fewer_names, "is missing"),
        (other_records, "cannot be read"),
    ],
)
def test_garbage_is_a_failure_of_its_round(spoil, said: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    federated = Federated(tiny("fedper", **THREE, cohort=3), tmp_path)

    def meddle(name: str, reply: Message) -> Message:
        if name == "2" and reply.metadata.message_type == "train":
            reply.content = spoil(*from_records(reply.content))
        return reply

    federated.wires.meddle = meddle
    federated.finish()
    assert [line["failed"] for line in Run(federated.out).rounds] == [["2"], ["2"]]
    assert said in (federated.out / "log.txt").read_text()
    assert [row["rounds_trained"] for row in Run(federated.out).clients] == [2, 2, 0]


def without(name: str) -> Callable[[dict[str, float]], dict[str, float]]:
    return lambda numbers: {key: value for key, value in numbers.items() if key != name}


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (without("personal_accuracy"), "'personal_accuracy' is missing"),
        (lambda numbers: {**numbers, "personal_confusion_0_0": float("nan")}, "not a number of images"),
        (lambda numbers: {**numbers, "personal_confusion_0_99": 1.0}, "no score is called"),
        (lambda numbers: {**numbers, "personal_loss": float("inf")}, "not a finite number"),
    ],
)
def test_garbage_scores_are_left_out(spoil: Any, said: str, tmp_path: Path) -> None:
    federated = Federated(tiny("fedavg", **THREE, cohort=3), tmp_path)

    def meddle(name: str, reply: Message) -> Message:
        if name == "0" and reply.metadata.message_type == "evaluate" and reply.metadata.group_id == "1":
            content, about = from_records(reply.content)
            reply.content = to_records(Payload({}, spoil(dict(content.scalars))), about)
        return reply

    federated.wires.meddle = meddle
    federated.finish()
    assert said in (federated.out / "log.txt").read_text()
    first, last = Run(federated.out).rounds
    assert ("server" in first["views"], "server" in last["views"]) == (False, True)  # of all clients or of none
    assert Run(federated.out).summary["views"]["server"]["best_round_number"] == 2


@pytest.mark.parametrize("examples", [float("inf"), float("nan"), 0.0])
def test_a_weight_that_is_no_number_of_images_is_refused(examples: float, tmp_path: Path) -> None:
    federated = Federated(tiny("fedavg", **THREE, cohort=3, rounds=1), tmp_path)

    def meddle(name: str, reply: Message) -> Message:
        if name == "1" and reply.metadata.message_type == "train":
            content, about = from_records(reply.content)
            reply.content = to_records(Payload(content.trees, {**content.scalars, "examples": examples}), about)
        return reply

    federated.wires.meddle = meddle
    federated.finish()
    assert Run(federated.out).rounds[0]["failed"] == ["1"]


@pytest.mark.parametrize(
    "about", [{}, {"site": "0"}, {"site": "0", "common": "[]", "train": 1, "test": 1, "classes": 2}]
)
def test_a_hello_that_is_not_ours_is_named(about: dict[str, Any], tmp_path: Path) -> None:
    federated = Federated(tiny("fedavg", **THREE), tmp_path)

    def meddle(name: str, reply: Message) -> Message:
        if name == "0":
            reply.content = to_records(Payload(), about)
        return reply

    federated.wires.meddle = meddle
    with pytest.raises(UserError, match="node 100 sent something that cannot be read"):
        federated.finish(min_sites=3)


def test_messages_are_as_many_as_the_rounds_need(tmp_path: Path) -> None:
    federated = Federated(tiny("fedper", **THREE, rounds=3, eval_every=2), tmp_path)
    federated.finish()
    asked = [m.metadata.message_type for m in federated.wires.crossed if not m.metadata.reply_to_message_id]
    rows = Run(federated.out).rounds
    assert asked.count("train") == sum(len(row["cohort"]) for row in rows)
    assert [row["views"] is None for row in rows] == [True, False, False]
    assert asked.count("evaluate") == 2 * 3
    kept = [len(list(folder.iterdir())) for folder in federated.folder.glob("sites/*/runs/*/checkpoint/clients")]
    assert kept == [1, 1, 1], "a site keeps one model of its own, however often it is tested"


def test_a_site_that_is_away_is_named_and_may_come_back(tmp_path: Path) -> None:
    federated = Federated(tiny("fedper", **THREE, cohort=3, rounds=3), tmp_path)
    steps = federated.rounds(min_sites=2)
    next(steps)
    gone = federated.wires.nodes.pop(102)
    assert next(steps).row["failed"] == ["2"]
    assert [row["client"] for row in Run(federated.out).clients] == ["0", "1"]
    federated.wires.nodes[555] = gone  # without keys a node that restarts has another number
    last = next(steps)
    assert last.row["failed"] == []
    assert [row["rounds_trained"] for row in Run(federated.out).clients] == [3, 3, 2]


def test_too_few_sites_stop_the_run_and_lose_nothing(tmp_path: Path) -> None:
    experiment = tiny("fedper", **THREE, cohort=3)
    whole = Federated(experiment, tmp_path / "whole")
    whole.finish()
    federated = Federated(experiment, tmp_path / "stopped")
    steps = federated.rounds(min_sites=3)
    next(steps)
    federated.wires.meddle = lambda name, reply: None if name == "0" else reply
    with pytest.raises(UserError, match="fewer than 3 sites answered in each of 3 attempts: 0 did not answer"):
        next(steps)
    federated.wires.meddle = lambda name, reply: reply
    federated.finish(resume=True, min_sites=3)
    assert server_files(federated.out) == server_files(whole.out)


def test_a_run_whose_sites_stay_away_ends_and_says_who_is_there(tmp_path: Path) -> None:
    federated = Federated(tiny("fedper", **THREE, cohort=3, rounds=2), tmp_path)
    steps = federated.rounds(min_sites=3)
    next(steps)
    del federated.wires.nodes[101]
    with pytest.raises(UserError, match=r"2 sites are connected \(.*\), but 3 are needed"):
        next(steps)


def test_a_site_without_the_state_that_the_server_goes_on_from_says_so(tmp_path: Path) -> None:
    federated = Federated(tiny("fedper", **THREE, cohort=3, rounds=2), tmp_path)
    steps = federated.rounds()
    next(steps)
    shutil.rmtree(federated.state_of("1") / "states")
    next(steps)
    assert Run(federated.out).rounds[1]["failed"] == ["1"]
    assert "state of round 1, which this site does not have" in (federated.out / "log.txt").read_text()


def test_two_servers_do_not_share_a_folder(tmp_path: Path) -> None:
    with only_run(tmp_path), pytest.raises(UserError, match="another process is running in"), only_run(tmp_path):
        pass


# Who may take part.


def test_two_sites_with_one_name_are_refused(tmp_path: Path) -> None:
    federated = Federated(tiny("fedavg", **THREE), tmp_path)
    federated.wires.nodes[999] = dict(federated.wires.nodes[100])
    with pytest.raises(UserError, match="two sites have the name '0'"):
        federated.finish(min_sites=3)
    assert not (federated.out / "run.toml").exists()


@pytest.mark.attack
def test_a_name_belongs_to_the_key_that_was_registered_for_it(tmp_path: Path) -> None:
    """Site 1 says that it is site 0: it is named, and costs itself the run, but nobody else."""
    federated = Federated(tiny("fedavg", **THREE, cohort=3), tmp_path)
    federated.pinned = {100: "0", 101: "1", 102: "2"}
    federated.wires.nodes[101] = {**federated.wires.nodes[101], "site": "0"}
    with pytest.raises(UserError, match="the node that was registered for site 1 says that it is '0'"):
        federated.finish(min_sites=3)
    assert not (federated.out / "run.toml").exists()
    federated.finish(min_sites=2)
    assert [row["failed"] for row in Run(federated.out).rounds] == [["1"], ["1"]]


@pytest.mark.attack
def test_a_node_whose_key_was_registered_for_no_site_is_not_even_asked(tmp_path: Path) -> None:
    federated = Federated(tiny("fedavg", **THREE, cohort=3), tmp_path)
    federated.pinned = {100: "0", 101: "1", 102: "2", 998: "of another study"}
    for node in (998, 999):
        federated.wires.nodes[node] = {"site": "0", "state": str(tmp_path / "stranger")}
    federated.finish()
    assert [row["failed"] for row in Run(federated.out).rounds] == [[], []]
    assert {message.metadata.dst_node_id for message in federated.wires.crossed} & {998, 999} == set()
    assert not (tmp_path / "stranger").exists()


def test_a_site_that_does_not_take_part_is_named_as_registered(tmp_path: Path) -> None:
    """Whatever name it gives in its refusal."""
    federated = with_policy(tmp_path, 'methods = ["local"]')
    federated.pinned = {100: "2", 101: "1", 102: "0"}
    with pytest.raises(UserError, match="site 2 does not take part: the policy allows local"):
        federated.finish(min_sites=3)


def test_a_site_that_restarts_before_the_first_round_is_taken_by_its_new_node(tmp_path: Path) -> None:
    """Flower counts a node that was killed as connected for a minute."""
    federated = Federated(tiny("fedavg", **THREE, cohort=3), tmp_path)
    wires = federated.wires
    again, answered = dict(wires.nodes[100]), []

    def meddle(site: str, reply: Message) -> Message | None:
        node = reply.metadata.src_node_id
        if node == 101 and 102 not in wires.nodes:  # 0 has answered; now it is started again, and the last site comes
            wires.nodes[999], wires.nodes[102] = again, late
        answered.append(node)
        if node != 100 or answered.count(100) < 2:
            return reply
        del wires.nodes[100]  # by now Flower knows that it has gone
        return None

    late, wires.meddle = wires.nodes.pop(102), meddle
    federated.finish(min_sites=3)
    assert [row["failed"] for row in Run(federated.out).rounds] == [[], []]
    assert answered.count(100) == 2, "its first hello, and the question whether it is still there"


def test_a_site_nobody_listed_is_refused(tmp_path: Path) -> None:
    federated = Federated(tiny("fedavg", **THREE), tmp_path)
    federated.wires.nodes[999] = {"site": "stranger", "state": str(tmp_path / "stranger"), "trial": "yes"}
    with pytest.raises(UserError, match="site stranger does not take part"):
        federated.finish(min_sites=3)


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("weights", "the initial weights"),
        ("classes", "the class list"),
        ("settings", "settings"),
        ("version", "the fedvit version"),
        ("inputs", "the input settings"),
        ("model", "model"),
    ],
)
def test_a_site_that_differs_is_refused_by_name(
    part: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federated = Federated(tiny("fedavg", **THREE), tmp_path)
    right = site.common

    def wrong(experiment, net, classes):  # type: ignore[no-untyped-def]
        return {**right(experiment, net, classes), part: "other"}

    monkeypatch.setattr(site, "common", wrong)  # the sites' own; the server has its own name for it
    with pytest.raises(UserError, match=f"site 0 differs from the server in {said}.*Nothing was trained"):
        federated.finish(min_sites=3)


def test_what_server_and_site_have_in_common_is_told_apart() -> None:
    def prints(classes: tuple[str, ...] = ("a", "b"), **flags: object) -> dict[str, object]:
        experiment = tiny("fedavg", **flags)
        return common(experiment, make_net(experiment, 2, torch.device("cpu")), classes)

    base = prints()
    assert differences(base, prints()) == []
    assert differences(base, prints(("a", "c"))) == ["the class list (server a, b, client a, c)"]
    assert differences(base, prints(lr=0.5)) == ["the settings (train.lr: server 0.002, client 0.5)"]
    assert [found.split(" (")[0] for found in differences(base, prints(seed=1))] == [
        "the initial weights",
        "the settings",
    ]
    assert "the model" in differences(base, prints(model="resnet18", patch_size=None))[0]


def test_too_few_sites_at_the_start_are_named(tmp_path: Path) -> None:
    federated = Federated(tiny("fedavg", **THREE), tmp_path)
    del federated.wires.nodes[101]
    with pytest.raises(UserError, match="2 of 3 sites connected within 1 s, but at least 3 are needed; missing: 1"):
        federated.finish(min_sites=3)


# A site's rules.


def with_policy(tmp_path: Path, text: str, label: str = "fedper") -> Federated:
    rules = tmp_path / "policy.toml"
    rules.write_text(text)
    return Federated(tiny(label, **THREE), tmp_path, policy=str(rules))


@pytest.mark.parametrize(
    ("text", "label", "said"),
    [
        ('methods = ["fedavg"]', "fedper", "the policy allows fedavg, but this run uses fedper"),
        ('groups = ["shared"]', "scaffold", "does not allow the tensor group control to leave"),
        ("largest_message_mb = 0.001", "fedavg", "allows at most 0.001 MB per message"),
        ("largest_epsilon = 8", "fedavg", "requires an epsilon of at most 8, but this run has no privacy bound"),
    ],
)
def test_a_site_refuses_before_the_first_round(text: str, label: str, said: str, tmp_path: Path) -> None:
    federated = with_policy(tmp_path, text, label)
    with pytest.raises(UserError, match=said):
        federated.finish()
    assert not (federated.out / "run.toml").exists()
    assert said in (federated.state_of("0") / "log.txt").read_text()
    assert not list(federated.folder.glob("sites/*/states/*/*"))


def test_a_site_may_keep_its_class_counts(tmp_path: Path) -> None:
    federated = with_policy(tmp_path, "class_counts = false", "fedavg")
    federated.finish()
    numbers = {key for content in federated.wires.contents() for key in content.metric_records.get("numbers", {})}
    assert "personal_accuracy" in numbers
    assert not [key for key in numbers if "confusion" in key]
    assert "server" not in Run(federated.out).summary["views"]
    write_report([federated.out], tmp_path / "report.html")
    assert json.loads((federated.out / "confusion.json").read_text()) == {}


@pytest.mark.parametrize("text", ["groups = 3", "method = ['fedavg']", "not toml"])
def test_a_policy_that_cannot_be_read_lets_nothing_happen(text: str, tmp_path: Path) -> None:
    federated = with_policy(tmp_path, text)
    with pytest.raises(UserError, match="a file or setting at the site is not as expected"):
        federated.finish()
    assert "policy.toml" in (federated.state_of("0") / "log.txt").read_text()


def test_a_wrong_manifest_at_a_site_is_told_without_its_words(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("path,label,patient,site\na.png,ill,MRN7,0\nb.png,ill,MRN7,1\n")
    federated = Federated(tiny("fedavg", **THREE), tmp_path)
    federated.wires.nodes[100]["data"] = str(tmp_path / "mine.csv")
    experiment = federated.folder / "app" / "fedvit_app" / "experiment.toml"
    experiment.write_text(experiment.read_text().replace("samples = 120\n", ""))
    about = pushed(federated, "evaluate", "x")
    assert about["code"] == "mistake"
    assert not [word for word in ("MRN", "png", "mine.csv") if word in str(about)]
    assert "a.png (line 2 of mine.csv) does not exist" in (federated.state_of("0") / "log.txt").read_text()


def test_what_goes_wrong_at_a_site_stays_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    federated = Federated(tiny("fedavg", **THREE, cohort=3), tmp_path)

    def fail(self: object, *more: object) -> None:
        raise RuntimeError("a secret path")

    steps = federated.rounds(min_sites=0)
    next(steps)
    monkeypatch.setattr(site.Site, "train", fail)
    next(steps)
    assert Run(federated.out).rounds[-1]["failed"] == ["0", "1", "2"]
    assert "a secret path" in (federated.state_of("1") / "log.txt").read_text()
    assert "a secret path" not in (federated.out / "log.txt").read_text()
    assert not any("secret" in str(dict(r)) for c in federated.wires.contents() for r in c.config_records.values())


def test_a_message_that_is_not_the_agreed_one_is_refused_at_the_site(tmp_path: Path) -> None:
    federated = Federated(tiny("fedavg", **THREE), tmp_path)
    federated.finish()
    wires = federated.wires
    content = to_records(Payload({"shared": {"head.bias": torch.zeros(3)}}, {"round": 3}), {"run": "x", "continues": 0})
    wires.push_messages([Message(content, dst_node_id=100, message_type="train", group_id="3")])
    about = wires.crossed[-1].content[ABOUT]
    assert about["code"] == "refused"
    assert "not what was agreed: group shared" in about["text"]


def pushed(federated: Federated, task: str, run: str) -> dict[str, Any]:
    """The answer of site 0 to a message that no server of ours sent."""
    experiment, federation = read_app(federated.folder / "app" / "fedvit_app")
    net = make_net(experiment, len(federation.classes), torch.device("cpu"))
    down = net.plan.dispatch(net.server(federation.sites), "0")
    content = to_records(Payload(down.trees, {**down.scalars, "round": 1}), {"run": run, "continues": 0})
    federated.wires.push_messages([Message(content, dst_node_id=100, message_type=task, group_id="1")])
    return dict(federated.wires.crossed[-1].content[ABOUT])


def test_rules_hold_without_a_hello(tmp_path: Path) -> None:
    federated = with_policy(tmp_path, 'methods = ["local"]', "fedavg")
    assert pushed(federated, "train", "x")["code"] == "refused"
    assert not list(federated.state_of("0").glob("states/*/*.safetensors"))


def test_the_server_does_not_choose_where_a_site_writes(tmp_path: Path) -> None:
    federated = Federated(tiny("fedavg", **THREE), tmp_path)
    federated.state_of("0").mkdir(parents=True)
    before = {path for path in tmp_path.rglob("*") if not path.is_relative_to(federated.state_of("0"))}
    assert pushed(federated, "evaluate", "../../x")["round"] == 1
    assert {path for path in tmp_path.rglob("*") if not path.is_relative_to(federated.state_of("0"))} == before


def test_a_state_folder_that_cannot_be_written_is_not_told_elsewhere(tmp_path: Path) -> None:
    federated = Federated(tiny("fedavg", **THREE), tmp_path)
    (tmp_path / "sites").mkdir()
    federated.state_of("0").write_text("a file where a folder should be")
    about = pushed(federated, "train", "x")
    assert about["code"] == "mistake"
    assert str(tmp_path) not in str(about)


# Real sites.


def write_manifests(root: Path) -> None:
    """A manifest in every site's folder: two images for each patient."""
    for site_ in sorted(root.iterdir()):
        files = sorted(file.relative_to(site_) for file in site_.glob("*/*.png"))
        lines = [f"{f},{f.parent.name},MRN-{site_.name}-{f.parent.name}-{int(f.stem) // 2}" for f in files]
        (site_ / "manifest.csv").write_text("\n".join(["path,label,patient", *lines]))


@pytest.mark.parametrize(
    ("method", "manifest"),
    [("fedper", ""), ("fedala", ""), ("fedper", "manifest.csv")],  # fedala looks at the images again to predict
)
def test_sites_with_folders_of_their_own_end_as_one_process_with_all_of_them(
    method: str, manifest: str, sites_folder: Path, tmp_path: Path
) -> None:
    flags = {"method": method, "rounds": 2, "epochs": 1, "image_size": 16, "patch_size": 4}
    held = {"data.val": 0.2} if manifest else {}
    cache = {"data.cache": str(tmp_path / "cache"), **held}
    everything = str(sites_folder / "*" / manifest) if manifest else str(sites_folder)
    write_manifests(sites_folder)
    alone = finish(load_experiment(None, cache, {**flags, "data": everything}), tmp_path / "alone")

    images = {path.name: path / manifest for path in sites_folder.iterdir()}
    federated = Federated.of_folders(load_experiment(None, held, flags), tmp_path, images)
    federated.finish(min_sites=2)
    assert server_files(federated.out) == server_files(alone)
    assert states(federated) == memories(alone)

    if manifest:  # patients are known at the site by a hash with a secret of its own, and nowhere else
        (split,) = federated.state_of("north").glob("runs/*/split.json")
        assert len(set(json.loads(split.read_text())["patients"])) == 14
        assert (federated.state_of("north") / "cache" / "patients.salt").stat().st_mode & 0o777 == 0o600
        kept = [f for f in tmp_path.rglob("*") if f.is_file() and not f.is_relative_to(sites_folder)]
        assert not [file for file in kept if b"MRN-north" in file.read_bytes()]
        assert not [c for c in federated.wires.contents() if "MRN-north" in str({k: dict(v) for k, v in c.items()})]

    # The site takes its model home from its own folder; the server has none to give.
    (own,) = (federated.state_of("north") / "runs").iterdir()
    mine, wanted = fedvit.load_run(own).model("north"), fedvit.load_run(alone).model("north")
    assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), wanted.parameters(), strict=True))
    assert mine.description.classes == ["ill", "well"]
    with pytest.raises(UserError, match="at the site"):
        fedvit.load_run(federated.out).model("north")
    file, image = tmp_path / "north.safetensors", sites_folder / "north" / "ill" / "0.png"
    for words in (
        ["export", str(own), "--client", "north", "--out", str(file)],
        ["predict", str(own), str(image), "--client", "north"],
    ):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
    assert file.is_file()
    assert "ill" in done.output


# The command.


def command(*words: str) -> Result:
    return CliRunner().invoke(app, ["flower", *words])


def test_fedvit_flower_writes_an_app_without_paths_of_this_machine(tmp_path: Path) -> None:
    folder = tmp_path / "app"
    weights = str(tmp_path / "vit.safetensors")
    done = command(
        str(folder), "--sites", "south,north", "--classes", "ill,well", "--method", "fedper", "--weights", weights,
        "--model", "vit_tiny_patch16_224", "--out", "the-run",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    experiment, federation = read_app(folder / "fedvit_app")
    assert federation.sites == ("north", "south")
    assert federation.classes == ("ill", "well")
    assert experiment.partition.clients == 2
    assert experiment.data.auroc is True
    assert str(experiment.model.weights) == "vit.safetensors"
    everything = "".join(path.read_text() for path in folder.rglob("*") if path.is_file())
    assert str(tmp_path) not in everything
    assert 'out = "the-run"' in everything


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sites", "a,a", "--classes", "x,y"], "distinct names"),
        (["--sites", "a", "--classes", "x,y"], "at least two sites"),
        (["--sites", "a,b", "--classes", "x"], "two classes"),
        (["--sites", "a,b", "--classes", "x,y", "--cohort", "3"], "a cohort of 3"),
    ],
)
def test_fedvit_flower_refuses(words: list[str], said: str, tmp_path: Path) -> None:
    done = command(str(tmp_path / "app"), *words)
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())
    assert not (tmp_path / "app").exists()


def test_fedvit_flower_takes_an_experiment_file(tmp_path: Path) -> None:
    file = tmp_path / "experiment.toml"
    file.write_text('[method]\nname = "fedperfix"\n[train]\nrounds = 7\n')
    done = command(str(tmp_path / "app"), "--from", str(file), "--sites", "north,south", "--classes", "ill,well")
    assert done.exit_code == 0, done.output
    experiment, federation = read_app(tmp_path / "app" / "fedvit_app")
    assert (experiment.label, experiment.train.rounds, federation.sites) == ("fedperfix", 7, ("north", "south"))
    file.write_text("[data]\nsamples = 100\n")
    done = command(str(tmp_path / "b"), "--from", str(file), "--sites", "north,south", "--classes", "ill,well")
    assert done.exit_code == 2
    assert "data.samples" in done.output


def test_flower_calls_nobody_unless_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("FLWR_TELEMETRY_ENABLED", "FLWR_DISABLE_UPDATE_CHECK")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert [Trial(tmp_path, 1).environment()[name] for name in names] == ["0", "1"]
    monkeypatch.setenv(names[0], "1")
    assert Trial(tmp_path, 1).environment()[names[0]] == "1"


def test_a_process_of_a_trial_that_ends_is_named_with_its_last_words(tmp_path: Path) -> None:
    trial, words = Trial(tmp_path, 1), [sys.executable, "-c", "print('no such port'); raise SystemExit(3)"]
    with daemon(words, trial, "supernode-a") as process, pytest.raises(UserError) as problem:
        list(follow(trial, {"supernode-a": process}, tmp_path / "out", "1", 0))
    assert "supernode-a ended with status 3" in str(problem.value)
    assert "--resume continues" in str(problem.value)
    assert str(problem.value).endswith("no such port")


def test_ports_of_a_trial_differ_and_nobody_has_them() -> None:
    with socket.socket() as taken:
        mine = free_port()
        taken.bind(("127.0.0.1", mine))
        ports = [free_port() for _ in range(12100)]  # all of them, and the first ones again
    assert mine not in ports
    assert len(set(ports[:1000])) == 1000
    assert all(20000 <= port < 32000 for port in ports)


def test_everything_but_flower_works_without_it() -> None:
    code = "import sys; sys.modules['flwr'] = None; import fedvit.cli.main, fedvit.runs.resume"
    code += "; import fedvit.network.flower.template as app"
    code += "; app.need_flower()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "UserError: this needs Flower" in done.stderr


def test_fedvit_flower_needs_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    done = command(str(tmp_path), "--sites", "a,b", "--classes", "x,y")
    assert done.exit_code == 2
    assert "is not empty" in done.output


@pytest.mark.parametrize(("method", "said"), [("fedv", "split-server"), ("centralized", "pools"), ("fedfed", "sends")])
def test_methods_that_cannot_run_at_sites_say_why(method: str, said: str, tmp_path: Path) -> None:
    federated = Federated(tiny(method, **THREE), tmp_path)
    with pytest.raises(UserError, match=said):
        federated.finish()
