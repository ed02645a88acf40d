"""Keyed randomness: every draw depends only on its address (seed, round, client, purpose)."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def _key(seed: int, *address: object) -> int:
    """Return 63 bits that depend on the seed and on every part of the address."""
    text = "\x1f".join([str(seed), *map(str, address)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, *address: object) -> torch.Generator:
    """Return a torch generator for this address alone."""
    return torch.Generator().manual_seed(_key(seed, *address))


def numpy_generator(seed: int, *address: object) -> np.random.Generator:
    """Return a numpy generator for this address alone."""
    return np.random.default_rng(_key(seed, *address))


@contextmanager
def seeded(seed: int, *address: object) -> Iterator[None]:
    """Seed torch's global generator inside the block only; initializers and dropout draw from it."""
    with torch.random.fork_rng():
        torch.manual_seed(_key(seed, *address))
        yield
