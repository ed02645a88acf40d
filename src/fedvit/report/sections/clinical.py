"""The section "Clinical scores": rates at a threshold, AUROC, calibration, and tests against Local."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from fedvit.core.clinical import RATES, ClassScore, Interval, SiteScore, macro
from fedvit.report import svg
from fedvit.report.paired import EVERY_CLASS, EVERYONE, PairedTest, against_local
from fedvit.report.sections.parts import MOST_DETAILS, Group
from fedvit.report.statistics import Record
from fedvit.report.units import amount, client, decimal, p_value, percent, signed_decimal
from fedvit.runs.clinical import Clinical

MOST_PLOTS = 12  # classes with a reliability plot of their own, and columns of AUROCs by client
MOST_CLIENTS = 30  # in the tables of a run
RATE_NAMES = {"sensitivity": "sensitivity %", "specificity": "specificity %", "ppv": "PPV %", "npv": "NPV %"}
_HEAD = ("images", "positive", "threshold", *RATE_NAMES.values(), "F1", "AUROC", "AP", "Brier", "ECE")
_SOURCES = {"val": "from val", "given": "given", "default": "default", None: ""}
_TEST_HEAD = ("images", "AUROC gained", "DeLong p", "only this right", "only Local right", "McNemar p")


@dataclass(frozen=True)
class Cell:
    """A number, and what stands below it: its interval, or where it comes from."""

    value: str
    more: str = ""


@dataclass(frozen=True)
class RichTable:
    """A table whose cells have two lines."""

    label: str
    first: str
    head: Sequence[str]
    lines: Sequence[tuple[str, Sequence[Cell]]]


@dataclass(frozen=True)
class Fold:
    """The details of one run."""

    title: str
    classes: RichTable | None
    plots: Sequence[tuple[str, Markup]]
    hidden_plots: int
    clients: RichTable
    areas: RichTable | None
    tests: RichTable | None
    left_out: str


@dataclass(frozen=True)
class ClinicalSection:
    """All runs in one table, the tests against Local or why there are none, and the details of the best rows."""

    intro: str
    runs: RichTable
    tests: RichTable | None
    untested: Sequence[str]
    folds: Sequence[Fold]
    by_patient: bool


@dataclass(frozen=True)
class _Run:
    """A run with clinical scores, its name among the others, and its tests against Local."""

    name: str
    clients: Sequence[str]  # all that train
    scores: Clinical
    tests: Sequence[PairedTest]
    untested: str

    @property
    def classes(self) -> Sequence[ClassScore]:
        return self.scores.pooled.classes

    @property
    def has_overall(self) -> bool:
        """Whether one test is about all classes, which are exclusive; those of single classes are details then."""
        return any(test.name == EVERY_CLASS for test in self.tests)


def clinical(group: Group) -> ClinicalSection | None:
    """Prepare the section; None if no run has clinical scores."""
    every = [record for row in group.rows for record in row.records]
    several = len({record.seed for record in every}) > 1
    runs, first = [], []
    for row in group.ranked:
        own = [_run(row.label, record, every, several=several) for record in row.records]
        found = [one for one in own if one is not None]
        runs += found
        first += found[:1]
    if not runs:
        return None
    tests = [
        (
            one.name if test.name == EVERY_CLASS or len(one.classes) == 1 else f"{one.name}: {test.name}",
            test_cells(test),
        )
        for one in runs
        for test in one.tests
        if test.client == EVERYONE and (test.name == EVERY_CLASS or not one.has_overall)
    ]
    return ClinicalSection(
        _intro(runs[0].scores) + _without(runs[0]),
        RichTable("Clinical scores of every run", "run", _HEAD, [(one.name, whole_cells(one.scores)) for one in runs]),
        RichTable("Tests against Local", "run", _TEST_HEAD, tests) if tests else None,
        list(dict.fromkeys(f"{one.name}: {one.untested}" for one in runs if one.untested)),
        [_fold(one) for one in first[:MOST_DETAILS]],
        all(one.scores.by_patient for one in runs),
    )


def _run(label: str, record: Record, every: Sequence[Record], *, several: bool) -> _Run | None:
    if record.clinical is None:
        return None
    name = f"{label}, seed {record.seed}" if several else label
    unseen = record.split.get("unseen", [])
    trained = [one for one in record.split.get("clients", {}) if one not in unseen]
    return _Run(name, trained, record.clinical, *against_local(record, every))


def _intro(own: Clinical) -> str:
    """Say what the numbers are about."""
    words = "Every client's own model on its own test images after the last round, and all their images together. "
    names = [own.name(one.number) for one in own.pooled.classes]
    if len(names) == 1:
        return words + f"Positive is {names[0]}."
    shared = [own.name(number) for number in own.macro_classes]
    if not shared:
        return words + (
            "No class is tested with positive and negative images by every client, so there is no mean over classes "
            "by which clients could be compared."
        )
    which = "all" if len(shared) == len(names) else f"{len(shared)} of {len(names)}"
    return words + (
        f"Means are over {which} classes, always the same: those of which every client tests positive and negative "
        f"images ({', '.join(shared)})."
    )


def _without(one: _Run) -> str:
    """Name the clients that the scores are not about, such as sites that keep theirs."""
    missing = [client(name) for name in one.clients if name not in one.scores.clients]
    return f" Without {', '.join(missing)}, which sent no clinical scores." if missing else ""


# Cells.


def whole_cells(own: Clinical) -> list[Cell]:
    """Return the scores of all images together: of the one class, or the means over the shared classes."""
    return summed_cells(own, own.pooled)


def summed_cells(own: Clinical, score: SiteScore) -> list[Cell]:
    """Return the scores of the only class that is measured, or means over the classes that every client can test."""
    if len(score.classes) == 1:
        (one,) = score.classes
        return class_cells(one, own.within(one.number) if score is own.pooled else None)
    means = macro(score, own.macro_classes)
    cells = [Cell(percent(_hundred(means[name]))) for name in RATES]
    return [Cell(amount(score.images)), Cell("-"), Cell("-"), *cells] + [
        Cell(decimal(means[name])) for name in ("f1", "auroc", "average_precision", "brier", "ece")
    ]


def class_cells(one: ClassScore, within: float | None = None) -> list[Cell]:
    """Return the scores of a class; `within` replaces an AUROC that counts do not determine."""
    cut = "several" if one.threshold is None else f"{one.threshold:.2f}"
    rates = [Cell(percent(_hundred(one.metric(name))), _percents(one.intervals.get(name))) for name in RATES]
    area = Cell(decimal(one.auroc), _decimals(one.intervals.get("auroc")))
    if one.auroc is None and within is not None:
        area = Cell(decimal(within), "mean of the clients")
    return [
        Cell(f"{one.images:,}"),
        Cell(f"{one.positives:,}"),
        Cell(cut, _SOURCES[one.source]),
        *rates,
        Cell(decimal(one.f1)),
        area,
        Cell(decimal(one.average_precision)),
        Cell(decimal(one.brier), _decimals(one.intervals.get("brier"))),
        Cell(decimal(one.ece)),
    ]


def test_cells(test: PairedTest) -> list[Cell]:
    area, counts = test.delong, test.mcnemar
    return [
        Cell(f"{test.images:,}"),
        Cell("-") if area is None else Cell(signed_decimal(area.difference), _signed(area.interval)),
        Cell("-" if area is None else p_value(area.p)),
        Cell(f"{counts.first_only:,}"),
        Cell(f"{counts.second_only:,}"),
        Cell(p_value(counts.p)),
    ]


def _hundred(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _percents(ends: Interval | None) -> str:
    return "" if ends is None else f"{100 * ends[0]:.0f} … {100 * ends[1]:.0f}"


def _decimals(ends: Interval | None) -> str:
    return "" if ends is None else f"{ends[0]:.2f} … {ends[1]:.2f}"


def _signed(ends: Interval) -> str:
    return f"{signed_decimal(ends[0])} … {signed_decimal(ends[1])}"


# One run.


def _fold(one: _Run) -> Fold:
    own, pooled = one.scores, one.scores.pooled
    clients = _shown(own)
    several = len(pooled.classes) > 1
    plotted = sorted(pooled.classes, key=lambda score: -score.positives)[:MOST_PLOTS]
    tests = [
        (_test_name(test), test_cells(test))
        for test in one.tests
        if (several and test.client == EVERYONE and test.name != EVERY_CLASS)
        or (test.client in clients and (test.name == EVERY_CLASS or not several))
    ]
    classes = [(own.name(score.number), class_cells(score, own.within(score.number))) for score in pooled.classes]
    hidden = len(own.clients) - len(clients)
    return Fold(
        one.name,
        RichTable("Scores of every class", "class", _HEAD, classes) if several else None,
        [(own.name(score.number), _plot(own.name(score.number), score)) for score in plotted],
        len(pooled.classes) - len(plotted),
        RichTable(
            "Scores of every client",
            "client",
            _HEAD,
            [(client(name), summed_cells(own, own.clients[name])) for name in clients],
        ),
        _areas(own, clients) if several else None,
        RichTable("Tests against Local in detail", "class or client" if several else "client", _TEST_HEAD, tests)
        if tests
        else None,
        f"The {len(clients)} of {len(own.clients)} clients with the most test images are shown." if hidden else "",
    )


def _test_name(test: PairedTest) -> str:
    return test.name if test.client == EVERYONE else client(test.client)


def _shown(own: Clinical) -> list[str]:
    """Return the clients in the tables: all, or those with the most test images, in their order."""
    largest = sorted(own.clients, key=lambda name: -own.clients[name].images)[:MOST_CLIENTS]
    return [name for name in own.clients if name in largest]


def _areas(own: Clinical, clients: Sequence[str]) -> RichTable:
    """Make the table of every client's AUROC by class, each with its number of positive images."""
    chosen = sorted(own.pooled.classes, key=lambda score: -score.positives)[:MOST_PLOTS]
    numbers = sorted(score.number for score in chosen)
    lines = []
    for name in clients:
        by_number = {score.number: score for score in own.clients[name].classes}
        cells = [Cell(decimal(by_number[n].auroc), f"{by_number[n].positives:,} positive") for n in numbers]
        lines.append((client(name), cells))
    return RichTable("AUROC of every class at every client", "client", [own.name(n) for n in numbers], lines)


def _plot(name: str, score: ClassScore) -> Markup:
    filled = [place for place in score.bins if place.images]
    bins = [(place.images, place.probability / place.images, place.positives / place.images) for place in filled]
    alt = f"Reliability of the probability of {name} on {score.images} images, calibration error {decimal(score.ece)}"
    return svg.reliability_plot(bins, alt)
