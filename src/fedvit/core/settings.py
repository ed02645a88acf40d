"""The tables of an experiment: names, defaults and limits. The package `config` reads and resolves them."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr

PLANNED = ("cosine", "step")  # schedules that plan their learning rates over all rounds


def _not_a_truth_value(value: Any) -> Any:
    """Reject booleans: `lr = true` is a mistake, not the number 1."""
    if isinstance(value, bool):
        raise ValueError("expected a number, not true or false")
    return value


Number = BeforeValidator(_not_a_truth_value)
Numbers = Annotated[str, BeforeValidator(lambda v: str(v) if type(v) in (int, float) else v)]  # joined by commas
Finite = Annotated[float, Number, Field(allow_inf_nan=False)]
Positive = Annotated[float, Number, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Number, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Number, Field(ge=0, lt=1)]
Fraction = Annotated[float, Number, Field(ge=0, le=1)]  # a Share that may also be 1
Count = Annotated[int, Number, Field(ge=1)]
Whole = Annotated[int, Number, Field(ge=0)]


class Table(BaseModel):
    """One TOML table: it is frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class DataSettings(Table):
    """Where the images come from."""

    name: str = "digits"  # a known name, an npz file or a folder
    dir: Path | None = None  # default: the environment variable FEDVIT_DATA
    layout: Literal["auto", "class", "domain", "site", "tiny_imagenet"] = "auto"  # how a folder is organized
    site: str | None = None  # the name of the one owner of a folder with the layout class/image
    class_names: str | None = None  # of a folder, joined by commas, if not every site has every class
    size: Count | None = None  # pixels at which a folder's images are stored; default: the model's input size
    cache: Path | None = None  # where decoded images are kept; default: the user's cache folder
    download: bool = False  # let torchvision download missing files
    skip_bad: bool = False  # skip files that cannot be read
    samples: Count | None = None  # keep this many images, the same number of every class
    test: Annotated[float, Field(gt=0, lt=1)] = 0.25  # fraction held out for testing if the source has no test set
    val: Share = 0.0  # fraction of each client's training images held out for validation
    unseen: Annotated[int, Field(ge=0)] = 0  # clients that never train and are scored separately
    auroc: bool | None = None  # also measure AUROC; default: for two classes and for MedMNIST

    @property
    def folder(self) -> Path | None:
        """The folder that holds datasets and weights."""
        return self.dir or (Path(os.environ["FEDVIT_DATA"]) if os.environ.get("FEDVIT_DATA") else None)

    @property
    def cache_folder(self) -> Path:
        """The folder where decoded images are kept."""
        return self.cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedvit"

    @property
    def class_list(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.class_names.split(",")) if self.class_names else ()

    def find(self, path: Path) -> Path:
        """Return the path as given, or that path inside the data folder if only this one exists."""
        if self.folder is None or path.is_absolute() or path.exists():
            return path
        inside = self.folder / path
        return inside if inside.exists() else path


class PartitionSettings(Table):
    """How the images are partitioned among clients."""

    name: str | None = None  # default: site for folders of sites, otherwise dirichlet
    clients: Count | None = None  # default: the number of sites or domains, otherwise 24
    alpha: Positive = 0.3
    classes: Count = 2  # pathological: classes per client
    level: Annotated[float, Field(ge=0, le=100)] = 80.0  # dh: percent of heterogeneity
    min_samples: Count | None = None  # default: min(batch / data.test, images / clients / 2)


class ModelSettings(Table):
    """What is trained. A size of None means the model's own size."""

    name: str = "vit_micro"
    image_size: Count | None = None
    patch_size: Count | None = None
    weights: Path | None = None
    pretrained: bool = False
    groups: dict[str, list[str]] | None = None  # layer groups besides the built-in ones: name -> paths of modules
    fingerprint: str | None = None  # of the initial weights of a module from Python

    @property
    def from_scratch(self) -> bool:
        return self.weights is None and not self.pretrained


