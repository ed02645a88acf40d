"""Split learning between real processes: the same bits as in one, faults that cost a round at most, and refusals."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import channel

from fedvit.core.errors import UserError
from fedvit.core.payload import Payload
from fedvit.engine.checkpoint import load_checkpoint
from fedvit.engine.client_store import ClientStore
from fedvit.network.grpc.channel import (
    Connection,
    ConnectionRefusedByServerError,
    GarbageError,
    LateError,
    Listener,
    LostError,
    TakenError,
    why_no_connection,
)
from fedvit.network.grpc.client import SplitClient
from fedvit.network.grpc.identity import Identity
from fedvit.network.site_state import SiteState
from fedvit.runs.folder import Run
from fedvit.split.messages import Message, pack
from tests.conftest import finish, same_trees
from tests.grid import newest
from tests.network.processes import NAMES, Authority, Site, free_address, site, wait_for

SERVER = "DNS:localhost,IP:127.0.0.1"


def same_memory(a: Any, b: Any) -> bool:
    pairs = [(a[key], b[key]) for key in a if key in b]
    return a.keys() == b.keys() and all(same_trees(x, y) if isinstance(x, dict) else x == y for x, y in pairs)


def assert_same_bits(here: Site, reference: Path) -> None:
    """Body, server memory, clients' memories, clients.csv and rounds.jsonl of a served run and one in one process."""
    store = ClientStore(reference / "checkpoint", in_ram=False)
    expected = load_checkpoint(reference / "checkpoint", store, clean=False)
    found = load_checkpoint(here.out / "checkpoint", ClientStore(here.out / "checkpoint", in_ram=False), clean=False)
    assert expected is not None
    assert found is not None
    assert found.round == expected.round
    assert same_trees(found.shared, expected.shared)
    assert found.memory.keys() == expected.memory.keys()
    assert all(same_trees(found.memory[key], expected.memory[key]) for key in expected.memory)
    for name in NAMES:
        kept = newest(SiteState(here.folder / f"client-{name}"), here.run)
        assert same_memory(kept, store.get(name)), f"client {name} has other weights"
    for file in ("clients.csv", "confusion.json", "rounds.jsonl"):
        assert (here.out / file).read_text() == (reference / file).read_text(), file


@pytest.mark.parametrize(
    ("label", "sets", "safe"),
    [
        ("fedv", {"fedround": 1}, True),
        ("fedvz", {"draws": 2, "fedround": 1, "receives": "sampled"}, False),
        ("fedvz", {"black_box": True, "average": "head", "perturb": 0.1, "server_decay": 0.5, "decay_every": 1}, False),
        ("festa", {"fedround": 1, "client_head_lr": 0, "receives": "all"}, False),
        ("splitfed_v1", {}, False),
        ("splitfed_v2", {"train.dropout": 0.2}, False),
        ("fesvibs", {"fedround": 1}, False),
        ("minibatch_sfl", {}, False),
    ],
)
def test_the_same_bits_as_in_one_process(label: str, sets: dict[str, Any], safe: bool, tmp_path: Path) -> None:
    authority = Authority(tmp_path) if safe else None
    with site(tmp_path, label, sets) as here:
        server = here.server(security=authority.flags("server", SERVER) if authority else ("--insecure",))
        clients = [
            here.client(name, security=authority.flags(name) if authority else ("--insecure",)) for name in NAMES
        ]
        reference = finish(here.experiment, tmp_path / "reference")
        text = server.wait()
        for client in clients:
            assert "the run is finished" in client.wait()
        assert "results:" in text
        assert_same_bits(here, reference)
        for file in ("run.toml", "summary.json", "report.html", "log.txt", "timings.jsonl"):
            assert (here.out / file).is_file(), file
        kept = [path for path in here.out.rglob("*.safetensors") if "server-" not in path.name]
        assert not kept, "the server keeps something of a client"


