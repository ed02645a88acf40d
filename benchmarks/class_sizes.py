"""How often two class sizes follow from a site's scores, exact and rounded: python -m benchmarks.class_sizes."""

import random
from collections.abc import Callable

from fedvit.network.policy import rounded

SITES, SMALLEST, LARGEST = 100, 3, 30
Seen = tuple[float, float]  # accuracy and balanced accuracy


def scores(first: int, second: int, a: int, b: int) -> Seen:
    return 100 * (a + b) / (first + second), 50 * (a / first + b / second)


def fits(first: int, second: int, seen: Seen, known: Callable[[float], float]) -> bool:
    """Return whether some numbers of hits in classes of these sizes give these scores, as far as they are known."""
    hits = ((a, b) for a in range(first + 1) for b in range(second + 1))
    return any(tuple(map(known, scores(first, second, *both))) == tuple(map(known, seen)) for both in hits)


def found(evaluations: int, known: Callable[[float], float]) -> int:
    """Return at how many sites only one pair of sizes, in any order, fits all evaluations."""
    rng, count = random.Random(0), 0
    for _ in range(SITES):
        first, second = (rng.randint(SMALLEST, LARGEST) for _ in range(2))
        seen = [scores(first, second, rng.randint(0, first), rng.randint(0, second)) for _ in range(evaluations)]
        test = first + second
        sizes = [one for one in range(1, test // 2 + 1) if all(fits(one, test - one, each, known) for each in seen)]
        count += len(sizes) == 1
    return count


if __name__ == "__main__":
    for evaluations in (1, 10):
        exact = found(evaluations, lambda value: round(value, 9))
        coarse = found(evaluations, lambda value: rounded("accuracy", value))
        print(f"{evaluations} evaluations: sizes known at {exact} of {SITES} sites, {coarse} with scores = rounded")
