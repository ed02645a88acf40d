"""The published figure that belongs to a row of ours: from the papers' tables, by the settings of the row."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fedvit.config.resolve import resolve, to_tables
from fedvit.config.tables import Tables
from fedvit.core.errors import UserError
from fedvit.core.settings import PartitionSettings
from fedvit.report.paper_tables import Published
from fedvit.studies.published import fedpeft, fedperfix, fedv, pfededit
from fedvit.studies.published.common import Table, rows_of

# A paper's main table comes first: if several tables are equally near to a row, the first one counts.
PAPERS: Mapping[str, list[Table]] = {
    "FedPerfix (Sun et al. 2023)": [fedperfix.TABLE2, fedperfix.TABLE1, *fedperfix.FILES[1:]],
    "FedPEFT (Sun et al. 2022)": [
        fedpeft.TABLE1, fedpeft.TABLE4, fedpeft.TABLE3, fedpeft.TABLE6, fedpeft.TABLE7,
    ],
    "PFedEdit (Yuan et al. 2024)": [*pfededit.FILES, *pfededit.EDITING],
    "FedV": [*fedv.FILES],
}  # fmt: skip
MEASURED = {  # what a paper's figure is; ours is the mean over clients of their own models after the last round
    "FedPerfix (Sun et al. 2023)": ("mean ± deviation over clients", True),
    "FedPEFT (Sun et al. 2022)": ("accuracy of the server's model", False),
    "PFedEdit (Yuan et al. 2024)": ("best round, over the images of all clients", False),
    "FedV": ("mean ± deviation over three seeds", True),
}
DECIDES = {  # the setting that makes a partition rule what it is
    "dirichlet": "alpha", "dirichlet_train": "alpha", "domain": "alpha", "pathological": "classes", "dh": "level",
}  # fmt: skip
IGNORED = {  # settings that do not change what is measured
    "data.dir", "data.cache", "data.download", "data.skip_bad", "data.auroc", "data.layout", "model.weights",
    "model.pretrained", "model.fingerprint", "run.seed", "run.eval_every", "run.before_after", "run.track",
    "run.threads", "run.device", "run.cache_mb",
}  # fmt: skip
WORDS: Mapping[str, Callable[[Any], str]] = {  # how a footnote names a paper's setting, in this order
    "data.name": str,
    "data.samples": lambda value: "all images" if value is None else f"{value} images",
    "model.name": str,
    "start": str,
    "model.image_size": "{} px".format,
    "partition.clients": "{} clients".format,
    "train.cohort": "{} per round".format,
    "train.rounds": "{} rounds".format,
    "train.epochs": "{} epochs".format,
    "train.batch": "batch {}".format,
    "train.optimizer": str,
    "train.lr": "lr {:g}".format,
}


@dataclass(frozen=True)
class Cell:
    """One figure of a paper's table with its settings, as far as the paper fixes them."""

    paper: str
    table: str
    column: str
    value: str
    settings: Tables

    @property
    def source(self) -> str:
        return f"{self.paper}, {self.table}, {self.column}"


@dataclass(frozen=True)
class Match:
    """A cell that a row of ours belongs to, and the paper's settings where the row differs."""

    cell: Cell
    differ: Mapping[str, Any]

    @property
    def published(self) -> Published:
        measured, comparable = MEASURED[self.cell.paper]
        numbers = _numbers(self.cell.value)
        assert numbers is not None
        note = (
            f"other settings, {measured}; there {_listed(self.differ)}" if self.differ else f"same settings, {measured}"
        )
        return Published(*numbers, self.cell.source, note, comparable and not self.differ)


@cache
def cells() -> tuple[Cell, ...]:
    """Return every accuracy that the papers' tables print."""
    return tuple(_cells())


def _cells() -> Iterator[Cell]:
    for paper, tables in PAPERS.items():
        for table in tables:
            name = table.words.rpartition(", ")[2]
            for _, column, value, settings, _ in rows_of(table):
                if _numbers(value) is not None:
                    yield Cell(paper, name, column.words, value, settings)


def _numbers(text: str) -> tuple[float, float | None] | None:
    """Read a figure and its deviation in percent; None for a picture or for rounds to a target."""
    value, _, deviation = text.partition("±")
    try:
        scale = 100 if value.startswith(".") else 1  # PFedEdit prints fractions
        return scale * float(value), scale * float(deviation) if deviation else None
    except ValueError:
        return None


