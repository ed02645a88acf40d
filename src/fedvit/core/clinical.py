"""Clinical scores of a set of test images: one class against the rest, at a threshold.

What is undefined, such as the sensitivity without a positive image, is None and never 0.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fedvit.core.cases import Cases, shared
from fedvit.core.randomness import numpy_generator

BINS = 10  # of equal width, in the reliability plot and the calibration error
DRAWS = 1000  # of the bootstrap
RATES = ("sensitivity", "specificity", "ppv", "npv")
WITH_INTERVALS = (*RATES, "auroc", "brier")
METRICS = (*WITH_INTERVALS, "ece", "f1", "average_precision")
AT_ONCE = 2_000_000  # images times draws that are held in memory
Interval = tuple[float, float]


@dataclass(frozen=True)
class Bin:
    """The images whose probability lies in one of the bins: how many, the sum of theirs, and the positive ones."""

    images: int
    probability: float
    positives: int


@dataclass(frozen=True)
class ClassScore:
    """One class against the rest, on one set of images."""

    number: int
    tp: int
    fp: int
    tn: int
    fn: int
    squares: float  # the sum of the squared differences of probability and truth
    auroc: float | None
    bins: tuple[Bin, ...]
    threshold: float | None = None  # None: the clients have different ones
    source: str | None = None
    intervals: Mapping[str, Interval] = field(default_factory=dict)  # 95 %, by metric
    average_precision: float | None = None

    @property
    def images(self) -> int:
        return self.tp + self.fp + self.tn + self.fn

    @property
    def positives(self) -> int:
        return self.tp + self.fn

    @property
    def sensitivity(self) -> float | None:
        return _share(self.tp, self.fn)

    @property
    def specificity(self) -> float | None:
        return _share(self.tn, self.fp)

    @property
    def ppv(self) -> float | None:
        return _share(self.tp, self.fp)

    @property
    def npv(self) -> float | None:
        return _share(self.tn, self.fn)

    @property
    def f1(self) -> float | None:
        """The harmonic mean of sensitivity and PPV."""
        return _share(2 * self.tp, self.fp + self.fn)

    @property
    def brier(self) -> float:
        """The mean squared difference of probability and truth."""
        return self.squares / self.images

    @property
    def ece(self) -> float:
        """The expected calibration error: the mean distance of probability and share of positives, over the bins."""
        return sum(abs(one.probability - one.positives) for one in self.bins) / self.images

    def metric(self, name: str) -> float | None:
        found: float | None = getattr(self, name)
        return found


@dataclass(frozen=True)
class SiteScore:
    """One site's scores by class; `patients` is None where no patient is known."""

    patients: int | None
    classes: tuple[ClassScore, ...]

    @property
    def images(self) -> int:
        return self.classes[0].images


def _share(right: int, wrong: int) -> float | None:
    return right / (right + wrong) if right + wrong else None


def score_cases(cases: Cases, seed: int, name: str) -> SiteScore:
    """Score test images. The intervals come from a bootstrap over patients whose draws depend on seed and name."""
    ones = np.ones((1, len(cases)))
    values = []
    for k, number in enumerate(cases.columns):
        truth, probability, positive = cases.truth[:, k], cases.probability[:, k], cases.positive[:, k]
        area = float(weighted_auroc(probability, truth, ones)[0])
        values.append(
            ClassScore(
                number,
                int((truth & positive).sum()),
                int((~truth & positive).sum()),
                int((~truth & ~positive).sum()),
                int((truth & ~positive).sum()),
                float(((probability - truth) ** 2).sum()),
                None if np.isnan(area) else area,
                bins_of(probability, truth),
                cases.threshold[k],
                cases.source[k],
                average_precision=average_precision(probability, truth),
            )
        )
    spread = _intervals(cases, values, seed, name)
    scored = tuple(_with_intervals(value, own) for value, own in zip(values, spread, strict=True))
    return SiteScore(len(np.unique(cases.patient)) if cases.by_patient else None, scored)


def _with_intervals(score: ClassScore, intervals: Mapping[str, Interval]) -> ClassScore:
    return ClassScore(**{**score.__dict__, "intervals": intervals})


