"""The studies of FedV: its tables and figures. Table 1 is a benchmark, `python -m benchmarks backbones`."""

from dataclasses import replace

from fedvit.config.tables import stack_tables
from fedvit.studies import small
from fedvit.studies.cases import Case, grid, of_table, panels
from fedvit.studies.definitions.study import Study
from fedvit.studies.published import fedv
from fedvit.studies.published.common import method

SEEDS = (0, 1, 2)  # the paper averages over three seeds and does not name them


def _kept_heads(cases: list[Case]) -> list[Case]:
    """Make the split rows of a table once more, with pre-trained heads that are not trained."""
    split = [case for case in cases if case.row in ("fedv", "fedvz")]
    kept = [stack_tables([case.settings, fedv.KEPT_HEAD]) for case in split]
    return [
        replace(case, row=f"{case.row}, kept head", settings=settings, published="")
        for case, settings in zip(split, kept, strict=True)
    ]


def _lambdas(cases: list[Case]) -> list[Case]:
    """Make a case of every column of Table 2 for each of Ditto's lambdas, with a validation set to choose by."""
    return [
        replace(
            case,
            row=f"{value:g}",
            settings=stack_tables([case.settings, {"method": {"lam": value}}, small.WITH_VAL]),
            published="",
        )
        for case in cases
        if case.row == "ditto"
        for value in fedv.LAMBDAS
    ]


TABLE2 = of_table(fedv.TABLE2)

STUDIES: dict[str, Study] = {
    "fedv-table2": Study(
        asks="Does split learning on a pre-trained ViT beat federated learning where clients differ?",
        source="FedV, Table 2",
        kind="accuracy",
        view="personal",
        columns="partition",
        digits=grid(small.DIGITS_SPLIT, small.FEDV_ROWS, small.FEDV_COLUMNS),
        pretrained=grid(small.IMAGENET, small.FEDV_ON_TINY, small.FEDV_COLUMNS),
        paper=[*TABLE2, *_kept_heads(TABLE2)],
        minutes=(6, 12),
        paper_seeds=SEEDS,
        seeds=(0,),
    ),
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
    "fedv-table5": Study(
        asks="Does Table 2 hold on Tiny-ImageNet?",
        source="FedV, Table 5",
        kind="accuracy",
        view="personal",
        columns="partition",
        digits=grid(
            small.DIGITS_SPLIT,
            small.FEDV_ROWS,
            {name: small.FEDV_COLUMNS[name] for name in ("Dir(0.1)", "Path-5")},
        ),
        pretrained=grid(
            small.IMAGENET,
            small.FEDV_ON_TINY,
            {name: small.FEDV_COLUMNS[name] for name in ("Dir(0.1)", "Path-5")},
        ),
        paper=of_table(fedv.TABLE5),
        minutes=(3, 6),
        paper_seeds=SEEDS,
        seeds=(0,),
    ),
    "fedv-ditto": Study(
        asks="Which lambda should Ditto have beside FedV?",
        source="FedV, Appendix A.3",
        kind="choose",
        view="personal",
        columns="partition",
        digits=grid(
            stack_tables([small.DIGITS_SPLIT, small.WITH_VAL]),
            {f"{value:g}": method("ditto", lam=value) for value in fedv.LAMBDAS},
            small.FEDV_COLUMNS,
        ),
        paper=_lambdas(TABLE2),
        minutes=(5, None),
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
        pretrained=panels(stack_tables([small.IMAGENET_SPLIT, small.WITH_VAL]), small.SPLIT_PANELS),
        paper=of_table(*fedv.ABLATIONS),
        minutes=(7, 5),
        paper_seeds=SEEDS,
    ),
}
