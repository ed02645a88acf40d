"""The studies of FedPEFT (Sun et al. 2022): its tables and figures, but for Table 5, about differential privacy."""

from dataclasses import replace

from fedvit.config.tables import Tables, stack_tables
from fedvit.studies import small
from fedvit.studies.cases import Case, grid, of_table
from fedvit.studies.definitions.study import Study
from fedvit.studies.published import fedpeft
from fedvit.studies.published.common import rows_of
from fedvit.studies.published.fedpeft_costs import TARGETS, printed_costs

SEEDS = (0, 1, 2)  # the paper runs its experiments several times and names no seeds

COMMUNICATION = [
    replace(case, costs=printed_costs(case.row, case.column)) for case in of_table(fedpeft.TABLE1, targets=TARGETS)
]


def _searches() -> list[Case]:
    """Make the grid of Table 8: every tune at every rate in eleven settings; the twelfth is that of Table 5."""
    rates: dict[float, Tables] = {rate: {"train": {"lr": rate}} for rate in fedpeft.RATES}
    return [
        Case(f"{rate:g}", f"{column.words}, {tune}", stack_tables([settings, own]), "best" * (rate == float(value)))
        for tune, column, value, settings, _ in rows_of(fedpeft.TABLE8)
        for rate, own in rates.items()
    ]


def _trained_on(*images: int) -> dict[str, Tables]:
    """Make columns with this many training images in all; the small grids hold out a quarter more for testing."""
    return {f"{count} images to train on": {"data": {"samples": count * 4 // 3, "test": 0.25}} for count in images}


STUDIES: dict[str, Study] = {
    "fedpeft-table1": Study(
        aka=("communication", "fedpeft-table2"),
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
        paper=COMMUNICATION,
        minutes=(6, 18),
        paper_seeds=SEEDS,
    ),
    "fedpeft-table3": Study(
        aka=("capability",),
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
        paper_seeds=SEEDS,
        seeds=(0,),
    ),
    "fedpeft-table4": Study(
        aka=("domain-gap",),
        asks="How do tuned parts fare on images far from those of the pre-training?",
        source="FedPEFT, Table 4",
        kind="accuracy",
        view="server",
        columns="data",
        digits=grid(small.DIGITS, small.tunes()),
        pretrained=grid(small.IMAGENET, small.ON_TINY, {"Office-Caltech": {}, "PneumoniaMNIST": small.PNEUMONIA}),
        paper=of_table(fedpeft.TABLE4),
        minutes=(2, 12),
        note="Bias on PCam: Table 4 prints 84.98, but +0.47 over full tuning beside it, which makes Table 1's 85.29.",
        paper_seeds=SEEDS,
    ),
    "fedpeft-table6": Study(
        aka=("scarcity",),
        asks="How do tuned parts fare with few images in all?",
        source="FedPEFT, Table 6",
        kind="accuracy",
        view="server",
        columns="images",
        digits=grid(
            stack_tables([small.DIGITS, {"partition": {"min_samples": 4}}]),
            small.tunes(),
            _trained_on(225, 450, 900),
        ),
        pretrained=grid(
            stack_tables([small.IMAGENET, {"partition": {"min_samples": 8}}]),
            small.ON_TINY,
            _trained_on(300, 600, 1200),
        ),
        paper=of_table(fedpeft.TABLE6),
        minutes=(4, 12),
        paper_seeds=SEEDS,
    ),
    "fedpeft-table7": Study(
        aka=("pretraining",),
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
        paper_seeds=SEEDS,
    ),
    "fedpeft-table8": Study(
        aka=("lr",),
        asks="Which learning rate is best for each tune?",
        source="FedPEFT, Table 8",
        kind="choose",
        view="server",
        columns="setting and tune",
        digits=small.rates(small.MICRO_RATES, small.DIGITS),
        pretrained=small.rates(fedpeft.RATES, small.BRIEF),
        paper=_searches(),
        minutes=(4, 20),
        paper_seeds=SEEDS,
        seeds=(0,),
    ),
    "fedpeft-figure3": Study(
        aka=("features",),
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
