"""What all exported files have in common: a description, and a check against the run's own model."""

import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from fedvit.core.batches import InputSettings, prepare
from fedvit.core.errors import UserError
from fedvit.core.files import cannot_write
from fedvit.core.plan import Plugin
from fedvit.data.sources import load_digits
from fedvit.models.build import MICRO, PYTHON, WITHOUT_PATCHES, check_name, sizes_of
from fedvit.models.folding import CannotFoldError, fold
from fedvit.models.plugins.specs import PLUGINS
from fedvit.runs.description import Check, Description, Timm
from fedvit.runs.models import Chain

TOLERANCE = 1e-4  # for a logit's difference, relative to the largest logit (at least 1)
CHECK_IMAGES = 16
ONE_FILE = 1_500_000_000  # bytes of weights above which ONNX keeps them in a second file


def write_checked(
    path: Path,
    description: Description,
    reference: Tensor,
    again: Callable[[Path], nn.Module],
    save_to: Callable[[Path, Description], None],
) -> Description:
    """Write a file, read it back and compare; only then does it get its name."""
    partial = path.parent / f"{path.name}.{os.getpid()}.partial"  # a folder, because large ONNX models are two files
    try:
        partial.mkdir(parents=True)
        save_to(partial / path.name, description)
        check = _compare_logits(again(partial / path.name), description, reference)
        if check.difference > check.tolerance:
            raise UserError(
                f"{path.name} was not written: its model differs from the run's own by {check.difference:.2g} in a "
                f"logit, more than {check.tolerance:.2g}; please report this, and try the other --format"
            )
        description = description.model_copy(update={"checked": check})
        save_to(partial / path.name, description)
        for file in partial.iterdir():
            file.replace(path.parent / file.name)
    except OSError as problem:
        raise cannot_write(path, problem) from problem
    except SafetensorError as problem:  # how safetensors reports a full disk
        raise UserError(f"{path} cannot be written: {problem}") from problem
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return description


# Comparing.


def check_images(description: Description) -> Tensor:
    """Return real images that need no data folder and belong to no client: bundled digits, prepared for this model."""
    return prepare(_some_digits(), inputs_of(description))


@cache
def _some_digits() -> Tensor:
    images = load_digits().images
    return torch.from_numpy(images[:: len(images) // CHECK_IMAGES][:CHECK_IMAGES].copy())


def inputs_of(description: Description) -> InputSettings:
    return InputSettings(description.input.size, description.input.mean, description.input.std)


@torch.no_grad()
def logits(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out.float()


def _compare_logits(model: nn.Module, description: Description, reference: Tensor) -> Check:
    """Return the largest difference of a logit on the check images, and how large it may be."""
    difference = (logits(model, check_images(description)) - reference).abs().max().item()
    return Check(
        images=CHECK_IMAGES, difference=difference, tolerance=TOLERANCE * max(1.0, reference.abs().max().item())
    )


# The plain model.


def plain_model(model: nn.Module, description: Description) -> tuple[Description, dict[str, Tensor]]:
    """Return timm's arguments and the weights that fit its model; raise CannotFoldError if there is none."""
    if isinstance(model, Chain):
        what = "the features leave the body early" if description.split and description.split.cut == "vibs" else None
        raise CannotFoldError(what or "what client and server exchange is rounded (method.wire)")
    arguments = _timm_arguments(model, description)
    weights = fold(model, plugins_of(description))
    try:
        plain = create(arguments)
    except Exception as problem:  # timm may not be able to build a model of this size
        raise CannotFoldError(f"timm cannot build this model: {problem}") from problem
    shapes = {name: tensor.shape for name, tensor in plain.state_dict().items()}
    if shapes != {name: tensor.shape for name, tensor in weights.items()}:
        raise CannotFoldError("timm's model of this name has different weights")
    return description.model_copy(update={"timm": arguments}), weights


def _timm_arguments(model: Any, description: Description) -> Timm:
    """Return what timm.create_model needs for the plain model; raise CannotFoldError if timm has none."""
    settings, classes = description.model, len(description.classes)
    if settings.name == PYTHON:
        raise CannotFoldError("the model is a module of your own: pass it to fedvit.load_model(FILE, module=...)")
    if settings.name in WITHOUT_PATCHES:
        if description.rate < 1 or not timm.is_model(settings.name):
            raise CannotFoldError("timm has no such model")
        return Timm(model_name=settings.name, num_classes=classes)
    sizes = sizes_of(settings)
    name = settings.name
    if name == "vit_micro":
        name, sizes = "vit_tiny_patch16_224", {**MICRO, **sizes}
    if description.rate < 1:
        width, hidden = model.embed_dim, model.blocks[0].mlp.fc1.out_features
        ratio = hidden / width
        exact = ratio if int(width * ratio) == hidden else (hidden + 0.5) / width  # timm rounds the product down
        sizes = {**sizes, "embed_dim": width, "mlp_ratio": exact}
    return Timm(model_name=name, num_classes=classes, **sizes)


def create(arguments: Timm) -> nn.Module:
    """Create timm's model; names that would download something are refused."""
    check_name(arguments.model_name)
    model: nn.Module = timm.create_model(**arguments.arguments())
    return model.eval()


def description_of(model: nn.Module) -> Description:
    found = getattr(model, "description", None)
    if not isinstance(found, Description):
        raise UserError("expected a model from fedvit.load_model or run.model, which carry the class names")
    return found


def plugins_of(description: Description) -> list[Plugin]:
    found = []
    for table in description.plugins:
        options = {key: value for key, value in table.items() if key != "kind"}
        if table.get("kind") not in PLUGINS:
            raise UserError(f"unknown plugin {table.get('kind')!r}: the file was written by another version of fedvit")
        found.append(PLUGINS[table["kind"]](**options))
    return found
