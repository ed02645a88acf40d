"""Checkpoints of the server and client memories, written atomically: a kill loses at most the round it interrupts.

A round writes only new files; its manifest, written last by a rename, points at them with hashes. Two generations are
kept, so a damaged file costs one round, and with `run.keep=best` the best round as of each of them. Randomness needs no
state, because it is keyed by round.
"""

import hashlib
import json
import logging
import re
from collections.abc import Collection
from pathlib import Path
from typing import NotRequired, TypedDict

import torch

from fedvit.core.errors import UserError
from fedvit.core.files import Version, write_bytes
from fedvit.core.payload import Payload, from_bytes, to_bytes
from fedvit.core.server import Server
from fedvit.engine.client_store import ClientStore

log = logging.getLogger(__name__)
NORMS = "update_norms"  # the lengths of past updates, for train.clip_update=auto
FILE = re.compile(r"(clients/)?[^/\0]+\.safetensors|scores-\d+\.csv")  # of a checkpoint, below its folder


class Manifest(TypedDict):
    """What a generation consists of."""

    round: int
    server: Version
    clients: dict[str, Version]
    scores: NotRequired[Version]  # of a run with run.keep=best


def save_checkpoint(
    folder: Path, server: Server, store: ClientStore, *, retain: Collection[int] = (), scores: bytes | None = None
) -> None:
    """Commit a finished round to disk, and keep the generations of the rounds in `retain`.

    `scores` is the round's clients.csv, for a run that may come back to this round.
    """
    trees = {"shared": server.shared, **{f"memory:{k}": v for k, v in server.memory.items()}}
    if server.norms:
        trees[NORMS] = {NORMS: torch.tensor(server.norms, dtype=torch.float64)}
    blob = to_bytes(Payload(trees))
    version = write_bytes(folder, f"server-{server.round:06d}.safetensors", blob)
    manifest = Manifest(round=server.round, server=version, clients=store.versions)
    if scores is not None:
        manifest["scores"] = write_bytes(folder, f"scores-{server.round:06d}.csv", scores)
    write_bytes(folder, manifest_name(server.round), json.dumps(manifest, sort_keys=True).encode())
    collect_garbage(folder, server.round, store, retain)


def collect_garbage(folder: Path, round_: int, store: ClientStore, retain: Collection[int] = ()) -> None:
    """Keep this generation, the previous one and those in `retain`, and remove the files that only others need."""
    needed = {file for kept in retain for file in _files_of(read_manifest(folder / manifest_name(kept)))}
    for path in [*folder.glob("manifest-*.json"), *folder.glob("server-*.safetensors"), *folder.glob("scores-*.csv")]:
        if (number := int(path.stem.rpartition("-")[2])) < round_ - 1 and number not in retain:
            path.unlink()
    old = [file for since, file in store.superseded if since < round_ and file not in needed]
    for file in old:
        (folder / file).unlink(missing_ok=True)
    store.superseded = [(since, file) for since, file in store.superseded if file not in old]


def _files_of(manifest: Manifest) -> list[str]:
    """Return every file that a manifest points at."""
    more = [manifest["scores"]] if "scores" in manifest else []
    return [version["file"] for version in (manifest["server"], *manifest["clients"].values(), *more)]


def load_checkpoint(folder: Path, store: ClientStore, *, clean: bool = True) -> Server | None:
    """Load the newest intact generation, or return None if there is no checkpoint. Damaged generations are reported."""
    manifests = sorted(folder.glob("manifest-*.json"), reverse=True)
    damage = []
    for path in manifests:
        try:
            server = _load_generation(path, store)
        except (OSError, ValueError) as problem:
            damage.append(f"{path.name}: {problem}")
            log.warning("checkpoint %s is damaged (%s); trying the previous generation", path.name, problem)
            continue
        if clean:
            _sweep(folder, server.round)
            current = {version["file"] for version in store.versions.values()}
            older = sorted(f"clients/{path.name}" for path in folder.glob("clients/*"))
            store.superseded = [(server.round, file) for file in older if file not in current]
        return server
    if damage:
        raise UserError(
            f"no generation of the checkpoint in {folder} is intact ({'; '.join(damage)}): "
            "remove the run's folder, or give another --out, and start again"
        )
    return None


def load_kept(folder: Path, store: ClientStore, round_: int) -> Server:
    """Load the generation of the round that a run has kept as its best."""
    try:
        return _load_generation(folder / manifest_name(round_), store)
    except (OSError, ValueError) as problem:
        raise UserError(
            f"round {round_}, which the run kept as its best, cannot be read from {folder} ({problem}): take the "
            "models after the last round (--last; in Python last=True), or run it again"
        ) from problem


def read_scores(folder: Path, round_: int) -> bytes:
    """Return the clients.csv of a kept round."""
    return whole(folder, read_manifest(folder / manifest_name(round_))["scores"])


def _load_generation(path: Path, store: ClientStore) -> Server:
    """Check every file of a generation, point the store at its memories, and return its server."""
    folder, manifest = path.parent, read_manifest(path)
    blob = whole(folder, manifest["server"])
    for version in manifest["clients"].values():
        whole(folder, version)  # one at a time, because all memories together may not fit in RAM
    trees = from_bytes(blob, copy=True).trees
    memory = {k.removeprefix("memory:"): v for k, v in trees.items() if k.startswith("memory:")}
    store.versions = manifest["clients"]
    norms = trees[NORMS][NORMS].tolist() if NORMS in trees else ()
    return Server(manifest["round"], dict(trees.get("shared", {})), memory, norms=tuple(norms))


def newest_round(folder: Path) -> int:
    """Return the round of the newest generation, intact or not, or 0 if there is none."""
    rounds = (path.stem.rpartition("-")[2] for path in folder.glob("manifest-*.json"))
    return max((int(number) for number in rounds if number.isdecimal()), default=0)


def read_manifest(path: Path) -> Manifest:
    """Return a generation's manifest; raise ValueError if we did not write it, or if it names a file elsewhere."""
    try:
        found = json.loads(path.read_text())
        versions = [found["server"], *found["clients"].values(), *([found["scores"]] if "scores" in found else [])]
        ours = all(FILE.fullmatch(one["file"]) and one["sha256"].isalnum() for one in versions)
        if not ours or type(found["round"]) is not int or path.name != manifest_name(found["round"]):
            raise ValueError("it names a file that no checkpoint has, or another round")
    except (KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise ValueError(f"it is not a manifest of ours: {problem}") from problem
    manifest = Manifest(round=found["round"], server=found["server"], clients=found["clients"])
    return Manifest(**manifest, scores=found["scores"]) if "scores" in found else manifest


def manifest_name(round_: int) -> str:
    return f"manifest-{round_:06d}.json"


def whole(folder: Path, version: Version) -> bytes:
    """Return the bytes of a file after checking that they are the ones that were written."""
    blob = (folder / version["file"]).read_bytes()
    if hashlib.sha256(blob).hexdigest() != version["sha256"]:
        raise ValueError(f"{version['file']} has changed since it was written")
    return blob


def _sweep(folder: Path, round_: int) -> None:
    """Remove files that no generation up to this round needs: those of a lost later round, and half-written ones."""
    needed = set()
    for path in folder.glob("manifest-*.json"):
        if int(path.stem.rpartition("-")[2]) <= round_:
            try:
                needed |= {path.name, *_files_of(read_manifest(path))}
            except ValueError:
                continue  # a damaged manifest keeps no files alive
    for path in [*folder.glob("*"), *folder.glob("clients/*")]:
        if path.is_file() and str(path.relative_to(folder)) not in needed:
            path.unlink()
