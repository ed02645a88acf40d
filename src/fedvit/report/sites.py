"""Every unit under every row: accuracy and gain with intervals over its test images, and who gains or is hurt."""

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedvit.core.files import no_formula, replacing
from fedvit.report.bootstrap import Hits, Interval, accuracy_interval, difference_interval, hits_of, merge
from fedvit.report.statistics import LOCAL, Record, Row, Unit, mean

Verdict = Literal["gains", "hurt", "cannot be told", ""]  # empty: there is nothing to compare with
_HEADER = (
    "client", "seeds", "row", "test_samples", "accuracy", "accuracy_low", "accuracy_high", "balanced_accuracy", "auroc",
    "gain", "gain_low", "gain_high", "verdict",
)  # fmt: skip


@dataclass(frozen=True)
class SiteScore:
    """One unit under one row, averaged over the seeds of the unit."""

    unit: Unit
    row: str
    seeds: Sequence[int]
    test_samples: float
    accuracy: float
    interval: Interval
    balanced: float | None
    auroc: float | None
    gain: float | None = None
    gain_interval: Interval | None = None

    @property
    def verdict(self) -> Verdict:
        """Whether the unit gains or is hurt beyond doubt: its interval lies on one side of 0."""
        if self.gain_interval is None:
            return ""
        low, high = self.gain_interval
        return "gains" if low > 0 else "hurt" if high < 0 else "cannot be told"


def units_of(rows: Iterable[Row]) -> list[Unit]:
    """Return the units of all rows, in the order in which they occur."""
    found = (unit for row in rows for unit in _records_by_unit(row))
    return list(dict.fromkeys(found))


def unit_names(units: Iterable[Unit]) -> dict[Unit, str]:
    """Name the units; a seed is part of the name only where there are several."""
    kept = list(units)
    several = len({unit.seed for unit in kept}) > 1
    return {unit: unit.label if several else unit.name for unit in kept}


def site_scores(row: Row, rows: Sequence[Row], units: Sequence[Unit] | None = None) -> list[SiteScore]:
    """Score the units of a row, or those that are asked for; gains are measured against Local's row among the rows."""
    alone = {record.test_images: record for other in rows if other.method == LOCAL for record in other.records}
    locals_ = {record.seed: alone.get(record.test_images) for record in row.records}
    known = _records_by_unit(row)
    wanted = known if units is None else [unit for unit in units if unit in known]
    return [_score(row, unit, known[unit], locals_) for unit in wanted]


def _records_by_unit(row: Row) -> dict[Unit, dict[int, tuple[Record, dict[str, Any]]]]:
    """Return, for every unit and seed, the run and the client's line in clients.csv."""
    found: dict[Unit, dict[int, tuple[Record, dict[str, Any]]]] = {}
    for record in row.records:
        for line in record.clients:
            unit = Unit(line["client"], None if row.same_owners else record.seed)
            found.setdefault(unit, {})[record.seed] = record, dict(line)
    return found


def _score(
    row: Row, unit: Unit, seeds: dict[int, tuple[Record, dict[str, Any]]], alone: dict[int, Record | None]
) -> SiteScore:
    lines = [line for _, line in seeds.values()]
    groups = _by_images(row, unit, seeds)
    own = {seed: _hits(record, line) for seed, (record, line) in seeds.items()}
    interval = accuracy_interval([merge([own[seed] for seed in group]) for group in groups], unit.label)
    gain = row.unit_gains.get(unit) if row.method != LOCAL else None
    gain_interval = None
    if gain is not None:
        pairs = []
        for group in groups:
            local = {seed: _local_hits(*seeds[seed], alone.get(seed)) for seed in group}
            both = [(own[seed], other) for seed, other in local.items() if other is not None]
            if both:
                pairs.append((merge([one for one, _ in both]), merge([other for _, other in both])))
        gain_interval = difference_interval(pairs, unit.label) if pairs else None
    return SiteScore(
        unit,
        row.label,
        list(seeds),
        mean(line["test_samples"] for line in lines) or 0.0,
        mean(line["personal_accuracy"] for line in lines) or 0.0,
        interval,
        mean(line.get("personal_balanced_accuracy") for line in lines),
        mean(line.get("personal_auroc") for line in lines),
        gain,
        gain_interval,
    )


def _by_images(row: Row, unit: Unit, seeds: Iterable[int]) -> list[list[int]]:
    """Group a unit's seeds by its test images. A network does not list images: there, all seeds are one group."""
    groups: dict[str, list[int]] = {}
    for record in row.records:
        if record.seed in seeds:
            part = record.split.get("clients", {}).get(unit.name, {})
            groups.setdefault(str(part.get("test")), []).append(record.seed)
    return list(groups.values())


def _hits(record: Record, line: dict[str, Any]) -> Hits:
    """Return a client's hits by class, or without classes if the run did not record them."""
    found = hits_of(record.confusion.get(line["client"], ()))
    return found if found.images else _plain(line["personal_accuracy"], line["test_samples"])


def _local_hits(record: Record, line: dict[str, Any], alone: Record | None) -> Hits | None:
    """Return Local's hits on the same images: from its run, or without classes from the client's line."""
    if alone is not None:
        found = next((other for other in alone.clients if other["client"] == line["client"]), None)
        return None if found is None else _hits(alone, dict(found))
    told = line.get("local_accuracy")
    return None if told is None else _plain(told, line["test_samples"])


def _plain(accuracy: float, images: int) -> Hits:
    return Hits({0: int(images)}, {0: accuracy / 100})


def write_sites(path: Path, rows: Sequence[Row]) -> None:
    """Write sites.csv, one line per unit and row. Values that do not apply are empty."""
    with replacing(path) as partial, partial.open("w", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(_HEADER)
        for row in rows:
            for one in site_scores(row, rows):
                numbers = (
                    one.accuracy,
                    *one.interval,
                    one.balanced,
                    one.auroc,
                    one.gain,
                    *(one.gain_interval or (None, None)),
                )
                cells = ["" if number is None else f"{number:.4f}" for number in numbers]
                seeds = " ".join(map(str, one.seeds))
                writer.writerow(
                    [
                        no_formula(one.unit.name),
                        seeds,
                        no_formula(one.row),
                        f"{one.test_samples:g}",
                        *cells,
                        one.verdict,
                    ]
                )
