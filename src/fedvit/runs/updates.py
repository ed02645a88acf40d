"""What the rounds of a run say about every client's updates: how long they are, where they point, who stands out."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from fedvit.core.payload import CLAIMED

FEWEST = 3  # clients, for one of them to stand out
FAR = 3.5  # robust deviations from the median of the clients
LEAST_LENGTH, LEAST_COSINE = 0.2, 0.1  # smallest robust deviation of the log of a length, and of a cosine
_ROBUST = 1.4826  # times the median absolute deviation: the standard deviation, if values are normal


class Update(NamedTuple):
    """One update: its length relative to the median of its round, and its cosine with the others of the round."""

    round: int
    length: float
    cosine: float | None


@dataclass(frozen=True)
class ClientUpdates:
    """The updates of one client over the rounds; numbers are medians.

    Attributes:
        rounds: In how many rounds the client's update was measured.
        norm: The L2 norm.
        length: The norm relative to the median of the round.
        cosine: The cosine with the mean direction of the round's other clients.
        clipped: In how many rounds the update was shortened.
        claimed: The most training images that the client reported beyond those it counts for.
        long: Whether it stands out by its length.
        away: Whether it stands out by pointing away from the others.
    """

    rounds: int
    norm: float
    length: float
    cosine: float | None
    clipped: int
    claimed: float | None
    long: bool = False
    away: bool = False

    @property
    def stands_out(self) -> bool:
        return self.long or self.away


def updates_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Update]]:
    """Return every update of every client, from the lines of rounds.jsonl."""
    found: dict[str, list[Update]] = {}
    for row in rows:
        norms = row.get("update_norms", {})
        middle = statistics.median(norms.values()) if norms else 0.0
        for name, norm in norms.items():
            if middle > 0:
                cosine = row["update_cosines"].get(name)
                found.setdefault(name, []).append(Update(row["round"], norm / middle, cosine))
    return found


def about_updates(rows: Sequence[Mapping[str, Any]]) -> dict[str, ClientUpdates]:
    """Summarize every client's updates and mark those that stand out."""
    found = {}
    for name, updates in updates_of(rows).items():
        cosines = [update.cosine for update in updates if update.cosine is not None]
        claims = [row[CLAIMED][name] for row in rows if name in row.get(CLAIMED, {})]
        found[name] = ClientUpdates(
            rounds=len(updates),
            norm=statistics.median(row["update_norms"][name] for row in rows if name in row.get("update_norms", {})),
            length=statistics.median(update.length for update in updates),
            cosine=statistics.median(cosines) if cosines else None,
            clipped=sum(name in row.get("clipped", ()) for row in rows),
            claimed=max(claims, default=None),
        )
    lengths = _deviations({n: math.log(max(one.length, 1e-9)) for n, one in found.items()}, LEAST_LENGTH)
    directions = _deviations({n: one.cosine for n, one in found.items() if one.cosine is not None}, LEAST_COSINE)
    return {
        name: ClientUpdates(
            **{
                **asdict(one),
                "long": lengths.get(name, 0.0) > FAR,
                "away": directions.get(name, 0.0) < -FAR and (one.cosine or 0.0) < 0,
            }
        )
        for name, one in found.items()
    }


def _deviations(values: Mapping[str, float], least: float) -> dict[str, float]:
    """Return how many robust deviations each value lies from the median; none if there are too few values."""
    if len(values) < FEWEST:
        return {}
    middle = statistics.median(values.values())
    spread = max(least, _ROBUST * statistics.median(abs(value - middle) for value in values.values()))
    return {name: (value - middle) / spread for name, value in values.items()}
