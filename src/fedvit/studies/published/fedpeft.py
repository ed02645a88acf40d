"""FedPEFT (Sun et al. 2022), which does not give the momentum, the smallest client, or how it draws scarce images."""

from fedvit.config.tables import Tables, stack_tables
from fedvit.studies.published.common import Column, Table

SETTINGS: Tables = {
    "data": {"name": "cifar100"},
    "partition": {"name": "dirichlet_train", "clients": 64, "alpha": 0.1, "min_samples": 10},
    "model": {"name": "vit_base_patch16_224.augreg_in21k", "image_size": 224, "pretrained": True},
    "train": {
        "cohort": 8, "rounds": 50, "epochs": 10, "batch": 64, "optimizer": "sgd", "momentum": 0.0,
        "weight_decay": 1e-4, "weighting": "samples", "augment": "crop",
    },
    "method": {"name": "fedavg"},
    "run": {"seed": 0, "eval_every": 5},
}  # fmt: skip
TUNES = ("full", "head", "bias", "adapter", "prompt")
USUAL_RATES = {"full": 1e-3, "head": 5e-3, "bias": 1e-2, "adapter": 5e-3, "prompt": 1e-2, "scratch": 1e-2}
DEFAULT_RATES = {**USUAL_RATES, "full": 5e-4, "head": 1e-2}  # Table 8: 64 clients, 8 per round, alpha 0.1
RATES = (1e-4, 5e-4, 1e-3, 5e-3, 1e-2, 5e-2)
CIFAR = Column("cifar100", "CIFAR-100", {})
PCAM = Column(
    "pcam",
    "PCam",
    {
        "data": {"name": "pcam", "samples": 20_000},
        "partition": {"alpha": 0.5},
        "train": {"augment": "flip"},
    },
)


def _tuned(tune: str, lr: float) -> Tables:
    """Return a row that tunes these weights at this learning rate; scratch trains all weights from random ones."""
    own: Tables = {"tune": {"name": "full" if tune == "scratch" else tune}, "train": {"lr": lr}}
    return stack_tables([own, {"model": {"pretrained": False}}]) if tune == "scratch" else own


def _is_default(column: Column) -> bool:
    """Tell whether this column is the setting for which Table 8 gives learning rates of its own."""
    settings = stack_tables([SETTINGS, column.settings])
    here = (settings["data"], settings["partition"], settings["train"]["cohort"])
    return here == (SETTINGS["data"], SETTINGS["partition"], SETTINGS["train"]["cohort"])


def _tune_row(name: str, column: Column) -> tuple[Tables, str]:
    """Return a tune at the learning rate that Table 8 found for this column."""
    rate = (DEFAULT_RATES if _is_default(column) else USUAL_RATES)[name]
    if name == "adapter" and column.settings.get("data", {}).get("samples") == 1000:
        rate = 1e-3
    return _tuned(name, rate), ""


def _sized_row(name: str, column: Column) -> tuple[Tables, str]:
    """Return a row of Table 1, TUNE_xCLIENTS, which samples that many clients per round."""
    tune, _, cohort = name.rpartition("_x")
    if tune == "shufflenet":
        model = {"name": "shufflenet_v2_x0_5", "image_size": 224}
        own = stack_tables([_tuned("full", 5e-2 if column is CIFAR else 1e-1), {"model": model}])
    else:
        own, _ = _tune_row(tune, column)
    return stack_tables([own, {"train": {"cohort": int(cohort)}}]), ""


def _of_federation(clients: int, cohort: int, alike: bool) -> Column:
    """Make a column of Table 3."""
    partition = {"name": "iid" if alike else "dirichlet_train", "clients": clients}
    words = f"N={clients} M={cohort} {'iid' if alike else 'skewed'}"
    return Column(words.replace(" ", "_"), words, {"partition": partition, "train": {"cohort": cohort}})


def _of_scarcity(samples: int) -> Column:
    """Make a column of Table 6."""
    partition = {"min_samples": 2}
    return Column(f"k{samples}", f"{samples} images", {"data": {"samples": samples}, "partition": partition})


def _of_weights(words: str, model: str) -> Column:
    """Make a column of Table 7."""
    return Column(model, words, {"model": {"name": model}})


WORDS = "FedPEFT (Sun et al. 2022), Table"
TABLE1 = Table("fedpeft/table1", f"{WORDS}s 1 and 2", stack_tables([SETTINGS, {"run": {"eval_every": 1}}]),
               [CIFAR, PCAM], """
    full_x8        92.09  84.82
    full_x4        89.84  82.64
    full_x2        86.96  81.31
    full_x1        73.10  78.29
    head_x8        72.55  72.38
    head_x64       75.47  78.24
    shufflenet_x8  51.44  72.91
    bias_x8        91.02  85.29
    adapter_x8     88.05  79.63
    prompt_x8      89.90  87.25
""", _sized_row)  # fmt: skip
TARGETS = {  # of Table 2, in percent
    "CIFAR-100": (85.0, 90.0),
    "PCam": (75.0, 80.0),
}
FEDERATIONS = [
    _of_federation(n, m, alike) for n, m in ((16, 16), (16, 2), (64, 64), (64, 8)) for alike in (True, False)
]
TABLE3 = Table("fedpeft/table3", f"{WORDS} 3", SETTINGS, FEDERATIONS, """
    scratch  38.44 35.72  -     -      -     -      -     -
    full     93.70 93.50  93.32 87.01  93.66 92.81  93.50 92.09
    head     78.11 77.59  76.65 62.80  78.45 75.51  77.59 72.55
    bias     91.89 90.25  91.35 86.18  92.71 91.71  92.49 91.02
    adapter  90.21 88.77  89.48 80.08  90.50 89.26  90.39 88.05
    prompt   92.09 90.37  91.60 85.54  91.87 90.96  92.00 89.90
""", _tune_row)  # fmt: skip
TABLE4 = Table("fedpeft/table4", f"{WORDS} 4", SETTINGS, [CIFAR, PCAM], """
    full     92.09  84.82
    head     72.55  72.38
    bias     91.02  85.29
    adapter  88.05  79.63
    prompt   89.90  87.25
""", _tune_row)  # fmt: skip
TABLE6 = Table("fedpeft/table6", f"{WORDS} 6", SETTINGS, [_of_scarcity(k) for k in (1000, 1500, 2000)], """
    full     66.52  67.47  77.67
    head     52.13  56.52  60.15
    bias     76.40  81.14  83.83
    adapter  71.34  76.91  79.22
    prompt   63.77  71.94  76.89
""", _tune_row)  # fmt: skip
TABLE7 = Table("fedpeft/table7", f"{WORDS} 7", SETTINGS, [
    _of_weights("ViT-B, ImageNet-21K", "vit_base_patch16_224.augreg_in21k"),
    _of_weights("ViT-B, ImageNet-1K", "vit_base_patch16_224.augreg_in1k"),
    _of_weights("ViT-S, ImageNet-21K", "vit_small_patch16_224.augreg_in21k"),
], """
    full     92.09  92.09  89.33
    head     72.55  80.78  74.40
    bias     91.02  90.73  88.40
    adapter  87.99  88.69  84.15
    prompt   89.63  89.29  87.39
""", _tune_row)  # fmt: skip
FIGURE3 = Table("fedpeft/figure3", "FedPEFT (Sun et al. 2022), Figure 3", SETTINGS, [CIFAR], "\n".join(
    f"{tune} figure" for tune in TUNES), _tune_row)  # fmt: skip
