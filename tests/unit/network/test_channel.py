"""What crosses in split learning: one copy on each side, checks before use, sums that no order of arrival changes."""

import importlib
import json
import math
import queue
import socket
import sys
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load
from torch.utils._python_dispatch import TorchDispatchMode

from fedvit.core import payload
from fedvit.core.errors import UserError
from fedvit.core.metrics import METRICS, score_problem
from fedvit.core.payload import Payload
from fedvit.engine.net import make_net
from fedvit.engine.split_loop import LocalClients, Loopback, federate_split, one_step, server_side
from fedvit.methods import METHODS
from fedvit.models.cuts import Parts
from fedvit.network.grpc.channel import (
    Connection,
    Event,
    GarbageError,
    LateError,
    Session,
    TakenError,
    why_no_connection,
)
from fedvit.network.grpc.checks import Checks, Progress
from fedvit.network.grpc.client import SplitClient, site_data
from fedvit.network.grpc.identity import host_and_port, identity_of
from fedvit.network.grpc.remote_clients import RemoteClients
from fedvit.network.handshake import common, differences
from fedvit.runs.write import Holding
from fedvit.split.client import ClientSide
from fedvit.split.messages import GIVEN_UP, Message, pack, unpack
from fedvit.split.plan import SplitPlan
from fedvit.split.server import ServerSide
from tests.conftest import Bench, same_trees, tiny

TREES = {
    "h": {"x": torch.randn(3, 5, 7).bfloat16(), "scale": torch.rand(3, 5, 1)},
    "labels": {"y": torch.arange(3, dtype=torch.int32), "none": torch.zeros(0, 4), "one": torch.tensor(2.5)},
    "odd": {"i": torch.tensor([[1, -2]], dtype=torch.int8), "b": torch.tensor([True, False, True])},
}


def test_a_message_comes_out_as_it_went_in_and_is_plain_safetensors() -> None:
    message = Message(3, "nörth", 2, "forward", Payload(TREES, {"last": 1.0, "loss": -0.5}))
    blob = message.to_bytes()
    again = Message.from_bytes(blob)
    assert (again.round, again.client, again.step, again.kind) == (3, "nörth", 2, "forward")
    assert again.payload.scalars == message.payload.scalars
    assert again.payload.trees.keys() == TREES.keys()
    for group, members in TREES.items():
        assert same_trees(again.payload.trees[group], members)
        assert all(again.payload.trees[group][name].dtype == tensor.dtype for name, tensor in members.items())
    assert again.payload.nbytes == message.payload.nbytes
    assert set(load(blob)) == set(payload.flatten(TREES))


def test_a_message_is_read_in_place() -> None:
    x = torch.randn(64, 197, 192)
    blob = Message(1, "c", 0, "forward", Payload({"h": {"x": x}})).to_bytes()
    read = Message.from_bytes(blob).payload.trees["h"]["x"]
    whole = torch.frombuffer(blob, dtype=torch.uint8)
    assert whole.data_ptr() <= read.data_ptr() < whole.data_ptr() + len(blob)
    assert read.data_ptr() % 4 == 0


def test_a_tensor_is_copied_once_where_it_is_written_and_once_where_it_is_read() -> None:
    x = torch.randn(64, 197, 192)

    class Made(TorchDispatchMode):
        """Bytes of the tensors that torch makes, those that lie in older ones not counted."""

        def __init__(self) -> None:
            super().__init__()
            self.known, self.nbytes = {x.untyped_storage().data_ptr()}, 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in self.known:
                self.known.add(out.untyped_storage().data_ptr())
                self.nbytes += out.nbytes
            return out

    size, slack = x.nbytes, 100_000
    tracemalloc.start()
    try:
        with Made() as made:
            blob = Message(1, "c", 0, "forward", Payload({"h": pack(x, "fp32")})).to_bytes()
        assert made.nbytes == 0
        assert size <= tracemalloc.get_traced_memory()[1] < size + slack  # the bytes themselves
        tracemalloc.reset_peak()
        read = Message.from_bytes(blob).payload.trees["h"]
        made.known.add(read["x"].untyped_storage().data_ptr())
        with made:
            again = unpack(read, torch.device("cpu"))
        assert made.nbytes == size
        assert tracemalloc.get_traced_memory()[1] < size + slack
    finally:
        tracemalloc.stop()
    assert torch.equal(again, x)


