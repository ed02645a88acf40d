"""The papers' tables that are studies rather than comparisons: settings and published figures. They have no files."""

from typing import Any

from fedvit.studies.published.tables import (
    ADAM,
    FEDPERFIX,
    FEDV,
    PFEDEDIT,
    SPLIT_OWN,
    Column,
    Table,
    Tables,
    method,
    of_dirichlet,
    of_level,
    stacked,
)

# FedPerfix, Table 1: which parts are personal, alone and with the head.

PARTS = {
    "all_local": "", "all_global": "", "head": "", "patch_embed": "patch_embed", "pos_embed": "pos_embed",
    "norm": "norm", "attn": "attn", "mlp": "mlp",
}  # fmt: skip
ALONE, WITH_HEAD = Column("alone", "alone", {}), Column("with_head", "with head", {})


def personal_row(name: str, column: Column) -> tuple[Tables, str]:
    """Rows of the sensitivity study; three of them are methods of their own."""
    plain = {"all_local": "local", "all_global": "fedavg", "head": "fedper"}
    if name in plain:
        return method(plain[name]), ""
    return method("custom", personal=PARTS[name] if column is ALONE else f"{PARTS[name]},head"), ""


SENSITIVITY = Table("fedperfix/table1", "FedPerfix (Sun et al. 2023), Table 1", FEDPERFIX, [ALONE, WITH_HEAD], """
    all_local    34.74±9.36   -
    all_global   23.29±11.31  -
    head         44.42±7.98   -
    patch_embed  27.61±10.02  43.45±8.69
    pos_embed    23.80±11.42  45.04±8.08
    norm         23.94±11.19  44.60±7.96
    attn         42.95±8.68   44.63±8.67
    mlp          42.53±8.82   42.63±8.84
""", personal_row)  # fmt: skip


RESOURCES = {  # Table 2: storage, FLOPs and communication of each row, in the paper's millions
    "fedavg": "21.03 65.65 21.03", "local": "21.03 65.65 0", "apfl": "42.06 131.30 21.03",
    "per_fedavg": "21.03 131.30 21.03", "fedbn": "21.03 65.65 21.01", "fedbabu": "21.03 65.65 20.66",
    "fedper": "21.03 65.65 20.66", "vanilla_attention": "21.03 65.65 13.89", "fedperfix": "24.42 66.58 20.66",
}  # fmt: skip


# FedPEFT (Sun et al. 2022). Momentum, the smallest client and how scarce images are drawn are not given.