def published_for(rows: Sequence[Tables]) -> list[Published | None]:
    """Return the published figure of every row of a table, given their settings, or None where no paper has the row.

    A paper has a row if method, tune, dataset, partition rule and kind of model are the same. Settings that differ
    otherwise, such as the number of clients or rounds, are named. A figure in the same settings comes first. The
    others come from as few columns of the papers as possible, so that they can be compared with one another.
    """
    found = [[Match(cell, differences(cell, row)) for cell in cells() if _is_row(cell.settings, row)] for row in rows]
    rank: dict[str, tuple[int, int]] = {}
    for match in (match for matches in found for match in matches):
        covered, differ = rank.get(match.cell.source, (0, 0))
        rank[match.cell.source] = (covered - 1, differ + len(match.differ))
    nearest = [
        min(matches, key=lambda match: (bool(match.differ), rank[match.cell.source], len(match.differ)), default=None)
        for matches in found
    ]
    return [None if match is None else match.published for match in nearest]


def _is_row(cell: Tables, run: Tables) -> bool:
    """Tell whether a cell asks the question that a run answers, whatever its scale."""
    method = {"name": "fedavg", **cell.get("method", {})}
    named = run["tune"].get("name") == cell.get("tune", {}).get("name", "full") and all(
        run["method"].get(key) == value
        for key, value in method.items()
        if key == "name" or isinstance(value, str | bool)
    )
    rule = run["partition"].get("name")
    key = DECIDES.get(str(rule))
    return (
        named
        and dataset_of(run["data"]["name"]) == cell["data"]["name"]
        and rule == cell["partition"]["name"]
        and (key is None or _rule(cell, key) == _rule(run, key))
        and kind_of(run["model"]["name"]) == kind_of(cell["model"]["name"])
    )


def _rule(tables: Tables, key: str) -> Any:
    return tables["partition"].get(key, PartitionSettings.model_fields[key].default)


def dataset_of(name: str) -> str:
    """Return the dataset that a file's or folder's name stands for, as in cifar100_small.npz."""
    stem = Path(str(name)).name.removesuffix(".npz").lower()
    known = {cell.settings["data"]["name"] for cell in cells()}
    return stem if stem in known else stem.partition("_")[0]


def kind_of(model: str) -> str:
    """Return a model's architecture; a DeiT is a ViT that was trained in another way."""
    kind = str(model).partition("_")[0].rstrip("0123456789")
    return "vit" if kind == "deit" else kind


def differences(cell: Cell, run: Tables) -> dict[str, Any]:
    """Return the paper's value of every setting in which the run differs from this cell."""
    try:
        there = _flat(to_tables(resolve({name: dict(table) for name, table in cell.settings.items()})))
    except UserError:  # the paper's data or device is not here: compare what the paper fixes
        there = _flat(cell.settings)
        here = {key: value for key, value in _flat(run).items() if key in there}
    else:
        here = _flat(run)
    found = {key: there.get(key) for key in {**there, **here} if there.get(key) != here.get(key)}
    if "partition.clients" in found and "train.cohort" in there:
        found["train.cohort"] = there["train.cohort"]  # the same number of other clients is another share
    if "start" in found and "init" not in cell.settings.get("method", {}):
        found.pop("method.init", None)  # its default follows from what the weights start from
    return found


def _flat(tables: Tables) -> dict[str, Any]:
    """Return settings by table.key without those that change no figure, and what the weights start from."""
    model = tables.get("model", {})
    weights = model.get("weights")
    start = f"weights {Path(weights).name}" if weights else "pre-trained" if model.get("pretrained") else "from scratch"
    plain = {
        f"{name}.{key}": value
        for name, table in tables.items()
        if name != "versions"
        for key, value in table.items()
        if f"{name}.{key}" not in IGNORED
    }
    return {**plain, "data.name": Path(str(tables["data"]["name"])).name.removesuffix(".npz"), "start": start}


def _listed(settings: Mapping[str, Any]) -> str:
    """Name a paper's settings in words, in a fixed order; a setting that the paper lacks is named as such."""
    order = [*(key for key in WORDS if key in settings), *sorted(key for key in settings if key not in WORDS)]
    words = []
    for key in order:
        value = settings[key]
        if key in WORDS and (value is not None or key == "data.samples"):
            words.append(WORDS[key](value))
        else:
            name = key.partition(".")[2]
            words.append(f"no {name}" if value is None else f"{name} {value}")
    return ", ".join(words)
