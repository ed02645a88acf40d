"""Writing and loading models as ONNX files."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedvit.core.errors import UserError
from fedvit.models.folding import CannotFoldError
from fedvit.runs.card import KEY as CARD
from fedvit.runs.card import Card
from fedvit.runs.description import KEY, Description
from fedvit.runs.model_file import ONE_FILE, check_images, create, description_of, logits, plain_model, write_checked
from fedvit.runs.models import OpenedRun, attach_description


class OnnxModel(nn.Module):
    """An ONNX file as a module: normalized images in, logits out."""

    def __init__(self, path: Path):
        super().__init__()
        runtime = _needed("onnxruntime")
        self.session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def forward(self, x: Tensor) -> Tensor:
        try:
            found = self.session.run(None, {"images": x.cpu().numpy()})[0]
        except Exception as problem:  # onnxruntime has a dozen exception types of its own
            raise UserError(f"onnxruntime cannot run the model on images {tuple(x.shape)}: {problem}") from problem
        return torch.from_numpy(found)


def _needed(name: str) -> Any:
    """Import an optional package, or raise an error that says how to install it."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as problem:
        raise UserError(f"ONNX needs {name}, which is not installed: pip install 'fedvit[onnx]'") from problem


def load_onnx(path: Path) -> nn.Module:
    _needed("onnxruntime")
    try:
        model = OnnxModel(path)
    except UserError:
        raise
    except Exception as problem:  # onnxruntime has a dozen exception types of its own
        raise UserError(f"{path} cannot be opened by onnxruntime: {problem}") from problem
    metadata = model.session.get_modelmeta().custom_metadata_map
    return attach_description(model, Description.from_metadata(metadata, path))


def write_onnx(model: nn.Module, opened: OpenedRun, path: Path, card: Card) -> Description:
    """Write one graph from normalized images (batch, 3, size, size) to logits (batch, classes), for any batch size."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        _needed(name)
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
    program = _convert(model, images, path)

    def save_to(file: Path, final: Description) -> None:
        program.model.metadata_props[KEY] = final.to_json()
        program.model.metadata_props[CARD] = card(final)
        size = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
        program.save(file, external_data=size > ONE_FILE)

    return write_checked(path, description, reference, load_onnx, save_to)


def _convert(model: nn.Module, images: Tensor, path: Path) -> Any:
    """Convert the model with torch's own exporter, which writes only to the log."""
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
    except Exception as problem:  # the exporter can fail in many ways
        reason = str(problem).strip().splitlines()[0]
        raise UserError(
            f"{path.name}: torch cannot convert this model to ONNX ({reason}); use --format timm"
        ) from problem
