"""One site's answer never ends the server: every attack that a review tried over the real messages."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import Message as FlowerMessage

from fedvit.core.clinical import score_cases
from fedvit.core.clinical_message import to_scalars
from fedvit.core.errors import UserError, one_line
from fedvit.core.metrics import METRICS, pooled
from fedvit.core.payload import Payload, from_bytes, to_bytes
from fedvit.engine.client_store import memory_from_bytes
from fedvit.engine.net import make_net
from fedvit.engine.split_loop import server_side
from fedvit.models.cuts import Parts
from fedvit.network import boundary
from fedvit.network.boundary import read_hello, read_order, read_report, read_scores
from fedvit.network.flower.records import from_records, to_records
from fedvit.network.grpc import remote_clients
from fedvit.network.grpc.channel import Event, GarbageError, Session
from fedvit.network.grpc.checks import Checks, Progress
from fedvit.network.grpc.remote_clients import RemoteClients
from fedvit.network.payload_check import difference, up_of
from fedvit.network.site import Site
from fedvit.runs.folder import Run
from fedvit.runs.write import Holding
from fedvit.split.messages import Message, pack
from fedvit.split.server import ServerSide
from tests.conftest import Bench, tiny
from tests.grid import Federated
from tests.unit.core.test_clinical import drawn

pytestmark = pytest.mark.attack
THREE = {"clients": 3, "samples": 120, "cohort": 3}
AGREED = Holding(20, 10, 3)
SCORES = {f"personal_{metric}": 1.0 for metric in METRICS}
NESTED = "[" * 200_000


# Decoders raise ValueError, whatever they are given.


def blob(entry: dict[str, Any], metadata: dict[str, str], name: str = "h/x", nbytes: int = 0) -> bytes:
    text = json.dumps({"__metadata__": metadata, name: entry}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(nbytes)


NOTHING = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
HEADER = {"message": '[1,"c",0,"start"]', "numbers": "{}"}


@pytest.mark.parametrize(
    "bad",
    [
        blob({**NOTHING, "shape": [0, 1 << 62, 4]}, HEADER),
        blob({**NOTHING, "shape": [0] * 70}, HEADER),
        blob(NOTHING, HEADER, "h/" + "x" * 1_000_000),
        blob(NOTHING, HEADER, "h/x\nERROR forged"),
        blob(NOTHING, {**HEADER, "numbers": "[1]"}),
        blob(NOTHING, {**HEADER, "numbers": '{"loss": "a"}'}),
        blob(NOTHING, {**HEADER, "numbers": '{"loss": true}'}),
        blob(NOTHING, {**HEADER, "numbers": '{"loss": 1' + "0" * 400 + "}"}),
        blob(NOTHING, {**HEADER, "numbers": NESTED}),
        blob(NOTHING, {**HEADER, "empty": '"ab"'}),
        blob(NOTHING, {**HEADER, "empty": NESTED}),
        blob(NOTHING, {**HEADER, "empty": '["a\\nERROR forged"]'}),
    ],
)
def test_a_decoder_raises_nothing_but_value_error(bad: bytes) -> None:
    for read in (from_bytes, memory_from_bytes, Message.from_bytes):
        with pytest.raises(ValueError, match=r"not |number|name|nested|large"):
            read(bad)


def test_the_round_and_step_of_a_message_are_numbers_of_ours() -> None:
    for head in ('[1e400,"c",0,"start"]', '[-1,"c",0,"start"]', f'[{10**30},"c",0,"start"]', NESTED):
        with pytest.raises(ValueError, match="not a message"):
            Message.from_bytes(blob(NOTHING, {**HEADER, "message": head}))


# From a site to the server.


def hello(**changes: Any) -> dict[str, Any]:
    return {"site": "north", "common": "{}", "train": 20, "test": 10, "classes": 3, **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {"common": NESTED},
        {"common": '{"a":' * 50 + "1" + "}" * 50},
        {"common": '"' + "x" * 2_000_000 + '"'},
        {"common": 3},
        {"train": 999_999_999},
        {"train": True},
        {"test": -1},
    ],
)
def test_a_hello_that_no_site_sends_is_an_error_and_nothing_more(changes: dict[str, Any]) -> None:
    assert isinstance(read_hello(hello()), boundary.Hello)
    with pytest.raises(ValueError, match=r"hello|JSON"):
        read_hello(hello(**changes))


def test_a_refusal_is_one_short_line_of_printable_text() -> None:
    forged = "x\n2026-01-01 ERROR fedvit: forged \x1b[31m" + "y" * 2_000_000
    found = read_hello({"code": forged, "text": forged, "site": forged})
    assert str(found).isprintable()
    assert len(str(found)) < 400


@pytest.fixture(scope="module")
def report() -> Payload:
    """The report of a site that trained nothing."""
    experiment = tiny("fedavg")
    net = make_net(experiment, 10, torch.device("cpu"))
    down = replace(net.federated.dispatch(net.server(["0"]), "0"), scalars={"round": 1.0})
    return up_of(net, down, 1)


def spoilt(report: Payload, value: float, **numbers: float) -> Payload:
    trees = {group: {n: torch.full_like(t, value) for n, t in tree.items()} for group, tree in report.trees.items()}
    return Payload(trees, {"examples": 20.0, "loss": 1.0, **numbers})


@pytest.mark.parametrize(
    ("value", "numbers", "said"),
    [
        (1e15, {}, "larger than 1,000,000"),
        (9e5, {}, "1000 times that before round 1"),
        (float("nan"), {}, "infinite or NaN"),
        (0.1, {"loss": 1e308}, "the loss is not a number that training gives"),
        (0.1, {"loss": float("nan")}, "the loss is not a number that training gives"),
        (0.1, {"examples": float("nan")}, "the number of training images"),
        (0.1, {"x" * 1_000_000: 1.0}, "missing or unknown"),
    ],
)
def test_a_report_beyond_any_training_is_refused(
    value: float, numbers: dict[str, float], said: str, report: Payload
) -> None:
    assert read_report(spoilt(report, 0.1), report, AGREED).scalars["examples"] == 20
    with pytest.raises(ValueError, match=said) as problem:
        read_report(spoilt(report, value, **numbers), report, AGREED)
    assert len(str(problem.value)) < 400


def test_a_site_counts_for_no_more_images_than_it_said_it_has(report: Payload) -> None:
    assert read_report(spoilt(report, 0.1, examples=999_999_999.0), report, AGREED).scalars["examples"] == 20
    assert read_report(spoilt(report, 0.1, examples=7.0), report, AGREED).scalars["examples"] == 7


@pytest.mark.parametrize(
    "wrong",
    [
        {"personal_confusion_2_2": 0.0},  # of a class that nobody has
        {"personal_confusion_2_2": 11.0},
        {"personal_confusion_2_2": 10.0, "personal_loss": 1e308},
    ],
)
def test_scores_that_no_site_can_have_are_refused(wrong: dict[str, float]) -> None:
    right = {**SCORES, "personal_confusion_2_2": 10.0}
    assert pooled({"a": read_scores(Payload(scalars=right), 3, AGREED).scalars})["accuracy"] == 100
    with pytest.raises(ValueError, match=r"images|loss"):
        read_scores(Payload(scalars={**SCORES, **wrong}), 3, AGREED)


@pytest.mark.parametrize("view", ["=cmd|' /C calc'!A0", "x" * 1_000_000, "a\nERROR forged", ""])
def test_a_view_that_no_plan_has_is_refused(view: str) -> None:
    invented = {f"{view}_{metric}": 1.0 for metric in METRICS}
    with pytest.raises(ValueError, match="a view has a name that no plan gives"):
        read_scores(Payload(scalars={**SCORES, **invented}), 3, AGREED)


def test_clinical_scores_are_of_no_more_images_than_the_site_has() -> None:
    clinical = to_scalars(score_cases(drawn(images=10), 0, "a"))
    assert read_scores(Payload(scalars={**SCORES, **clinical}), 2, AGREED).scalars.items() >= clinical.items()
    with pytest.raises(ValueError, match="the clinical scores are of 10 images, but the site has 9"):
        read_scores(Payload(scalars={**SCORES, **clinical}), 2, Holding(20, 9, 2))


def test_a_tensor_name_of_a_megabyte_is_not_repeated(report: Payload) -> None:
    long = Payload({"x" * 1_000_000: {}})
    assert len(str(difference(long, report))) <= 300
    named = Payload({**report.trees, "shared": {**report.trees["shared"], "x" * 1_000_000: torch.zeros(1)}})
    assert len(str(difference(named, report))) <= 400
    assert one_line("a\n\x1b[2Kb") == "a [2Kb"


# The whole server, with one evil site among three.


def evil(task: str, change: Callable[[Payload, dict[str, Any]], Any]) -> Callable[[str, FlowerMessage], FlowerMessage]:
    """Site 2 answers this task with something else."""

    def meddle(name: str, reply: FlowerMessage) -> FlowerMessage:
        if name == "2" and reply.metadata.message_type == task:
            reply.content = change(*from_records(reply.content))
        return reply

    return meddle


NONSENSE = {
    "nested lists": {"common": NESTED},
    "an impossible number of images": {"train": 999_999_999},
    "another site's name": {"site": "0"},
    "a name with a forged line": {"site": "2\nERROR forged"},
    "a refusal": {"code": "refused", "text": "no\nERROR forged"},
}


@pytest.mark.parametrize("case", NONSENSE)
def test_a_hello_that_does_not_fit_costs_its_site_the_run_and_nobody_else(case: str, tmp_path: Path) -> None:
    """Without enough other sites, it ends the run before the first round."""
    federated = Federated(tiny("fedavg", **THREE), tmp_path)
    federated.wires.meddle = evil(
        "query.hello", lambda content, about: to_records(content, {**about, **NONSENSE[case]})
    )
    with pytest.raises(UserError, match=r"(node 102|site 2|nodes 100 and 102|is not one of).*Nothing was trained"):
        federated.finish(min_sites=3)
    federated.finish(min_sites=2)
    assert [row["failures"] for row in Run(federated.out).rounds] == [{"2": "is not connected"}] * 2
    said = (federated.out / "log.txt").read_text()
    assert re.search("WARNING.*(node 102|site 2|nodes 100 and 102|is not one of)", said)
    assert "\nERROR forged" not in said


def test_evil_reports_and_scores_are_failures_of_their_site(tmp_path: Path) -> None:
    federated = Federated(tiny("fedavg", **THREE, rounds=2), tmp_path)

    def change(content: Payload, about: dict[str, Any]) -> Any:
        if "personal_loss" in content.scalars:
            return to_records(Payload({}, {**content.scalars, "personal_confusion_9_9": 0.0}), about)
        if about["round"] == 2:
            return to_records(Payload(content.trees, {**content.scalars, "examples": 999_999_999.0}), about)
        return to_records(spoilt(content, 1e15), about)

    federated.wires.meddle = lambda name, reply: (
        evil(reply.metadata.message_type, change)(name, reply)
        if (reply.metadata.message_type in ("train", "evaluate"))
        else reply
    )
    federated.finish()
    first, second = Run(federated.out).rounds
    assert (first["failed"], second["failed"]) == (["2"], [])
    assert "larger than 1,000,000" in first["failures"]["2"]
    assert "'personal_confusion_9_9' is not a number of images" in second["failures_evaluation"]["2"]
    said = (federated.out / "log.txt").read_text()
    assert "site 2 reports 1e+09 training images, but said 22 when it connected: it counts as 22" in said


def test_a_run_whose_sites_all_fail_is_not_finished_and_may_be_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federated = Federated(tiny("fedavg", **THREE, rounds=4), tmp_path)
    right = Site.train

    def fail(self: Site, *more: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(Site, "train", fail)
    with pytest.raises(UserError, match=r"no client has trained in 3 rounds.*saved up to round 2"):
        federated.finish(min_sites=0)
    assert not Run(federated.out).finished
    monkeypatch.setattr(Site, "train", right)
    federated.finish(resume=True)
    assert [len(row["failed"]) for row in Run(federated.out).rounds] == [3, 3, 0, 0]
    assert Run(federated.out).finished


def test_a_run_whose_scores_are_all_refused_says_so(tmp_path: Path) -> None:
    federated = Federated(tiny("fedavg", **THREE, rounds=1), tmp_path)

    def meddle(name: str, reply: FlowerMessage) -> FlowerMessage:
        if reply.metadata.message_type == "evaluate":
            reply.content = to_records(Payload(), from_records(reply.content)[1])
        return reply

    federated.wires.meddle = meddle
    with pytest.raises(UserError, match="no client could be evaluated"):
        federated.finish(min_sites=0)


# From the server to a site.


@pytest.mark.parametrize(
    ("about", "numbers"),
    [
        ({"run": "r"}, {"round": 1.0}),
        ({"run": "r", "continues": -1}, {"round": 1.0}),
        ({"run": 3, "continues": 0}, {"round": 1.0}),
        ({"run": "r" * 1000, "continues": 0}, {"round": 1.0}),
        ({"run": "r", "continues": 0}, {}),
        ({"run": "r", "continues": 0}, {"round": float("inf")}),
        ({"run": "r", "continues": 0}, {"round": 1.5}),
        ({"run": "r", "continues": 0}, {"round": 1.0, "rate": float("nan")}),
        ({"run": "r", "continues": 0}, {"round": 1.0, "rate": 10**400}),
    ],
)
def test_an_order_that_no_server_gives_is_refused(about: dict[str, Any], numbers: dict[str, float]) -> None:
    assert read_order(Payload({}, {"round": 3.0}), {"run": "r", "continues": 2}) == boundary.Order("r", 3, 2)
    with pytest.raises(UserError, match="the server's message"):
        read_order(Payload({}, numbers), about)


# Split learning.


def split_side(method: str, folder: Path) -> tuple[Checks, ServerSide, Progress, Bench]:
    bench = Bench(tiny(method), folder)
    parts = Parts(bench.net.module, bench.net.split.cut)
    side = server_side(bench.net, parts, bench.server, bench.experiment, 1, ["c"])
    return Checks(bench.net, 32), side, Progress("train", 2, average=True), bench


def say(kind: str, step: int, trees: dict[str, Any], **numbers: float) -> Message:
    return Message(1, "c", step, kind, Payload(trees, numbers))


@pytest.mark.parametrize(
    ("method", "kind"), [("festa", "backward"), ("fedv", "forward"), ("fedv", "parts"), ("fedvz", "losses")]
)
def test_values_of_1e37_are_refused_before_the_body_sees_them(method: str, kind: str, tmp_path: Path) -> None:
    checks, side, progress, _ = split_side(method, tmp_path)
    h = {"h": pack(torch.zeros(4, *checks.h), "fp32")}
    b = {"b": pack(torch.full((4, *checks.b), 1e37), "fp32")}
    evil = {
        "forward": say("forward", 0, {"h": pack(torch.full((4, *checks.h), 1e37), "fp32")}, last=0.0),
        "backward": say("backward", 0, b, last=0.0, wanted=1.0),
        "parts": say("parts", 2, {"parts": {name: torch.full_like(t, 1e37) for name, t in checks.own.items()}}),
        "losses": say("losses", 1, {}, draw=0.0, plus=1.7e308, minus=-1.7e308),
    }[kind]
    good = [say("start", 0, {}, updated=0.0), say("forward", 0, h, last=0.0), say("forward", 1, h, last=1.0)]
    for message in good[: {"forward": 1, "backward": 2}.get(kind, 3)]:
        checks.check(message, progress, side)
        side.answer(message)
    with pytest.raises(GarbageError, match=r"larger than|invalid value"):
        checks.check(evil, progress, side)


def test_a_gradient_that_ruins_the_body_drops_its_sender(tmp_path: Path) -> None:
    checks, side, _, bench = split_side("festa", tmp_path)
    names = ["c", "d"]
    listener: Any = SimpleNamespace(declined={}, sessions={}, events=remote_clients.queue.SimpleQueue())
    served = RemoteClients(listener, names, bench.experiment, checks, {}, patience=60, least=0)
    session = listener.sessions["c"] = Session("c", {"train": 64})
    h, b = torch.full((4, *checks.h), 9e5), torch.full((4, *checks.b), 9e5)
    said = [
        say("start", 0, {}, updated=0.0),
        say("forward", 0, {"h": pack(h, "fp32")}, last=0.0),
        say("backward", 0, {"b": pack(b, "fp32")}, last=0.0, wanted=1.0),
    ]
    events = [Event("call", session, message.to_bytes()) for message in said]
    for event in events:
        listener.events.put(event)
    done = served.train(side, ["c"], 1, average=False)
    assert "the body cannot learn from it" in done.reasons["c"]
    assert not side.gradients


def test_a_client_does_not_hold_a_round_open_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks, side, _, bench = split_side("fedv", tmp_path)
    listener: Any = SimpleNamespace(declined={}, sessions={}, events=remote_clients.queue.SimpleQueue())
    served = RemoteClients(listener, ["c", "d"], bench.experiment, checks, {}, patience=60, least=0)
    for name in ("c", "d"):
        listener.sessions[name] = Session(name, {"train": 10**7, "test": 3, "classes_here": 2})
    scores = Payload(scalars=SCORES)
    listener.events.put(Event("done", listener.sessions["c"], Message(1, "c", 0, "evaluate", scores).to_bytes()))
    monkeypatch.setattr(remote_clients, "LONGEST_WAIT", 0)
    monkeypatch.setattr(remote_clients, "TICK", 0.01)
    found, _ = served.evaluate(side, ["c", "d"], 1)
    assert list(found) == ["c"]
    assert "longer than half of the clients" in served.absences(1)["d"]


def test_a_payload_of_ours_is_read_as_it_was_written() -> None:
    mine = Payload({"shared": {"x": torch.ones(2)}, "none": {}}, {"loss": 0.5, "round": 3})
    assert from_bytes(to_bytes(mine)).scalars == mine.scalars
