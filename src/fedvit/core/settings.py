"""The tables of an experiment: names, defaults and limits. The package `config` reads and resolves them."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr

CLIP_GRAD = 100.0  # the default of train.clip_grad on pre-trained weights, far above their ordinary gradients
CLIP_BIAS = 10.0  # the same for biases, whose steps are the largest: chosen on validation images (docs/results.md)
FOCAL_GAMMA = 2.0  # the default of train.focal_gamma
LossName = Literal["cross_entropy", "weighted", "focal", "balanced"]
MAX_PIXELS = 89_478_485  # the default of data.max_pixels, beyond which PIL, too, suspects a bomb
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
ClipUpdate = Literal["off", "auto"] | Positive
Aggregate = Literal["mean", "median", "trimmed_mean", "krum", "multi_krum"]
Whole = Annotated[int, Number, Field(ge=0)]


class Table(BaseModel):
    """One TOML table: it is frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class DataSettings(Table):
    """Where the images come from."""

    name: str = Field(default="digits", description="A known name, an npz file, a folder or a manifest (.csv).")
    dir: Path | None = Field(
        default=None,
        description="Folder that holds datasets and weights; default: the environment variable FEDVIT_DATA.",
    )
    task: Literal["single", "multi"] | None = Field(
        default=None,
        description="Whether an image has one of the classes or any number of them (multi); default: as the data says.",
    )
    layout: Literal["auto", "class", "domain", "site", "tiny_imagenet"] = Field(
        default="auto", description="How a folder is organized."
    )
    site: str | None = Field(default=None, description="Name of the one owner of a folder with the layout class/image.")
    class_names: str | None = Field(
        default=None, description="Classes of a folder, joined by commas, if not every site has every class."
    )
    patient: str | None = Field(
        default=None,
        description="Whose image a file is: folder for class/patient/image, dicom for the patient ID in its header, or "
        "a regular expression whose groups match the patient in its path. A manifest may have a column patient.",
    )
    window: str | None = Field(
        default=None,
        description="Gray levels of files with more than 8 bits that become black to white: CENTRE,WIDTH, or range for "
        "each image's own; default: a DICOM file's window, otherwise its range; all 16 bits of other files.",
    )
    size: Count | None = Field(
        default=None, description="Pixels at which a folder's images are stored; default: the model's input size."
    )
    cache: Path | None = Field(
        default=None, description="Where decoded images are kept; default: the user's cache folder."
    )
    download: bool = Field(default=False, description="Let torchvision download missing files.")
    skip_bad: bool = Field(default=False, description="Skip files that cannot be read, and name them in a warning.")
    max_pixels: Count = Field(
        default=MAX_PIXELS, description="Most pixels of an image file; a small file may claim more than memory holds."
    )
    follow_links: bool = Field(default=False, description="Follow symbolic links that lead out of a folder of images.")
    samples: Count | None = Field(
        default=None, description="Keep this many images, the same number of every class; default: all."
    )
    test: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.25, description="Fraction held out for testing if the source has no test set."
    )
    join_val: bool = Field(
        default=True,
        description="Train on the validation images of PCam, an npz file or a folder, too; false leaves them out.",
    )
    val: Share = Field(default=0.0, description="Fraction of each client's training images held out for validation.")
    unseen: Annotated[int, Field(ge=0)] = Field(
        default=0, description="Number of clients that never train and are scored separately."
    )
    auroc: bool | None = Field(
        default=None,
        description="Also measure AUROC; default: for two classes, for several labels per image and for MedMNIST.",
    )

    @property
    def several_labels(self) -> bool:
        """Whether an image may have several labels; known in resolved settings."""
        return self.task == "multi"

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

    name: str | None = Field(
        default=None,
        description="Rule of the partition (see data.md); default: site for folders of sites, otherwise dirichlet.",
    )
    clients: Count | None = Field(
        default=None, description="Number of clients; default: the number of sites or domains, otherwise 24."
    )
    alpha: Positive = Field(
        default=0.3,
        description="Concentration of dirichlet and dirichlet_train: the smaller, the more the clients differ.",
    )
    classes: Count = Field(default=2, description="Classes per client under the rule pathological.")
    level: Annotated[float, Field(ge=0, le=100)] = Field(
        default=80.0, description="Percent of heterogeneity under the rule dh."
    )
    min_samples: Count | None = Field(
        default=None,
        description="Fewest images of a client; default: train.batch / data.test, but at most half an equal share.",
    )


