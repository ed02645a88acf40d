"""The export of models: safetensors for plain timm where that is exact, else for FedViT by a description; or ONNX.

Every file is read back and compared with the run's own model before it gets its name.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedvit.core.errors import UserError
from fedvit.core.files import check_writable, write_text
from fedvit.models.build import PYTHON, backbone, build
from fedvit.models.folding import CannotFoldError
from fedvit.models.width import narrow
from fedvit.runs.card import KEY as CARD
from fedvit.runs.card import Card, Statements, model_card, path_of
from fedvit.runs.description import KEY, Description
from fedvit.runs.folder import Run
from fedvit.runs.model_file import check_images, create, description_of, logits, plain_model, plugins_of, write_checked
from fedvit.runs.models import Chain, OpenedRun, attach_description, client_model, open_run, server_model, why_no_server
from fedvit.runs.onnx import load_onnx, write_onnx

Format = Literal["timm", "onnx"]
SUFFIX: dict[Format, str] = {"timm": ".safetensors", "onnx": ".onnx"}


@dataclass(frozen=True)
class Exported:
    """A file that was written."""

    path: Path
    description: Description
    card: Path  # the model card beside it; the same text is in the file

    @property
    def name(self) -> str:
        return "server" if self.description.client is None else f"client {self.description.client}"


def export(
    run: Run,
    *,
    clients: list[str],
    server: bool,
    everything: bool,
    form: Format,
    out: Path,
    last: bool = False,
    license: str | None = None,
    intended_use: str | None = None,
) -> Iterator[Exported]:
    """Write the requested models, each with its card, into the folder `out`, or to `out` itself if it names a file.

    `license` and `intended_use` are what the card says about them.
    """
    opened = open_run(run, last=last)
    names = opened.clients if everything else clients
    with_server = server or (everything and why_no_server(opened) is None)
    if not names and not with_server:
        raise UserError(
            f"say which model: --client NAME, --server or --all; the clients are {', '.join(opened.clients)}"
        )
    makers: list[tuple[str, Callable[[], nn.Module]]] = [
        (f"client-{quote(name, safe=' ')}", lambda name=name: client_model(opened, name))  # type: ignore[misc]
        for name in names
    ]
    if with_server:
        makers.append(("server", lambda: server_model(opened)))
    one_file = out.suffix in SUFFIX.values()
    if one_file and out.suffix != SUFFIX[form]:
        raise UserError(f"--out {out} does not fit the {form} format: name it {out.with_suffix(SUFFIX[form]).name}")
    if one_file and len(makers) > 1:
        raise UserError(f"--out {out} is one file, but there are {len(makers)} models: name a folder")
    check_writable(out.parent if one_file else out)
    write = {"timm": _write_timm, "onnx": write_onnx}[form]
    for name, make in makers:
        path = out if one_file else out / f"{name}{SUFFIX[form]}"
        card = partial(model_card, opened, said=Statements(license, intended_use))
        description = write(make(), opened, path, card)
        write_text(path_of(path), card(description))
        yield Exported(path, description, path_of(path))


def _write_timm(model: nn.Module, opened: OpenedRun, path: Path, card: Card) -> Description:
    """Write plain timm weights if they make exactly the same model, else all weights as they are."""
    description = description_of(model)
    reference = logits(model, check_images(description))
    try:
        plain = plain_model(model, description)
        description, weights = plain
    except CannotFoldError as why:
        description = description.model_copy(update={"not_timm": str(why)})
        weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    own = opened.experiment.own.module
    if own is None and description.model.name == PYTHON:  # a model of the hub that timm alone cannot name
        own = backbone(opened.experiment.model.model_copy(update={"pretrained": False}), len(description.classes))

    def again(unchecked: Path) -> nn.Module:
        return _load_safetensors(unchecked, own)

    return write_checked(path, description, reference, again, lambda file, d: save(weights, d, file, card(d)))


def save(weights: dict[str, Tensor], description: Description, path: Path, card: str) -> None:
    whole = {name: tensor.cpu().contiguous() for name, tensor in weights.items()}
    save_file(whole, path, {KEY: description.to_json(), CARD: card, "format": "pt"})


# Loading.


def load_model(path: str | Path, module: nn.Module | None = None) -> nn.Module:
    """Load a model that `fedvit export` wrote, ready to predict; nothing is unpickled.

    `model.description` says what goes in and what comes out. `module` is needed for a run whose model was a module of
    your own: its weights are replaced by those in the file.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(
            f"{path} is a folder: expected a .safetensors or .onnx file; for the folder of a run, use "
            "fedvit.load_run(FOLDER).model(CLIENT)"
        )
    if not path.is_file():
        raise UserError(f"no model at {path}: expected a .safetensors or .onnx file from `fedvit export`")
    if path.suffix == ".onnx":
        return load_onnx(path)
    return _load_safetensors(path, module)


def _load_safetensors(path: Path, module: nn.Module | None) -> nn.Module:
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
        weights = load_file(path)
    except (SafetensorError, OSError) as problem:
        raise UserError(f"{path} is not a safetensors file ({problem}): no other format is read") from problem
    description = Description.from_metadata(metadata, path)
    model = create(description.timm) if description.timm is not None else _rebuild(description, module)
    try:
        model.load_state_dict(weights)
    except RuntimeError as problem:
        raise UserError(f"{path} does not fit the model that it describes: {problem}") from problem
    return attach_description(model, description)


def _rebuild(description: Description, module: nn.Module | None) -> nn.Module:
    """Rebuild the model with its plugins, width and parts; its weights are still arbitrary."""
    if description.model.name == PYTHON and module is None:
        raise UserError(
            "this file holds weights for a module of your own: pass it, fedvit.load_model(FILE, module=YourModule()); "
            "an export with --format onnx needs no module"
        )
    plugins = tuple(plugins_of(description))
    model = build(description.model, len(description.classes), plugins, 0, module)
    if description.rate < 1:
        model = narrow(model, description.rate)
    return model if description.split is None else Chain(model, description.split)