def header_with(**changes: object) -> bytes:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}
    text = json.dumps({"__metadata__": {"message": '[1,"c",0,"start"]', "numbers": "{}"}, "h/x": entry}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(8)


@pytest.mark.parametrize(
    "blob",
    [
        b"",
        b"\x80\x04\x95\x00\x00",
        bytes(100),
        (1 << 40).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"{}",
        (5000).to_bytes(8, "little") + b"[" * 5000,
        header_with(shape=[3]),
        header_with(shape=[-2]),
        header_with(shape=[2.0]),
        header_with(shape=[1 << 62, 1 << 62]),
        header_with(data_offsets=[8, 16]),
        header_with(data_offsets=[-8, 0]),
        header_with(dtype="object"),
        header_with(more=1),
    ],
)
def test_what_is_not_a_message_is_an_error_and_nothing_more(blob: bytes) -> None:
    assert Message.from_bytes(header_with()).kind == "start"
    with pytest.raises(ValueError, match="not "):
        Message.from_bytes(blob)


@pytest.mark.parametrize("method", ["fedv", "fedvz", "splitfed_v1", "fesvibs"])
def test_who_comes_first_does_not_matter_and_the_lost_leave_nothing(method: str, tmp_path: Path) -> None:
    def trained(folder: str, arrivals: list[str], lost: str | None) -> tuple[dict[str, torch.Tensor], ...]:
        bench = Bench(tiny(method, {"server_lr": 0.01}), tmp_path / folder)
        parts, cohort = Parts(bench.net.module, bench.net.split.cut), ["0", "1", "2"]
        side = server_side(bench.net, parts, bench.server, bench.experiment, 1, cohort)
        channel = Loopback(side)
        work = {
            name: ClientSide(side.split, parts, bench.worker.client(name, 1, {})).requests(average=True)
            for name in arrivals
        }
        if lost:
            one_step(work.pop(lost), channel)
            side.drop(lost)
        else:
            side.drop("1")
        while work:  # all at once, step by step
            for name in list(work):
                if not one_step(work[name], channel):
                    side.finish(name)
                    del work[name]
        body, memory = side.end_of_round()
        return body, memory["average"]

    expected = trained("a", ["0", "2"], None)
    found = trained("b", ["2", "1", "0"], "1")
    assert all(same_trees(a, b) for a, b in zip(expected, found, strict=True))
    assert not same_trees(expected[0], Bench(tiny(method), tmp_path / "c").net.shared)


class Heard(Loopback):
    """A channel that remembers what it carried."""

    def call(self, request: bytes) -> bytes:
        carried.append(request)
        return super().call(request)


carried: list[bytes] = []


@pytest.mark.parametrize("method", [name for name in METHODS if isinstance(METHODS[name](), SplitPlan)])
def test_no_weight_of_a_client_is_in_its_messages(method: str, tmp_path: Path) -> None:
    carried.clear()
    bench = Bench(tiny(method), tmp_path)
    parts = Parts(bench.net.module, bench.net.split.cut)
    side = server_side(bench.net, parts, bench.server, bench.experiment, 1, ["0"])
    client = bench.worker.client("0", 1, {})
    work, channel = ClientSide(side.split, parts, client).requests(average=False), Heard(side)
    while one_step(work, channel):
        pass
    own = client.memory["personal"]
    assert isinstance(own, dict)
    values = [t.contiguous().reshape(-1).numpy().tobytes() for t in own.values() if t.numel() > 4]
    assert values
    assert len(carried) > 2
    assert not [value for value in values if any(value in message for message in carried)]


def test_a_turn_that_is_undone_leaves_body_and_optimiser_as_they_were(tmp_path: Path) -> None:
    bench = Bench(tiny("splitfed_v2"), tmp_path)
    parts = Parts(bench.net.module, bench.net.split.cut)

    def turns(*names: str) -> dict[str, torch.Tensor]:
        side = server_side(bench.net, parts, bench.server, bench.experiment, 1, ["0", "1", "2"])
        for name in names:
            side.begin_turn()
            requests = ClientSide(side.split, parts, bench.worker.client(name, 1, {})).requests(average=False)
            while one_step(requests, Loopback(side)):
                pass
            if name == "1":
                side.drop("1")
                side.undo_turn()
        return side.end_of_round()[0]

    assert same_trees(turns("0", "1", "2"), turns("0", "2"))


@pytest.fixture
def checked(tmp_path: Path) -> tuple[Checks, ServerSide, Progress]:
    bench = Bench(tiny("fedv"), tmp_path)
    parts = Parts(bench.net.module, bench.net.split.cut)
    side = server_side(bench.net, parts, bench.server, bench.experiment, 1, ["c"])
    return Checks(bench.net, 32), side, Progress("train", 2, average=True)


def say(kind: str, step: int = 0, trees: dict[str, dict[str, torch.Tensor]] | None = None, **numbers: float) -> Message:
    return Message(1, "c", step, kind, Payload(trees or {}, numbers))


def test_a_whole_round_passes_the_checks_and_messages_out_of_place_do_not(
    checked: tuple[Checks, ServerSide, Progress],
) -> None:
    checks, side, progress = checked
    h, b = {"h": pack(torch.zeros(4, *checks.h), "fp32")}, {"b": pack(torch.zeros(4, 1, 48), "fp32")}
    parts = {"parts": dict(checks.own)}
    whole = [
        say("start", updated=0.0),
        say("forward", 0, h, last=0.0),
        say("backward", 0, b, last=0.0, wanted=1.0),
        say("forward", 1, h, last=1.0),
        say("backward", 1, b, last=1.0, wanted=1.0),
        say("parts", 2, parts),
    ]
    for position, message in enumerate(whole):
        for other in (m for n, m in enumerate(whole) if n != position):
            if other.kind in ("forward", "parts") and progress.started and other.step == progress.step + 1:
                continue  # a client whose head does not learn asks for no gradient
            with pytest.raises(LateError):
                checks.check(other, progress, side)
        checks.check(message, progress, side)
        side.answer(message)
    for message in whole:
        with pytest.raises(LateError):
            checks.check(message, progress, side)
    with pytest.raises(LateError, match="for round 9 arrived in round 1"):
        checks.check(Message(9, "c", 0, "start"), progress, side)


BAD: dict[str, Callable[[torch.Tensor], Message]] = {
    "shape": lambda x: say("forward", 0, {"h": {"x": x[:, :-1]}}, last=0.0),
    "kind of number": lambda x: say("forward", 0, {"h": {"x": x.double()}}, last=0.0),
    "name": lambda x: say("forward", 0, {"h": {"y": x}}, last=0.0),
    "another tensor": lambda x: say("forward", 0, {"h": {"x": x, "z": x}}, last=0.0),
    "no images": lambda x: say("forward", 0, {"h": {"x": x[:0]}}, last=0.0),
    "too many images": lambda x: say("forward", 0, {"h": {"x": x.repeat(10, 1, 1)}}, last=0.0),
    "not a number": lambda x: say("forward", 0, {"h": {"x": x / 0}}, last=0.0),
    "the last too early": lambda x: say("forward", 0, {"h": {"x": x}}, last=1.0),
    "a number too many": lambda x: say("forward", 0, {"h": {"x": x}}, last=0.0, lr=9.0),
    "an unknown message": lambda x: say("shutdown"),
}


@pytest.mark.parametrize("bad", BAD)
def test_garbage_is_found_before_it_is_used(bad: str, checked: tuple[Checks, ServerSide, Progress]) -> None:
    checks, side, progress = checked
    checks.check(say("start", updated=0.0), progress, side)
    with pytest.raises(GarbageError):
        checks.check(BAD[bad](torch.zeros(4, *checks.h)), progress, side)
    assert not side.pending


def test_scores_are_those_that_a_test_gives(checked: tuple[Checks, ServerSide, Progress], tmp_path: Path) -> None:
    bench = Bench(tiny("fedv", rounds=1), tmp_path / "b")
    (done,) = federate_split(
        bench.net, bench.server, LocalClients(bench.net, bench.transport), bench.experiment, bench.test_samples
    )
    assert done.scores is not None
    score = dict(next(iter(done.scores.values())))
    images = sum(count for key, count in score.items() if "confusion" in key)
    agreed = Holding(1, int(images), 1)
    checked[0].check_scores(score, agreed)
    for name in ("personal_confusion_0_99", "personal_confusion_x_1", "rate", "personal_confusion_1"):
        with pytest.raises(GarbageError):
            checked[0].check_scores({**score, name: 1.0}, agreed)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "localhost:8443", "127.3.2.1:5", "[::1]:5"])
