"""Client memory between rounds, versioned on disk and, while it fits, in RAM."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict
from urllib.parse import quote

from safetensors.torch import load, save

from fedvit.client import Memory
from fedvit.payload import flatten, numbers_of, unflatten


class Version(TypedDict):
    """One file of a checkpoint and the hash that proves it whole."""

    file: str  # relative to the checkpoint's folder
    sha256: str


class Store:
    """The memories of all clients. A client that never took part has none, and costs nothing.

    `versions` points at the newest file of each client; `superseded` lists the files that a round replaced, for
    the checkpoint to delete once no kept generation needs them.
    """

    def __init__(self, folder: Path, *, in_ram: bool):
        self.folder = folder
        self.in_ram = in_ram
        self.ram: dict[str, Memory] = {}
        self.versions: dict[str, Version] = {}
        self.superseded: list[tuple[int, str]] = []

    def get(self, client: str) -> Memory:
        """A client's memory; the dictionary is the caller's own, the tensors are not to be changed in place."""
        if client in self.ram:
            return dict(self.ram[client])
        if client in self.versions:
            memory = memory_from_bytes((self.folder / self.versions[client]["file"]).read_bytes())
            if self.in_ram:
                self.ram[client] = memory
            return dict(memory)
        return {}

    def put(self, round_: int, memories: Mapping[str, Memory]) -> None:
        """Write the memories of a round's cohort as new files; older files stay."""
        for client, memory in memories.items():
            if not memory:
                continue
            file = f"clients/{quote(client, safe='')}-{round_:06d}.safetensors"
            if client in self.versions and self.versions[client]["file"] != file:
                self.superseded.append((round_, self.versions[client]["file"]))
            self.versions[client] = write(self.folder, file, memory_to_bytes(memory))
            if self.in_ram:
                self.ram[client] = memory


def memory_to_bytes(memory: Memory) -> bytes:
    trees = {name: value for name, value in memory.items() if isinstance(value, dict)}
    numbers = {name: value for name, value in memory.items() if not isinstance(value, dict)}
    return save(flatten(trees), {"numbers": json.dumps(numbers)})


def memory_from_bytes(blob: bytes) -> Memory:
    return {**unflatten(load(blob)), **numbers_of(blob)}


def write(folder: Path, file: str, blob: bytes) -> Version:
    """Write a file so that it is there whole or not at all."""
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as stream:
        stream.write(blob)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(path)
    return {"file": file, "sha256": hashlib.sha256(blob).hexdigest()}
