"""Every study by name: what it asks, its grid of runs in small and as published, and how it is measured.

A study is data. `digits` is its grid on the embedded digits; `pretrained` the one on real images and ImageNet weights
of ViT-Tiny, taken instead where the data folder has them; `paper` the published one. `fedvit.studies.run` runs them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fedvit.studies import ablations
from fedvit.studies.published import tables
from fedvit.studies.published.tables import ADAM, FEDPERFIX_OWN, SMALL, Table, Tables, method, rows_of, stacked

Kind = Literal["accuracy", "choose", "target", "cost", "features"]


@dataclass(frozen=True)
class Case:
    """One cell of a study's table."""

    row: str
    column: str  # empty where the table has one
    settings: Tables
    published: str = ""  # what the paper reports for it
    targets: tuple[float, ...] = ()  # accuracies, %, whose cost is asked for


@dataclass(frozen=True)
class Study:
    """A question, and the runs that answer it.

    `choose` marks the best row of every column on validation images; `target` asks when accuracies are reached; `cost`
    trains nothing; `features` draws what the models see.
    """

    asks: str
    source: str
    kind: Kind
    view: Literal["personal", "server"]
    columns: str  # what the columns are, in words
    digits: Sequence[Case]
    paper: Sequence[Case]
    minutes: tuple[float, float | None]  # of one core, on digits and on pre-trained weights, by estimate
    pretrained: Sequence[Case] | None = None
    seeds: tuple[int, ...] = (0, 1, 2)  # on digits; the other grids have one
    overall: bool = False  # the mean over the columns is a figure of its own


def grid(
    base: Tables,
    rows: Mapping[str, Tables],
    columns: Mapping[str, Tables] | None = None,
    targets: tuple[float, ...] = (),
) -> list[Case]:
    """Every row in every column."""
    return [
        Case(row, column, stacked(base, here, own), targets=targets)
        for column, here in (columns or {"": {}}).items()
        for row, own in rows.items()
    ]


def of_table(*tables: Table, targets: Mapping[str, tuple[float, ...]] | None = None) -> list[Case]:
    """The cells of published tables, column by column; a single column needs no name."""
    cells = [(column, name, value, settings) for t in tables for name, column, value, settings, _ in rows_of(t)]
    names = list(dict.fromkeys(column.words for column, *_ in cells))
    found = [
        Case(
            name,
            column.words if len(names) > 1 else "",
            settings,
            "" if value == "figure" else value,
            (targets or {}).get(column.words, ()),
        )
        for column, name, value, settings in cells
    ]
    return sorted(found, key=lambda case: names.index(case.column) if case.column else 0)


def one(table: str) -> Table:
    return next(t for t in tables.TABLES if t.folder == table)


def every(table: str) -> list[Table]:
    return [t for t in tables.TABLES if t.folder == table]


# The small settings. On digits a run takes some ten seconds of one core, on pre-trained weights about one minute.

DIGITS: Tables = {
    "data": {"name": "digits"},
    "partition": {"name": "dirichlet", "clients": 24, "alpha": 0.3},
    "model": {"name": "vit_micro"},
    "train": {"cohort": 8, "rounds": 16, "epochs": 2, "batch": 32, "optimizer": "adamw"},
    "run": {"eval_every": 4},
}
DIGITS_DH = stacked(
    DIGITS,
    {
        "partition": {"name": "dh", "clients": 10, "level": 80.0},
        "train": {"cohort": 10, "rounds": 12, "epochs": 1, "weighting": "equal"},
    },
)
DIGITS_SPLIT: Tables = {
    **DIGITS,
    "partition": {"name": "dirichlet", "clients": 16, "alpha": 0.3},
    "train": {"cohort": 4, "rounds": 12, "epochs": 2, "batch": 32, "optimizer": "adam", "lr": 0.002},
    "method": {"name": "fedv", "fedround": 5},
    "run": {"eval_every": 6},
}
IMAGENET = stacked(
    SMALL,
    {
        "data": {"name": "office_caltech10", "samples": 1600},
        "partition": {"name": "dirichlet", "clients": 16, "alpha": 0.3},
        "train": {"cohort": 4, "rounds": 8, "epochs": 2},
        "method": {"name": "fedavg"},
        "run": {"eval_every": 4},
    },
)
BRIEF = stacked(IMAGENET, {"train": {"rounds": 6, "epochs": 1}, "run": {"eval_every": 0}})  # for the widest grids
IMAGENET_SPLIT = stacked(
    IMAGENET,
    {"run": {"eval_every": 0}},
    ADAM,
    {"method": {"name": "fedv", "fedround": 5}},
)
PNEUMONIA: Tables = {"data": {"name": "pneumoniamnist", "samples": 1500}, "partition": {"alpha": 0.5}}
TINY_RATES = {
    "full": 5e-3,
    "head": 5e-3,
    "bias": 1e-2,
    "adapter": 5e-3,
    "prompt": 1e-2,
}  # those of experiments/small; `lr` chooses
FROM_SCRATCH: Tables = {"model": {"weights": None}}
WITH_VAL: Tables = {"data": {"val": 0.2}}
MICRO_RATES = (1e-4, 5e-4, 1e-3, 5e-3, 1e-2)


