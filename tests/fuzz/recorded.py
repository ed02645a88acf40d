"""Real messages and files, recorded from small runs: what the fuzz targets change."""

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
from flwr.app import RecordDict

from fedvit.core.clinical import score_cases
from fedvit.core.clinical_message import to_scalars
from fedvit.core.payload import Payload, to_bytes
from fedvit.engine import split_loop
from fedvit.engine.client_store import memory_to_bytes
from fedvit.engine.split_loop import LocalClients, Loopback, federate_split
from fedvit.engine.worker import load_data
from fedvit.network.flower.records import from_records
from fedvit.network.grpc.checks import Checks, Progress
from fedvit.network.handshake import common
from fedvit.network.payload_check import up_of
from fedvit.runs.write import Holding
from fedvit.split.messages import Message
from fedvit.split.server import ServerSide
from tests.conftest import Bench, finish, tiny
from tests.grid import Federated
from tests.unit.core.test_clinical import drawn

SMALL = {"clients": 2, "cohort": 2, "samples": 60, "rounds": 1}
SPLIT: tuple[tuple[str, dict[str, Any]], ...] = (
    ("fedvz", {"draws": 2}),
    ("fedvz", {"black_box": True, "average": "head"}),
    ("splitfed_v1", {}),
    ("fesvibs", {}),
    ("fedv", {"wire": "int8", "fedround": 1}),
)
ODD = Payload(  # what few methods send: no tensors, no numbers in a tensor, one number, truth values
    {"none": {}, "odd": {"zero": torch.zeros(0, 4), "one": torch.tensor(2.5), "b": torch.tensor([True, False])}},
    {"loss": 0.5, "round": 3},
)
LONGEST = 20_000  # bytes of a message: longer ones only make every input slower


@dataclass(frozen=True)
class Recorded:
    """What crossed and what was written in a run over Flower and in runs of split learning."""

    records: list[RecordDict]
    abouts: list[dict[str, Any]]  # of the hellos
    downs: list[tuple[Payload, dict[str, Any]]]
    ups: list[Payload]
    scores: list[Payload]
    wanted: Payload  # a report of the same form
    agreed: Holding
    memories: list[bytes]
    blobs: list[bytes]
    checkpoint: Path
    exchanges: "list[Exchange]"
    hello: dict[str, Any]  # of a client of split learning


@dataclass(frozen=True)
class Exchange:
    """A message of a split learning client and its answer, with what both sides check them with."""

    checks: Checks
    side: ServerSide
    progress: Progress  # of the client, when the server is about to check the message
    request: Message
    answer: Message
    images: int


def record(folder: Path) -> Recorded:
    """Run a small federation and small split runs in memory, and keep what crossed."""
    experiment = tiny("scaffold+head", **SMALL)
    made = Federated(experiment, folder / "flower")
    made.finish()
    records = [message.content for message in made.wires.crossed]
    read = [from_records(content) for content in records]
    downs = [(content, about) for content, about in read if "continues" in about]
    replies = [content for content, about in read if "round" in about]
    scores = [reply for reply in replies if "personal_loss" in reply.scalars][:1]
    tested = sum(int(value) for key, value in scores[0].scalars.items() if "confusion" in key)
    clinical = to_scalars(score_cases(drawn(images=tested, patients=tested - 1), 0, "a"))
    finish(experiment, folder / "run")
    exchanges, memories, hello = [], [], {}
    for number, (label, sets) in enumerate(SPLIT):
        found, bench = record_split(folder / f"split-{number}", label, sets)
        exchanges += found
        memories += [memory_to_bytes(bench.store.get(name)) for name in bench.split.clients]
        agreed = common(bench.experiment, bench.net, load_data(bench.experiment)[0].class_names)
        hello = {"name": "0", "train": 24, "test": 6, "classes_here": 10, "common": json.loads(json.dumps(agreed))}
    memories += [path.read_bytes() for path in sorted(made.folder.glob("sites/*/states/*/*.safetensors"))]
    blobs = [to_bytes(content) for content, _ in read if content.trees]
    return Recorded(
        records,
        [about for _, about in read if "common" in about],
        [*downs, (Payload({}, {"round": 2.0, "rate": 0.1}), downs[0][1])],  # some methods send a number
        [reply for reply in replies if "examples" in reply.scalars],
        [*scores, Payload({}, {**scores[0].scalars, **clinical})],
        up_of(Bench(experiment, folder / "here").net, downs[0][0], 1),
        Holding(30, tested, 10),
        [*(blob for blob in memories if len(blob) < LONGEST), memory_to_bytes({**ODD.trees, "updated": 2.0})],
        [*blobs, to_bytes(ODD)],
        folder / "run" / "checkpoint",
        exchanges,
        hello,
    )


def record_split(folder: Path, label: str, sets: dict[str, Any]) -> tuple[list[Exchange], Bench]:
    """Run a round of split learning, and keep the first messages of each kind and what the server knew by then."""
    bench = Bench(tiny(label, sets, **{**SMALL, "batch": 2}), folder)
    checks, found = Checks(bench.net, 2), list[Exchange]()
    tasks = iter(("train", "evaluate"))

    class Ear(Loopback):
        def __init__(self, server: ServerSide):
            super().__init__(server)
            self.task, self.images = next(tasks), 0
            self.progress: dict[str, Progress] = {}

        def call(self, request: bytes) -> bytes:
            sent = Message.from_bytes(request)
            steps = -(-len(bench.split.clients[sent.client].train) // 2)
            due = self.progress.setdefault(sent.client, Progress(self.task, steps, average=True))
            side = copy.copy(self.server)
            side.pending, side.ends, before = dict(side.pending), dict(side.ends), replace(due)
            checks.check(sent, due, self.server)
            answer = super().call(request)
            self.images = len(sent.payload.trees["h"]["x"]) if "h" in sent.payload.trees else self.images
            known = sum(one.request.kind == sent.kind for one in found)
            if known < 2 and len(request) + len(answer) < LONGEST:
                found.append(Exchange(checks, side, before, sent, Message.from_bytes(answer), self.images))
            return answer

    with listening(Ear):
        for _ in federate_split(
            bench.net, bench.server, LocalClients(bench.net, bench.transport), bench.experiment, bench.test_samples
        ):
            pass
    return found, bench


@contextmanager
def listening(channel: type[Loopback]) -> Iterator[None]:
    """Let the split loop use another channel."""
    before, split_loop.Loopback = split_loop.Loopback, channel  # type: ignore[misc]
    try:
        yield
    finally:
        split_loop.Loopback = before  # type: ignore[misc]


POLICY = {
    "methods": ["fedper", "fedavg+bias"], "groups": ["shared"], "largest_message_mb": 5.0, "class_counts": False,
    "largest_epsilon": 3.0,
}  # fmt: skip


def policy_text() -> bytes:
    return tomli_w.dumps(POLICY).encode()


def manifest_texts(folder: Path) -> list[bytes]:
    """Return a manifest with all columns, and one with the two that are needed."""
    for name in ("a", "b", "p1"):
        (folder / f"{name}.png").touch()
    lines = ["path,label,patient,site,split", "a.png,cat,p1,north,train", 'b.png,"dog, big",p2,south,test']
    return ["\r\n".join(lines).encode(), b"path,label\np1.png,0\na.png,1\n"]


def npz_bytes(folder: Path) -> bytes:
    pixels, labels = np.zeros((4, 2, 2, 3), np.uint8), np.arange(4) % 2
    np.savez(folder / "real.npz", train_images=pixels, train_labels=labels, test_images=pixels, test_labels=labels)
    return (folder / "real.npz").read_bytes()