def test_the_benchmark_of_the_channel_runs() -> None:
    (row,) = channel.results(repeats=1, seconds=0.0, widths={"narrow": 8}, batch=1, wires=("bf16",))
    assert row.median > 0
    assert "narrow bf16" in row.what
    assert "on the wire" in row.beside


def test_a_client_that_is_killed_costs_its_round_and_comes_back_with_its_state(tmp_path: Path) -> None:
    with site(tmp_path, "fedv", {"fedround": 1}, rounds=3, epochs=8) as here:
        server = here.server("--min-sites", 3)  # the next round waits for it
        clients = {name: here.client(name) for name in NAMES}
        wait_for(lambda: "round 2: train" in here.log("1"))
        clients["1"].kill()
        wait_for(lambda: len(here.rows()) >= 2)
        clients["1"] = here.client("1")
        server.wait()
        for client in clients.values():
            client.wait()
        rows = here.rows()
        assert [row["failed"] for row in rows] == [[], ["1"], []]
        assert "client 1 was lost" in (here.out / "log.txt").read_text()
        state = SiteState(tmp_path / "client-1")
        assert list(state.states(here.run)) == [1, 3]
        assert "does not have it" not in here.log("1")


def test_a_server_that_is_killed_in_mid_round_ends_with_the_same_bits(tmp_path: Path) -> None:
    with site(tmp_path, "splitfed_v1", {}, rounds=3, epochs=4) as here:
        server = here.server()
        clients = [here.client(name) for name in NAMES]
        wait_for(lambda: "round 2: train" in here.log("2"))
        server.kill()
        server = here.server("--resume")
        reference = finish(here.experiment, tmp_path / "reference")
        server.wait()
        for client in clients:
            client.wait()
        assert_same_bits(here, reference)


def test_sites_that_are_ahead_of_a_resumed_server_go_back(tmp_path: Path) -> None:
    with site(tmp_path, "fedv", {"fedround": 2}, rounds=2) as here:
        server, clients = here.server(), [here.client(name) for name in NAMES]
        for process in (server, *clients):
            process.wait()
        # As if the server had died when the sites had committed round 2 and it had not.
        (here.out / "checkpoint" / "manifest-000002.json").unlink()
        (here.out / "summary.json").unlink()
        assert list(SiteState(tmp_path / "client-0").states(here.run)) == [1, 2]
        server, clients = here.server("--resume"), [here.client(name) for name in NAMES]
        reference = finish(here.experiment, tmp_path / "reference")
        for process in (server, *clients):
            process.wait()
        assert_same_bits(here, reference)


def test_garbage_and_late_messages_cost_their_sender_the_round_and_nobody_else(tmp_path: Path) -> None:
    with site(tmp_path, "fedv", {}, rounds=5, epochs=1) as here:
        server = here.server("--set", "run.eval_every=0")
        others = [here.client(name) for name in NAMES[:2]]
        honest = SplitClient(here.experiment, "2", tmp_path / "client-2")
        stranger = Connection(here.address, None)
        wait_for(lambda: answers(stranger, honest.hello))
        _, tasks = stranger.attend(honest.hello)

        def said(number: int, step: int, kind: str, trees: Any = None, **scalars: float) -> bytes:
            return Message(number, "2", step, kind, Payload(trees or {}, scalars)).to_bytes()

        x = torch.zeros(4, 5, 48)
        for number, task in zip(range(1, 5), tasks, strict=False):
            assert (task.kind, task.round) == ("train", number)
            with pytest.raises(LateError, match=f"for round {number + 1} arrived in round {number}"):
                stranger.call(said(number + 1, 0, "start", updated=0.0))
            stranger.call(said(number, 0, "start", updated=0.0))
            with pytest.raises(LateError, match="step 3"):
                stranger.call(said(number, 3, "forward", {"h": pack(x, "fp32")}, last=0.0))
            bad = {
                1: b"\x80\x04\x95not safetensors",
                2: said(number, 0, "forward", {"h": pack(x[:, :4], "fp32")}, last=0.0),
                3: said(number, 0, "forward", {"h": pack(x / 0, "fp32")}, last=0.0),
                4: said(number, 0, "__reduce__"),
            }[number]
            with pytest.raises(GarbageError):
                stranger.call(bad)
            with pytest.raises(LateError, match="too late"):
                stranger.call(said(number, 0, "forward", {"h": pack(x, "fp32")}, last=0.0))
        stranger.close()
        server.wait()
        for client in others:
            client.wait()
        assert [row["failed"] for row in here.rows()] == [["2"]] * 5
        assert "Traceback" not in (here.out / "log.txt").read_text()