def methods(*names: str) -> dict[str, Tables]:
    """Rows of these methods, with the options of FedPerfix's tables; rates are those of AdamW from scratch."""
    own = {"apfl": FEDPERFIX_OWN["apfl"][0], "per_fedavg": method("per_fedavg", lr=2e-4)}
    return {name: own.get(name, method(name)) for name in names}


def tunes(rates: Mapping[str, float] | None = None, *names: str) -> dict[str, Tables]:
    """Rows of these tunes, each at its own rate or at the default's."""
    return {
        name: {"tune": {"name": name}, **({"train": {"lr": rates[name]}} if rates else {})}
        for name in names or ablations.TUNES
    }


def sized(rows: Mapping[str, Tables], *cohorts: tuple[str, int]) -> dict[str, Tables]:
    """Rows TUNE_xCLIENTS: a tune with so many clients a round."""
    return {f"{name}_x{cohort}": stacked(rows[name], {"train": {"cohort": cohort}}) for name, cohort in cohorts}


def parts(base: Tables) -> list[Case]:
    """FedPerfix's Table 1 on other settings."""
    table = replace(ablations.SENSITIVITY, settings=base)
    return [replace(case, published="") for case in of_table(table)]


def federations(*sizes: tuple[int, int], alpha: float) -> dict[str, Tables]:
    """Columns of N clients, M a round, with much the same mix of classes or a skewed one; the rule is the same."""
    return {
        f"N={n} M={m} {words}": {"partition": {"clients": n, "alpha": skew}, "train": {"cohort": m}}
        for n, m in sizes
        for words, skew in (("iid", 1000.0), ("skewed", alpha))
    }


def rates(tunes: Sequence[str], values: Sequence[float], base: Tables) -> list[Case]:
    """Every tune at every rate, with images held out to choose by."""
    columns: dict[str, Tables] = {tune: {"tune": {"name": tune}} for tune in tunes}
    return grid(stacked(base, WITH_VAL), {f"{rate:g}": {"train": {"lr": rate}} for rate in values}, columns)


def panels(base: Tables, rows: Mapping[str, Mapping[str, Tables]]) -> list[Case]:
    """Columns with rows of their own."""
    return [case for column, own in rows.items() for case in grid(base, own, {column: {}})]


def edits(**options: Any) -> Tables:
    return method("pfededit", **{"k": 3, **options})


def federation_of(clients: int, cohort: int) -> Tables:
    return {"partition": {"clients": clients}, "train": {"cohort": cohort}}