class ModelSettings(Table):
    """What is trained."""

    name: str = Field(
        default="vit_micro",
        description=(
            "vit_micro, a ViT or DeiT of timm, also as hf-hub:OWNER/NAME, resnet18, resnet50, resnet50_gn, "
            "densenet121, shufflenet_v2_x0_5 or mlp."
        ),
    )
    image_size: Count | None = Field(
        default=None, description="Height and width of the input images in pixels; default: the model's own."
    )
    patch_size: Count | None = Field(
        default=None, description="Height and width of a patch in pixels; default: the model's own."
    )
    weights: Path | None = Field(
        default=None,
        description="Start from the pre-trained weights in this .safetensors file; default: random weights.",
    )
    pretrained: bool = Field(default=False, description="Start from the pre-trained weights on the hub.")
    groups: dict[str, list[str]] | None = Field(
        default=None, description="Layer groups besides the built-in ones: for each name, the paths of its modules."
    )
    fingerprint: str | None = Field(
        default=None,
        description="Hash of the initial weights of a module from Python; a run writes it, you do not set it.",
    )

    @property
    def from_scratch(self) -> bool:
        return self.weights is None and not self.pretrained


class TrainSettings(Table):
    """How the model is trained."""

    rounds: Count = Field(default=16, description="Number of rounds.")
    cohort: Count | None = Field(
        default=None, description="Number of clients sampled per round; default: all clients, at most 8."
    )
    epochs: Count = Field(default=2, description="Number of local epochs per round.")
    batch: Count = Field(default=32, description="Batch size.")
    lr: Positive | None = Field(
        default=None,
        description="Learning rate; default: the tune's published rate for SGD, a fifth of it for Adam and AdamW.",
    )
    lr_classifier: Positive | None = Field(
        default=None, description="Learning rate of the classifier; default: train.lr. It follows the schedule too."
    )
    lr_plugins: Positive | None = Field(
        default=None,
        description="Learning rate of the modules that the method or the tune adds; default: train.lr. "
        "A method's own rate, such as offset_lr, comes first.",
    )
    clip_grad: NotNegative | None = Field(
        default=None,
        description="Largest L2 norm of a gradient over everything that is trained at once, 0: unlimited; default: "
        f"{CLIP_GRAD:g} on pre-trained weights, {CLIP_BIAS:g} with bias tuning, otherwise 0.",
    )
    warmup: Whole = Field(
        default=0,
        description="Rounds in which the learning rates rise to their full values: round k of W has k / (W + 1) of it.",
    )
    optimizer: Literal["sgd", "adam", "adamw"] | None = Field(
        default=None,
        description="Optimizer; default: adam for split learning, adamw from scratch, sgd on pre-trained weights.",
    )
    momentum: Share = Field(default=0.0, description="Momentum of sgd.")
    weight_decay: NotNegative = Field(default=0.0, description="Weight decay of the optimizer.")
    schedule: Literal["constant", "cosine", "step", "exp"] = Field(
        default="constant", description="How the learning rate changes over the rounds."
    )
    decay: Annotated[float, Field(gt=0, le=1)] | None = Field(
        default=None, description="Factor of the schedules step and exp; default: 0.1 for step, 0.99 per round for exp."
    )
    loss: LossName = Field(
        default="cross_entropy",
        description="What training minimizes: cross_entropy (with several labels per image, the binary one of each), "
        "weighted by the inverse of the client's class counts, focal, or balanced softmax with the client's counts.",
    )
    focal_gamma: NotNegative | None = Field(
        default=None,
        description=f"Exponent of the loss focal: the larger, the less count images that are answered well; default: "
        f"{FOCAL_GAMMA:g}.",
    )
    weighting: Literal["samples", "equal"] | None = Field(
        default=None,
        description="Weights of the clients in the mean: by their training images, or equal; default: the method's.",
    )
    clip_update: ClipUpdate = Field(
        default="off",
        description="Largest L2 norm of the change that a client's report makes to what it received: off, a number, or "
        "auto, twice the median of past changes. A larger one is scaled down.",
    )
    aggregate: Aggregate = Field(
        default="mean",
        description="How the server combines reports. All but mean resist bad ones and give every client the same "
        "weight; see robust.md.",
    )
    byzantine: Count = Field(
        default=1,
        description="Bad reports per round that train.aggregate must resist. A round needs twice as many reports "
        "and one more (median, trimmed_mean) or three more (krum, multi_krum).",
    )
    dropout: Share = Field(default=0.0, description="Probability that a sampled client fails.")
    augment: Literal["none", "flip", "crop"] = Field(
        default="none", description="Random changes of training images: none, a horizontal flip, or a flip and a crop."
    )
    compile: bool = Field(
        default=False, description="Use torch.compile for training, which changes the rounding of results."
    )


