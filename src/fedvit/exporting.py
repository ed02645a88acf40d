"""Models to take home: safetensors for plain timm where that is exact, else with a description; or ONNX.

Every file is opened again and compared with the run's own model before it gets its name.
"""

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import timm
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedvit.data import datasets, pipeline
from fedvit.description import KEY, Check, Description, Timm
from fedvit.errors import UserError
from fedvit.experiment import Run
from fedvit.models.classifier import MICRO, PYTHON, TORCHVISION, InputSettings, build, check_name, sizes_of
from fedvit.models.folding import CannotFoldError, folded
from fedvit.models.plugins import PLUGINS, Plugin
from fedvit.models.width import narrow
from fedvit.opening import Chain, Opened, client_model, described, open_run, server_model, why_no_server

log = logging.getLogger(__name__)
Format = Literal["timm", "onnx"]
SUFFIX: dict[Format, str] = {"timm": ".safetensors", "onnx": ".onnx"}
TOLERANCE = 1e-4  # of a logit's difference, as a share of the largest logit (at least 1)
CHECK_IMAGES = 16
ONE_FILE = 1_500_000_000  # bytes of weights above which ONNX keeps them in a file beside


@dataclass(frozen=True)
class Exported:
    """One written file."""

    path: Path
    description: Description

    @property
    def name(self) -> str:
        return "server" if self.description.client is None else f"client {self.description.client}"


def export(
    run: Run, *, clients: list[str], server: bool, everything: bool, form: Format, out: Path
) -> Iterator[Exported]:
    """Write the models that were asked for into `out`, a folder, or into `out` itself where it names one file."""
    opened = open_run(run)
    names = opened.clients if everything else clients
    with_server = server or (everything and why_no_server(opened) is None)
    if not names and not with_server:
        raise UserError(f"say which model: --client NAME, --server or --all; there are {', '.join(opened.clients)}")
    makers: list[tuple[str, Callable[[], nn.Module]]] = [
        (f"client-{quote(name, safe=' ')}", lambda name=name: client_model(opened, name))  # type: ignore[misc]
        for name in names
    ]
    if with_server:
        makers.append(("server", lambda: server_model(opened)))
    one_file = out.suffix in SUFFIX.values()
    if one_file and out.suffix != SUFFIX[form]:
        raise UserError(f"--out {out} is no name for the {form} format: name it {out.with_suffix(SUFFIX[form]).name}")
    if one_file and len(makers) > 1:
        raise UserError(f"--out {out} is one file, and there are {len(makers)} models: name a folder")
    write = {"timm": write_timm, "onnx": write_onnx}[form]
    for name, make in makers:
        path = out if one_file else out / f"{name}{SUFFIX[form]}"
        yield Exported(path, write(make(), opened, path))


def write_timm(model: nn.Module, opened: Opened, path: Path) -> Description:
    """Plain timm weights where they are exactly the same model, else all weights as they are."""
    description = description_of(model)
    reference = logits(model, check_images(description))
    try:
        plain = plain_model(model, description)
        description, weights = plain
    except CannotFoldError as why:
        description = description.model_copy(update={"not_timm": str(why)})
        weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    own = opened.experiment.own.module

    def again(partial: Path) -> nn.Module:
        return load_safetensors(partial, own)

    return written(path, description, reference, again, lambda file, d: save(weights, d, file))


def written(
    path: Path,
    description: Description,
    reference: Tensor,
    again: Callable[[Path], nn.Module],
    save_to: Callable[[Path, Description], None],
) -> Description:
    """Write, open again, compare; only then does the file get its name."""
    partial = path.parent / f"{path.name}.{os.getpid()}.partial"  # a folder: large ONNX models are two files
    try:
        partial.mkdir(parents=True)
        save_to(partial / path.name, description)
        check = compared(again(partial / path.name), description, reference)
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
        raise UserError(f"{path} cannot be written: {problem.strerror or problem}") from problem
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return description


