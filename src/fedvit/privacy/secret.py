"""The secret that noise follows from. A server knows run.seed, so noise must not follow from that."""

import hmac
import os
import secrets
from hashlib import sha256
from pathlib import Path

import numpy as np

from fedvit.core.errors import UserError
from fedvit.core.files import writing
from fedvit.core.payload import Payload, to_bytes

LENGTH = 32  # bytes


def keep_secret(path: Path) -> bytes:
    """Return the secret in this file; make the file, for its owner's eyes only, if there is none."""
    if not path.exists():
        with writing(path):
            make_private(path.parent)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as stream:
                stream.write(secrets.token_hex(LENGTH) + "\n")
                stream.flush()
                os.fsync(stream.fileno())
    try:
        found = bytes.fromhex(path.read_text())
    except (ValueError, OSError) as problem:
        raise UserError(f"{path} does not hold the secret of a run's noise ({problem})") from problem
    if len(found) != LENGTH:
        raise UserError(f"{path} should hold {2 * LENGTH} hexadecimal digits, found {2 * len(found)}")
    return found


def make_private(folder: Path) -> None:
    """Make a folder that only its owner may look into."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)


def message_key(secret: bytes, round_: int, client: str, down: Payload) -> bytes:
    """Return the key of all noise in a client's answer to a message.

    It depends on the message: with a key of the round alone, a server that sends two messages in one round could
    subtract the answers and be rid of the noise. The same message gets the same answer.
    """
    return _derive(secret, str(round_).encode(), client.encode(), sha256(to_bytes(down)).digest())


def draws(key: bytes, *address: object) -> np.random.Generator:
    """Return a generator that only those who know the key can repeat.

    It is Philox with a key of 128 bits: a counter-based generator, though not one certified for cryptography.
    """
    derived = _derive(key, *(str(part).encode() for part in address))
    return np.random.Generator(np.random.Philox(key=int.from_bytes(derived[:16], "big")))


def _derive(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(len(part).to_bytes(8, "big") + part for part in parts), "sha256")
