"""Trees: flat dictionaries from parameter names to tensors. No function here modifies its arguments."""

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


def fingerprint(weights: Mapping[str, Tensor]) -> str:
    """Return a hash of all tensors with their names, types and shapes, in the order of the mapping."""
    digest = hashlib.sha256()
    for name, tensor in weights.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


Tree = dict[str, Tensor]


def pick(tree: Mapping[str, Tensor], names: Iterable[str]) -> Tree:
    """Return the entries of `tree` under `names`, in the order of `names`."""
    return {name: tree[name] for name in names}


def overlay(*trees: Mapping[str, Tensor]) -> Tree:
    """Return one tree with the entries of all trees; a later tree wins."""
    merged: Tree = {}
    for tree in trees:
        merged.update(tree)
    return merged


def mean(weighted: Iterable[tuple[float, Mapping[str, Tensor]]]) -> Tree:
    """Return the weighted mean of a stream of trees as a running sum, so that only one tree is held at a time.

    Sums are kept in float64, so the mean of equal trees is that tree, bit for bit.
    """
    total = 0.0
    sums: Tree = {}
    dtypes: dict[str, torch.dtype] = {}
    for weight, tree in weighted:
        total += weight
        if not sums:
            dtypes = {name: tensor.dtype for name, tensor in tree.items()}
            sums = {name: tensor.to(torch.float64, copy=True).mul_(weight) for name, tensor in tree.items()}
        else:
            for name, tensor in tree.items():
                sums[name].add_(tensor, alpha=weight)
    if total <= 0:
        raise ValueError("the mean needs at least one tree with a positive weight, found none")
    return {name: sums[name].div_(total).to(dtypes[name]) for name in sums}


def nbytes(tree: Mapping[str, Tensor]) -> int:
    """Return the size of all tensors in bytes."""
    return sum(tensor.nbytes for tensor in tree.values())