def test_no_certificates_on_this_machine_only(address: str) -> None:
    assert identity_of(address, None, None, None, insecure=True) is None
    with pytest.raises(UserError, match="expected --cert"):
        identity_of(address, Path("a"), None, None, insecure=False)


def test_addresses() -> None:
    for address in ("10.0.0.1:80", "hospital.example:443", "0.0.0.0:1", "[::]:1"):
        with pytest.raises(UserError, match="--insecure is for trials"):
            identity_of(address, None, None, None, insecure=True)
    assert host_and_port("[::1]:80") == ("::1", 80)
    for address in ("localhost", "localhost:", ":80", "a:99999", "a:b"):
        with pytest.raises(UserError, match="HOST:PORT"):
            host_and_port(address)


def test_without_grpcio_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)
    monkeypatch.delitem(sys.modules, "fedvit.network.grpc.channel")
    with pytest.raises(UserError, match=r"pip install fedvit\[split\]"):
        importlib.import_module("fedvit.network.grpc.channel")


def test_a_sites_folder_is_one_client_divided_class_by_class(tmp_path: Path) -> None:
    for label in ("cat", "dog"):
        (tmp_path / "images" / label).mkdir(parents=True)
        for number in range(8):
            picture = Image.new("L", (8, 8), 10 * number + len(label))
            picture.save(tmp_path / "images" / label / f"{number}.png")
    experiment = tiny("fedv", {"data.class_names": "bird,cat,dog"})
    dataset, split = site_data(experiment, "north", tmp_path / "images", tmp_path / "state")
    assert dataset.class_names == ("bird", "cat", "dog")
    part = split.clients["north"]
    assert np.bincount(dataset.labels[part.train]).tolist() == [0, 6, 6]
    assert np.bincount(dataset.labels[part.test]).tolist() == [0, 2, 2]
    assert any((tmp_path / "state").rglob("*")), "decoded images stay in the site's folder"
    with pytest.raises(UserError, match="expected a folder of class folders"):
        site_data(experiment, "north", tmp_path / "nothing", tmp_path / "state")