def answers(connection: Connection, hello: dict[str, Any]) -> bool:
    """Whether the server is up: it refuses a stranger."""
    try:
        connection.attend({**hello, "name": "nobody"})
    except LostError:
        return False
    except LateError as problem:
        assert "no client 'nobody' is expected" in str(problem)  # noqa: PT017
        return True
    return False


def test_refusals_of_a_running_server(tmp_path: Path) -> None:
    with site(tmp_path, "fedv") as here:
        server = here.server()
        first = here.client("0")
        wait_for(lambda: "connected" in here.log("0"))
        port, method = (
            here.server("--out", tmp_path / "other"),
            here.server("--set", "method.name=fedavg", "--out", "x"),
        )
        second, unknown = here.client("0"), here.client("00")
        other = here.client("1", "--set", "train.lr=0.5", "--set", "run.seed=3")
        plain = here.client("1", security=Authority(tmp_path).flags("1"))
        assert "a client named '0' is already connected" in second.wait(2)
        assert "no client '00'" in unknown.wait(2)
        refused = other.wait(2)
        assert "train.lr: server" in refused
        assert "the initial weights" in refused
        assert "does not speak TLS" in plain.wait(2)
        assert "the port is in use" in port.wait(2)
        assert "fedvit flower" in method.wait(2)
        assert server.popen.poll() is None
        assert first.popen.poll() is None


def test_no_server_and_no_certificates(tmp_path: Path) -> None:
    with site(tmp_path, "fedv") as here:
        nobody = here.client("0", "--wait", 0)
        bare = here.client("0", security=())
        far = here.start(
            "split-client", here.file, "--server", "192.0.2.1:9", "--name", "0", "--state", "x", "--insecure"
        )
        assert f"no server at {here.address}" in nobody.wait(2)
        assert "expected --cert, --key and --ca" in bare.wait(2)
        assert "--insecure is for trials on one machine" in far.wait(2)


def test_a_site_has_rules_of_its_own(tmp_path: Path) -> None:
    rules = tmp_path / "policy.toml"
    rules.write_text('methods = ["fedv"]\ngroups = ["h", "b"]\nclass_counts = false\nlargest_message_mb = 20')
    with site(tmp_path, "fedv", {"fedround": 0}) as here:
        server = here.server()
        silent = tmp_path / "silent.toml"
        silent.write_text('scores = "none"')
        clients = [here.client("0", "--policy", rules), here.client("1"), here.client("2", "--policy", silent)]
        server.wait()
        for client in clients:
            client.wait()
        assert set(json.loads((here.out / "confusion.json").read_text())) == {"1"}
        assert [client["client"] for client in Run(here.out).clients] == ["0", "1"]
        assert all(set(row["losses"]) == {"0", "1"} and not row["failed"] for row in here.rows())


