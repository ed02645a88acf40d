"""Ways to combine the reports of a round that a few bad clients cannot move far; they ignore the clients' weights.

`byzantine` is how many reports of a round may be arbitrary. Every function reads its trees tensor by tensor and in
pieces, so that beyond the reports themselves, which a `Spool` keeps, it needs little memory.
"""

import mmap
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from fedvit.core import tree
from fedvit.core.payload import Payload, from_bytes, to_bytes
from fedvit.core.settings import Aggregate
from fedvit.core.tree import Tree

Weighted = Iterable[tuple[float, Mapping[str, Tensor]]]
Combine = Callable[[Weighted], Tree]
IN_MEMORY = 2**26  # bytes of reports that stay in memory
PIECE = 2**20  # numbers of all reports together that are looked at at once


class TooFewReportsError(Exception):
    """So few clients answered that a bad one could decide."""


class Spool:
    """Trees that stay readable until the round is over: the first ones in memory, the others in temporary files."""

    def __init__(self, in_memory: int = IN_MEMORY):
        self.left = in_memory

    def keep(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the tree itself, or one with the same values in a file that vanishes with it."""
        self.left -= tree.nbytes(weights)
        if self.left >= 0 or not weights:
            return weights
        with tempfile.TemporaryFile() as file:
            file.write(to_bytes(Payload({"kept": dict(weights)})))
            file.flush()
            view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        kept = from_bytes(view).trees["kept"]  # type: ignore[arg-type]
        return {name: kept[name] for name in weights}


def fewest_reports(aggregate: Aggregate, byzantine: int) -> int:
    """Return how many reports are needed so that this many bad ones cannot decide."""
    if aggregate == "mean":
        return 1
    return 2 * byzantine + (3 if aggregate in ("krum", "multi_krum") else 1)


def combine_by(aggregate: Aggregate, byzantine: int) -> Combine:
    """Return the function that combines the reports of a round."""
    if aggregate == "mean":
        return tree.mean
    return partial(_combine, aggregate, byzantine)


def _combine(aggregate: Aggregate, byzantine: int, weighted: Weighted) -> Tree:
    spool = Spool()
    trees = [spool.keep(one) for _, one in weighted]
    needed = fewest_reports(aggregate, byzantine)
    if len(trees) < needed:
        raise TooFewReportsError(
            f"{len(trees)} reports arrived, but {aggregate} with train.byzantine={byzantine} needs {needed}"
        )
    match aggregate:
        case "median":
            return _by_number(trees, _middle)
        case "trimmed_mean":
            return trimmed_mean(trees, byzantine)
        case "krum":
            return _equal_mean(trees[i] for i in closest(trees, byzantine, 1))
        case _:
            return _equal_mean(trees[i] for i in closest(trees, byzantine, len(trees) - byzantine - 2))


def _equal_mean(trees: Iterable[Mapping[str, Tensor]]) -> Tree:
    return tree.mean((1.0, one) for one in trees)


def trimmed_mean(trees: Sequence[Mapping[str, Tensor]], trim: int) -> Tree:
    """Average every number over the clients, without the `trim` smallest and the `trim` largest."""
    if trim == 0:
        return _equal_mean(trees)
    return _by_number(trees, lambda rows: torch.stack(rows[trim : len(rows) - trim]).double().mean(0))


def _middle(rows: list[Tensor]) -> Tensor:
    """Return the middle row, or the mean of the two middle ones."""
    return (rows[(len(rows) - 1) // 2].double() + rows[len(rows) // 2].double()) / 2


def _by_number(trees: Sequence[Mapping[str, Tensor]], choose: Callable[[list[Tensor]], Tensor]) -> Tree:
    """Return a tree whose numbers `choose` takes from the sorted numbers of all clients."""
    result = {}
    for name, like in trees[0].items():
        found = torch.empty(like.numel(), dtype=like.dtype)
        for place, rows in _pieces(trees, name):
            found[place] = choose(_sorted_rows(rows)).to(like.dtype)
        result[name] = found.view(like.shape)
    return result


def _pieces(trees: Sequence[Mapping[str, Tensor]], name: str) -> Iterator[tuple[slice, list[Tensor]]]:
    """Yield the same piece of a tensor from all trees."""
    flat = [one[name].reshape(-1) for one in trees]
    step = max(1, PIECE // len(flat))
    for begin in range(0, flat[0].numel(), step):
        place = slice(begin, begin + step)
        yield place, [row[place] for row in flat]


def _sorted_rows(rows: list[Tensor]) -> list[Tensor]:
    """Sort every column by exchanging neighbours, which for so few rows is several times faster than `torch.sort`."""
    rows = list(rows)
    for end in range(len(rows) - 1, 0, -1):
        for i in range(end):
            rows[i], rows[i + 1] = torch.minimum(rows[i], rows[i + 1]), torch.maximum(rows[i], rows[i + 1])
    return rows


def closest(trees: Sequence[Mapping[str, Tensor]], byzantine: int, wanted: int) -> list[int]:
    """Return the numbers of the trees that lie closest to their nearest neighbours (Krum), in the order of the trees.

    The score of a tree is the sum of its squared distances to the `len(trees) - byzantine - 2` nearest others; of equal
    scores the earlier tree is the better one.
    """
    count = len(trees)
    squares = torch.zeros(count, count, dtype=torch.float64)
    upper = torch.triu_indices(count, count, 1)
    for name in trees[0]:
        for _, rows in _pieces(trees, name):
            between = torch.pdist(torch.stack([row.double() for row in rows])).square()
            squares[upper[0], upper[1]] += between
    squares = (squares + squares.T).fill_diagonal_(torch.inf)
    scores = squares.sort(1).values[:, : count - byzantine - 2].sum(1)
    return sorted(torch.argsort(scores, stable=True)[:wanted].tolist())
