"""Class names and probabilities for image files, which are read as the training images were."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console
from torch import nn

from fedvit.core.batches import EVALUATION_BATCH, prepare
from fedvit.core.errors import UserError
from fedvit.core.files import write_csv
from fedvit.data import folders
from fedvit.data.cache import UnreadableError
from fedvit.data.decoding import decode
from fedvit.data.dicom import is_dicom
from fedvit.runs.description import Description
from fedvit.runs.export import load_model
from fedvit.runs.folder import load_run
from fedvit.runs.model_file import description_of, inputs_of
from fedvit.runs.models import client_model, open_run, server_model


class Prediction(NamedTuple):
    """The most likely classes of an image, best first, with their probabilities.

    With several labels per image, these are independent: each label has a probability from 0 to 1 of its own.
    """

    image: Path
    classes: tuple[str, ...]
    probabilities: tuple[float, ...]


def predict(
    model: nn.Module, images: Sequence[str | Path], *, top: int = 1, unreadable: list[str] | None = None
) -> Iterator[Prediction]:
    """Predict the classes of image files and, recursively, of folders of them.

    A file that cannot be read raises an error or, if a list `unreadable` is given, is added to it with the reason.
    """
    description = description_of(model)
    top = min(top, len(description.classes))
    for files, logits in batches_of_logits(model, list(_image_files(images)), unreadable):
        chances, numbers = probabilities(logits, description).topk(top, dim=1)
        for file, chance, number in zip(files, chances.tolist(), numbers.tolist(), strict=True):
            yield Prediction(file, tuple(description.classes[n] for n in number), tuple(chance))


def probabilities(logits: torch.Tensor, description: Description) -> torch.Tensor:
    """Return the probability of every class: they sum to 1, unless an image may have several labels."""
    return torch.sigmoid(logits) if description.several_labels else torch.softmax(logits, dim=1)


def batches_of_logits(
    model: nn.Module, files: Sequence[Path], unreadable: list[str] | None = None
) -> Iterator[tuple[list[Path], torch.Tensor]]:
    """Yield image files with their logits (files, classes), as the run's evaluation computes them.

    A file that cannot be read raises an error or, if a list `unreadable` is given, is added to it with the reason.
    """
    description = description_of(model)
    for start in range(0, len(files), EVALUATION_BATCH):
        good, pixels = [], []
        for file in files[start : start + EVALUATION_BATCH]:
            try:
                pixels.append(_read_image(file, description))
                good.append(file)
            except (UnreadableError, UserError) as problem:
                if unreadable is None:
                    raise UserError(str(problem)) from problem
                unreadable.append(str(problem))
        if good:
            yield good, _logits(model, np.stack(pixels))


@torch.no_grad()
def _logits(model: nn.Module, images: NDArray[np.uint8]) -> torch.Tensor:
    """Return the logits of images (batch, height, width, 1 or 3), as the run's evaluation does."""
    description = description_of(model)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    x = prepare(torch.from_numpy(images).to(device), inputs_of(description))
    with torch.autocast(device.type, torch.bfloat16, enabled=description.precision == "bf16"):
        logits: torch.Tensor = model(x)
    return logits.float().cpu()


def _image_files(images: Iterable[str | Path]) -> Iterator[Path]:
    """Yield files as they are given, and all images below folders in the order of their names."""
    for path in map(Path, images):
        if path.is_dir():
            found = images_below(path)
            if not found:
                raise UserError(f"no images in {path}: looked for {', '.join(sorted(folders.SUFFIXES))}")
            yield from found
        elif path.exists():
            yield path
        else:
            raise UserError(f"no image at {path}")


def images_below(folder: Path) -> list[Path]:
    """Return all images below a folder in the order of their names; hidden files and folders are ignored."""
    return [
        file
        for file in sorted(folder.rglob("*"))
        if not hidden(file.relative_to(folder)) and file.is_file() and _is_image(file)
    ]


def _is_image(file: Path) -> bool:
    """Return whether a file is an image by its suffix or, without one, a DICOM file by its mark."""
    return file.suffix.lower() in folders.SUFFIXES or (not file.suffix and is_dicom(file))


def hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _read_image(file: Path, description: Description) -> NDArray[np.uint8]:
    """Read an image as the training images were read: in gray or color, squashed to their size."""
    height, width, channels = description.image
    window = description.reading.window if description.reading else None
    pixels = decode(file, (width, height), Counter(), window)
    if channels == 1:
        pixels = np.asarray(Image.fromarray(pixels).convert("L"), dtype=np.uint8)[..., None]
    return pixels


def model_of(source: Path, client: str | None, *, server: bool, last: bool = False) -> nn.Module:
    """Return the model that a command names: an exported file, or a client's or the server's model of a run."""
    if source.is_file():
        if client is not None or server or last:
            raise UserError(f"{source} is one model: --client, --server and --last are for the folder of a run")
        return load_model(source)
    if not source.exists():
        raise UserError(f"no model or run at {source}: expected a file from `fedvit export`, or the folder of a run")
    run = load_run(source)
    opened = open_run(run, last=last)
    if (client is None) != server:
        raise UserError(f"say whose model: --client NAME or --server; the clients are {', '.join(opened.clients)}")
    return server_model(opened) if client is None else client_model(opened, client)


def predict_to(
    console: Console, model: nn.Module, images: Sequence[str | Path], top: int | None, table: Path | None
) -> list[str]:
    """Print predictions to the console or write them to a CSV file; return what could not be read.

    Without `top`, they are the likeliest class, or all of several labels.
    """
    unreadable: list[str] = []
    description = description_of(model)
    names = description.classes
    top = min(top or (len(names) if description.several_labels else 1), len(names))
    found = predict(
        model, images, top=len(names) if table and description.several_labels else top, unreadable=unreadable
    )
    if table is not None:
        lines = _label_lines(found, names) if description.several_labels else _csv_lines(found, top)
        count = write_csv(table, lines)
        console.print(f"{count} images: {table}", soft_wrap=True, highlight=False, markup=False)
        return unreadable
    for image, classes, chances in found:
        pairs = (f"{name} {100 * chance:.1f} %" for name, chance in zip(classes, chances, strict=True))
        console.print(f"{image}: {', '.join(pairs)}", soft_wrap=True, highlight=False, markup=False)
    return unreadable


def header(top: int) -> list[str]:
    """Return the columns of a table of predictions."""
    more = [f"{word}_{place}" for place in range(2, top + 1) for word in ("class", "probability")]
    return ["image", "class", "probability", *more]


def _csv_lines(predictions: Iterable[Prediction], top: int) -> Iterator[list[object]]:
    """Yield the header and one line per image, as predictions arrive."""
    yield [*header(top)]
    for image, classes, chances in predictions:
        yield [image, *(cell for pair in zip(classes, chances, strict=True) for cell in pair)]


def _label_lines(predictions: Iterable[Prediction], names: Sequence[str]) -> Iterator[list[object]]:
    """Yield a header and one line per image: the labels with a probability of at least a half, and all of them."""
    yield ["image", "labels", *(f"probability {name}" for name in names)]
    for image, classes, chances in predictions:
        chance = dict(zip(classes, chances, strict=True))
        yield [image, "|".join(name for name in names if chance[name] >= 0.5), *(chance[name] for name in names)]
