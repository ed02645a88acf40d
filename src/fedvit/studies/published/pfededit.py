"""PFedEdit (Yuan et al. 2024), with batch and optimizer from its code and the baselines' options from their papers.

Layers are those that the paper counts, 54 in ResNet18 and 111 in ViT-B/16; 7 % of them are edited, rounded up: 4 and 8.
Figure 2 and Tables 2 to 5, 7 and 8 are on CIFAR at 80 % heterogeneity and on Lyme at 50 %.
"""

from typing import Any

from fedvit.config.tables import Tables, stack_tables
from fedvit.studies.published.common import Column, Table, method

SETTINGS: Tables = {
    "partition": {"name": "dh", "clients": 10},
    "train": {
        "cohort": 10, "rounds": 100, "epochs": 1, "batch": 10, "optimizer": "sgd", "momentum": 0.0,
        "weighting": "equal",
    },
    "tune": {"name": "full"},
    "run": {"seed": 2023, "eval_every": 1},
}  # fmt: skip
NAMES = {
    "fedavg": "FedAvg", "fedper": "FedPer", "fedbn": "FedBN", "fedrep": "FedRep", "distrans": "DisTrans",
    "moon": "MOON", "apfl": "APFL", "pfededit": "PFedEdit", "fedfa": "FedFA", "fedfed": "FedFed", "fedala": "FedALA",
    "fed_lamb": "Fed-LAMB", "fedrolex": "FedRolex", "heterofl": "HeteroFL", "cd2_pfed": "CD2-pFed",
    "partialfed": "PartialFed-Fix",
}  # fmt: skip
RESNET18 = {"name": "resnet18", "pretrained": True}
DATA: dict[str, tuple[str, Tables, str]] = {  # name -> words, settings, note
    "cifar10": ("CIFAR-10", {"model": {**RESNET18, "image_size": 64}, "train": {"lr": 0.01}}, ""),
    "cifar100": ("CIFAR-100", {"model": {**RESNET18, "image_size": 224}, "train": {"lr": 0.01}}, ""),
    "lyme": (
        "Lyme",
        {
            "data": {"layout": "class"},
            "model": {"name": "vit_base_patch16_224.augreg_in1k", "image_size": 224, "pretrained": True},
            "train": {"lr": 0.001},
        },
        "Private data: lyme is a folder of four classes, with train/ and test/ above them if it has its own.",
    ),
}


def _of_level(data: str, level: int, folder: str | None = None) -> Column:
    """Make the column of a dataset at this level of heterogeneity, in percent."""
    words, settings, note = DATA[data]
    here: Tables = {"data": {"name": data}, "partition": {"level": float(level)}}
    return Column(folder or f"{data}_dh{level}", f"{words}, DH {level} %", stack_tables([settings, here]), note)


def _row(name: str, column: Column) -> tuple[Tables, str]:
    """Return a row of Tables 1 and 6, with the options that the authors of its method use."""
    data = column.settings["data"]["name"]
    match name:
        case "pfededit":
            return edited(), "The layers are counted as in the paper, and 7 % of them are edited, rounded up."
        case "moon" if data == "cifar10":
            return method(name, mu=5.0), "mu as MOON's authors use it on CIFAR-10."
        case "distrans" if column.settings["partition"]["level"] == 0:
            own = method(name, a=0.3, offset_lr=0.001, offsets="server")
            return own, "As DisTrans's authors have it for i.i.d. data: the server makes the offsets."
        case "distrans":
            return method(name, offset_lr=0.001), "offset_lr as DisTrans's authors use it."
        case "cd2_pfed" | "partialfed":
            return method(name), "Its options are not given; the method is written from its abstract."
        case "fed_lamb":
            return method(name, lr=0.001), "Its rate is not given; a step is lr times the weights' length."
        case "fedrep":
            return method(name), "The head's epochs are not given: one, then one of the body."
        case "fedfed":
            return method(name, distill_rounds=15), (
                "15 rounds of stage 1, as FedFed's authors; the classifier trains in the other 85. Every client stores "
                "everybody's noisy images: tens of gigabytes at 224 px."
            )
        case "heterofl" | "fedrolex":
            return method(name), "The rates are not given: half of the clients at 1, half at 1/2."
    return method(name), ""


