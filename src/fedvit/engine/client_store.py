"""Client memories between rounds, versioned on disk and, while they fit, also kept in RAM."""

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from fedvit.core.client import Memory
from fedvit.core.files import Version, write_bytes
from fedvit.core.payload import Payload, from_bytes, to_bytes


class ClientStore:
    """The memories of all clients. A client that never took part has none and costs nothing.

    `versions` points at the newest file of each client; `superseded` lists the files that a round replaced, which
    the checkpoint deletes once no kept generation needs them.
    """

    def __init__(self, folder: Path, *, in_ram: bool):
        self.folder = folder
        self.in_ram = in_ram
        self.ram: dict[str, Memory] = {}
        self.versions: dict[str, Version] = {}
        self.superseded: list[tuple[int, str]] = []

    def get(self, client: str) -> Memory:
        """Return a client's memory. The caller owns the dictionary, but must not change the tensors in place."""
        if client in self.ram:
            return dict(self.ram[client])
        if client in self.versions:
            memory = memory_from_bytes((self.folder / self.versions[client]["file"]).read_bytes())
            if self.in_ram:
                self.ram[client] = memory
            return dict(memory)
        return {}

    def put(self, round_: int, memories: Mapping[str, Memory]) -> None:
        """Write the memories of a round's cohort to new files; older files stay."""
        for client, memory in memories.items():
            if not memory:
                continue
            file = f"clients/{quote(client, safe='')}-{round_:06d}.safetensors"
            if client in self.versions and self.versions[client]["file"] != file:
                self.superseded.append((round_, self.versions[client]["file"]))
            self.versions[client] = write_bytes(self.folder, file, memory_to_bytes(memory))
            if self.in_ram:
                self.ram[client] = memory


def memory_to_bytes(memory: Memory) -> bytes:
    trees = {name: value for name, value in memory.items() if isinstance(value, dict)}
    return to_bytes(Payload(trees, {name: value for name, value in memory.items() if not isinstance(value, dict)}))


def memory_from_bytes(blob: bytes) -> Memory:
    kept = from_bytes(blob, copy=True)
    return {**kept.trees, **kept.scalars}