class TrainSettings(Table):
    """How the model is trained."""

    rounds: Count = 16
    cohort: Count | None = None  # default: all clients, at most 8
    epochs: Count = 2
    batch: Count = 32
    lr: Positive | None = None  # default: the tune's published learning rate for SGD, a fifth of it for Adam(W)
    optimizer: Literal["sgd", "adam", "adamw"] | None = None  # default: adamw from scratch, sgd on pre-trained weights
    momentum: Share = 0.0
    weight_decay: NotNegative = 0.0
    schedule: Literal["constant", "cosine", "step", "exp"] = "constant"
    decay: Annotated[float, Field(gt=0, le=1)] | None = None  # factor of step (0.1) and exp (0.99 per round)
    weighting: Literal["samples", "equal"] | None = None  # default: the method's
    dropout: Share = 0.0  # probability that a sampled client fails
    augment: Literal["none", "flip", "crop"] = "none"
    compile: bool = False  # use torch.compile for training; changes the rounding of results


class RunSettings(Table):
    """How the experiment is run and measured."""

    seed: Annotated[int, Field(ge=0)] = 0
    eval_every: Annotated[int, Field(ge=0)] | None = None  # 0: only after the last round
    evaluate: Literal["after", "in_round"] = "after"  # in_round: before aggregation, as in FedPerfix's code
    before_after: bool = False  # add two views: before and after one local training
    until_accuracy: Annotated[float, Field(gt=0, le=100)] | None = None
    track: Literal["tensorboard"] | None = None  # write scalars to it during the run
    threads: Count = 1
    precision: Literal["fp32", "bf16"] = "fp32"
    device: str = "auto"
    cache_mb: Annotated[int, Field(ge=0)] | None = None  # for activations of frozen layers; default: 1/4 of free RAM

    @property
    def devices(self) -> list[str]:
        """The single devices; `cuda:0,1` means two."""
        kind, _, numbers = self.device.partition(":")
        return [f"{kind}:{number.strip()}" for number in numbers.split(",")] if numbers else [kind]


@dataclass(frozen=True)
class FromPython:
    """What was passed from Python and is stored in no file: a plan (fedvit.Plan) and a module (torch.nn.Module)."""

    plan: Any = None
    module: Any = None


class Made:
    """What was made from a table, kept so that it is made once; it is not a setting, and pickling drops it."""

    source: Any = None
    result: Any = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Made)

    def __hash__(self) -> int:
        return 0

    def __reduce__(self) -> tuple[type["Made"], tuple[()]]:
        return Made, ()


class Experiment(Table):
    """Everything that determines a run's results, resolved: no default is left open."""

    data: DataSettings = DataSettings()
    partition: PartitionSettings = PartitionSettings()
    model: ModelSettings = ModelSettings()
    train: TrainSettings = TrainSettings()
    method: dict[str, Any] = {"name": "fedavg"}  # the name, and the arguments of its plan
    tune: dict[str, Any] = {"name": "full"}
    run: RunSettings = RunSettings()
    _own: FromPython = PrivateAttr(default_factory=FromPython)
    _made: Made = PrivateAttr(default_factory=Made)

    @property
    def own(self) -> FromPython:
        """The parts that were passed from Python; they travel with the experiment, but are written to no file."""
        return self._own

    def with_own(self, own: FromPython) -> "Experiment":
        copy = self.model_copy()
        copy._own = own
        return copy

    def keep_plan(self, make: Callable[[Mapping[str, Any]], Any]) -> Any:
        """Return the plan of [method], made on the first call; `methods.plan_of` knows how to make it."""
        if self._made.source is not self.method:
            self._made.source, self._made.result = self.method, make(self.method)
        return self._made.result

    @property
    def label(self) -> str:
        """METHOD, or METHOD+TUNE if not everything is tuned."""
        method, tune = str(self.method["name"]), str(self.tune["name"])
        return method if tune == "full" else f"{method}+{tune}"
