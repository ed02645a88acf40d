"""The studies of PFedEdit (Yuan et al. 2024): its tables and figures."""

from fedvit.config.tables import stack_tables
from fedvit.studies import small
from fedvit.studies.cases import grid, of_table, panels
from fedvit.studies.definitions.study import Study
from fedvit.studies.published import pfededit
from fedvit.studies.published.common import method

STUDIES: dict[str, Study] = {
    "pfededit-table1": Study(
        aka=("dh",),
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
    "pfededit-table2": Study(
        aka=("convergence",),
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
    "pfededit-figure2": Study(
        aka=("choice",),
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
}
