"""The boundary of the federated protocol: one function for each kind of message that arrives from another machine.

Each returns content that the rest of the code may trust, or raises ValueError with one short line that quotes no value
of a tensor. The messages of split learning are checked in `network.grpc.checks`.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedvit.core.clinical_message import from_scalars
from fedvit.core.errors import PublicError, one_line
from fedvit.core.metrics import CONFUSION, LARGEST, score_problem
from fedvit.core.payload import CLAIMED, Payload
from fedvit.network.payload_check import difference
from fedvit.runs.write import Holding

LONGEST_JSON = 1_000_000  # characters of a hello
DEEPEST_JSON = 8  # lists within lists
LONGEST_RUN = 100  # characters of a run's ID
LONGEST_NAME = 100  # characters of a site's name
LONGEST_REFUSAL = {"site": LONGEST_NAME, "code": 20, "text": 300}
MOST_IMAGES = 10**7  # of one site
MOST_ROUNDS = 10**7
LARGEST_LOSS = 1e9
TOKEN = "session"
WELCOME = (TOKEN, "run")
KEPT_BACK = {"withheld": 1.0}  # instead of scores


@dataclass(frozen=True)
class Hello:
    """A site's introduction."""

    site: str
    holding: Holding
    common: Mapping[str, Any]  # what must agree, for `handshake.differences`


@dataclass(frozen=True)
class Declined:
    """A site's reply that it does not take part, or that it could not answer."""

    site: str
    code: str
    text: str

    def __str__(self) -> str:
        return f"{self.code}: {self.text}"


@dataclass(frozen=True)
class Order:
    """What a server wants a site to do: a round of a run, from the state after the round `continues`."""

    run: str
    round: int
    continues: int


def read_json(text: object) -> Any:
    """Read JSON from another machine; raise ValueError if it is malformed, too long or nested too deeply."""
    if not isinstance(text, str | bytes) or len(text) > LONGEST_JSON:
        raise ValueError(f"expected JSON of at most {LONGEST_JSON:,} characters")
    try:
        content = json.loads(text)
    except RecursionError as problem:
        raise ValueError("JSON is nested too deeply") from problem
    inside, depth = [content], 0
    while inside:
        depth += 1
        if depth > DEEPEST_JSON:
            raise ValueError("JSON is nested too deeply")
        inside = [part for value in inside for part in _parts_of(value)]
    return content


def _parts_of(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []


def is_count(value: object) -> bool:
    """Return whether this is a number of images or classes that a site may have."""
    return type(value) is int and 0 < value <= MOST_IMAGES


# From a site to the server.


def read_hello(about: Mapping[str, Any]) -> Hello | Declined:
    """Return a site's introduction or its refusal."""
    site = one_line(about.get("site", ""), LONGEST_NAME)
    if "code" in about:
        return read_refusal(about)
    agreed = read_json(about.get("common"))
    counts = [about.get(key) for key in ("train", "test", "classes")]
    no_label = type(counts[-1]) is int and counts[-1] == 0  # where an image may have several labels, or none
    if not isinstance(agreed, dict) or not all(map(is_count, counts[:-1] if no_label else counts)):
        raise ValueError("this is not the hello of a site")
    return Hello(site, Holding(*map(int, counts)), agreed)  # type: ignore[arg-type]


def read_introduction(request: bytes) -> dict[str, Any]:
    """Return what a split learning client says about itself when it connects; its name is a short line of text."""
    said = read_json(request)
    name = said.get("name") if isinstance(said, dict) else None
    if not isinstance(name, str) or not name or name != one_line(name, LONGEST_NAME):
        raise ValueError("this is not the hello of a fedvit split-client")
    return dict(said)


def read_refusal(about: Mapping[str, Any]) -> Declined:
    return Declined(*(one_line(about.get(key, ""), most) for key, most in LONGEST_REFUSAL.items()))


def read_report(up: Payload, wanted: Payload, agreed: Holding) -> Payload:
    """Return the report of a site that trained; its weight is at most the number of images agreed on at its hello.

    `wanted` is a report of the same form.
    """
    wrong = difference(up, wanted)
    if wrong is not None:
        raise ValueError(wrong)
    numbers = dict(up.scalars)
    strange = sorted(numbers.keys() - {"examples", "loss"} - wanted.scalars.keys())
    if strange or wanted.scalars.keys() - numbers.keys():
        raise ValueError(f"the numbers of a report are missing or unknown: {one_line(strange, 60)}")
    examples = numbers.get("examples", 0)
    if not 0 < examples < math.inf:
        raise ValueError("the number of training images is missing or invalid")
    wrong_numbers = sorted(
        key for key, value in numbers.items() if key != "examples" and not abs(value) <= LARGEST_LOSS
    )
    if wrong_numbers:
        raise ValueError(f"the {wrong_numbers[0]} is not a number that training gives")
    more = {CLAIMED: examples} if examples > agreed.train else {}
    return Payload(up.trees, {**numbers, "examples": min(examples, agreed.train), **more})


def read_scores(up: Payload, classes: int, agreed: Holding) -> Payload:
    """Return the scores of a site that tested its model, or nothing if its policy keeps them all."""
    if not up.trees and up.scalars == KEPT_BACK:
        return Payload()
    wrong = "scores hold no tensors" if up.trees else score_problem(up.scalars, classes)
    if wrong is not None:
        raise ValueError(wrong)
    if any(key.endswith("_loss") and abs(value) > LARGEST_LOSS for key, value in up.scalars.items()):
        raise ValueError("a loss is not a number that a test gives")
    counts = [value for key, value in up.scalars.items() if f"_{CONFUSION}_" in key]
    if counts and sum(counts) != agreed.test:
        raise ValueError(f"the confusion counts are of {sum(counts):.0f} images, but the site has {agreed.test}")
    clinical = from_scalars(up.scalars)
    if clinical is not None and (clinical.images != agreed.test or (clinical.patients or 0) > agreed.test):
        raise ValueError(f"the clinical scores are of {clinical.images} images, but the site has {agreed.test}")
    return up


# From the server to a site.


def read_order(content: Payload, about: Mapping[str, Any]) -> Order:
    """Return what the server wants; its tensors are compared with those that were agreed in `Site.check`."""
    run, continues, round_ = about.get("run"), about.get("continues"), content.scalars.get("round")
    if not isinstance(run, str) or not 0 < len(run) <= LONGEST_RUN or not run.isprintable():
        raise PublicError("the server's message names no run")
    if type(continues) is not int or not 0 <= continues <= MOST_ROUNDS:
        raise PublicError("the server's message names no round to continue from")
    if round_ is None or not 1 <= round_ <= MOST_ROUNDS or round_ != int(round_):
        raise PublicError("the server's message names no round")
    if not all(abs(value) <= LARGEST for value in content.scalars.values()):  # NaN is not, either
        raise PublicError("the server's message has numbers that are not finite")
    return Order(run, int(round_), continues)


def read_welcome(text: bytes) -> dict[str, str]:
    """Return what a split learning server answers to a client that connects."""
    said = read_json(text)
    if not isinstance(said, dict) or not all(isinstance(said.get(key), str) for key in WELCOME):
        raise ValueError("expected a session and a run")
    return {key: said[key] for key in WELCOME}
