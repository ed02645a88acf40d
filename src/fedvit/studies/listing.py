"""All studies as a table for the terminal; quick, since nothing of torch is needed for it."""

from rich.box import SIMPLE_HEAD
from rich.table import Table

from fedvit.studies.definitions import STUDIES


def studies_table() -> Table:
    """`fedvit study` without a name."""
    title = "fedvit study NAME"
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("study", "question", "mirrors"):
        table.add_column(name, overflow="fold")
    for name in ("runs,\nat most", "minutes of\none core"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, study in STUDIES.items():
        digits, weights = study.minutes
        runs = f"{len(study.digits) * len(study.seeds) if study.kind != 'cost' else 0}"
        if study.pretrained is not None:
            runs = f"{runs} / {len(study.pretrained)}"
        table.add_row(
            name, study.asks, study.source, runs, f"{digits:g}" if weights is None else f"{digits:g} / {weights:g}"
        )
    table.caption = (
        "where there are two numbers, the second is on pre-trained weights, if the data folder has them; minutes are "
        "estimates; --workers 2 shares the work over two cores"
    )
    table.caption_justify = "left"
    return table
