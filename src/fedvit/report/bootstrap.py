"""Bootstrap intervals over a client's test images, from the counts of its confusion matrix.

Drawing images with replacement is drawing each image's class by the classes' shares, and then a hit or a miss by the
hit rate within the class. For the difference of two rows on the same images, the rows share the draw of the classes,
and hits within a class are independent, because counts do not tell which images both rows got right. Where the rows
agree on most images, this makes the interval wider than it would have to be, never narrower. One hit and one miss are
added to each row before drawing (Agresti and Caffo's correction), so that a client with a few images, all of them
right, does not look certain.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedvit.core.randomness import numpy_generator

DRAWS = 2000
_ENDS = (0.025, 0.975)  # of a 95 % interval
Interval = tuple[float, float]
Cells = Iterable[Sequence[int]]  # [class, predicted class, images]


@dataclass(frozen=True)
class Hits:
    """One test of a client: the images of each class and the share of them that was classified correctly."""

    images: Mapping[int, int]
    rates: Mapping[int, float]

    @property
    def total(self) -> int:
        return sum(self.images.values())

    @property
    def accuracy(self) -> float:
        """The share of all images that was classified correctly."""
        return sum(n * self.rates[c] for c, n in self.images.items()) / self.total

    def without_classes(self) -> "Hits":
        return Hits({0: self.total}, {0: self.accuracy})


def hits_of(cells: Cells) -> Hits:
    """Count the hits of every class in a confusion matrix."""
    images: dict[int, int] = {}
    right: dict[int, int] = {}
    for true, predicted, count in cells:
        images[true] = images.get(true, 0) + count
        right[true] = right.get(true, 0) + (count if true == predicted else 0)
    kept = {c: n for c, n in sorted(images.items()) if n}
    return Hits(kept, {c: right[c] / n for c, n in kept.items()})


def merge(tests: Sequence[Hits]) -> Hits:
    """Average the hit rates of several tests on the same images: testing images twice makes no more images."""
    if any(test.images != tests[0].images for test in tests):
        tests = [test.without_classes() for test in tests]
    first = tests[0].images
    return Hits(first, {c: sum(test.rates[c] for test in tests) / len(tests) for c in first})


def accuracy_interval(tests: Sequence[Hits], name: str) -> Interval:
    """Return the interval of a client's accuracy in percent, averaged over tests on different images."""
    draw = numpy_generator(0, "accuracy", name)
    draws = []
    for test in tests:
        p = _corrected(test.accuracy, test.total)
        draws.append(_draw_sums(draw, test.total, (1 - p, p)) / test.total)
    return _interval(draws)


def difference_interval(tests: Sequence[tuple[Hits, Hits]], name: str) -> Interval:
    """Return the interval of the difference of two rows in points, averaged over tests on different images."""
    draw, draws = numpy_generator(0, "difference", name), []
    for one, other in tests:
        if one.images != other.images:
            one, other = one.without_classes(), other.without_classes()
        total, first, second = one.total, 0.0, 0.0  # chances that only the first or only the second row is right
        for c, n in one.images.items():
            p, q = (_corrected(test.rates[c], total) for test in (one, other))
            first += n / total * p * (1 - q)
            second += n / total * q * (1 - p)
        sums = _draw_sums(draw, total, (second, 1 - first - second, first))  # an image adds 0, 1 or 2
        draws.append((sums - total) / total)
    return _interval(draws)


def _draw_sums(draw: np.random.Generator, images: int, chances: Sequence[float]) -> NDArray[np.int64]:
    """Draw what so many images add up to, if an image adds 0, 1, ... with these chances.

    A sum's chances are those of one image, convolved with themselves. Drawing from them is the same as drawing images
    one by one, and takes a single draw for each sum.
    """
    size = images * (len(chances) - 1) + 1
    of_sum = np.fft.irfft(np.fft.rfft(chances, 2 * size) ** images, 2 * size)[:size]
    below = np.cumsum(np.maximum(of_sum, 0))
    return np.asarray(np.searchsorted(below, draw.random(DRAWS) * below[-1]), dtype=np.int64)


def _corrected(rate: float, images: int) -> float:
    """Return a hit rate after one more hit and one more miss among the client's images."""
    return (rate * images + 1) / (images + 2)


def _interval(draws: Sequence[NDArray[np.float64]]) -> Interval:
    ordered = np.sort(np.mean(draws, axis=0))
    low, high = (100 * float(ordered[round(share * (DRAWS - 1))]) for share in _ENDS)
    return low, high
