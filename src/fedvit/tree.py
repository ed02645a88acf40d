"""Trees: flat dictionaries from parameter name to tensor. No function here changes its arguments."""

from collections.abc import Callable, Collection, Iterable, Mapping

import torch
from torch import Tensor

Tree = dict[str, Tensor]


def pick(tree: Mapping[str, Tensor], names: Iterable[str]) -> Tree:
    """The entries of `tree` under `names`, in the order of `names`."""
    return {name: tree[name] for name in names}


def drop(tree: Mapping[str, Tensor], names: Collection[str]) -> Tree:
    """The entries of `tree` that are not under `names`."""
    return {name: tensor for name, tensor in tree.items() if name not in names}


def overlay(*trees: Mapping[str, Tensor]) -> Tree:
    """One tree with the entries of all; a later tree wins."""
    merged: Tree = {}
    for tree in trees:
        merged.update(tree)
    return merged


def clone(tree: Mapping[str, Tensor]) -> Tree:
    """A copy that shares no memory with `tree`."""
    return {name: tensor.detach().clone() for name, tensor in tree.items()}


def zip_map(function: Callable[..., Tensor], *trees: Mapping[str, Tensor]) -> Tree:
    """Apply `function` to the tensors of the same name; all trees must have the same names."""
    first = trees[0]
    for other in trees[1:]:
        if other.keys() != first.keys():
            difference = sorted(first.keys() ^ other.keys())
            raise ValueError(f"expected trees with the same names, found a difference in {difference[:5]}")
    return {name: function(*(tree[name] for tree in trees)) for name in first}


def mean(weighted: Iterable[tuple[float, Mapping[str, Tensor]]]) -> Tree:
    """The weighted mean of a stream of trees, as a running sum, so that one tree is held at a time.

    Sums are kept in float64: the mean of equal trees is then that tree to the bit.
    """
    total = 0.0
    sums: Tree = {}
    dtypes: dict[str, torch.dtype] = {}
    for weight, tree in weighted:
        total += weight
        if not sums:
            dtypes = {name: tensor.dtype for name, tensor in tree.items()}
            sums = {name: tensor.double().mul_(weight) for name, tensor in tree.items()}
        else:
            for name, tensor in tree.items():
                sums[name].add_(tensor, alpha=weight)
    if total <= 0:
        raise ValueError("the mean needs at least one tree with a positive weight, found none")
    return {name: sums[name].div_(total).to(dtypes[name]) for name in sums}


def nbytes(tree: Mapping[str, Tensor]) -> int:
    """Bytes of all tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tree.values())


def numel(tree: Mapping[str, Tensor]) -> int:
    """Numbers in all tensors."""
    return sum(tensor.numel() for tensor in tree.values())
