"""Every decoder of content from another machine or from a file: how it is fed, how it may refuse, and what must hold
for whatever it accepts. Anything else is an escape.
"""

import io
import json
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedvit.core import payload
from fedvit.core.clinical_message import clinical_problem, from_scalars
from fedvit.core.errors import PublicError, UserError
from fedvit.core.metrics import score_problem
from fedvit.core.payload import Payload
from fedvit.data import manifest, sources
from fedvit.engine import checkpoint, client_store
from fedvit.engine.client_store import ClientStore
from fedvit.network import boundary, payload_check, policy
from fedvit.network.flower import records
from fedvit.network.grpc import checks, server
from fedvit.network.grpc.channel import ConnectionRefusedByServerError
from fedvit.network.grpc.checks import AnswerError, Checks
from fedvit.split.messages import Message
from tests.fuzz import recorded
from tests.fuzz.mutate import STRANGE, mutated_bytes, mutated_frame, mutated_json, mutated_payload, mutated_text
from tests.fuzz.recorded import Exchange, Recorded


@dataclass(frozen=True)
class Target:
    """One decoder, or one boundary function behind it."""

    name: str
    real: Sequence[Any]  # recorded content
    mutate: Callable[[Any, Random], Any]
    read: Callable[[Any], Any]
    refuses: tuple[type[Exception], ...]
    right: Callable[[Any], bool]
    covers: tuple[Callable[..., Any], ...]  # the functions whose branches count


def targets(real: Recorded, folder: Path) -> list[Target]:
    """Build all targets over recorded content; those that read files write them to this folder."""
    return [*messages(real), *readers(real), *split_targets(real), *files(real, folder)]


def messages(real: Recorded) -> list[Target]:
    frame = (payload.unframe, payload._lying_in, payload._empty_groups, payload.unflatten, payload.read_numbers)
    blobs = [one.to_bytes() for exchange in real.exchanges for one in (exchange.request, exchange.answer)]
    return [
        Target("payload", real.blobs, mutated_frame, read_payload, (ValueError,), sound, (payload.from_bytes, *frame)),
        Target("split message", blobs, mutated_frame, Message.from_bytes, (ValueError,),
               lambda message: message.round >= 0 and sound(message.payload), (Message.from_bytes, *frame)),
        Target("client memory", real.memories, mutated_frame, client_store.memory_from_bytes, (ValueError,),
               lambda memory: bool(client_store.memory_to_bytes(memory)), (client_store.memory_from_bytes, *frame)),
        Target("Flower records", real.records, mutated_records, records.from_records, (ValueError,),
               lambda found: sound(found[0]), (records.from_records,)),
    ]  # fmt: skip


def readers(real: Recorded) -> list[Target]:
    classes, agreed = 10, real.agreed
    numbers = (boundary.read_scores, score_problem, clinical_problem)
    scored = [content for content in real.scores if sum(content.scalars.values()) > 0]
    return [
        Target("hello", [*real.abouts, {"site": "1", "code": "refused", "text": "its policy"}], mutated_about,
               boundary.read_hello, (ValueError,), fine_hello,
               (boundary.read_hello, boundary.read_json, boundary.read_refusal, boundary.is_count)),
        Target("report", real.ups, mutated_payload, lambda up: boundary.read_report(up, real.wanted, agreed),
               (ValueError,), lambda up: finite(up) and 0 < up.scalars["examples"] <= agreed.train,
               (boundary.read_report, payload_check.difference, payload_check._tree_difference)),
        Target("scores", scored, mutated_payload, lambda up: boundary.read_scores(up, classes, agreed),
               (ValueError,), lambda up: finite(up) and from_scalars(up.scalars) is not False, numbers),
        Target("order", real.downs, lambda down, rng: (mutated_payload(down[0], rng), mutated_about(down[1], rng)),
               lambda down: boundary.read_order(*down), (PublicError,),
               lambda order: type(order.round) is type(order.continues) is int, (boundary.read_order,)),
    ]  # fmt: skip