FEDPEFT: Tables = {
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
DEFAULT_RATES = {**USUAL_RATES, "full": 5e-4, "head": 1e-2}  # Table 8 for 64 clients, 8 a round, alpha 0.1
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


def tuned(tune: str, lr: float) -> Tables:
    """A row that trains these weights at this rate; scratch is everything from random weights."""
    own: Tables = {"tune": {"name": "full" if tune == "scratch" else tune}, "train": {"lr": lr}}
    return stacked(own, {"model": {"pretrained": False}}) if tune == "scratch" else own


def is_default(column: Column) -> bool:
    """Whether this column is the setting that Table 8 gives rates of its own for."""
    settings = stacked(FEDPEFT, column.settings)
    here = (settings["data"], settings["partition"], settings["train"]["cohort"])
    return here == (FEDPEFT["data"], FEDPEFT["partition"], FEDPEFT["train"]["cohort"])


def tune_row(name: str, column: Column) -> tuple[Tables, str]:
    """A tune at the rate that Table 8 found for this column."""
    rate = (DEFAULT_RATES if is_default(column) else USUAL_RATES)[name]
    if name == "adapter" and column.settings.get("data", {}).get("samples") == 1000:
        rate = 1e-3
    return tuned(name, rate), ""


def sized_row(name: str, column: Column) -> tuple[Tables, str]:
    """A row of Table 1, TUNE_xCLIENTS: so many clients a round."""
    tune, _, cohort = name.rpartition("_x")
    if tune == "shufflenet":
        model = {"name": "shufflenet_v2_x0_5", "image_size": 224}
        own = stacked(tuned("full", 5e-2 if column is CIFAR else 1e-1), {"model": model})
    else:
        own, _ = tune_row(tune, column)
    return stacked(own, {"train": {"cohort": int(cohort)}}), ""


def of_federation(clients: int, cohort: int, alike: bool) -> Column:
    partition = {"name": "iid" if alike else "dirichlet_train", "clients": clients}
    words = f"N={clients} M={cohort} {'iid' if alike else 'skewed'}"
    return Column(words.replace(" ", "_"), words, {"partition": partition, "train": {"cohort": cohort}})


def of_scarcity(samples: int) -> Column:
    partition = {"min_samples": 2}
    return Column(f"k{samples}", f"{samples} images", {"data": {"samples": samples}, "partition": partition})


def of_weights(words: str, model: str) -> Column:
    return Column(model, words, {"model": {"name": model}})


FEDPEFT_WORDS = "FedPEFT (Sun et al. 2022), Table"
COMMUNICATION = Table("fedpeft/table1", f"{FEDPEFT_WORDS}s 1 and 2", stacked(FEDPEFT, {"run": {"eval_every": 1}}),
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
""", sized_row)  # fmt: skip
COMMUNICATION_TARGETS = {"CIFAR-100": (85.0, 90.0), "PCam": (75.0, 80.0)}
FEDERATIONS = [of_federation(n, m, alike) for n, m in ((16, 16), (16, 2), (64, 64), (64, 8)) for alike in (True, False)]
CAPABILITY = Table("fedpeft/table3", f"{FEDPEFT_WORDS} 3", FEDPEFT, FEDERATIONS, """
    scratch  38.44 35.72  -     -      -     -      -     -
    full     93.70 93.50  93.32 87.01  93.66 92.81  93.50 92.09
    head     78.11 77.59  76.65 62.80  78.45 75.51  77.59 72.55
    bias     91.89 90.25  91.35 86.18  92.71 91.71  92.49 91.02
    adapter  90.21 88.77  89.48 80.08  90.50 89.26  90.39 88.05
    prompt   92.09 90.37  91.60 85.54  91.87 90.96  92.00 89.90
""", tune_row)  # fmt: skip
DOMAIN_GAP = Table("fedpeft/table4", f"{FEDPEFT_WORDS} 4", FEDPEFT, [CIFAR, PCAM], """
    full     92.09  84.82
    head     72.55  72.38
    bias     91.02  85.29
    adapter  88.05  79.63
    prompt   89.90  87.25
""", tune_row)  # fmt: skip
SCARCITY = Table("fedpeft/table6", f"{FEDPEFT_WORDS} 6", FEDPEFT, [of_scarcity(k) for k in (1000, 1500, 2000)], """
    full     66.52  67.47  77.67
    head     52.13  56.52  60.15
    bias     76.40  81.14  83.83
    adapter  71.34  76.91  79.22
    prompt   63.77  71.94  76.89
""", tune_row)  # fmt: skip
PRETRAINING = Table("fedpeft/table7", f"{FEDPEFT_WORDS} 7", FEDPEFT, [
    of_weights("ViT-B, ImageNet-21K", "vit_base_patch16_224.augreg_in21k"),
    of_weights("ViT-B, ImageNet-1K", "vit_base_patch16_224.augreg_in1k"),
    of_weights("ViT-S, ImageNet-21K", "vit_small_patch16_224.augreg_in21k"),
], """
    full     92.09  92.09  89.33
    head     72.55  80.78  74.40
    bias     91.02  90.73  88.40
    adapter  87.99  88.69  84.15
    prompt   89.63  89.29  87.39
""", tune_row)  # fmt: skip
FEATURES = Table("fedpeft/figure3", "FedPEFT (Sun et al. 2022), Figure 3", FEDPEFT, [CIFAR], "\n".join(
    f"{tune} figure" for tune in TUNES), tune_row)  # fmt: skip


# PFedEdit, Tables 2 to 5 and 7 and Figure 2. Rows of 7 % of the layers, CIFAR at 80 % heterogeneity, Lyme at 50 %.

C10, C100, LYME = of_level("cifar10", 80), of_level("cifar100", 80), of_level("lyme", 50)
CONVERGENCE_TARGETS = (60.0, 70.0, 75.0, 80.0, 85.0, 90.0)


def first_column(data: str) -> Column:
    return {"cifar10": C10, "cifar100": C100, "lyme": LYME}[data]


def edit_column(words: str, data: str) -> Column:
    """One parameter on one data set: a column of the editing study."""
    at = first_column(data)
    return Column(f"{words}_{data}", f"{words}, {at.words.split(',')[0]}", at.settings)


def edited_share(name: str, column: Column) -> tuple[Tables, str]:
    """Table 3: k is the share of the layers that the authors count, rounded up."""
    layers = 111 if column.settings["data"]["name"] == "lyme" else 54
    k = -(-int(name.removesuffix("%")) * layers // 100)
    return method("pfededit", k=k) if k else method("fedavg"), ""


def edited(column: Column, **options: Any) -> Tables:
    return method("pfededit", k=8 if column.settings["data"]["name"] == "lyme" else 4, **options)


EDIT_DATA = ("cifar10", "cifar100", "lyme")
EDITING = [
    Table("pfededit/table3", "Table 3", PFEDEDIT, [edit_column("layers", d) for d in EDIT_DATA], """
        0%  .806  .748  .716
        1%  .933  .860  .868
        3%  .947  .878  .880
        5%  .948  .885  .889
        7%  .962  .890  .912
        9%  .952  .874  .910
    """, edited_share),
    Table("pfededit/table4", "Table 4", PFEDEDIT, [edit_column("probe", d) for d in ("cifar10", "cifar100")], """
        0.01   .951  -
        0.025  .953  .875
        0.05   .954  .884
        0.08   .954  .886
        0.1    .962  .890
    """, lambda name, column: (edited(column, probe=float(name)), "")),
    Table("pfededit/table5", "Table 5", PFEDEDIT, [edit_column("metric", d) for d in ("cifar10", "cifar100")], """
        accuracy         .540  .705
        loss             .905  .886
        te               .885  .821
        prediction_list  .962  .890
    """, lambda name, column: (edited(column, metric=name), "")),
    Table("pfededit/table7", "Table 7", PFEDEDIT, [edit_column("choice", d) for d in ("cifar10", "cifar100")], """
        fixed     .920±.025  .885±.019
        flexible  .962±.018  .890±.018
    """, lambda name, column: (edited(column, flexible=name == "flexible"), "")),
]  # fmt: skip
CONVERGENCE = Table("pfededit/table2", "PFedEdit (Yuan et al. 2024), Table 2", PFEDEDIT, [C10, C100, LYME], """
    fedavg    5/8/13/33/-/-   9/24/-/-/-/-     32/87/-/-/-/-
    pfededit  4/6/7/9/11/13   6/8/10/12/18/-   3/4/5/5/9/25
""", lambda name, column: (edited(column) if name == "pfededit" else method(name), ""))  # fmt: skip
CHOICES: dict[str, dict[str, Any]] = {
    "random": {"metric": "random"},
    "norms": {"metric": "random", "layers": "norms"},
    "ranked": {"metric": "loss"},
}
CHOICE_SIZES = (1, 3, 5, 7, 10, 13, 17)
CHOICE = Table("pfededit/figure2", "PFedEdit (Yuan et al. 2024), Figure 2", PFEDEDIT,
               [Column(f"k{k}", f"k={k}", C100.settings) for k in CHOICE_SIZES],
               "\n".join(f"{name} {'figure ' * len(CHOICE_SIZES)}" for name in CHOICES),
               lambda name, column: (method("pfededit", k=int(column.folder[1:]), **CHOICES[name]), ""))  # fmt: skip


# FedV's ablations are figures; of their grids only the numbers of clients and the best of each are known to us.

SPLIT_BASE = stacked(
    FEDV,
    of_dirichlet("cifar10", 0.1).settings,
    {"model": {"name": "deit_small_patch16_224", "pretrained": True}, "train": {"weighting": "equal"}},
    ADAM,
    SPLIT_OWN["fedv"][0],
)


def split_row(name: str, column: Column) -> tuple[Tables, str]:
    number = int(name.removesuffix("_"))
    match column.folder:
        case "epochs":
            return {"train": {"epochs": number}}, ""
        case "clients":
            return {"partition": {"clients": number}, "train": {"cohort": number // 10}}, ""
    return {"method": {"fedround": number}}, ""


SPLIT = [
    Table("fedv/epochs", "FedV, local epochs", SPLIT_BASE, [Column("epochs", "local epochs K", {})],
          "1 figure\n 5 figure\n 10 figure", split_row),
    Table("fedv/clients", "FedV, clients", SPLIT_BASE, [Column("clients", "clients M", {})],
          "50 figure\n 100 figure\n 150 figure\n 200 figure", split_row),
    Table("fedv/fedround", "FedV, fedround", SPLIT_BASE, [Column("fedround", "fedround", {})],
          "10 figure\n 20 figure\n 50 figure\n 100 figure", split_row),
]  # fmt: skip
