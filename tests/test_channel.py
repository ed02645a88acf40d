"""What crosses in split learning: frames in one copy, checks before use, sums that do not depend on who came first."""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load

from fedvit import payload
from fedvit.errors import UserError
from fedvit.models.cuts import Parts
from fedvit.payload import Payload
from fedvit.split import ClientSide, Message, ServerSide, pack
from fedvit.split_checks import Checks, Progress
from fedvit.split_client import site_data
from fedvit.split_rounds import Here, Loopback, federate_split, one_step, server_side
from fedvit.transport.channel import GarbageError, LateError, host_and_port, identity_of
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
        parts, cohort = Parts(bench.net.module, bench.net.plan.split.cut), ["0", "1", "2"]  # type: ignore[union-attr]
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


def test_a_turn_that_is_undone_leaves_body_and_optimiser_as_they_were(tmp_path: Path) -> None:
    bench = Bench(tiny("splitfed_v2"), tmp_path)
    parts = Parts(bench.net.module, bench.net.plan.split.cut)  # type: ignore[union-attr]

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
    parts = Parts(bench.net.module, bench.net.plan.split.cut)  # type: ignore[union-attr]
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
    with pytest.raises(LateError, match="of round 9 came in round 1"):
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
        bench.net, bench.server, Here(bench.net, bench.transport), bench.experiment, bench.test_samples
    )
    assert done.scores is not None
    score = dict(next(iter(done.scores.values())))
    checked[0].check_scores(score)
    for name in ("personal_confusion_0_99", "personal_confusion_x_1", "rate", "personal_confusion_1"):
        with pytest.raises(GarbageError):
            checked[0].check_scores({**score, name: 1.0})


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
    monkeypatch.delitem(sys.modules, "fedvit.transport.channel")
    with pytest.raises(UserError, match=r"pip install fedvit\[split\]"):
        importlib.import_module("fedvit.transport.channel")


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