def split_targets(real: Recorded) -> list[Target]:
    names, mine = ["0", "1"], real.hello["common"]

    def introduced(blob: bytes) -> dict[str, Any]:
        hello = boundary.read_introduction(blob)
        server._check_hello(hello, mine, names)
        return hello

    def asked(one: Exchange) -> Payload:
        one.checks.check(one.request, replace(one.progress), one.side)
        return one.request.payload

    def answered(one: Exchange) -> Payload:
        one.checks.check_answer(one.request, one.answer, one.images)
        return one.answer.payload

    def tasked(one: tuple[Checks, Message]) -> Payload:
        one[0].check_task(one[1])
        return one[1].payload

    def in_json(blob: bytes, rng: Random) -> bytes:
        return mutated_text(blob.decode(), rng).encode(errors="replace")

    checked, numbers = real.exchanges[0].checks, {"continues": 0, "average": 1.0}
    tasks = [(checked, Message(1, "0", 0, kind, Payload({}, numbers))) for kind in ("train", "evaluate")]
    tasks.append((checked, Message(1, "0", 0, "receive", Payload({"average": checked.own}, numbers))))
    both = (checks.compare, checks._all_numbers)
    answers = [one for one in real.exchanges if one.request.kind != "done"]
    return [
        Target("split hello", [json.dumps(real.hello).encode()], in_json, introduced,
               (ValueError, ConnectionRefusedByServerError), lambda hello: hello["name"] in names,
               (boundary.read_introduction, boundary.is_count, server._check_hello)),
        Target("split welcome", [json.dumps({"run": "r", "session": "t"}).encode()], in_json, boundary.read_welcome,
               (ValueError,), lambda found: set(found) == set(boundary.WELCOME), (boundary.read_welcome,)),
        Target("split request", real.exchanges,
               lambda one, rng: replace(one, request=mutated_message(one.request, rng)), asked,
               (ConnectionRefusedByServerError,), finite,
               (Checks.check, Checks.kinds, Checks.place, Checks.check_numbers, Checks.check_tensors, *both)),
        Target("split answer", answers, lambda one, rng: replace(one, answer=mutated_message(one.answer, rng)),
               answered, (AnswerError,), finite, (Checks.check_answer, Checks.check_answered_numbers, *both)),
        Target("split task", tasks, lambda one, rng: (one[0], mutated_message(one[1], rng)), tasked, (AnswerError,),
               finite, (Checks.check_task,)),
    ]  # fmt: skip


def files(real: Recorded, folder: Path) -> list[Target]:
    (kept,) = real.checkpoint.glob("manifest-*.json")
    whole = {path.relative_to(real.checkpoint): path.read_bytes() for path in real.checkpoint.rglob("*.safetensors")}
    elsewhere = folder / "elsewhere.safetensors"
    elsewhere.touch()
    saved = folder / "checkpoint"

    def load(text: str) -> Any:
        """Load, as a run does that is resumed; an empty text stands for no manifest."""
        for path, blob in whole.items():
            if not (saved / path).exists():
                (saved / path).parent.mkdir(exist_ok=True, parents=True)
                (saved / path).write_bytes(blob)
        (saved / kept.name).unlink(missing_ok=True)
        if text:
            (saved / kept.name).write_text(text, errors="replace")
        store = ClientStore(saved, in_ram=False)
        found = checkpoint.load_checkpoint(saved, store)
        checkpoint.collect_garbage(saved, 9, store)
        return found, store

    def fine_checkpoint(loaded: Any) -> bool:
        found, store = loaded
        readable = all(isinstance(store.get(name), dict) for name in store.versions if found.round > 8)
        return elsewhere.exists() and (found is None or (type(found.round) is int and readable))

    def read_policy(blob: bytes) -> policy.Policy:
        (folder / "policy.toml").write_bytes(blob)
        return policy.read_policy(folder / "policy.toml" if blob else None)

    def read_manifest(content: tuple[dict[str, str], bytes]) -> manifest.Manifest:
        (folder / "images.csv").write_bytes(content[1])
        return manifest.read_manifest(folder / content[0].get("path", "images.csv"), *content[0].get("more", ()))

    def read_npz(blob: bytes) -> Any:
        (folder / "images.npz").write_bytes(blob)
        return sources.from_npz(folder / "images.npz")

    columns, plain = recorded.manifest_texts(folder)
    (folder / "b.csv").write_bytes(columns)
    ways = [({}, columns), ({"more": ("north",)}, columns), ({"path": "*.csv"}, columns), ({}, plain),
            ({"more": (None, r"([a-z])\d?[.]png")}, plain)]  # fmt: skip
    return [
        Target("checkpoint manifest", [kept.read_text(), ""], lambda text, rng: mutated_text(text or "[]", rng), load,
               (UserError,), fine_checkpoint,
               (checkpoint.read_manifest, checkpoint.load_checkpoint, checkpoint.whole, checkpoint._sweep)),
        Target("site policy", [recorded.policy_text(), b""], mutated_bytes, read_policy, (UserError,),
               lambda found: isinstance(found, policy.Policy), (policy.read_policy,)),
        Target("manifest of images", ways, lambda way, rng: (way[0], mutated_bytes(way[1], rng)), read_manifest,
               (UserError,), lambda found: all(row.name for row in found.rows),
               (manifest.read_manifest, manifest._read_one, manifest._check_header, manifest._duplicates)),
        Target("npz of images", [recorded.npz_bytes(folder)], mutated_npz, read_npz, (UserError,),
               lambda found: len(found.images) == len(found.labels), (sources.from_npz, sources._check_claims)),
    ]  # fmt: skip


