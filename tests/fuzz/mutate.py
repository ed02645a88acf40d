"""Change recorded content a little, in ways that have broken decoders: sizes, kinds, depth, text and single bytes.

All choices come from one random generator, so hypothesis can steer and shrink them, and a seed repeats them.
"""

import json
from functools import lru_cache
from random import Random
from typing import Any

import torch

from fedvit.core.payload import Payload

NESTED = "[" * 2000  # deeper than Python's parser goes
STRANGE: tuple[Any, ...] = (
    0, 1, -1, 0.5, 2**31, 2**53 + 1, 2**62, 2**63, -(2**63), 10**30, 10**400, 1e308, -1e308, 5e-324,
    float("inf"), float("-inf"), float("nan"), True, None, "", "x", "x" * 400, "a\n2026-01-01 ERROR forged\x1b[2K",
    "\ud800", "../../x", "=1+1", "[]", "{}", "[1]", '{"a": 1e999}', NESTED, [], {}, [0], {"a": {}},
    [[[[[[[[[]]]]]]]]],    "I64", "BOOL", "F8_E4M3", 7, 16, 4096,
)  # fmt: skip
BYTES = (b"", b"\x00", b"\xff" * 8, b"{", b"[" * 2000, b'"', b"\\", b"\xc3", b"NaN", b"-", b"9" * 5000, b"\n", b",,,")


def mutated_bytes(blob: bytes, rng: Random) -> bytes:
    """Overwrite, insert, repeat, remove or cut bytes."""
    for _ in range(rng.randint(1, 3)):
        a = rng.randrange(len(blob) + 1)
        b = min(len(blob), a + rng.choice((0, 1, 2, 8, 100)))
        match rng.randrange(5):
            case 0 if a < len(blob):
                blob = b"".join((blob[:a], bytes([rng.randrange(256)]), blob[a + 1 :]))
            case 1:
                blob = blob[:a] + rng.choice(BYTES) + blob[b:]
            case 2:
                blob = blob[:b] + blob[a:]
            case 3:
                blob = blob[:a] + blob[b:]
            case _:
                blob = blob[:a] if rng.random() < 0.3 else blob[:a] + rng.choice(BYTES) + blob[a:]
    return blob


def mutated_json(value: Any, rng: Random) -> Any:
    """Return content with one place changed; what is not on the way there is shared with the original."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        found = dict(value)
        match rng.randrange(8):
            case 0:
                del found[key]
            case 1:
                found[str(rng.choice(STRANGE))[:3000]] = value[rng.choice(list(value))]
            case 2:
                found[key] = value[rng.choice(list(value))]
            case 3:
                found = {(key + rng.choice(("x", "/", "\n", "_1")) if k == key else k): v for k, v in found.items()}
            case _:
                found[key] = mutated_json(value[key], rng)
        return found
    if isinstance(value, list) and value and rng.random() < 0.9:
        place = rng.randrange(len(value))
        match rng.randrange(5):
            case 0:
                return value[:place] + value[place + 1 :]
            case 1:
                return [*value, value[place]]
            case _:
                return [*value[:place], mutated_json(value[place], rng), *value[place + 1 :]]
    if isinstance(value, str) and value[:1] in ("[", "{") and rng.random() < 0.8:
        return dumped(mutated_json(_parsed(value), rng))
    if type(value) in (int, float) and abs(value) < 2**60 and rng.random() < 0.4:
        return value + rng.choice((-1, 1, 0.5, 8, -value * 2))
    return rng.choice(STRANGE)


@lru_cache(1000)
def _parsed(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return []  # text that was changed before


def dumped(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def mutated_text(text: str, rng: Random) -> str:
    """Change JSON text as text, or as what it says."""
    if rng.random() < 0.3:
        return mutated_bytes(text.encode(), rng).decode(errors="replace")
    found = _parsed(text)
    for _ in range(rng.randint(1, 2)):
        found = mutated_json(found, rng)
    return dumped(found)


def mutated_frame(blob: bytes, rng: Random) -> bytes:
    """Change a message of tensors: its bytes, its header, or both."""
    if rng.random() < 0.3:
        return mutated_bytes(blob, rng)
    start = 8 + int.from_bytes(blob[:8], "little")
    header = _parsed(blob[8:start])
    for _ in range(rng.randint(1, 2)):
        header = mutated_json(header, rng)
    text, rest = dumped(header).encode(), blob[start:]
    if rng.random() < 0.2:
        rest = mutated_bytes(rest, rng)
    length = len(text) + (rng.choice((-1, 1, 2**40)) if rng.random() < 0.05 else 0)
    return length.to_bytes(8, "little", signed=False) + text + rest


VALUES = (0.0, -1.0, 1e-30, 1e5, 1e7, 1e37, float("inf"), float("nan"), 2.0**31)


def mutated_tensor(tensor: torch.Tensor, rng: Random) -> torch.Tensor:
    match rng.randrange(6):
        case 0:
            return tensor.to(rng.choice((torch.float64, torch.bfloat16, torch.int64, torch.bool)))
        case 1:
            return tensor.unsqueeze(0)
        case 2:
            return tensor.flatten()[: rng.randrange(4)]
        case 3 if tensor.is_floating_point() or tensor.dtype == torch.int64:
            return torch.full_like(tensor, rng.choice(VALUES if tensor.is_floating_point() else (0.0, -1.0, 2.0**62)))
        case 4 if tensor.is_floating_point() and tensor.numel():
            found = tensor.clone()
            found.view(-1)[rng.randrange(tensor.numel())] = rng.choice(VALUES)
            return found
        case _:
            return tensor * -1 if tensor.dtype != torch.bool else ~tensor


def mutated_payload(payload: Payload, rng: Random) -> Payload:
    """Change a message that has been decoded: its groups, its tensors or its numbers, which are numbers still."""
    trees, scalars = {group: dict(members) for group, members in payload.trees.items()}, dict(payload.scalars)
    for _ in range(rng.randint(1, 3)):
        groups = [group for group, members in trees.items() if members]
        match rng.randrange(10):
            case 0 if groups:
                del trees[rng.choice(groups)]
            case 1:
                trees[str(rng.choice(STRANGE))[:500]] = {}
            case 2 | 3 | 4 | 5 if groups:
                members = trees[rng.choice(groups)]
                name = rng.choice(list(members))
                members[name] = mutated_tensor(members[name], rng)
            case 6 if groups:
                members = trees[rng.choice(groups)]
                name = rng.choice(list(members))
                members[str(rng.choice(STRANGE))[:500]] = members.pop(name) if rng.random() < 0.5 else members[name]
            case _:
                changed = mutated_json(scalars, rng)
                numbers = changed.items() if isinstance(changed, dict) else ()
                scalars = {key: value for key, value in numbers if type(value) in (int, float)}
    return Payload(trees, scalars)
