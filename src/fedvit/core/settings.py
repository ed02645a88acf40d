"""The tables of an experiment: names, defaults and limits. Reading and resolving them is `config`'s work."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr

PLANNED = ("cosine", "step")  # schedules that plan their rates over the rounds


def _not_a_truth_value(value: Any) -> Any:
    """`lr = true` is a slip, not the number 1."""
    if isinstance(value, bool):
        raise ValueError("expected a number, not true or false")
    return value


Number = BeforeValidator(_not_a_truth_value)
Numbers = Annotated[str, BeforeValidator(lambda v: str(v) if type(v) in (int, float) else v)]  # joined by commas
Finite = Annotated[float, Number, Field(allow_inf_nan=False)]
Positive = Annotated[float, Number, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Number, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Number, Field(ge=0, lt=1)]
Fraction = Annotated[float, Number, Field(ge=0, le=1)]  # a Share that may be all
Count = Annotated[int, Number, Field(ge=1)]
Whole = Annotated[int, Number, Field(ge=0)]


class Table(BaseModel):
    """One TOML table: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class DataSettings(Table):
    """Where the images come from."""

    name: str = "digits"  # a known name, an npz file or a folder
    dir: Path | None = None  # default: the environment variable FEDVIT_DATA
    layout: Literal["auto", "class", "domain", "site", "tiny_imagenet"] = "auto"  # of a folder
    site: str | None = None  # the folder is one owner's, class/image, and this is the owner's name
    class_names: str | None = None  # of a folder, joined by commas, where sites do not all have every class
    size: Count | None = None  # pixels at which a folder's images are stored; default: the model's input size
    cache: Path | None = None  # where decoded images are kept; default: the user's cache folder
    download: bool = False  # let torchvision fetch what is not there
    skip_bad: bool = False  # leave out files that cannot be read
    samples: Count | None = None  # keep so many images, the same number of every class
    test: Annotated[float, Field(gt=0, lt=1)] = 0.25  # share held out as test where the source has no test set
    val: Share = 0.0  # share of each client's training images held out for choosing things
    unseen: Annotated[int, Field(ge=0)] = 0  # clients that never train, scored apart
    auroc: bool | None = None  # measure AUROC too; default: for two classes and for MedMNIST's sets

    @property
    def folder(self) -> Path | None:
        """The folder of data and weights."""
        return self.dir or (Path(os.environ["FEDVIT_DATA"]) if os.environ.get("FEDVIT_DATA") else None)

    @property
    def cache_folder(self) -> Path:
        """Where decoded images are kept."""
        return self.cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedvit"

    @property
    def class_list(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.class_names.split(",")) if self.class_names else ()

    def find(self, path: Path) -> Path:
        """A file as named, or of that name in the data folder."""
        if self.folder is None or path.is_absolute() or path.exists():
            return path
        inside = self.folder / path
        return inside if inside.exists() else path


class PartitionSettings(Table):
    """How the images are divided over clients."""

    name: str | None = None  # default: site for folders of sites, else dirichlet
    clients: Count | None = None  # default: the number of sites or domains, else 24
    alpha: Positive = 0.3
    classes: Count = 2  # pathological: classes per client
    level: Annotated[float, Field(ge=0, le=100)] = 80.0  # dh: percent of heterogeneity
    min_samples: Count | None = None  # default: min(batch / data.test, images / clients / 2)


class ModelSettings(Table):
    """What is trained. Sizes of None mean the model's own."""

    name: str = "vit_micro"
    image_size: Count | None = None
    patch_size: Count | None = None
    weights: Path | None = None
    pretrained: bool = False
    groups: dict[str, list[str]] | None = None  # layer groups beside the known ones: name -> paths of modules
    fingerprint: str | None = None  # of the first weights of a module from Python

    @property
    def from_scratch(self) -> bool:
        return self.weights is None and not self.pretrained


class TrainSettings(Table):
    """How it is trained."""

    rounds: Count = 16
    cohort: Count | None = None  # default: all clients, at most 8
    epochs: Count = 2
    batch: Count = 32
    lr: Positive | None = None  # default: the tune's published rate for SGD, a fifth of it for Adam and AdamW
    optimizer: Literal["sgd", "adam", "adamw"] | None = None  # default: adamw from scratch, sgd on pre-trained weights
    momentum: Share = 0.0
    weight_decay: NotNegative = 0.0
    schedule: Literal["constant", "cosine", "step", "exp"] = "constant"
    decay: Annotated[float, Field(gt=0, le=1)] | None = None  # factor of step (0.1) and exp (0.99 a round)
    weighting: Literal["samples", "equal"] | None = None  # default: the method's
    dropout: Share = 0.0  # chance that a sampled client fails
    augment: Literal["none", "flip", "crop"] = "none"
    compile: bool = False  # torch.compile the training pass; rounds differently


class RunSettings(Table):
    """How it is run and measured."""

    seed: Annotated[int, Field(ge=0)] = 0
    eval_every: Annotated[int, Field(ge=0)] | None = None  # 0: after the last round only
    evaluate: Literal["after", "in_round"] = "after"  # in_round: FedPerfix's code, before aggregation
    before_after: bool = False  # two more views: before and after one local training
    until_accuracy: Annotated[float, Field(gt=0, le=100)] | None = None
    track: Literal["tensorboard"] | None = None  # write scalars there while it runs
    threads: Count = 1
    precision: Literal["fp32", "bf16"] = "fp32"
    device: str = "auto"
    cache_mb: Annotated[int, Field(ge=0)] | None = None  # for activations of frozen layers; default: 1/4 of free RAM

    @property
    def devices(self) -> list[str]:
        """`cuda:0,1` is two devices."""
        kind, _, numbers = self.device.partition(":")
        return [f"{kind}:{number.strip()}" for number in numbers.split(",")] if numbers else [kind]


@dataclass(frozen=True)
class FromPython:
    """What came from Python and no file holds: a plan (fedvit.Plan) and a module (torch.nn.Module)."""

    plan: Any = None
    module: Any = None


class Made:
    """What was made of a table, so that it is made once; no part of the settings, and left behind by every pickle."""

    source: Any = None
    result: Any = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Made)

    def __hash__(self) -> int:
        return 0

    def __reduce__(self) -> tuple[type["Made"], tuple[()]]:
        return Made, ()


class Experiment(Table):
    """Everything that decides a run's results, resolved: no default is left open."""

    data: DataSettings = DataSettings()
    partition: PartitionSettings = PartitionSettings()
    model: ModelSettings = ModelSettings()
    train: TrainSettings = TrainSettings()
    method: dict[str, Any] = {"name": "fedavg"}  # name, and the arguments of its plan
    tune: dict[str, Any] = {"name": "full"}
    run: RunSettings = RunSettings()
    _own: FromPython = PrivateAttr(default_factory=FromPython)
    _made: Made = PrivateAttr(default_factory=Made)

    @property
    def own(self) -> FromPython:
        """The parts that were given from Python; they go where the experiment goes, but into no file."""
        return self._own

    def with_own(self, own: FromPython) -> "Experiment":
        copy = self.model_copy()
        copy._own = own
        return copy

    def keep_plan(self, make: Callable[[Mapping[str, Any]], Any]) -> Any:
        """The plan of [method], made at the first call; `methods.plan_of` knows how."""
        if self._made.source is not self.method:
            self._made.source, self._made.result = self.method, make(self.method)
        return self._made.result

    @property
    def label(self) -> str:
        """METHOD, or METHOD+TUNE where not everything is tuned."""
        method, tune = str(self.method["name"]), str(self.tune["name"])
        return method if tune == "full" else f"{method}+{tune}"