# How content that is not bytes is changed.


def read_payload(blob: bytes) -> Payload:
    return payload.from_bytes(blob, copy=bool(len(blob) % 2))


def mutated_message(message: Message, rng: Random) -> Message:
    if rng.random() < 0.8:
        return replace(message, payload=mutated_payload(message.payload, rng))
    field = rng.choice(("round", "step", "client", "kind"))
    number = field in ("round", "step")
    found = rng.choice([value for value in STRANGE if type(value) is (int if number else str)])
    kind = rng.choice((*checks.KINDS, found)) if field == "kind" else found
    return replace(message, **{field: kind if field == "kind" else found})


def mutated_about(about: dict[str, Any], rng: Random) -> dict[str, Any]:
    """Change the metadata of a Flower message, which holds numbers, texts and flat lists."""
    found = mutated_json(about, rng)
    return found if isinstance(found, dict) else {}


def mutated_records(content: RecordDict, rng: Random) -> RecordDict:
    """Change a Flower message by what Flower lets through: its records, their types and their values."""
    while True:
        found = dict(content.items())
        name = rng.choice(list(found))
        try:
            match rng.randrange(8):
                case 0:
                    del found[name]
                case 1:
                    found[str(rng.choice(STRANGE))[:100]] = found[name]
                case 2:
                    found[name] = found[rng.choice(list(found))]
                case 3 | 4 if isinstance(found[name], ArrayRecord):
                    found[name] = ArrayRecord({key: mutated_array(one, rng) for key, one in found[name].items()})
                case 5 if isinstance(found[name], ArrayRecord):
                    found[name] = ArrayRecord({f"{key}2": one for key, one in found[name].items()})
                case _ if isinstance(found[name], ConfigRecord | MetricRecord):
                    changed = mutated_json(dict(found[name]), rng)
                    found[name] = type(found[name])(changed)
                case _:
                    found[name] = MetricRecord({"a": [1, 2]})
            return RecordDict(found)
        except (TypeError, ValueError, AttributeError):
            continue  # Flower itself does not build such a record


def mutated_array(array: Array, rng: Random) -> Array:
    if rng.random() < 0.2:
        return Array("float32", (1,), str(rng.choice(STRANGE))[:100], array.data)
    return Array(array.dtype, array.shape, array.stype, mutated_frame(array.data, rng))


def mutated_npz(blob: bytes, rng: Random) -> bytes:
    """Change a zip of arrays: its bytes, one array's content or shape, or the arrays that there are."""
    if rng.random() < 0.5:
        return mutated_bytes(blob, rng)
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(blob)) as old, zipfile.ZipFile(out, "w") as new:
        names = old.namelist()
        contents = {name: old.read(name) for name in names}
        victim = rng.choice(names)
        match rng.randrange(4):
            case 0:
                del contents[victim]
            case 1:
                contents[rng.choice(("class_names.npy", "val_images.npy", "x", "../x.npy"))] = contents[victim]
            case 2:
                contents[victim] = mutated_bytes(contents[victim], rng)
            case _:
                first = rng.choice((b"9999999999999", b"2", b"3", b"-1", b"", b"4, 2", b"0", b"'4'", b"[4]"))
                contents[victim] = contents[victim].replace(b"'shape': (4,", b"'shape': (" + first + b",", 1)
        for name, content in contents.items():
            new.writestr(name, content)
    found = out.getvalue()
    if rng.random() < 0.1:  # a size in the list of contents that is not true
        at = found.rindex(b"PK\x01\x02") + 24
        found = found[:at] + b"\xf0\xff\xff\xff" + found[at + 4 :]
    return found


# What must hold for whatever is accepted.


def sound(found: Payload) -> bool:
    names = [name for group, members in found.trees.items() for name in (group, *members)]
    sized = all(len(name) <= payload.LONGEST_NAME and (name.isprintable() or not name) for name in names)
    return sized and all(type(value) in (int, float) for value in found.scalars.values())


def finite(found: Payload) -> bool:
    tensors = [tensor for members in found.trees.values() for tensor in members.values() if tensor.is_floating_point()]
    small = all(bool((tensor.abs() <= payload_check.LARGEST).all()) for tensor in tensors)
    return small and all(abs(value) < float("inf") for value in found.scalars.values())


def fine_hello(hello: boundary.Hello | boundary.Declined) -> bool:
    if isinstance(hello, boundary.Declined):
        return str(hello).isprintable() and len(str(hello)) < 400
    return hello.site.isprintable() and 0 < hello.holding.train <= boundary.MOST_IMAGES