# What a client makes of its server.

Change = Callable[[torch.Tensor], torch.Tensor]


class Answering:
    """A server whose answers a test may change; the body is a real one."""

    def __init__(self, side: ServerSide, spoil: Callable[[Message], Message | None]):
        self.side, self.spoil, self.ends = side, spoil, list[Message]()

    def call(self, request: bytes) -> bytes:
        answer = self.side.answer(Message.from_bytes(request))
        return (self.spoil(answer) or answer).to_bytes()

    def send(self, way: str, request: bytes) -> bytes:
        self.ends.append(Message.from_bytes(request))
        return b""


def task_of(kind: str, number: int, continues: int, **trees: dict[str, torch.Tensor]) -> Message:
    return Message(number, "0", 0, kind, Payload(trees, {"continues": continues, "average": 1.0}))


def client_of(
    method: str, tmp_path: Path, sets: dict[str, Any] | None = None
) -> tuple[SplitClient, Callable[..., Any]]:
    experiment = tiny(method, {"data.samples": 240, **(sets or {})}, clients=3, cohort=3)
    bench, client = Bench(experiment, tmp_path), SplitClient(experiment, "0", tmp_path / "state")
    parts = Parts(bench.net.module, bench.net.split.cut)

    def answering(number: int, spoil: Callable[[Message], Message | None], average: Any = None) -> Answering:
        memory = {"average": average, "averaged": {"round": torch.tensor(number)}} if average else {}
        server = replace(bench.server, memory=memory)
        return Answering(server_side(bench.net, parts, server, experiment, number, ["0"]), spoil)

    return client, answering