def edited(percent: int = 7, **options: Any) -> Tables:
    """Return a row that edits this share of the layers that the paper counts."""
    return method("pfededit", ratio=percent / 100, layers="paper", **options)


LEVELS = (0, 40, 60, 80, 100)
TABLE1 = Table("pfededit/table1", "PFedEdit (Yuan et al. 2024), Table 1", SETTINGS,
               [*(_of_level(data, level) for data in ("cifar10", "cifar100") for level in LEVELS),
                _of_level("lyme", 0), _of_level("lyme", 50)], """
    fedavg    .942  .923 .939 .806 .830  .783 .779 .772 .737 .664  .707 .716
    fedper    .890  .873 .880 .887 .902  .733 .753 .748 .769 .790  .700 .808
    fedbn     .9272 .926 .940 .945 .961  .746 .776 .802 .862 .904  .733 .821
    fedrep    .889  .884 .920 .933 .980  .742 .747 .793 .859 .880  .730 .833
    distrans  .947  .944 .960 .954 .972  .788 .779 .850 .887 .903  .745 .850
    moon      .922  .931 .927 .938 .940  .746 .762 .768 .770 .773  .699 .768
    apfl      .891  .889 .910 .915 .927  .744 .753 .802 .833 .859  .722 .781
    pfededit  .955  .953 .965 .962 .989  .790 .825 .855 .890 .930  .765 .912
""", _row)  # fmt: skip
TABLE6 = Table("pfededit/table6", "PFedEdit (Yuan et al. 2024), Table 6", SETTINGS,
               [_of_level("cifar10", 80, "cifar10"), _of_level("cifar100", 80, "cifar100"),
                _of_level("lyme", 50, "lyme")], """
    fedfa     .887±.060  .673±.032  .938±.029
    fedfed    .923±.058  .696±.023  .943±.038
    fedala    .936±.023  .840±.022  .932±.035
    fed_lamb  .917±.024  .822±.020  .938±.043
    fedrolex  .792±.032  .674±.042  .872±.046
    heterofl  .735±.030  .620±.038  .831±.040
    pfededit  .938±.043  .868±.018  .970±.042
""", _row)  # fmt: skip
BY_SKIN = Column("lyme_skin", "Lyme, light and dark skin", stack_tables([
    DATA["lyme"][1],
    {"data": {"name": "lyme_skin", "layout": "domain"}, "partition": {"name": "domain", "clients": 10, "alpha": 100.0}},
]), "Private data: lyme_skin is a folder of two domains, light and dark, with four classes in each. Five clients of a "
    "domain share its classes evenly, because the paper gives no more than that skins are at different clients.",
)  # fmt: skip
TABLE8 = Table("pfededit/table8", "PFedEdit (Yuan et al. 2024), Table 8", SETTINGS, [*TABLE6.columns, BY_SKIN], """
    cd2_pfed    .915±.050  .833±.028  .903±.040  .897±.032
    partialfed  .903±.040  .825±.023  .926±.045  .908±.020
    pfededit    .938±.043  .868±.018  .970±.042  .921±.027
""", _row)  # fmt: skip
FILES = [TABLE1, TABLE6, TABLE8]  # which experiments/published.py writes


# The ablations. A target is an accuracy in percent.

C10, C100, LYME = _of_level("cifar10", 80), _of_level("cifar100", 80), _of_level("lyme", 50)
TARGETS = (60.0, 70.0, 75.0, 80.0, 85.0, 90.0)


def _edit_column(words: str, data: str) -> Column:
    """Make the column of one parameter on one dataset."""
    at = {"cifar10": C10, "cifar100": C100, "lyme": LYME}[data]
    return Column(f"{words}_{data}", f"{words}, {at.words.split(',')[0]}", at.settings)


def _edited_share(name: str, column: Column) -> tuple[Tables, str]:
    """Return a row of Table 3, which edits this share of the layers."""
    percent = int(name.removesuffix("%"))
    return edited(percent) if percent else method("fedavg"), ""


def tried(probe: float) -> Tables:
    """Return a row of Table 4, which tries this share of the images; a tenth is never trained on, 500 of 5,000."""
    return edited(probe=probe, held_out=0.1) if probe < 0.1 else edited()


