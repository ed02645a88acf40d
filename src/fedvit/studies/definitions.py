"""Every study by name: its question, its small and its published grid of runs, and how it is measured.

A study is data, and `fedvit.studies.run` runs it. `digits` is its grid on the embedded digits, and `paper` is the
published one. `pretrained` is its grid on real images with a ViT-Tiny pre-trained on ImageNet; it replaces `digits` if
the data folder has both. This module does not load PyTorch, so that listing the studies is fast.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.table import Table

from fedvit.config.tables import stack_tables
from fedvit.studies import small
from fedvit.studies.cases import Case, grid, of_table, panels
from fedvit.studies.published import fedpeft, fedpeft_costs, fedperfix, fedv, pfededit
from fedvit.studies.published.common import method

Kind = Literal["accuracy", "choose", "target", "cost", "features"]


@dataclass(frozen=True)
class Study:
    """A question, and the runs that answer it.

    The kind `choose` marks the best row of every column on validation images, `target` measures what it costs to reach
    given accuracies, `cost` trains nothing, and `features` draws what the models see.
    """

    asks: str
    source: str
    kind: Kind
    view: Literal["personal", "server"]
    columns: str  # what the columns vary
    digits: Sequence[Case]
    paper: Sequence[Case]
    minutes: tuple[float, float | None]  # estimates for one core, on digits and on pre-trained weights
    pretrained: Sequence[Case] | None = None
    seeds: tuple[int, ...] = (0, 1, 2)  # on digits; the other grids have one seed
    overall: bool = False  # also report the mean over the columns
    note: str = ""  # the caption of a table of costs


TABLE2 = [replace(case, column="") for case in of_table(fedperfix.TABLE2) if case.column == "CIFAR-100"]
COSTS = [replace(case, published=fedperfix.COSTS[case.row]) for case in TABLE2]

STUDIES: dict[str, Study] = {
    "sensitivity": Study(
        asks="Which parts of a ViT should be personal?",
        source="FedPerfix, Table 1",
        kind="accuracy",
        view="personal",
        columns="personal part",
        digits=small.parts(small.DIGITS),
        paper=of_table(fedperfix.TABLE1),
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
        note=fedperfix.COST_NOTE,
    ),
    "backbones": Study(
        asks="Do the methods order the same way on a ResNet and on a ViT?",
        source="FedPerfix, Table 3",
        kind="accuracy",
        view="personal",
        columns="model",
        digits=grid(
            stack_tables(
                [
                    small.DIGITS,
                    {"partition": {"clients": 16, "alpha": 0.1}, "train": {"cohort": 4, "rounds": 12, "epochs": 1}},
                ]
            ),
            small.TABLE3_ROWS,
            {"ResNet18": small.RESNET18, "ViT-Micro": {}},
        ),
        paper=[
            *(replace(case, column="ResNet50") for case in of_table(fedperfix.TABLE3)),
            *(replace(case, column="ViT-Small") for case in TABLE2 if case.row in small.TABLE3_ROWS),
        ],
        minutes=(10, None),
        seeds=(0,),
    ),
    "settings": Study(
        asks="How do the number of clients and the share that is sampled matter?",
        source="FedPerfix, Table 4",
        kind="accuracy",
        view="personal",
        columns="clients, and share per round",
        digits=grid(
            small.DIGITS,
            small.TABLE4_ROWS,
            {f"N={n}, {100 * k / n:g} %": small.federation_of(n, k) for n, k in ((16, 2), (16, 4), (32, 4), (32, 8))},
        ),
        paper=of_table(fedperfix.TABLE4),
        minutes=(8, None),
    ),
    "sizes": Study(
        asks="How does the size of the ViT matter?",
        source="FedPerfix, Table 5",
        kind="accuracy",
        view="personal",
        columns="model",
        digits=grid(
            stack_tables([small.DIGITS, {"train": {"rounds": 8, "cohort": 6}}]),
            small.TABLE4_ROWS,
            {
                "4 blocks of 48": {},
                "6 blocks of 64": {"model": {"name": "test_vit", **small.EIGHT_PIXELS}},
                "12 blocks of 192": {
                    "model": {"name": "vit_tiny_patch16_224", **small.EIGHT_PIXELS},
                    "train": {"lr": 5e-4},
                },
            },
        ),
        paper=of_table(fedperfix.TABLE5),
        minutes=(15, None),
        seeds=(0,),
    ),
    "designs": Study(
        asks="Which design of the personal part is best?",
        source="FedPerfix, Table 6",
        kind="accuracy",
        view="personal",
        columns="",
        digits=grid(small.DIGITS, small.methods("local", "fedperfix", "prefix_z", "prefix_r", "prompts", "adapters")),
        paper=of_table(fedperfix.TABLE6),
        minutes=(5, None),
    ),
    "communication": Study(
        asks="Which accuracy do tuned parts reach, and how many bytes does a target cost?",
        source="FedPEFT, Tables 1 and 2",
        kind="target",
        view="server",
        columns="",
        digits=grid(
            stack_tables([small.DIGITS, {"run": {"eval_every": 1}}]),
            {
                **small.sized(
                    small.tunes(), ("full", 8), ("full", 4), ("full", 2), ("full", 1), ("head", 8), ("head", 24)
                ),
                **small.sized(small.tunes(), ("bias", 8), ("adapter", 8), ("prompt", 8)),
            },
            targets=(15.0, 20.0, 30.0),
        ),
        pretrained=grid(
            stack_tables([small.IMAGENET, {"run": {"eval_every": 1}}]),
            {
                **small.sized(small.ON_TINY, ("full", 4), ("full", 2), ("full", 1), ("head", 4), ("head", 16)),
                **small.sized(small.ON_TINY, ("bias", 4), ("adapter", 4), ("prompt", 4)),
            },
            targets=(30.0, 45.0, 60.0),
        ),
        paper=of_table(fedpeft.TABLE1, targets=fedpeft_costs.TARGETS),
        minutes=(6, 18),
    ),
    "convergence": Study(
        asks="How many rounds and bytes does a target accuracy cost?",
        source="PFedEdit, Table 2",
        kind="target",
        view="personal",
        columns="data",
        digits=grid(
            stack_tables([small.DIGITS_DH, {"train": {"rounds": 24}, "run": {"eval_every": 1}}]),
            {"fedavg": method("fedavg"), "fedper": method("fedper"), "pfededit": small.edits()},
            targets=(50.0, 60.0, 70.0, 80.0, 90.0),
        ),
        paper=of_table(
            pfededit.TABLE2,
            targets={column.words: pfededit.TARGETS for column in pfededit.TABLE2.columns},
        ),
        minutes=(4, None),
    ),
    "capability": Study(
        asks="How do tuned parts fare with many or few, alike or different clients?",
        source="FedPEFT, Table 3",
        kind="accuracy",
        view="server",
        columns="clients N, sampled M",
        digits=grid(small.DIGITS, small.tunes(), small.federations((8, 8), (8, 2), (24, 24), (24, 6), alpha=0.3)),
        pretrained=[
            *grid(
                small.BRIEF,
                {"scratch": stack_tables([small.FROM_SCRATCH, {"train": {"lr": 1e-2}}])},
                small.federations((8, 8), alpha=0.3),
            ),
            *grid(small.BRIEF, small.ON_TINY, small.federations((8, 8), (8, 2), (16, 16), (16, 4), alpha=0.3)),
        ],
        paper=of_table(fedpeft.TABLE3),
        minutes=(7, 45),
        seeds=(0,),
    ),
    "domain-gap": Study(
        asks="How do tuned parts fare on images far from those of the pre-training?",
        source="FedPEFT, Table 4",
        kind="accuracy",
        view="server",
        columns="data",
        digits=grid(small.DIGITS, small.tunes()),
        pretrained=grid(small.IMAGENET, small.ON_TINY, {"Office-Caltech": {}, "PneumoniaMNIST": small.PNEUMONIA}),
        paper=of_table(fedpeft.TABLE4),
        minutes=(2, 12),
    ),
    "scarcity": Study(
        asks="How do tuned parts fare with few images in all?",
        source="FedPEFT, Table 6",
        kind="accuracy",
        view="server",
        columns="images in all",
        digits=grid(
            stack_tables([small.DIGITS, {"partition": {"min_samples": 4}}]),
            small.tunes(),
            {f"{n} images": {"data": {"samples": n}} for n in (300, 600, 1200)},
        ),
        pretrained=grid(
            stack_tables([small.IMAGENET, {"partition": {"min_samples": 8}}]),
            small.ON_TINY,
            {f"{n} images": {"data": {"samples": n}} for n in (400, 800, 1600)},
        ),
        paper=of_table(fedpeft.TABLE6),
        minutes=(4, 12),
    ),
    "pretraining": Study(
        asks="How much does the pre-training matter?",
        source="FedPEFT, Table 7",
        kind="accuracy",
        view="server",
        columns="weights at the start",
        digits=grid(small.DIGITS, small.tunes()),
        pretrained=grid(
            small.IMAGENET, small.ON_TINY, {"ViT-Tiny, ImageNet": {}, "ViT-Tiny, random": small.FROM_SCRATCH}
        ),
        paper=of_table(fedpeft.TABLE7),
        minutes=(2, 12),
    ),
    "lr": Study(
        asks="Which learning rate is best for each tune?",
        source="FedPEFT, Table 8",
        kind="choose",
        view="server",
        columns="tune",
        digits=small.rates(small.MICRO_RATES, small.DIGITS),
        pretrained=small.rates(fedpeft.RATES, small.BRIEF),
        paper=small.rates(fedpeft.RATES, fedpeft.SETTINGS),
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
            small.DIGITS_DH,
            small.methods("local", "fedavg", "fedper", "fedbn", "fedrep", "distrans", "moon", "apfl")
            | {"pfededit": small.edits()},
            {f"DH {level} %": {"partition": {"level": float(level)}} for level in pfededit.LEVELS},
        ),
        paper=of_table(pfededit.TABLE1),
        minutes=(10, None),
        seeds=(0,),
    ),
    "edit": Study(
        asks="How many layers to edit, tried on how many images, ranked how, once or every round?",
        source="PFedEdit, Tables 3, 4, 5 and 7",
        kind="choose",
        view="personal",
        columns="parameter",
        digits=panels(stack_tables([small.DIGITS_DH, small.WITH_VAL]), small.EDIT_PANELS),
        paper=of_table(*pfededit.EDITING),
        minutes=(7, None),
    ),
    "choice": Study(
        asks="Does it matter which layers are personal, or only how many?",
        source="PFedEdit, Figure 2",
        kind="accuracy",
        view="personal",
        columns="personal layers",
        digits=panels(
            small.DIGITS_DH,
            {
                f"k={k}": {name: small.edits(k=k, **options) for name, options in pfededit.CHOICES.items()}
                for k in (1, 3, 5, 7, 9)
            },
        ),
        paper=of_table(pfededit.FIGURE2),
        minutes=(6, None),
    ),
    "split": Study(
        asks="Split learning: how many local epochs, clients, and rounds between averages?",
        source="FedV, its ablation figures",
        kind="choose",
        view="personal",
        columns="parameter",
        digits=panels(stack_tables([small.DIGITS_SPLIT, small.WITH_VAL]), small.SPLIT_PANELS),
        paper=of_table(*fedv.ABLATIONS),
        minutes=(6, None),
    ),
    "pits": Study(
        asks="Split learning: which pre-trained transformer?",
        source="FedV, Table 3",
        kind="accuracy",
        view="personal",
        columns="transformer",
        digits=grid(
            small.DIGITS_SPLIT,
            {"fedv": method("fedv", fedround=5), "fedvz": method("fedvz", fedround=5)},
            {
                "ViT-Micro": {},
                "6 blocks of 64": {"model": {"name": "test_vit", **small.EIGHT_PIXELS}},
            },
        ),
        pretrained=grid(
            small.IMAGENET_SPLIT,
            {"fedv": method("fedv", fedround=5), "fedvz": method("fedvz", fedround=5)},
            {"ViT-Tiny, 16 px": {}, "ViT-Tiny, 8 px": small.TINY_PATCH8, "ViT-Tiny, random": small.FROM_SCRATCH},
        ),
        paper=of_table(*fedv.TABLE3),
        minutes=(3, 15),
        seeds=(0,),
    ),
    "features": Study(
        asks="What do the features before the classifier look like?",
        source="FedPEFT, Figure 3",
        kind="features",
        view="server",
        columns="",
        digits=grid(small.DIGITS, small.tunes()),
        pretrained=grid(stack_tables([small.IMAGENET, {"data": {"samples": 2000, "test": 0.5}}]), small.ON_TINY),
        paper=of_table(fedpeft.FIGURE3),
        minutes=(1, 6),
        seeds=(0,),
    ),
}


def studies_table() -> Table:
    """Make the table that `fedvit study` shows without a name."""
    title = "fedvit study NAME"
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("study", "question", "mirrors"):
        table.add_column(name, overflow="fold")
    for name in ("runs,\nat most", "minutes on\none core"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, study in STUDIES.items():
        digits, weights = study.minutes
        runs = f"{len(study.digits) * len(study.seeds) if study.kind != 'cost' else 0}"
        if study.pretrained is not None:
            runs = f"{runs} / {len(study.pretrained)}"
        minutes = f"{digits:g}" if weights is None else f"{digits:g} / {weights:g}"
        table.add_row(name, study.asks, study.source, runs, minutes)
    table.caption = (
        "of two numbers, the second is for pre-trained weights, which are used if the data folder has them; minutes "
        "are estimates; --workers 2 divides the work over two cores"
    )
    table.caption_justify = "left"
    return table
