"""Convert uint8 images in memory to normalized batches, with operations on whole tensors."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Batch = tuple[Tensor, Tensor]  # images (batch, 3, size, size) float, labels as in ClientData
EVALUATION_BATCH = 256  # images at once, where nothing is learned from them
Augment = Literal["none", "flip", "crop"]  # crop also flips


@dataclass(frozen=True)
class InputSettings:
    """The size and normalization that the model expects of its images."""

    size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


@dataclass(frozen=True)
class ClientData:
    """One client's images, as indices into the single image array of the dataset."""

    images: Tensor  # (samples of the whole dataset, height, width, 1 or 3) uint8
    labels: Tensor  # (samples) class numbers, or (samples, classes) 0 or 1 with several labels per image
    train: Tensor
    val: Tensor
    test: Tensor
    probe: Tensor  # held out of train if the method asks for it
    classes: int
    activations: Callable[[Tensor], Tensor] | None = None  # by index; replace the images if the model takes them

    @property
    def several_labels(self) -> bool:
        """Whether an image may have several of the classes, or none."""
        return self.labels.ndim == 2

    @property
    def class_counts(self) -> Tensor:
        """The number of training images of each class; with several labels per image, those that have it."""
        if self.several_labels:
            return self.labels[self.train].sum(0)
        return torch.bincount(self.labels[self.train], minlength=self.classes)

    @property
    def answer_counts(self) -> Tensor:
        """The number of training images by class; with several labels, by no and yes for each, (2, labels)."""
        counts = self.class_counts
        return torch.stack([len(self.train) - counts, counts]) if self.several_labels else counts


def image_batches(
    data: ClientData,
    order: Tensor,
    size: int,
    inputs: InputSettings,
    device: torch.device,
    augment: Augment = "none",
    generator: torch.Generator | None = None,
) -> Iterator[Batch]:
    """Yield the images of `order`, or their activations, in batches; the last batch may be smaller."""
    for chosen in torch.split(order, size):
        if data.activations is not None and augment == "none":
            yield data.activations(chosen), data.labels[chosen].to(device, non_blocking=True)
            continue
        images, labels = data.images[chosen], data.labels[chosen]
        if augment == "crop":
            images = crop(images, generator)
        if augment != "none":
            flips = torch.rand(len(images), generator=generator) < 0.5
            images = torch.where(flips.view(-1, 1, 1, 1), images.flip(2), images)
        if device.type == "cuda":
            images, labels = images.pin_memory(), labels.pin_memory()
        x = prepare(images.to(device, non_blocking=True), inputs, as_bytes=augment != "none")
        yield x, labels.to(device, non_blocking=True)


def crop(images: Tensor, generator: torch.Generator | None) -> Tensor:
    """Shift every image by up to an eighth of its size and fill the border with black (CIFAR's padding of 4)."""
    count, height, width, _ = images.shape
    pad = max(1, height // 8)
    padded = F.pad(images, (0, 0, pad, pad, pad, pad))
    rows, columns = torch.randint(2 * pad + 1, (2, count, 1), generator=generator).flatten(1).tolist()
    windows = zip(padded, rows, columns, strict=True)
    return torch.stack([image[row : row + height, column : column + width] for image, row, column in windows])


def shrinks(sides: Sequence[int], inputs: InputSettings) -> bool:
    """Return whether images of this height and width are made smaller, which takes smoothing."""
    return max(sides) > inputs.size


def prepare(images: Tensor, inputs: InputSettings, *, as_bytes: bool = False) -> Tensor:
    """Convert uint8 (batch, height, width, 1 or 3) to normalized float (batch, 3, size, size); gray becomes color.

    `as_bytes` resizes in whole gray levels, as PIL does: ten times faster on a CPU, and off by at most one level.
    """
    x = images.permute(0, 3, 1, 2)
    if x.shape[-2:] != (inputs.size, inputs.size):
        x = x if as_bytes and x.device.type == "cpu" else x.float()
        smooth = shrinks(x.shape[-2:], inputs)
        x = F.interpolate(x, (inputs.size, inputs.size), mode="bilinear", antialias=smooth)
    mean, std = (255 * torch.tensor(three, device=x.device) for three in (inputs.mean, inputs.std))
    x = x.float()
    if x.shape[1] == 1:
        x = x.expand(-1, 3, -1, -1).contiguous()
        x.sub_(mean.view(3, 1, 1)).div_(std.view(3, 1, 1))
    else:  # channels are adjacent in memory: normalize long rows of pixels, because rows of three would be slow
        x = x.contiguous(memory_format=torch.channels_last)
        x.permute(0, 2, 3, 1).flatten(2).sub_(mean.repeat(inputs.size)).div_(std.repeat(inputs.size))
    return x
