"""Sources of images. Every source becomes one `Dataset`: uint8 images of one size, labels, names."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedvit.errors import UserError, nearest
from fedvit.settings import DataSettings

Labels = NDArray[np.int64]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Dataset:
    """All images of one source, before they are split over clients."""

    name: str
    images: NDArray[np.uint8]  # (samples, height, width, 3)
    labels: Labels
    class_names: tuple[str, ...]
    official_test: NDArray[np.bool_] | None = None  # where the source itself says what is test

    @property
    def classes(self) -> int:
        return len(self.class_names)

    def __len__(self) -> int:
        return len(self.labels)


def digits() -> Dataset:
    """1,797 handwritten digits of 8 x 8, embedded in scikit-learn: nothing is downloaded."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    grey = np.round(bunch.images * (255 / 16)).astype(np.uint8)
    return Dataset(
        name="digits",
        images=np.repeat(grey[..., None], 3, axis=3),
        labels=bunch.target.astype(np.int64),
        class_names=tuple(str(name) for name in bunch.target_names),
    )


SOURCES: dict[str, Callable[[], Dataset]] = {"digits": digits}


def load(settings: DataSettings) -> Dataset:
    """The data set of these settings."""
    if settings.name not in SOURCES:
        raise UserError(f"unknown data set {settings.name!r}; {nearest(settings.name, SOURCES)}")
    return SOURCES[settings.name]()