EDIT_DATA = ("cifar10", "cifar100", "lyme")
TABLE3, TABLE4, TABLE5, TABLE7 = EDITING = [
    Table("pfededit/table3", "Table 3", SETTINGS, [_edit_column("layers", d) for d in EDIT_DATA], """
        0%  .806  .748  .716
        1%  .933  .860  .868
        3%  .947  .878  .880
        5%  .948  .885  .889
        7%  .962  .890  .912
        9%  .952  .874  .910
    """, _edited_share),
    Table("pfededit/table4", "Table 4", SETTINGS, [_edit_column("probe", d) for d in ("cifar10", "cifar100")], """
        0.01   .951  -
        0.025  .953  .875
        0.05   .954  .884
        0.08   .954  .886
        0.1    .962  .890
    """, lambda name, column: (tried(float(name)), "")),
    Table("pfededit/table5", "Table 5", SETTINGS, [_edit_column("metric", d) for d in ("cifar10", "cifar100")], """
        accuracy         .540  .705
        loss             .905  .886
        te               .885  .821
        prediction_list  .962  .890
    """, lambda name, column: (edited(metric=name), "")),
    Table("pfededit/table7", "Table 7", SETTINGS, [_edit_column("choice", d) for d in ("cifar10", "cifar100")], """
        fixed     .920±.025  .885±.019
        flexible  .962±.018  .890±.018
    """, lambda name, column: (edited(flexible=name == "flexible"), "")),
]  # fmt: skip
CONVERGED = {  # of Table 7: the round of each figure
    ("fixed", "choice, CIFAR-10"): 25, ("flexible", "choice, CIFAR-10"): 23,
    ("fixed", "choice, CIFAR-100"): 30, ("flexible", "choice, CIFAR-100"): 26,
}  # fmt: skip
TABLE2 = Table("pfededit/table2", "PFedEdit (Yuan et al. 2024), Table 2", SETTINGS, [C10, C100, LYME], """
    fedavg    5/8/13/33/-/-   9/24/-/-/-/-     32/87/-/-/-/-
    pfededit  4/6/7/9/11/13   6/8/10/12/18/-   3/4/5/5/9/25
""", lambda name, column: (edited() if name == "pfededit" else method(name), ""))  # fmt: skip
CHOICES: dict[str, dict[str, Any]] = {  # the first two are drawn once for all clients and rounds
    "random": {"metric": "random", "flexible": False, "layers": "paper"},
    "norms": {"metric": "random", "flexible": False, "layers": "main_norms"},  # ResNet18 has 17 of them
    "ranked": {"metric": "loss", "layers": "paper"},
}
CHOICE_SIZES = (1, 3, 5, 7, 10, 13, 17)
FIGURE2 = Table("pfededit/figure2", "PFedEdit (Yuan et al. 2024), Figure 2", SETTINGS,
                [Column(f"k{k}", f"k={k}", C100.settings) for k in CHOICE_SIZES],
                "\n".join(f"{name} {'figure ' * len(CHOICE_SIZES)}" for name in CHOICES),
                lambda name, column: (method("pfededit", k=int(column.folder[1:]), **CHOICES[name]), ""))  # fmt: skip


# The times, in seconds; the paper does not say of what.

NETWORKS = {
    "mlp": ("MLP", 32),
    "resnet18": ("ResNet18", 64),
    "resnet50": ("ResNet50", 64),
    "densenet121": ("DenseNet121", 64),
}
BRIEF: Tables = {"train": {"rounds": 4}, "run": {"eval_every": 0}}


def network(name: str, size: int) -> Tables:
    """Return the settings of a column of Table 9; the perceptron has no pre-trained weights."""
    return {"model": {"name": name, "image_size": size, **({} if name == "mlp" else {"pretrained": True})}}


TABLE9 = Table("pfededit/table9", "PFedEdit (Yuan et al. 2024), Table 9", stack_tables([SETTINGS, BRIEF]), [
    Column(name, words, stack_tables([C10.settings, network(name, size)])) for name, (words, size) in NETWORKS.items()
], """
    fedavg    60.50  187.09  301.23  642.54
    fedala    50.27  157.63  168.59  581.03
    fed_lamb  54.31  175.80  280.53  606.40
    pfededit  33.74  150.98  272.08  768.17
""", _row)  # fmt: skip