class PrivacySettings(Table):
    """Differential privacy of every training image, which is off unless epsilon or noise is set."""

    unit: Literal["image"] = Field(default="image", description="What is hidden: a single training image of a client.")
    epsilon: Positive | None = Field(
        default=None,
        description="Most that the whole run may reveal of an image; each client's noise follows from it.",
    )
    delta: Annotated[float, Number, Field(gt=0, lt=1)] = Field(
        default=1e-5, description="Probability with which epsilon may not hold: well below one in a client's images."
    )
    clip: Positive = Field(default=1.0, description="Largest L2 norm of one image's gradient.")
    noise: NotNegative | None = Field(
        default=None,
        description="Deviation of the noise in a batch's sum of gradients, in multiples of clip, instead of epsilon.",
    )
    accountant: Literal["rdp", "prv", "per_step"] = Field(
        default="rdp",
        description="How privacy is counted: by Renyi divergences; prv, tighter and slower; or per_step, FedPEFT's "
        "noise, which gives every single step epsilon and has no bound of this size for the run.",
    )

    @property
    def on(self) -> bool:
        return self.epsilon is not None or self.noise is not None


class RunSettings(Table):
    """How the experiment is run and measured."""

    seed: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="Random seed of the partition, the initial weights, the client sampling and the order of images.",
    )
    eval_every: Annotated[int, Field(ge=0)] | None = Field(
        default=None,
        description="Rounds between evaluations, 0: only after the last one; default: 1 for up to 100 clients, else 0.",
    )
    evaluate: Literal["after", "in_round"] = Field(
        default="after",
        description="When clients are tested: after aggregation, or in_round, before it, as in FedPerfix's code.",
    )
    finetune: Whole = Field(
        default=0,
        description="Epochs of local training before each client's model is tested or exported, with any method but "
        "split learning; 0: none. The view before_finetune is the model before.",
    )
    before_after: bool = Field(default=False, description="Add two views: before and after one local training.")
    clinical: bool | None = Field(
        default=None,
        description="Also measure clinical scores after the last round: sensitivity, specificity, PPV, NPV, AUROC and "
        "calibration of every class at every client (see clinical.md); default: for several labels per image.",
    )
    threshold: Numbers | None = Field(
        default=None,
        description="Probability from which an image is called positive: a number between 0 and 1, or youden or f1, "
        "which choose it for every class on a client's validation images; default: where there are validation "
        "images youden, or f1 for several labels per image; otherwise 0.5.",
    )
    positive: str | None = Field(
        default=None, description="Class that is called positive if there are two; default: the second one."
    )
    predictions: bool = Field(
        default=False,
        description="With run.clinical, also write predictions.csv: class and probabilities of every test image. "
        "It stays on the machine that has the images.",
    )
    until_accuracy: Annotated[float, Field(gt=0, le=100)] | None = Field(
        default=None,
        description="Stop once the mean personal accuracy reaches this many percent; default: run all rounds.",
    )
    keep: Literal["last", "best"] = Field(
        default="last",
        description="Round whose models you export and predict with: the last, or the one with the best mean accuracy "
        "on validation images; best needs such images, see data.val.",
    )
    patience: Count | None = Field(
        default=None,
        description="Stop after this many evaluations without a better mean accuracy on validation images; default: "
        "run all rounds.",
    )
    track: Literal["tensorboard", "mlflow", "wandb"] | None = Field(
        default=None, description="Write scalars, settings and tags to this tracker during the run."
    )
    threads: Count = Field(
        default=1, description="CPU threads per process; their number changes the order of floating-point sums."
    )
    precision: Literal["fp32", "bf16"] = Field(default="fp32", description="Floating-point precision.")
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:0, or several devices, such as cuda:0,1.")
    cache_mb: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="Memory for activations of frozen layers, in MB; default: a quarter of the free RAM."
    )

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
    method: dict[str, Any] = Field(default={"name": "fedavg"}, description="The method's name, and its options.")
    tune: dict[str, Any] = Field(default={"name": "full"}, description="The tune's name, and its options.")
    privacy: PrivacySettings = PrivacySettings()
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
