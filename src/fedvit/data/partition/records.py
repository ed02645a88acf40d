"""What a partition is, whatever rule made it: who owns which images."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from fedvit.core.settings import PartitionSettings
from fedvit.data.dataset import Indices


@dataclass(frozen=True)
class ClientPartition:
    """The indices of one client's images."""

    train: Indices
    test: Indices
    val: Indices
    probe: Indices = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # held out for a method's own choices

    def to_json(self) -> dict[str, list[int]]:
        parts = {"train": self.train, "val": self.val, "test": self.test}
        if len(self.probe):
            parts["probe"] = self.probe
        return {name: indices.tolist() for name, indices in parts.items()}


@dataclass(frozen=True)
class Partition:
    """Every client's images, the global test set, and the clients that never train."""

    clients: Mapping[str, ClientPartition]
    global_test: Indices
    class_names: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    source: str = ""  # hash of the images and labels that it partitions

    @property
    def seen(self) -> list[str]:
        unseen = set(self.unseen)
        return [name for name in self.clients if name not in unseen]

    def to_json(self) -> dict[str, Any]:
        body = {
            "clients": {name: part.to_json() for name, part in self.clients.items()},
            "unseen": list(self.unseen),
            "global_test": self.global_test.tolist(),
            "class_names": list(self.class_names),
            "source": self.source,
        }
        text = json.dumps(body, sort_keys=True)
        return {"hash": hashlib.sha256(text.encode()).hexdigest(), **body}


@dataclass(frozen=True)
class Request:
    """What a rule gets besides the data, such as the fewest images a client may have and the fraction for testing."""

    settings: PartitionSettings
    clients: int
    least: int
    test: float
    generator: Generator
    seed: int
    counts: NDArray[np.int64] | None = None  # images by patient and class, where the dataset has a row per patient
