"""The studies of FedV: its tables and figures."""

from fedvit.config.tables import stack_tables
from fedvit.studies import small
from fedvit.studies.cases import grid, of_table, panels
from fedvit.studies.definitions.study import Study
from fedvit.studies.published import fedv
from fedvit.studies.published.common import method

SEEDS = (0, 1, 2)  # the paper averages over three seeds and does not name them

STUDIES: dict[str, Study] = {
    "fedv-table3": Study(
        aka=("pits",),
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
        paper_seeds=SEEDS,
        seeds=(0,),
    ),
    "fedv-figure2": Study(
        aka=("split",),
        asks="Split learning: how many local epochs, clients, and rounds between averages?",
        source="FedV, its ablation figures",
        kind="choose",
        view="personal",
        columns="parameter",
        digits=panels(stack_tables([small.DIGITS_SPLIT, small.WITH_VAL]), small.SPLIT_PANELS),
        paper=of_table(*fedv.ABLATIONS),
        minutes=(6, None),
        paper_seeds=SEEDS,
    ),
}
