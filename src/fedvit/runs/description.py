"""What an exported model says of itself, as JSON in its file: all that is needed to build it again and to feed it."""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from fedvit.core.errors import UserError
from fedvit.core.settings import ModelSettings

KEY = "fedvit"  # of the description in a file's metadata
FORMAT = 1


class Part(BaseModel):
    """Frozen; what a newer version wrote beside the known keys is passed over."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())


class Inputs(Part):
    """Images as the model wants them: (batch, 3, size, size), values of 0..1 less `mean`, divided by `std`."""

    size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


class Parted(Part):
    """How a ViT was cut for split learning, where the pieces are more than the plain model."""

    cut: Literal["A", "B", "after", "vibs"]
    block: int
    wire: Literal["fp32", "bf16", "int8"]
    depth: int | None = None  # the blocks that features pass, where that is not all


class Timm(Part):
    """Arguments of timm.create_model; no others are taken from a file."""

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
    """How the file was compared with the run's own model: images, and the largest difference of a logit."""

    images: int
    difference: float
    tolerance: float


class Description(Part):
    """A model out of a run."""

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
    input: Inputs
    image: tuple[int, int, int]  # height, width, channels of the images it learned from, before they were resized
    precision: Literal["fp32", "bf16"]  # of the run's own predictions
    timm: Timm | None = None  # the plain model that the weights of this file belong to
    not_timm: str | None = None  # why there is none
    checked: Check | None = None

    def to_json(self) -> str:
        return self.model_dump_json(exclude_none=True)

    @staticmethod
    def from_metadata(metadata: Mapping[str, str], path: Any) -> "Description":
        """The description of a file, or an error that says what the file lacks."""
        if KEY not in metadata:
            raise UserError(
                f"{path} does not say which model it is: expected a file of `fedvit export`; plain weights of timm are "
                "given to a run with --weights"
            )
        try:
            found = Description.model_validate_json(metadata[KEY])
        except ValidationError as problem:
            raise UserError(f"{path} is described in a way this version does not know: {problem}") from problem
        if found.format > FORMAT:
            raise UserError(f"{path} was written by fedvit {found.fedvit}, which is newer: upgrade fedvit to open it")
        return found


def shared_options(method: Mapping[str, Any], rate: float) -> dict[str, Any]:
    """The method's table without what it says of other clients: the widths of HeteroFL name them."""
    return {key: f"{rate:g}" if key == "rates" else value for key, value in method.items() if value is not None}
