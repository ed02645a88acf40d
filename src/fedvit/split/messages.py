"""The messages between a client and the server that holds the body."""

import json
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from fedvit.core import payload
from fedvit.core.payload import Payload
from fedvit.core.tree import Tree
from fedvit.split.plan import Wire

GIVEN_UP = "given up"  # sent in place of the task's kind by a client that could not finish its task


@dataclass(frozen=True)
class Message:
    """A payload with its round, client, step and kind, by which a late message is recognized."""

    round: int
    client: str
    step: int
    kind: str
    payload: Payload = field(default_factory=Payload)

    def to_bytes(self) -> bytes:
        head = json.dumps([self.round, self.client, self.step, self.kind])
        return payload.frame(self.payload.trees, {"message": head, "numbers": json.dumps(dict(self.payload.scalars))})

    @staticmethod
    def from_bytes(blob: bytes) -> "Message":
        """Read the message that `to_bytes` wrote, with its tensors in place; raise ValueError for anything else."""
        trees, metadata = payload.unframe(blob)
        try:
            round_, client, step, kind = json.loads(metadata["message"])
            scalars = payload.read_numbers(metadata["numbers"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
            raise ValueError(f"not a message: {str(problem)[:200]}") from problem
        if not (type(round_) is type(step) is int and type(client) is type(kind) is str):
            raise ValueError("not a message: its header is of the wrong type")
        if not (min(round_, step) >= 0 and max(round_, step) <= payload.LARGEST_WHOLE):
            raise ValueError("not a message: its round or step is out of range")
        return Message(round_, client, step, kind, Payload(trees, scalars))

    def answered(self, content: Payload) -> "Message":
        return replace(self, payload=content)


class Channel(Protocol):
    """A client's connection to the server."""

    def call(self, request: bytes) -> bytes: ...


def pack(tensor: Tensor, wire: Wire) -> Tree:
    """Encode activations or gradients for sending; int8 uses one scale per token."""
    tensor = tensor.detach().cpu()
    if wire == "fp32":
        return {"x": tensor.float()}
    if wire == "bf16":
        return {"x": tensor.bfloat16()}
    scale = tensor.abs().amax(-1, keepdim=True).float().clamp(min=1e-30) / 127
    return {"x": (tensor / scale).round().to(torch.int8), "scale": scale}


def unpack(packed: Tree, device: torch.device) -> Tensor:
    """Decode what `pack` encoded into a new tensor, because a tensor's offset in a message could affect rounding.

    This is the only copy on the receiving side; `payload.frame` makes the only copy on the sending side.
    """
    x = packed["x"].to(device, torch.float32, copy=True)
    return x * packed["scale"].to(device) if "scale" in packed else x
