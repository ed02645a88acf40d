"""Arrays and messages in memory that several processes share."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

SMALL = 2**16  # messages with fewer bytes go through the pipe itself


@dataclass(frozen=True)
class SharedMessage:
    """What a pipe carries: a reference to bytes in shared memory, or the bytes themselves if there are few."""

    size: int
    few: bytes | None = None
    room: Tensor | None = None  # the shared memory, if the other side does not know it yet


@dataclass
class SharedBuffer:
    """Shared memory for one kind of message in one direction, which grows with the messages and is reused.

    A message must be taken before the next is put.
    """

    tensor: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def put(self, blob: bytes) -> SharedMessage:
        if len(blob) < SMALL:
            return SharedMessage(len(blob), few=blob)
        grows = len(blob) > len(self.tensor)
        if grows:
            self.tensor = torch.empty(len(blob), dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
        self.tensor.numpy()[: len(blob)] = np.frombuffer(blob, dtype=np.uint8)
        return SharedMessage(len(blob), room=self.tensor if grows else None)

    def take(self, parcel: SharedMessage) -> bytes:
        if parcel.few is not None:
            return parcel.few
        if parcel.room is not None:
            self.tensor = parcel.room
        return self.tensor.numpy()[: parcel.size].tobytes()


@dataclass(frozen=True)
class SharedBuffers:
    """The shared memory between the parent and one process, as each of them sees it."""

    down: SharedBuffer = field(default_factory=SharedBuffer)
    memory: SharedBuffer = field(default_factory=SharedBuffer)
    up: SharedBuffer = field(default_factory=SharedBuffer)
    kept: SharedBuffer = field(default_factory=SharedBuffer)


def shared_array(images: np.ndarray) -> Tensor:
    """Return an array's data as a tensor in memory that processes share."""
    tensor = torch.from_numpy(np.ascontiguousarray(images))
    tensor.share_memory_()  # type: ignore[no-untyped-call]
    return tensor


def map_of(images: Any) -> Any:
    """Return what is sent in place of the images: the shared tensor itself, or the location of a memory map."""
    if isinstance(images, np.memmap):
        return str(images.filename), images.dtype.str, images.shape, images.offset
    return images


def open_map(sent: Any) -> np.ndarray:
    if isinstance(sent, Tensor):
        return sent.numpy()
    file, kind, shape, offset = sent
    return np.memmap(file, dtype=kind, mode="r", shape=shape, offset=offset)