def bins_of(probability: NDArray[np.float64], truth: NDArray[np.bool_]) -> tuple[Bin, ...]:
    """Sort images into bins of equal width by their probability; the last bin includes 1."""
    place = np.minimum((probability * BINS).astype(np.int64), BINS - 1)
    images = np.bincount(place, minlength=BINS)
    chances = np.bincount(place, weights=probability, minlength=BINS)
    positives = np.bincount(place, weights=truth, minlength=BINS)
    return tuple(Bin(int(n), float(p), int(t)) for n, p, t in zip(images, chances, positives, strict=True))


def weighted_auroc(
    probability: NDArray[np.float64], truth: NDArray[np.bool_], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return, for each row of weights (draws, images), the chance that a positive ranks above a negative.

    Ties count half. A row without a positive or without a negative gives NaN.
    """
    order = np.argsort(probability, kind="stable")
    starts = np.flatnonzero(np.diff(probability[order], prepend=-1.0))  # of each distinct probability
    sorted_weights = weights[:, order]
    positive = np.add.reduceat(sorted_weights * truth[order], starts, axis=1)
    negative = np.add.reduceat(sorted_weights * ~truth[order], starts, axis=1)
    below = np.cumsum(negative, axis=1) - negative / 2
    pairs = positive.sum(axis=1) * negative.sum(axis=1)
    with np.errstate(invalid="ignore"):
        area: NDArray[np.float64] = (positive * below).sum(axis=1) / pairs
    return area


def average_precision(probability: NDArray[np.float64], truth: NDArray[np.bool_]) -> float | None:
    """Return the mean over the positive images of the PPV at a threshold of their probability; None if undefined.

    It is the area under the steps of the precision-recall curve.
    """
    if not 0 < truth.sum() < len(truth):
        return None
    order = np.argsort(-probability, kind="stable")
    last = np.flatnonzero(np.diff(probability[order], append=-1.0))  # of each distinct probability
    hits = np.cumsum(truth[order])[last]
    return float((np.diff(hits, prepend=0) * hits / (last + 1)).sum() / hits[-1])


# Bootstrap: all images of a patient are drawn together.


def _intervals(cases: Cases, scores: Sequence[ClassScore], seed: int, name: str) -> list[dict[str, Interval]]:
    """Return the 95 % intervals by class and metric; a metric that rests on one patient has none."""
    owners = np.unique(cases.patient, return_inverse=True)[1]
    draws = _draw_metrics(cases, scores, owners, seed, name) if owners.max() > 0 else {}
    found: list[dict[str, Interval]] = []
    for k, score in enumerate(scores):
        own: dict[str, Interval] = {}
        for metric, drawn in draws.items():
            value, patients = score.metric(metric), _patients_of(metric, cases, owners, k)
            kept = drawn[:, k][~np.isnan(drawn[:, k])]
            if value is None or patients < 2 or len(kept) == 0:
                continue
            low, high = np.quantile(kept, (0.025, 0.975))
            own[metric] = (float(low), float(high))
            if metric != "brier" and value in (0.0, 1.0):  # patients drawn again would show no spread at all
                widest = 0.025 ** (1 / patients)
                own[metric] = (widest, 1.0) if value else (0.0, 1 - widest)
        found.append(own)
    return found


def _patients_of(metric: str, cases: Cases, owners: NDArray[np.int64], k: int) -> int:
    """Count the patients on whom a metric rests; for AUROC, the pairs of different patients that can be formed."""
    truth, positive = cases.truth[:, k], cases.positive[:, k]
    rests_on = {"sensitivity": truth, "specificity": ~truth, "ppv": positive, "npv": ~positive}
    if metric == "auroc":
        sides = (len(np.unique(owners[truth])), len(np.unique(owners[~truth])), (int(owners.max()) + 1) // 2)
        return min(sides)
    return len(np.unique(owners[rests_on[metric]] if metric in rests_on else owners))


def _draw_metrics(
    cases: Cases, scores: Sequence[ClassScore], owners: NDArray[np.int64], seed: int, name: str
) -> dict[str, NDArray[np.float64]]:
    """Return every metric (draws, classes) on patients drawn with replacement; undefined values are NaN."""
    truth, positive = cases.truth, cases.positive
    squares = (cases.probability - truth) ** 2
    parts = [truth & positive, ~truth & positive, ~truth & ~positive, truth & ~positive, squares]
    patients = int(owners.max()) + 1
    sums = np.zeros((patients, len(parts), len(scores)))
    for number, part in enumerate(parts):
        np.add.at(sums[:, number], owners, part.astype(np.float64))
    found: dict[str, list[NDArray[np.float64]]] = {metric: [] for metric in WITH_INTERVALS}
    for drawn in _draw_patients(patients, len(cases), seed, name):
        tp, fp, tn, fn, squared = np.moveaxis((drawn @ sums.reshape(patients, -1)).reshape(-1, *sums.shape[1:]), 1, 0)
        weights = drawn[:, owners]
        areas = [
            np.full(len(drawn), np.nan)
            if score.auroc is None
            else weighted_auroc(cases.probability[:, k], truth[:, k], weights)
            for k, score in enumerate(scores)
        ]
        with np.errstate(invalid="ignore"):
            for metric, values in zip(
                WITH_INTERVALS,
                (tp / (tp + fn), tn / (tn + fp), tp / (tp + fp), tn / (tn + fn), np.stack(areas, axis=1),
                 squared / (tp + fp + tn + fn)),
                strict=True,
            ):  # fmt: skip
                found[metric].append(values)
    return {metric: np.concatenate(values) for metric, values in found.items()}


def _draw_patients(patients: int, images: int, seed: int, name: str) -> Iterator[NDArray[np.float64]]:
    """Yield how often each patient is drawn, (draws, patients), a block of draws at a time."""
    generator = numpy_generator(seed, "clinical", name)
    left = DRAWS
    while left:
        block = min(left, max(1, AT_ONCE // images))
        yield generator.multinomial(patients, np.full(patients, 1 / patients), size=block).astype(np.float64)
        left -= block


# Several sites.


def pool_counts(scores: Iterable[SiteScore]) -> SiteScore:
    """Add up what several sites counted; AUROC and intervals, which counts do not determine, are undefined."""
    sites = list(scores)
    numbers = sorted({one.number for site in sites for one in site.classes})
    patients = [site.patients for site in sites]
    known = sum(number for number in patients if number is not None)
    by_class = [[one for site in sites for one in site.classes if one.number == number] for number in numbers]
    return SiteScore(None if None in patients else known, tuple(_sum_of(own) for own in by_class))


def _sum_of(own: Sequence[ClassScore]) -> ClassScore:
    bins = tuple(
        Bin(sum(b.images for b in same), sum(b.probability for b in same), sum(b.positives for b in same))
        for same in zip(*(one.bins for one in own), strict=True)
    )
    tp, fp, tn, fn = (sum(getattr(one, name) for one in own) for name in ("tp", "fp", "tn", "fn"))
    threshold, source = shared([one.threshold for one in own]), shared([one.source for one in own])
    return ClassScore(own[0].number, tp, fp, tn, fn, sum(one.squares for one in own), None, bins, threshold, source)


def mean_auroc(scores: Iterable[SiteScore], number: int) -> float | None:
    """Return the mean of the sites' AUROCs of a class, weighted by their positive images; sites without one are out.

    This is not the AUROC of all images together: it compares only images of the same site.
    """
    own = [one for site in scores for one in site.classes if one.number == number and one.auroc is not None]
    images = sum(one.positives for one in own)
    return sum(one.positives * (one.auroc or 0.0) for one in own) / images if own else None


def classes_everywhere(scores: Iterable[SiteScore]) -> tuple[int, ...]:
    """Return the classes of which every site tests a positive and a negative image: the set for a macro mean.

    A mean over the classes that a site happens to have would rank sites by what they have.
    """
    sets = [{one.number for one in site.classes if 0 < one.positives < one.images} for site in scores]
    return tuple(sorted(set.intersection(*sets))) if sets else ()


def macro(score: SiteScore, classes: Sequence[int]) -> dict[str, float | None]:
    """Return every metric's mean over exactly these classes; None if one of them has no value, or without classes."""
    own = [one for one in score.classes if one.number in classes]
    found: dict[str, float | None] = {}
    for metric in METRICS:
        values = [one.metric(metric) for one in own]
        known = [value for value in values if value is not None]
        found[metric] = sum(known) / len(known) if known and len(known) == len(classes) else None
    return found
