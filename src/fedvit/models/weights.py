"""Load pre-trained weights from safetensors files."""

import logging
import sys
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from fedvit.core.errors import UserError
from fedvit.models.plugins.attach import classifier_names

log = logging.getLogger(__name__)


def load_weights_(model: nn.Module, path: Path) -> None:
    """Load a safetensors file that uses timm's names; nothing is unpickled.

    timm's own filter resamples position and patch embeddings to the model's size. A classifier for a different
    number of classes is not loaded and stays fresh; any other key that does not fit is an error.
    """
    if not path.is_file():
        raise UserError(f"no weights at {path}: give a .safetensors file, or put it into the data folder")
    try:
        found = {name: tensor.float() for name, tensor in load_file(path).items()}
    except (SafetensorError, OSError) as problem:
        raise UserError(
            f"{path} is not a safetensors file ({problem}): convert it, no other format is read"
        ) from problem
    adapt = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    if adapt is not None:
        try:
            found = adapt(found, model)
        except (RuntimeError, KeyError, ValueError, AttributeError) as problem:
            raise UserError(f"{path} does not fit {type(model).__name__}: {problem}") from problem
    expected = model.state_dict()
    heads = tuple(f"{path}." for path in classifier_names(model))
    fresh = {n for n in expected if n.startswith(heads) and (n not in found or found[n].shape != expected[n].shape)}
    if fresh:
        fresh = {n for n in expected if n.startswith(heads)}
        log.info("%s has a different classifier: ours starts fresh", path.name)
    found = {name: tensor for name, tensor in found.items() if not (fresh and name.startswith(heads))}
    missing = [n for n in expected if n not in found and n not in fresh]
    unexpected = [n for n in found if n not in expected]
    reshaped = [n for n in found if n in expected and found[n].shape != expected[n].shape]
    for what, names in (("lacks", missing), ("has unknown", unexpected), ("has different shapes for", reshaped)):
        if names:
            raise UserError(
                f"{path} does not fit {type(model).__name__}: it {what} {', '.join(names[:5])}"
                f"{f' and {len(names) - 5} more' if len(names) > 5 else ''}; choose the model these weights belong to"
            )
    model.load_state_dict(found, strict=False)
