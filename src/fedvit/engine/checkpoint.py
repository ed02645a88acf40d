"""Checkpoints of the server and client memories, written atomically: a kill loses at most the round it interrupts.

A round writes only new files; its manifest, written last by a rename, points at them with hashes. Two generations are
kept, so a damaged file costs one round. Randomness needs no state, because it is keyed by round.
"""

import hashlib
import json
import logging
from pathlib import Path

import torch

from fedvit.core.errors import UserError
from fedvit.core.files import Version, write_bytes
from fedvit.core.payload import Payload, from_bytes, to_bytes
from fedvit.core.server import Server
from fedvit.engine.client_store import ClientStore

log = logging.getLogger(__name__)
NORMS = "update_norms"  # the lengths of past updates, for train.clip_update=auto


def save_checkpoint(folder: Path, server: Server, store: ClientStore) -> None:
    """Commit a finished round to disk."""
    trees = {"shared": server.shared, **{f"memory:{k}": v for k, v in server.memory.items()}}
    if server.norms:
        trees[NORMS] = {NORMS: torch.tensor(server.norms, dtype=torch.float64)}
    blob = to_bytes(Payload(trees))
    version = write_bytes(folder, f"server-{server.round:06d}.safetensors", blob)
    manifest = {"round": server.round, "server": version, "clients": store.versions}
    write_bytes(folder, f"manifest-{server.round:06d}.json", json.dumps(manifest, sort_keys=True).encode())
    collect_garbage(folder, server.round, store)


def collect_garbage(folder: Path, round_: int, store: ClientStore) -> None:
    """Keep this generation and the previous one. Only files of recent rounds are touched, however many there are."""
    for path in [*folder.glob("manifest-*.json"), *folder.glob("server-*.safetensors")]:
        if int(path.stem.rpartition("-")[2]) < round_ - 1:
            path.unlink()
    for _, file in (old for old in store.superseded if old[0] < round_):
        (folder / file).unlink(missing_ok=True)
    store.superseded = [old for old in store.superseded if old[0] >= round_]


def load_checkpoint(folder: Path, store: ClientStore, *, clean: bool = True) -> Server | None:
    """Load the newest intact generation, or return None if there is no checkpoint. Damaged generations are reported."""
    manifests = sorted(folder.glob("manifest-*.json"), reverse=True)
    damage = []
    for path in manifests:
        try:
            manifest = json.loads(path.read_text())
            blob = whole(folder, manifest["server"])
            for version in manifest["clients"].values():
                whole(folder, version)  # one at a time, because all memories together may not fit in RAM
        except (OSError, ValueError, KeyError, TypeError) as problem:
            damage.append(f"{path.name}: {problem}")
            log.warning("checkpoint %s is damaged (%s); trying the previous generation", path.name, problem)
            continue
        trees = from_bytes(blob, copy=True).trees
        memory = {k.removeprefix("memory:"): v for k, v in trees.items() if k.startswith("memory:")}
        store.versions = manifest["clients"]
        if clean:
            _sweep(folder, manifest["round"])
            current = {version["file"] for version in store.versions.values()}
            older = sorted(f"clients/{path.name}" for path in folder.glob("clients/*"))
            store.superseded = [(manifest["round"], file) for file in older if file not in current]
        norms = trees[NORMS][NORMS].tolist() if NORMS in trees else ()
        return Server(manifest["round"], dict(trees.get("shared", {})), memory, norms=tuple(norms))
    if damage:
        raise UserError(
            f"no generation of the checkpoint in {folder} is intact ({'; '.join(damage)}): "
            "remove the run's folder, or give another --out, and start again"
        )
    return None


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
                manifest = json.loads(path.read_text())
                needed |= {path.name, manifest["server"]["file"], *(v["file"] for v in manifest["clients"].values())}
            except (ValueError, KeyError, TypeError):
                continue  # a damaged manifest keeps no files alive
    for path in [*folder.glob("*"), *folder.glob("clients/*")]:
        if path.is_file() and str(path.relative_to(folder)) not in needed:
            path.unlink()