def first_of(trees: Mapping[str, dict[str, torch.Tensor]], change: Change) -> Any:
    """The same tensors, the first of them changed."""
    changed = {group: dict(members) for group, members in trees.items()}
    group = next(iter(changed.values()))
    name = next(iter(group))
    group[name] = change(group[name])
    return changed


SPOILT: dict[str, Change] = {
    "another shape": lambda x: x.reshape(-1)[:1],  # which would stretch to any other
    "another kind": lambda x: x.double(),
    "not finite": lambda x: x / 0,
}


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("fedv", "start"),
        ("fedv", "forward"),
        ("fedv", "backward"),
        ("fedvz", "probe"),
        ("fedvz_black_box", "query"),
        ("splitfed_v1", "labelled"),
    ],
)
def test_a_client_gives_up_a_round_whose_answers_it_cannot_use(
    method: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name, _, blind = method.partition("_b")
    sets = {"black_box": True} if blind else {"receives": "all"} if name == "fedv" else {}
    client, answering = client_of(name, tmp_path, sets)
    first = answering(1, lambda answer: None)
    client.do(first, "r", task_of("train", 1, 0))  # type: ignore[arg-type]
    assert [end.kind for end in first.ends] == ["train"]
    before = client.state.get("r", 1)["personal"]
    for change in SPOILT.values():

        def spoil(answer: Message, change: Change = change) -> Message | None:
            content = answer.payload
            changed = Payload(first_of(content.trees, change), content.scalars) if answer.kind == kind else content
            return replace(answer, payload=changed)

        spoilt = answering(2, spoil, dict(client.checks.own))
        tasks = [task_of("train", 2, 1), *([task_of("evaluate", 2, 1)] if kind == "start" else [])]
        worked(client, spoilt, tasks)
        assert [end.kind for end in spoilt.ends] == [GIVEN_UP] * len(tasks)
        assert f"round 2: cannot use the server's message: the answer to '{kind}'" in caplog.text
        caplog.clear()
        assert list(client.state.states("r")) == [1]
        assert same_trees(client.state.get("r", 1)["personal"], before)  # type: ignore[arg-type]


def worked(client: SplitClient, server: Answering, tasks: list[Message]) -> bool:
    """The tasks of one connection to this server."""
    server.attend = lambda hello: ({"run": "r"}, iter(tasks))  # type: ignore[attr-defined]
    server.address = "here"  # type: ignore[attr-defined]
    return client.work(server, lambda text: None)  # type: ignore[arg-type]


def test_an_average_that_does_not_fit_is_not_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    client, answering = client_of("fedv", tmp_path, {"receives": "sampled"})
    server = answering(1, lambda answer: None)
    own = {name: torch.full_like(tensor, 0.5) for name, tensor in client.checks.own.items()}
    wrong = [first_of({"average": own}, change)["average"] for change in SPOILT.values()]
    wrong += [{**own, "blocks.0.norm1.weight": torch.zeros(48)}, dict(list(own.items())[1:])]
    worked(client, server, [task_of("train", 1, 0), *(task_of("receive", 1, 1, average=w) for w in wrong)])
    assert [end.kind for end in server.ends] == ["train"] + [GIVEN_UP] * 5
    assert caplog.text.count("cannot use the server's message: the task 'receive'") == 5
    kept = client.state.get("r", 1)["personal"]
    assert isinstance(kept, dict)
    assert not same_trees({name: kept[name] for name in own}, own)
    worked(client, server, [task_of("receive", 1, 1, average=own)])
    kept = client.state.get("r", 1)["personal"]
    assert isinstance(kept, dict)
    assert same_trees({name: kept[name] for name in own}, own)


@pytest.mark.parametrize(
    ("method", "wire"),
    [
        ("fedv", "int8"),
        ("fedvz", "int8"),
        ("festa", "fp32"),
        ("fesvibs", "bf16"),
        ("splitfed_v1", "int8"),
        ("splitfed_v2", "fp32"),
        ("minibatch_sfl", "bf16"),
    ],
)
def test_all_that_our_server_sends_can_be_used(method: str, wire: str, tmp_path: Path) -> None:
    client, answering = client_of(method, tmp_path, {"wire": wire})
    server = answering(1, lambda answer: None, dict(client.checks.own))
    worked(client, server, [task_of("train", 1, 0), task_of("evaluate", 1, 1)])
    assert [end.kind for end in server.ends] == ["train", "evaluate"]


# Links that break.


def test_a_client_that_was_connected_waits_for_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client, _ = client_of("fedv", tmp_path)
    monkeypatch.setattr("fedvit.network.grpc.client.PAUSE", 0)
    taken = TakenError("a client named '0' is already connected")
    script: list[bool | Exception] = []

    def work(connection: object, said: object) -> bool:
        found = script.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(client, "work", work)
    script[:] = [False, taken, taken, True]
    client.attend("127.0.0.1:1", None)
    assert not script
    for script[:], wait in (([taken, True], 60), ([False, taken, taken, True], -1)):
        with pytest.raises(TakenError):
            client.attend("127.0.0.1:1", None, wait=wait)
        assert script[-1] is True


def test_a_name_that_is_taken_has_an_error_of_its_own() -> None:
    class Problem:
        def code(self) -> Any:
            return grpc.StatusCode.ALREADY_EXISTS

        def details(self) -> str:
            return "connected already"

    connection = Connection("127.0.0.1:1", None)
    assert isinstance(connection.error_of(Problem()), TakenError)
    connection.close()


@pytest.mark.parametrize(("number", "may_help"), [(socket.EAI_AGAIN, True), (socket.EAI_NONAME, False)])
def test_a_name_service_that_is_down_may_come_back(
    number: int, may_help: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise socket.gaierror(number, "in words")

    monkeypatch.setattr(socket, "create_connection", fails)
    reason, found = why_no_connection("hospital.example:443", None)
    assert "hospital.example" in reason
    assert found is may_help


@pytest.fixture
def remote(tmp_path: Path) -> tuple[RemoteClients, ServerSide]:
    """The server of clients 0 and 1, both of which have trained; nobody is connected."""
    bench = Bench(tiny("fedv"), tmp_path)
    parts = Parts(bench.net.module, bench.net.split.cut)
    listener: Any = SimpleNamespace(declined={}, sessions={}, events=queue.SimpleQueue())
    trained = {"0": 1, "1": 1}
    made = RemoteClients(
        listener, list(trained), bench.experiment, Checks(bench.net, 32), trained, patience=60, least=0
    )  # fmt: skip
    return made, server_side(bench.net, parts, bench.server, bench.experiment, 2, ["0", "1"])


def test_a_client_that_declines_later_is_named(
    remote: tuple[RemoteClients, ServerSide], caplog: pytest.LogCaptureFixture
) -> None:
    served, side = remote
    served.listener.declined["1"] = "the policy allows festa"
    served.train(side, ["0"], 2, average=False)
    assert "client 1 does not take part: the policy allows festa" in caplog.text


def test_a_client_that_gives_up_is_dropped_at_once(
    remote: tuple[RemoteClients, ServerSide], caplog: pytest.LogCaptureFixture
) -> None:
    served, side = remote
    session = served.listener.sessions["0"] = Session("0", {"train": 8})
    said = Event("done", session, Message(2, "0", 0, GIVEN_UP).to_bytes())
    served.listener.events.put(said)
    done = served.train(side, ["0"], 2, average=False)
    assert list(done.failed) == ["0"]
    assert said.reply.result(0) == b""
    assert "round 2: client 0 gave up" in caplog.text


def test_scores_that_nothing_can_be_reckoned_with_drop_their_sender(
    remote: tuple[RemoteClients, ServerSide], caplog: pytest.LogCaptureFixture
) -> None:
    served, side = remote
    good = {f"personal_{metric}": 1.0 for metric in METRICS}
    ends = {"0": {**good, "personal_confusion_0_0": float("nan")}, "1": {**good, "personal_confusion_0_0": 3.0}}
    for name, scores in ends.items():
        session = served.listener.sessions[name] = Session(name, {"train": 8, "test": 3, "classes_here": 2})
        end = Message(2, name, 0, "evaluate", Payload(scalars=scores)).to_bytes()
        served.listener.events.put(Event("done", session, end))
    found, _ = served.evaluate(side, ["0", "1"], 2)
    assert found == {"1": ends["1"]}
    assert "client 0 sent an invalid message: 'personal_confusion_0_0' is not a number of images" in caplog.text


GOOD = {"personal_accuracy": 50.0, "personal_balanced_accuracy": 100.0, "personal_loss": 2.0}
MORE = {"personal_auroc": 1.0, "personal_val_accuracy": 0.0, "personal_confusion_9_0": 3}
GENERIC = {name.replace("personal", "generic"): value for name, value in GOOD.items()}


@pytest.mark.parametrize("scores", [GOOD, GOOD | MORE, GOOD | MORE | GENERIC, GOOD | GENERIC | {"generic_auroc": 0.5}])
def test_scores_as_tests_give_them_have_no_problem(scores: dict[str, float]) -> None:
    assert score_problem(scores, 10) is None


@pytest.mark.parametrize(
    "scores",
    [
        {},
        GENERIC,
        GOOD | {"generic_balanced_accuracy": 1.0},
        GOOD | {"generic_loss": 1.0},
        GOOD | GENERIC | {"generic_confusion_0_0": 1.0},
        *({**GOOD, "personal_confusion_0_0": value} for value in (math.nan, math.inf, -1.0, 0.5, 10**400)),
        *({**GOOD, "personal_accuracy": value} for value in (math.nan, math.inf, -1.0, 100.5, 10**400)),
        *({**GOOD, "personal_loss": value} for value in (math.nan, math.inf, -math.inf, 10**400)),
        {**GOOD, "personal_auroc": math.nan},
        *({**GOOD, f"personal_confusion_{cell}": 1.0} for cell in ("0_10", "0", "0_0_0", "01_0", "²_0", "٣_0", "-1_0")),
    ],
)
def test_scores_that_no_test_gives_have_a_problem_told_without_values(scores: dict[str, float]) -> None:
    problem = score_problem(scores, 10)
    assert problem is not None
    assert "nan" not in problem
    assert "inf" not in problem.replace("finite", "")


@pytest.mark.parametrize("method", ["fedavg", "fedv"])
@pytest.mark.parametrize(
    ("schedule", "matters"), [("constant", False), ("exp", False), ("cosine", True), ("step", True)]
)
def test_rounds_are_agreed_on_where_rates_depend_on_them(method: str, schedule: str, matters: bool) -> None:
    def prints(rounds: int) -> dict[str, Any]:
        experiment = tiny(method, {"train.schedule": schedule}, rounds=rounds)
        return common(experiment, make_net(experiment, 2, torch.device("cpu")), ("a", "b"))

    expected = ["the settings (train.rounds: server 10, client 20)"] if matters else []
    assert differences(prints(10), prints(20)) == expected
