"""The studies of FedPerfix (Sun et al. 2023): its tables and figures."""

from dataclasses import replace

from fedvit.config.tables import stack_tables
from fedvit.studies import small
from fedvit.studies.cases import grid, of_table
from fedvit.studies.definitions.study import Study
from fedvit.studies.published import fedperfix

TABLE2 = [replace(case, column="") for case in of_table(fedperfix.TABLE2) if case.column == "CIFAR-100"]
COSTS = [replace(case, published=fedperfix.COSTS[case.row]) for case in TABLE2 if case.row in fedperfix.COSTS]

STUDIES: dict[str, Study] = {
    "fedperfix-table1": Study(
        aka=("sensitivity",),
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
    "fedperfix-table2": Study(
        asks="Which method gives the clients the best models, and at what cost?",
        source="FedPerfix, Table 2",
        kind="accuracy",
        view="personal",
        columns="data",
        digits=grid(
            small.DIGITS,
            small.TABLE2_ROWS,
            {"digits, Dir(0.3)": {}, "digits, Dir(0.1)": {"partition": {"alpha": 0.1}}},
        ),
        pretrained=grid(small.BRIEF, small.TABLE2_ROWS, small.TABLE2_COLUMNS),
        paper=of_table(fedperfix.TABLE2),
        minutes=(14, 40),
        costs=fedperfix.COSTS,
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
    "fedperfix-table3": Study(
        aka=("backbones",),
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
    "fedperfix-table4": Study(
        aka=("settings",),
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
    "fedperfix-table5": Study(
        aka=("sizes",),
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
    "fedperfix-table6": Study(
        aka=("designs",),
        asks="Which design of the personal part is best?",
        source="FedPerfix, Table 6",
        kind="accuracy",
        view="personal",
        columns="",
        digits=grid(small.DIGITS, small.methods("local", *small.TABLE6_ROWS)),
        paper=of_table(fedperfix.TABLE6),
        minutes=(5, None),
    ),
    "fedperfix-figure3": Study(
        asks="What does every single client gain over Local?",
        source="FedPerfix, Figure 3",
        kind="gains",
        view="personal",
        columns="",
        digits=grid(small.DIGITS, small.TABLE2_ROWS),
        pretrained=grid(small.BRIEF, small.TABLE2_ROWS, {"": small.TABLE2_COLUMNS["CIFAR-100"]}),
        paper=[replace(case, published="") for case in TABLE2],
        minutes=(7, 13),
    ),
    "fedperfix-lambda": Study(
        asks="Which share of attention goes to the concatenated prefixes of equation 6?",
        source="FedPerfix, equation 6",
        kind="prefix",
        view="personal",
        columns="",
        digits=grid(small.DIGITS, small.SCALES),
        paper=grid(fedperfix.SETTINGS, small.SCALES),
        minutes=(1, None),
        seeds=(0,),
    ),
}
