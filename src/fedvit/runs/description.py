"""The description of an exported model, stored as JSON in its file: everything needed to rebuild it and to feed it."""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from fedvit.core.errors import UserError
from fedvit.core.settings import ModelSettings

KEY = "fedvit"  # the description's key in a file's metadata
FORMAT = 1


class Part(BaseModel):
    """A frozen part of a description; unknown keys, which a newer version may have written, are ignored."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())


class Reading(Part):
    """How a file becomes an image of the run, as PIL does it, after gray levels of more than 8 bits were scaled to 8.

    `window` is the run's data.window. Without one, 16-bit gray levels are divided by 257.

    The whole image is converted to `mode` and squashed to `width` x `height`, and then, if `gray`, converted to gray.
    """

    mode: Literal["RGB"] = "RGB"
    width: int
    height: int
    interpolation: Literal["bilinear"] = "bilinear"
    antialias: bool = True  # PIL's resize always smooths when it shrinks
    window: str | None = None
    gray: bool  # then convert it to 8-bit gray, and repeat that three times


class Inputs(Part):
    """Images as the model expects them: (batch, 3, size, size), values in 0..1 minus `mean`, divided by `std`.

    An image of another size is resized as floating-point numbers, with pixel centers aligned as in torchvision.
    """

    size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    interpolation: Literal["bilinear"] = "bilinear"
    antialias: bool | None = None  # of this second resize; unknown in files of version 0.1.0


class Parted(Part):
    """How a ViT was cut for split learning, if its parts do more than the plain model."""

    cut: Literal["A", "B", "after", "vibs"]
    block: int
    wire: Literal["fp32", "bf16", "int8"]
    depth: int | None = None  # the number of blocks that features pass, if not all


class Timm(Part):
    """The arguments of timm.create_model; no others are taken from a file."""

    model_name: str
    num_classes: int
    img_size: int | None = None
    patch_size: int | None = None
    embed_dim: int | None = None
    depth: int | None = None
    num_heads: int | None = None
    mlp_ratio: float | None = None

    def arguments(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)


class Check(Part):
    """How a file was compared with the run's own model: number of images, and the largest difference of a logit."""

    images: int
    difference: float
    tolerance: float


class Description(Part):
    """The description of a model from a run."""

    format: int = FORMAT
    fedvit: str = version("fedvit")
    client: str | None = None
    view: Literal["personal", "server"]
    round: int
    method: dict[str, Any]
    tune: dict[str, Any]
    model: ModelSettings
    plugins: list[dict[str, Any]]
    rate: float
    split: Parted | None = None
    classes: list[str]
    task: Literal["multi"] | None = None  # multi: an image may have several of the classes, or none
    input: Inputs
    image: tuple[int, int, int]  # height, width and channels of the training images, before resizing
    reading: Reading | None = None  # how a file becomes such an image
    precision: Literal["fp32", "bf16"]  # of the run's own predictions
    timm: Timm | None = None  # the plain model that the weights of this file belong to
    not_timm: str | None = None  # why there is none
    checked: Check | None = None

    @property
    def several_labels(self) -> bool:
        return self.task == "multi"

    def to_json(self) -> str:
        return self.model_dump_json(exclude_none=True)

    @staticmethod
    def from_metadata(metadata: Mapping[str, str], path: Any) -> "Description":
        """Return the description in a file's metadata, or raise an error that says what the file lacks."""
        if KEY not in metadata:
            raise UserError(
                f"{path} does not say which model it is: expected a file from `fedvit export`; to start a run from "
                "plain timm weights, use --weights"
            )
        try:
            found = Description.model_validate_json(metadata[KEY])
        except ValidationError as problem:
            raise UserError(f"{path} has a description that this version does not know: {problem}") from problem
        if found.format > FORMAT:
            raise UserError(f"{path} was written by fedvit {found.fedvit}, which is newer: upgrade fedvit to open it")
        return found


def shared_options(method: Mapping[str, Any], rate: float) -> dict[str, Any]:
    """Return the method's table without what it says about other clients: HeteroFL's widths name them."""
    return {key: f"{rate:g}" if key == "rates" else value for key, value in method.items() if value is not None}
