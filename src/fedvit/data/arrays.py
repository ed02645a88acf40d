"""Datasets that you pass from Python: arrays or torch datasets, for one owner or for many."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedvit.core.errors import UserError
from fedvit.data.dataset import Dataset, Images, Labels, checked_labels, join_parts, with_channels
from fedvit.data.torchvision_sets import class_names


def from_clients(clients: Mapping[str, Any], names: Sequence[str] | None = None) -> Dataset:
    """Build a dataset from each client's (images, labels) arrays or torch Dataset of (image, label)."""
    if not clients:
        raise UserError("expected each client's data by name, found no clients")
    pairs = {name: _arrays_of(f"client {name}", data) for name, data in clients.items()}
    for name, (pixels, numbers) in pairs.items():
        if len(pixels) != len(numbers) or not len(numbers):
            raise UserError(f"client {name} has {len(pixels)} images and {len(numbers)} labels")
    if len({numbers.shape[1:] for _, numbers in pairs.values()}) > 1:
        raise UserError(f"the clients differ in their labels: {_shapes(pairs)}; all need the same number per image")
    labels = np.concatenate([labels for _, labels in pairs.values()])
    sites = np.repeat(np.arange(len(pairs)), [len(labels) for _, labels in pairs.values()])
    given = None if names is None else np.asarray(names)
    return Dataset(
        "python",
        join_parts([images for images, _ in pairs.values()], "the clients' data"),
        labels,
        class_names(given, labels, "class_names"),
        sites=sites,
        site_names=tuple(map(str, clients)),
    )


def from_arrays(data: Any, names: Sequence[str] | None = None) -> Dataset:
    """Build a dataset from one (images, labels) pair or torch Dataset of (image, label), to be partitioned later."""
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise UserError(
            "data should be a name, a folder, each client's data by name, one (images, labels) pair, or a torch "
            f"Dataset with a length; found {type(data).__name__}"
        )
    images, labels = _arrays_of("data", data)
    given = None if names is None else np.asarray(names)
    return Dataset("python", images, labels, class_names(given, labels, "class_names"))


def _label_of(label: Any) -> Any:
    """Return a class number, or an array of 0 and 1."""
    return int(label) if np.ndim(label) == 0 else np.asarray(label)


def _shapes(pairs: Mapping[str, tuple[Images, Labels]]) -> str:
    return ", ".join(f"{name} has {' x '.join(map(str, labels.shape))}" for name, (_, labels) in pairs.items())


def _arrays_of(name: str, data: Any) -> tuple[Images, Labels]:
    if isinstance(data, tuple) and len(data) == 2:
        images, labels = data
    else:
        items = [data[i] for i in range(len(data))]
        images, labels = np.stack([np.asarray(item[0]) for item in items]), [_label_of(item[1]) for item in items]
    images, labels = np.asarray(images), np.asarray(labels)
    if images.ndim == 4 and images.shape[1] in (1, 3) and images.shape[3] not in (1, 3):
        images = images.transpose(0, 2, 3, 1)  # from torch's order, channels first
    if images.dtype.kind == "f":
        if images.size and (images.min() < 0 or images.max() > 1):
            raise UserError(f"{name}: float images must lie in 0..1, found {images.min():g}..{images.max():g}")
        images = np.round(images * 255).astype(np.uint8)
    return with_channels(images, name), checked_labels(labels, name)