TINY_PATCH8: Tables = {"model": {"patch_size": 8, "image_size": 40}}
EIGHT_PIXELS = {"image_size": 8, "patch_size": 2}
RESNET18: Tables = {"model": {"name": "resnet18", "image_size": 32}}
TABLE3 = methods("local", "fedavg", "apfl", "per_fedavg", "fedbn", "fedbabu", "fedper")
TABLE4 = methods("local", "fedavg", "apfl", "fedper", "fedperfix")
TABLE2 = [replace(case, column="") for case in of_table(one("fedperfix/table2")) if case.column == "CIFAR-100"]
COSTS = [replace(case, published=ablations.RESOURCES[case.row]) for case in TABLE2]
ON_TINY = tunes(TINY_RATES)
SPLIT_PANELS: dict[str, dict[str, Tables]] = {
    "local epochs K": {f"{n}": {"train": {"epochs": n}} for n in (1, 2, 5)},
    "clients M": {f"{n}": federation_of(n, n // 4) for n in (8, 16, 24)},
    "fedround": {f"{n}": {"method": {"fedround": n}} for n in (1, 3, 5, 11)},
}
EDIT_PANELS: dict[str, dict[str, Tables]] = {
    "layers k": {f"{k}": edits(k=k) if k else method("fedavg") for k in (0, 1, 2, 3, 5, 8)},
    "probe p": {f"{p:g}": edits(probe=p) for p in (0.05, 0.1, 0.2, 0.3)},
    "metric": {name: edits(metric=name) for name in ("accuracy", "loss", "te", "prediction_list")},
    "choice": {"fixed": edits(flexible=False), "flexible": edits(flexible=True)},
}

STUDIES: dict[str, Study] = {
    "sensitivity": Study(
        asks="Which parts of a ViT should be personal?",
        source="FedPerfix, Table 1",
        kind="accuracy",
        view="personal",
        columns="personal part",
        digits=parts(DIGITS),
        paper=of_table(ablations.SENSITIVITY),
        minutes=(6, None),
        overall=True,
    ),
    "resources": Study(
        asks="What does each method store, compute and send?",
        source="FedPerfix, Table 2, its cost columns",
        kind="cost",
        view="personal",
        columns="",
        digits=COSTS,
        paper=COSTS,
        minutes=(0.5, None),
        seeds=(1,),
    ),
    "backbones": Study(
        asks="Do the methods order the same way on a ResNet and on a ViT?",
        source="FedPerfix, Table 3",
        kind="accuracy",
        view="personal",
        columns="model",
        digits=grid(
            stacked(
                DIGITS,
                {"partition": {"clients": 16, "alpha": 0.1}, "train": {"cohort": 4, "rounds": 12, "epochs": 1}},
            ),
            TABLE3,
            {"ResNet18": RESNET18, "ViT-Micro": {}},
        ),
        paper=[
            *(replace(case, column="ResNet50") for case in of_table(one("fedperfix/table3"))),
            *(replace(case, column="ViT-Small") for case in TABLE2 if case.row in TABLE3),
        ],
        minutes=(10, None),
        seeds=(0,),
    ),
    "settings": Study(
        asks="How do the number of clients and the share that is sampled matter?",
        source="FedPerfix, Table 4",
        kind="accuracy",
        view="personal",
        columns="clients, and share a round",
        digits=grid(
            DIGITS,
            TABLE4,
            {f"N={n}, {100 * k / n:g} %": federation_of(n, k) for n, k in ((16, 2), (16, 4), (32, 4), (32, 8))},
        ),
        paper=of_table(one("fedperfix/table4")),
        minutes=(8, None),
    ),
    "sizes": Study(
        asks="How does the size of the ViT matter?",
        source="FedPerfix, Table 5",
        kind="accuracy",
        view="personal",
        columns="model",
        digits=grid(
            stacked(DIGITS, {"train": {"rounds": 8, "cohort": 6}}),
            TABLE4,
            {
                "4 blocks of 48": {},
                "6 blocks of 64": {"model": {"name": "test_vit", **EIGHT_PIXELS}},
                "12 blocks of 192": {"model": {"name": "vit_tiny_patch16_224", **EIGHT_PIXELS}, "train": {"lr": 5e-4}},
            },
        ),
        paper=of_table(one("fedperfix/table5")),
        minutes=(15, None),
        seeds=(0,),
    ),
    "designs": Study(
        asks="Which design of the personal part is best?",
        source="FedPerfix, Table 6",
        kind="accuracy",
        view="personal",
        columns="",
        digits=grid(DIGITS, methods("local", "fedperfix", "prefix_z", "prefix_r", "prompts", "adapters")),
        paper=of_table(one("fedperfix/table6")),
        minutes=(5, None),
    ),
    "communication": Study(
        asks="Which accuracy do tuned parts reach, and how many bytes does a target cost?",
        source="FedPEFT, Tables 1 and 2",
        kind="target",
        view="server",
        columns="",
        digits=grid(
            stacked(DIGITS, {"run": {"eval_every": 1}}),
            {
                **sized(tunes(), ("full", 8), ("full", 4), ("full", 2), ("full", 1), ("head", 8), ("head", 24)),
                **sized(tunes(), ("bias", 8), ("adapter", 8), ("prompt", 8)),
            },
            targets=(15.0, 20.0, 30.0),
        ),
        pretrained=grid(
            stacked(IMAGENET, {"run": {"eval_every": 1}}),
            {
                **sized(ON_TINY, ("full", 4), ("full", 2), ("full", 1), ("head", 4), ("head", 16)),
                **sized(ON_TINY, ("bias", 4), ("adapter", 4), ("prompt", 4)),
            },
            targets=(30.0, 45.0, 60.0),
        ),
        paper=of_table(ablations.COMMUNICATION, targets=ablations.COMMUNICATION_TARGETS),
        minutes=(6, 18),
    ),
    "convergence": Study(
        asks="How many rounds and bytes does a target accuracy cost?",
        source="PFedEdit, Table 2",
        kind="target",
        view="personal",
        columns="data",
        digits=grid(
            stacked(DIGITS_DH, {"train": {"rounds": 24}, "run": {"eval_every": 1}}),
            {"fedavg": method("fedavg"), "fedper": method("fedper"), "pfededit": edits()},
            targets=(50.0, 60.0, 70.0, 80.0, 90.0),
        ),
        paper=of_table(
            ablations.CONVERGENCE,
            targets={column.words: ablations.CONVERGENCE_TARGETS for column in ablations.CONVERGENCE.columns},
        ),
        minutes=(4, None),
    ),
    "capability": Study(
        asks="How do tuned parts fare with many or few, alike or different clients?",
        source="FedPEFT, Table 3",
        kind="accuracy",
        view="server",
        columns="clients N, sampled M",
        digits=grid(DIGITS, tunes(), federations((8, 8), (8, 2), (24, 24), (24, 6), alpha=0.3)),
        pretrained=[
            *grid(BRIEF, {"scratch": stacked(FROM_SCRATCH, {"train": {"lr": 1e-2}})}, federations((8, 8), alpha=0.3)),
            *grid(BRIEF, ON_TINY, federations((8, 8), (8, 2), (16, 16), (16, 4), alpha=0.3)),
        ],
        paper=of_table(ablations.CAPABILITY),
        minutes=(7, 45),
        seeds=(0,),
    ),
    "domain-gap": Study(
        asks="How do tuned parts fare on images far from those of the pre-training?",
        source="FedPEFT, Table 4",
        kind="accuracy",
        view="server",
        columns="data",
        digits=grid(DIGITS, tunes()),
        pretrained=grid(IMAGENET, ON_TINY, {"Office-Caltech": {}, "PneumoniaMNIST": PNEUMONIA}),
        paper=of_table(ablations.DOMAIN_GAP),
        minutes=(2, 12),
    ),
    "scarcity": Study(
        asks="How do tuned parts fare with few images in all?",
        source="FedPEFT, Table 6",
        kind="accuracy",
        view="server",
        columns="images in all",
        digits=grid(
            stacked(DIGITS, {"partition": {"min_samples": 4}}),
            tunes(),
            {f"{n} images": {"data": {"samples": n}} for n in (300, 600, 1200)},
        ),
        pretrained=grid(
            stacked(IMAGENET, {"partition": {"min_samples": 8}}),
            ON_TINY,
            {f"{n} images": {"data": {"samples": n}} for n in (400, 800, 1600)},
        ),
        paper=of_table(ablations.SCARCITY),
        minutes=(4, 12),
    ),
    "pretraining": Study(
        asks="How much does the pre-training matter?",
        source="FedPEFT, Table 7",
        kind="accuracy",
        view="server",
        columns="weights at the start",
        digits=grid(DIGITS, tunes()),
        pretrained=grid(IMAGENET, ON_TINY, {"ViT-Tiny, ImageNet": {}, "ViT-Tiny, random": FROM_SCRATCH}),
        paper=of_table(ablations.PRETRAINING),
        minutes=(2, 12),
    ),
    "lr": Study(
        asks="Which learning rate is best for each tune?",
        source="FedPEFT, Table 8",
        kind="choose",
        view="server",
        columns="tune",
        digits=rates(ablations.TUNES, MICRO_RATES, DIGITS),
        pretrained=rates(ablations.TUNES, ablations.RATES, BRIEF),
        paper=rates(ablations.TUNES, ablations.RATES, ablations.FEDPEFT),
        minutes=(4, 20),
        seeds=(0,),
    ),
    "dh": Study(
        asks="How do the methods fare as clients share fewer classes?",
        source="PFedEdit, Table 1",
        kind="accuracy",
        view="personal",
        columns="heterogeneity",
        digits=grid(
            DIGITS_DH,
            methods("local", "fedavg", "fedper", "fedbn", "fedrep", "distrans", "moon", "apfl") | {"pfededit": edits()},
            {f"DH {level} %": {"partition": {"level": float(level)}} for level in tables.LEVELS},
        ),
        paper=of_table(one("pfededit/table1")),
        minutes=(10, None),
        seeds=(0,),
    ),
    "edit": Study(
        asks="How many layers to edit, tried on how many images, ranked how, once or every round?",
        source="PFedEdit, Tables 3, 4, 5 and 7",
        kind="choose",
        view="personal",
        columns="parameter",
        digits=panels(stacked(DIGITS_DH, WITH_VAL), EDIT_PANELS),
        paper=of_table(*ablations.EDITING),
        minutes=(7, None),
    ),
    "choice": Study(
        asks="Does it matter which layers are personal, or only how many?",
        source="PFedEdit, Figure 2",
        kind="accuracy",
        view="personal",
        columns="personal layers",
        digits=[
            Case(name, f"k={k}", stacked(DIGITS_DH, edits(k=k, **options)))
            for k in (1, 3, 5, 7, 9)
            for name, options in ablations.CHOICES.items()
        ],
        paper=of_table(ablations.CHOICE),
        minutes=(6, None),
    ),
    "split": Study(
        asks="Split learning: how many local epochs, clients, and rounds between averages?",
        source="FedV, its ablation figures",
        kind="choose",
        view="personal",
        columns="parameter",
        digits=panels(stacked(DIGITS_SPLIT, WITH_VAL), SPLIT_PANELS),
        paper=of_table(*ablations.SPLIT),
        minutes=(6, None),
    ),
    "pits": Study(
        asks="Split learning: which pre-trained transformer?",
        source="FedV, Table 3",
        kind="accuracy",
        view="personal",
        columns="transformer",
        digits=grid(
            DIGITS_SPLIT,
            {"fedv": method("fedv", fedround=5), "fedvz": method("fedvz", fedround=5)},
            {
                "ViT-Micro": {},
                "6 blocks of 64": {"model": {"name": "test_vit", **EIGHT_PIXELS}},
            },
        ),
        pretrained=grid(
            IMAGENET_SPLIT,
            {"fedv": method("fedv", fedround=5), "fedvz": method("fedvz", fedround=5)},
            {"ViT-Tiny, 16 px": {}, "ViT-Tiny, 8 px": TINY_PATCH8, "ViT-Tiny, random": FROM_SCRATCH},
        ),
        paper=of_table(*every("fedv/table3")),
        minutes=(3, 15),
        seeds=(0,),
    ),
    "features": Study(
        asks="What do the features before the classifier look like?",
        source="FedPEFT, Figure 3",
        kind="features",
        view="server",
        columns="",
        digits=grid(DIGITS, tunes()),
        pretrained=grid(stacked(IMAGENET, {"data": {"samples": 2000, "test": 0.5}}), ON_TINY),
        paper=of_table(ablations.FEATURES),
        minutes=(1, 6),
        seeds=(0,),
    ),
}

SMALL_FILES = ("office_caltech10", str(SMALL["model"]["weights"]))


def has_weights(folder: Path | None) -> bool:
    """Whether the data folder has the images and weights of the grids on pre-trained weights."""
    return folder is not None and all((folder / name).exists() for name in SMALL_FILES)
