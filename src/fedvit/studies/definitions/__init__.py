"""Every study by name: its question, its small and its published grid of runs, and how it is measured.

Each paper has a file. A study is named after the table or figure that it repeats, and may have other names as well.
Nothing here loads PyTorch, so that listing the studies is fast.
"""

from rich.box import SIMPLE_HEAD
from rich.table import Table

from fedvit.core.errors import UserError, nearest
from fedvit.studies.definitions import fedpeft, fedperfix, fedv, pfededit
from fedvit.studies.definitions.study import Study

PAPERS: dict[str, dict[str, Study]] = {
    "fedperfix": fedperfix.STUDIES,
    "fedpeft": fedpeft.STUDIES,
    "pfededit": pfededit.STUDIES,
    "fedv": fedv.STUDIES,
}
STUDIES = {  # by every name
    name: study for studies in PAPERS.values() for plain, study in studies.items() for name in (plain, *study.aka)
}


def plain_name(name: str) -> str:
    """Return the name under which a study is listed."""
    if name in PAPERS:
        raise UserError(
            f"{name} is a paper: run one of its studies, {', '.join(PAPERS[name])}, or all with --all {name}"
        )
    if name not in STUDIES:
        raise UserError(f"unknown study {name!r}; {nearest(name, STUDIES)}")
    return next(plain for own in PAPERS.values() for plain, study in own.items() if name in (plain, *study.aka))


def paper_of(plain: str) -> str:
    """Return the paper that a study belongs to."""
    return next(paper for paper, own in PAPERS.items() if plain in own)


def studies_of(paper: str) -> dict[str, Study]:
    """Return a paper's studies."""
    if paper not in PAPERS:
        raise UserError(f"unknown paper {paper!r}; {nearest(paper, PAPERS)}")
    return PAPERS[paper]


def studies_table() -> Table:
    """Make the table that `fedvit study` shows without a name."""
    title = "fedvit study NAME, or fedvit study --all PAPER"
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("study, or its other name", "question", "mirrors"):
        table.add_column(name, overflow="fold")
    for name in ("runs,\nat most", "minutes on\none core"):
        table.add_column(name, justify="right", no_wrap=True)
    for studies in PAPERS.values():
        for name, study in studies.items():
            table.add_row("\n".join((name, *study.aka)), study.asks, study.source, *size_in_words(study))
        table.add_section()
    table.caption = (
        "of two numbers, the second is for pre-trained weights, which are used if the data folder has them; minutes "
        "are estimates; --workers 2 divides the work over two cores; --paper runs the published grid"
    )
    table.caption_justify = "left"
    return table


def size_in_words(study: Study) -> tuple[str, str]:
    """Return the runs and the minutes of a study's small grids."""
    digits, weights = study.minutes
    runs = f"{len(study.digits) * len(study.seeds) if study.kind != 'cost' else 0}"
    if study.pretrained is not None:
        runs = f"{runs} / {len(study.pretrained)}"
    return runs, f"{digits:g}" if weights is None else f"{digits:g} / {weights:g}"