def save(weights: dict[str, Tensor], description: Description, path: Path) -> None:
    whole = {name: tensor.cpu().contiguous() for name, tensor in weights.items()}
    save_file(whole, path, {KEY: description.to_json(), "format": "pt"})


# Comparing.


def check_images(description: Description) -> Tensor:
    """Real images that need no data folder and belong to no client: embedded digits, prepared for this model."""
    return pipeline.prepare(some_digits(), inputs_of(description))


@cache
def some_digits() -> Tensor:
    images = datasets.digits().images
    return torch.from_numpy(images[:: len(images) // CHECK_IMAGES][:CHECK_IMAGES].copy())


def inputs_of(description: Description) -> InputSettings:
    return InputSettings(description.input.size, description.input.mean, description.input.std)


@torch.no_grad()
def logits(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out.float()


def compared(model: nn.Module, description: Description, reference: Tensor) -> Check:
    """The largest difference of a logit on the check images, and how large it may be."""
    difference = (logits(model, check_images(description)) - reference).abs().max().item()
    return Check(
        images=CHECK_IMAGES, difference=difference, tolerance=TOLERANCE * max(1.0, reference.abs().max().item())
    )


# The plain model.


def plain_model(model: nn.Module, description: Description) -> tuple[Description, dict[str, Tensor]]:
    """Arguments for timm and the weights that fit its model; raises CannotFoldError where there is none."""
    if isinstance(model, Chain):
        what = "the features leave the body early" if description.split and description.split.cut == "vibs" else None
        raise CannotFoldError(what or "what crosses between client and server is rounded (method.wire)")
    arguments = timm_arguments(model, description)
    weights = folded(model, plugins_of(description))
    try:
        plain = create(arguments)
    except Exception as problem:  # a model of this size may be one that timm does not make
        raise CannotFoldError(f"timm does not make this model: {problem}") from problem
    shapes = {name: tensor.shape for name, tensor in plain.state_dict().items()}
    if shapes != {name: tensor.shape for name, tensor in weights.items()}:
        raise CannotFoldError("timm's model of this name has other weights")
    return description.model_copy(update={"timm": arguments}), weights


def timm_arguments(model: Any, description: Description) -> Timm:
    """What timm.create_model needs for the plain model; raises CannotFoldError where timm has none."""
    settings, classes = description.model, len(description.classes)
    if settings.name == PYTHON:
        raise CannotFoldError("the model is a module of your own: give it to fedvit.load_model(FILE, module=...)")
    if settings.name in TORCHVISION:
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
    """timm's model; names that would fetch something are refused."""
    check_name(arguments.model_name)
    model: nn.Module = timm.create_model(**arguments.arguments())
    return model.eval()


# Loading.


def load_model(path: str | Path, module: nn.Module | None = None) -> nn.Module:
    """A model that `fedvit export` wrote, ready to predict; nothing is unpickled.

    `model.description` says what goes in and what comes out. `module` is needed for a run whose model was a module of
    your own: its weights are replaced by those of the file.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(
            f"{path} is a folder: expected a .safetensors or .onnx file, or fedvit.load_run(FOLDER).model(CLIENT)"
        )
    if not path.is_file():
        raise UserError(f"no model at {path}: expected a .safetensors or .onnx file of `fedvit export`")
    if path.suffix == ".onnx":
        return load_onnx(path)
    return load_safetensors(path, module)


def load_safetensors(path: Path, module: nn.Module | None) -> nn.Module:
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
        weights = load_file(path)
    except (SafetensorError, OSError) as problem:
        raise UserError(f"{path} is not a safetensors file ({problem}): nothing else is read") from problem
    description = Description.from_metadata(metadata, path)
    model = create(description.timm) if description.timm is not None else rebuilt(description, module)
    try:
        model.load_state_dict(weights)
    except RuntimeError as problem:
        raise UserError(f"{path} does not fit the model that it describes: {problem}") from problem
    return described(model, description)


def rebuilt(description: Description, module: nn.Module | None) -> nn.Module:
    """The model with its plugins, at its width, in its parts; the weights are still any."""
    if description.model.name == PYTHON and module is None:
        raise UserError(
            "this file holds weights for a module of your own: give it, fedvit.load_model(FILE, module=YourModule()); "
            "an export with --format onnx needs no module"
        )
    plugins = tuple(plugins_of(description))
    model = build(description.model, len(description.classes), plugins, 0, module)
    if description.rate < 1:
        model = narrow(model, description.rate)
    return model if description.split is None else Chain(model, description.split)


def plugins_of(description: Description) -> list[Plugin]:
    found = []
    for table in description.plugins:
        options = {key: value for key, value in table.items() if key != "kind"}
        if table.get("kind") not in PLUGINS:
            raise UserError(f"unknown plugin {table.get('kind')!r}: the file is of another version of fedvit")
        found.append(PLUGINS[table["kind"]](**options))
    return found


def description_of(model: nn.Module) -> Description:
    found = getattr(model, "description", None)
    if not isinstance(found, Description):
        raise UserError("expected a model of fedvit.load_model or run.model, which say what their classes are")
    return found


# ONNX.


class OnnxModel(nn.Module):
    """An ONNX file as a module: normalised images in, logits out."""

    def __init__(self, path: Path):
        super().__init__()
        runtime = needed("onnxruntime")
        self.session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def forward(self, x: Tensor) -> Tensor:
        try:
            found = self.session.run(None, {"images": x.cpu().numpy()})[0]
        except Exception as problem:  # onnxruntime has a dozen kinds of its own
            raise UserError(f"onnxruntime cannot run the model on images {tuple(x.shape)}: {problem}") from problem
        return torch.from_numpy(found)


def needed(name: str) -> Any:
    """An optional package, or an error that says how to get it."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as problem:
        raise UserError(f"ONNX needs {name}, which is not installed: pip install 'fedvit[onnx]'") from problem


def load_onnx(path: Path) -> nn.Module:
    needed("onnxruntime")
    try:
        model = OnnxModel(path)
    except UserError:
        raise
    except Exception as problem:  # onnxruntime has a dozen kinds of its own
        raise UserError(f"{path} cannot be opened by onnxruntime: {problem}") from problem
    metadata = model.session.get_modelmeta().custom_metadata_map
    return described(model, Description.from_metadata(metadata, path))


def write_onnx(model: nn.Module, opened: Opened, path: Path) -> Description:
    """One graph from normalised images (batch, 3, size, size) to logits (batch, classes), for any batch."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        needed(name)
    description = description_of(model)
    images = check_images(description)
    reference = logits(model, images)
    try:
        description, weights = plain_model(model, description)
        plain = create(description.timm)  # type: ignore[arg-type]
        plain.load_state_dict(weights)
        model = plain
    except CannotFoldError as why:
        description = description.model_copy(update={"not_timm": str(why)})
    program = converted(model, images, path)

    def save_to(file: Path, final: Description) -> None:
        program.model.metadata_props[KEY] = final.to_json()
        size = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
        program.save(file, external_data=size > ONE_FILE)

    return written(path, description, reference, load_onnx, save_to)


def converted(model: nn.Module, images: Tensor, path: Path) -> Any:
    """torch's own exporter, which speaks to the log only."""
    import warnings

    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            return torch.onnx.export(
                model,
                (images[:2],),
                input_names=["images"],
                output_names=["logits"],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                dynamo=True,
                verbose=False,
            )
    except Exception as problem:  # the exporter has many ways to say that it cannot
        reason = str(problem).strip().splitlines()[0]
        raise UserError(
            f"{path.name}: torch cannot convert this model to ONNX ({reason}); use --format timm"
        ) from problem
