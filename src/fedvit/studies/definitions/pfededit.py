"""The studies of PFedEdit (Yuan et al. 2024): its tables and figures."""

from dataclasses import replace

from fedvit.config.tables import stack_tables
from fedvit.studies import small
from fedvit.studies.cases import Case, grid, of_table, panels
from fedvit.studies.definitions.study import Study
from fedvit.studies.published import pfededit
from fedvit.studies.published.common import Table, method

DH = stack_tables([small.DIGITS_DH, {"run": {"eval_every": 1}}])
WITH_VAL = stack_tables([DH, small.WITH_VAL])
RECENT = small.methods("fedfa", "fedfed", "fedala", "fed_lamb", "fedrolex", "heterofl")


def parameter(number: int, asks: str, table: Table, *panel: str, minutes: float) -> Study:
    """Make the study of a table that varies a parameter, on these panels of the small grid."""
    return Study(
        asks=asks,
        source=f"PFedEdit, Table {number}",
        kind="choose",
        view="personal",
        columns="parameter",
        digits=panels(WITH_VAL, {name: small.EDIT_PANELS[name] for name in panel}),
        paper=[_with_round(case) for case in of_table(table)],
        minutes=(minutes, None),
        best=True,
    )


def _with_round(case: Case) -> Case:
    """Name the round of a published figure, where the paper does (Table 7)."""
    number = pfededit.CONVERGED.get((case.row, case.column))
    return case if number is None else replace(case, published=f"{case.published}, round {number}")


STUDIES: dict[str, Study] = {
    "pfededit-table1": Study(
        aka=("dh",),
        asks="How do the methods fare as clients share fewer classes?",
        source="PFedEdit, Table 1",
        kind="accuracy",
        view="personal",
        columns="heterogeneity",
        digits=grid(
            DH,
            small.methods("local", "fedavg", "fedper", "fedbn", "fedrep", "distrans", "moon", "apfl")
            | {"pfededit": small.edits()},
            {f"DH {level} %": {"partition": {"level": float(level)}} for level in pfededit.LEVELS},
        ),
        paper=of_table(pfededit.TABLE1),
        minutes=(10, None),
        seeds=(0,),
        best=True,
    ),
    "pfededit-table2": Study(
        aka=("convergence",),
        asks="How many rounds and bytes does a target accuracy cost?",
        source="PFedEdit, Table 2",
        kind="target",
        view="personal",
        columns="data",
        digits=grid(
            stack_tables([DH, {"train": {"rounds": 24}}]),
            {"fedavg": method("fedavg"), "fedper": method("fedper"), "pfededit": small.edits()},
            targets=(50.0, 60.0, 70.0, 80.0, 90.0),
        ),
        paper=of_table(
            pfededit.TABLE2,
            targets={column.words: pfededit.TARGETS for column in pfededit.TABLE2.columns},
        ),
        minutes=(4, None),
        target_by="micro",
        best=True,
    ),
    "pfededit-table3": parameter(3, "How many layers to edit?", pfededit.TABLE3, "layers k", minutes=3),
    "pfededit-table4": parameter(
        4, "On how many images to try the layers, with as many to train on?", pfededit.TABLE4, "probe p", minutes=2
    ),
    "pfededit-table5": parameter(5, "How to rank the layers?", pfededit.TABLE5, "metric", minutes=2),
    "pfededit-table7": parameter(7, "Choose the layers once, or in every round?", pfededit.TABLE7, "choice", minutes=1),
    "edit": Study(
        asks="How many layers to edit, tried on how many images, ranked how, once or every round?",
        source="PFedEdit, Tables 3, 4, 5 and 7",
        kind="choose",
        view="personal",
        columns="parameter",
        digits=panels(WITH_VAL, small.EDIT_PANELS),
        paper=[_with_round(case) for case in of_table(*pfededit.EDITING)],
        minutes=(7, None),
        best=True,
    ),
    "pfededit-table6": Study(
        asks="How do more recent methods fare?",
        source="PFedEdit, Table 6",
        kind="accuracy",
        view="personal",
        columns="",
        digits=grid(DH, RECENT | {"pfededit": small.edits()}),
        paper=of_table(pfededit.TABLE6),
        minutes=(3, None),
        seeds=(0,),
        best=True,
    ),
    "pfededit-table8": Study(
        asks="Does it help to share a part of every layer, or to adopt a part of the layers?",
        source="PFedEdit, Table 8",
        kind="accuracy",
        view="personal",
        columns="data",
        digits=grid(DH, small.methods("cd2_pfed", "partialfed") | {"pfededit": small.edits()}),
        pretrained=grid(
            small.EIGHT_OWNERS,
            small.methods("cd2_pfed", "partialfed") | {"pfededit": small.edits(k=5)},
            {"Office-Caltech, DH 80 %": small.BY_CLASSES, "Office-Caltech, by domain": small.BY_DOMAIN},
        ),
        paper=of_table(pfededit.TABLE8),
        minutes=(2, 10),
        best=True,
    ),
    "pfededit-table9": Study(
        asks="How many seconds does a round take, by network?",
        source="PFedEdit, Table 9",
        kind="time",
        view="personal",
        columns="network",
        digits=grid(
            small.TIMED,
            {**small.methods("fedavg", "fedala", "fed_lamb"), "pfededit": method("pfededit", layers="paper")},
            {words: {"model": {"name": name, "image_size": 32}} for name, (words, _) in pfededit.NETWORKS.items()},
        ),
        paper=of_table(pfededit.TABLE9),
        minutes=(4, None),
        seeds=(0,),
    ),
    "pfededit-figure2": Study(
        aka=("choice",),
        asks="Does it matter which layers are personal, or only how many?",
        source="PFedEdit, Figure 2",
        kind="accuracy",
        view="personal",
        columns="personal layers",
        digits=panels(
            DH,
            {
                f"k={k}": {name: small.edits(k=k, **options) for name, options in pfededit.CHOICES.items()}
                for k in (1, 3, 5, 7, 9)
            },
        ),
        paper=of_table(pfededit.FIGURE2),
        minutes=(6, None),
    ),
}