@pytest.mark.parametrize(
    ("label", "rules", "said"),
    [
        ("fedv", 'methods = ["festa"]', "the policy allows festa, but this run uses fedv"),
        ("splitfed_v1", 'groups = ["h"]', "the policy does not allow the tensor group labels to leave"),
        ("fedv", "largest_message_mb = 0.001", "the policy allows at most 0.001 MB per message"),
    ],
)
def test_a_site_whose_rules_forbid_the_run_ends_it_before_round_1(
    label: str, rules: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "policy.toml").write_text(rules)
    with site(tmp_path, label) as here:
        server, others = here.server("--min-sites", 3), [here.client(name) for name in NAMES[1:]]
        careful = here.client("0", "--policy", tmp_path / "policy.toml")
        assert f"0 does not take part: {said}" in careful.wait(2)
        assert f"client 0 does not take part: {said}" in server.wait(2)
        assert f"refused: {said}" in here.log("0")
        assert not here.rows()
        assert all(client.popen.poll() is None for client in others)  # they look for another server


# Certificates, against the service itself.


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[tuple[str, Authority]]:
    authority, address = Authority(tmp_path), free_address()
    cert, key = authority.sign("server", SERVER)

    def admit(hello: Any) -> None:
        if hello["name"] == "stranger":
            raise ConnectionRefusedByServerError("no such client")

    listener = Listener(address, Identity(cert, key, authority.ca), admit, {"run": "r"}, clients=2)
    yield address, authority
    listener.close()


def greet(address: str, identity: Identity | None, name: str) -> dict[str, Any]:
    connection = Connection(address, identity)
    try:
        welcome, _ = connection.attend({"name": name})
        return welcome
    finally:
        connection.close()


def test_a_certificate_opens_the_door_for_its_own_name_only(listening: tuple[str, Authority]) -> None:
    address, authority = listening
    north = Identity(*authority.sign("north"), authority.ca)
    assert greet(address, north, "north")["run"] == "r"
    with pytest.raises(UserError, match="the certificate is for north, not for 'south'"):
        greet(address, north, "south")
    stranger = Identity(*authority.sign("stranger"), authority.ca)
    with pytest.raises(LateError, match="no such client"):
        greet(address, stranger, "stranger")


def test_a_session_cannot_be_used_with_another_certificate(listening: tuple[str, Authority]) -> None:
    address, authority = listening
    north, south = (Connection(address, Identity(*authority.sign(n), authority.ca)) for n in ("north", "south"))
    north.attend({"name": "north"})
    south.metadata = north.metadata  # a stolen token
    with pytest.raises(UserError, match="not for 'north'"):
        south.call(b"anything")
    south.metadata = (("session", "guessed"),)
    with pytest.raises(LateError, match="no such session"):
        south.call(b"anything")
    north.close()
    south.close()


def test_wrong_certificates_and_plain_connections_are_refused_and_say_why(
    listening: tuple[str, Authority], tmp_path: Path
) -> None:
    address, authority = listening
    other = Authority(tmp_path, "other")
    not_ours = Identity(*other.sign("north"), authority.ca)  # signed by somebody else
    not_theirs = Identity(*authority.sign("north"), other.ca)  # looks for another server
    for identity, words in ((not_ours, "certificate"), (not_theirs, "does not match"), (None, "plain connection")):
        with pytest.raises(LostError):
            greet(address, identity, "north")
        reason, may_help = why_no_connection(address, identity)
        assert words in reason
        assert not may_help
    with pytest.raises(UserError, match="are not a certificate and its key"):
        Identity(authority.sign("north")[0], authority.sign("south")[1], authority.ca).read()
    assert greet(address, Identity(*authority.sign("north"), authority.ca), "north"), "the server did not stay up"


def test_a_client_may_come_again_when_its_stream_has_ended(listening: tuple[str, Authority]) -> None:
    address, authority = listening
    north = Identity(*authority.sign("north"), authority.ca)
    first = Connection(address, north)
    first.attend({"name": "north"})
    with pytest.raises(TakenError, match="is already connected"):
        greet(address, north, "north")
    first.close()
    end = time.monotonic() + 20
    while True:
        try:
            assert greet(address, north, "north")["run"] == "r"
            return
        except UserError:
            assert time.monotonic() < end
            time.sleep(0.05)
