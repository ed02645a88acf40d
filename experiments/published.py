"""The papers' tables as experiment files: one for every row and column, and the tables in small.

    python experiments/published.py            # write experiments/<paper>/<table>/<column>/<row>.toml
    python experiments/published.py --check    # are the files on disk those that would be written?

Settings and published numbers stand once, in `fedvit.studies.published`; the tables in small stand here. The files are
never edited by hand. docs/experiments.md is the index.
"""

import argparse
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tomli_w

from fedvit.config.tables import Tables, stack_tables
from fedvit.studies.published import fedpeft, fedperfix, fedv, pfededit
from fedvit.studies.published.common import Table, method, rows_of, settings_of
from fedvit.studies.small import SMALL

HERE = Path(__file__).parent
PAPERS = {"fedperfix": fedperfix, "fedpeft": fedpeft, "pfededit": pfededit, "fedv": fedv}


@dataclass(frozen=True)
class Twin:
    """A table in small, for two cores: the settings under all rows, and the rows with settings of their own."""

    folder: str
    words: str
    settings: Tables
    rows: Sequence[str]
    own: Mapping[str, Tables] = field(default_factory=dict)  # rows that need a file
    also: str = ""  # the command's further columns


OPEN = {  # what holds for every file of a paper; docs/experiments.md says more
    "fedperfix": "",
    "fedpeft": "The paper's figure is that of the server's model: server_accuracy in summary.json.",
    "pfededit": "The paper's figure is its best round over all images: the largest micro in rounds.jsonl.",
    "fedv": "Share of clients a round (0.1) and image size are not given; the mean is over three seeds, not named.",
}


# The twins. On pre-trained weights the momentum is that of experiments/small and the rates lie within those tried there
# (results/small/rates.json); `fedvit search` can choose them anew.

ALONE = {"local": method("local", lr=0.001)}
FORK = {"apfl": fedperfix.OWN["apfl"][0]}
LAST_BLOCK = {"fedperfix_last_block": method("fedperfix", last_block=True)}


def small_fedperfix(samples: int, clients: int, rounds: int, size: int) -> Tables:
    """Dir(0.1) over pooled images, two clients a round."""
    here: Tables = {
        "data": {"samples": samples},
        "partition": {"name": "dirichlet", "clients": clients, "alpha": 0.1},
        "model": {"image_size": size},
        "train": {"cohort": 2, "rounds": rounds, "epochs": 2},
        "run": {"eval_every": 8},
    }
    return stack_tables([SMALL, here])


SMALL_TABLE2 = small_fedperfix(samples=4000, clients=16, rounds=32, size=64)
SMALL_TABLE3: Tables = {
    "data": {"name": "digits"},
    "partition": {"name": "dirichlet", "clients": 16, "alpha": 0.1},
    "model": {"name": "resnet18", "image_size": 32},
    "train": {"cohort": 2, "rounds": 40, "epochs": 2, "batch": 32, "optimizer": "adamw", "lr": 0.002},
    "tune": {"name": "full"},
    "run": {"eval_every": 10},
}
SMALL_PFEDEDIT = stack_tables(
    [
        SMALL,
        {
            "data": {"samples": 2000},
            "partition": {"name": "dh", "clients": 10, "level": 80.0},
            "train": {"cohort": 10, "rounds": 8, "epochs": 1, "weighting": "equal"},
            "run": {"eval_every": 4},
        },
    ]
)
SMALL_FEDV = stack_tables(
    [
        SMALL,
        {
            "data": {"samples": 2000},
            "partition": {"name": "pathological", "clients": 20, "classes": 10},
            "train": {"cohort": 2, "rounds": 24, "epochs": 5},
            "run": {"eval_every": 12},
        },
    ]
)
SMALL_ADAM: Tables = {"train": {"optimizer": "adam", "momentum": 0.0, "lr": 0.005}}
SMALL_SPLIT = {  # averaged well before the end, so that the test sees the clients' own heads and tails
    "fedv": stack_tables([SMALL_ADAM, method("fedv", fedround=12)]),
    "fedvz": stack_tables([SMALL_ADAM, method("fedvz", fedround=12)]),
    "festa": stack_tables([SMALL_ADAM, method("festa", fedround=12)]),
}
SMALL_BASELINES = {  # as in the full tables: FedAvg is tested after local training, Fed-RoD has its hypernetwork
    **ALONE, "fedavg_ft": method("fedavg_ft", epochs=5), "fed_rod": method("fed_rod", hyper=True),
    "ditto": method("ditto", lam=0.75),
}  # fmt: skip
TWINS = [
    Twin(
        "fedperfix/table2",
        "16 clients of 4,000 CIFAR-100 images, Dir(0.1), 12.5 % a round, as in the paper; a pre-trained ViT-Tiny "
        "instead of ViT-Small from scratch.",
        SMALL_TABLE2,
        (
            "local",
            "fedavg",
            "apfl",
            "per_fedavg",
            "fedbn",
            "fedbabu",
            "fedper",
            "vanilla_attention",
            "fedperfix",
            "fedperfix_last_block",
        ),
        {**ALONE, **FORK, **LAST_BLOCK, "per_fedavg": method("per_fedavg", lr=0.0002)},
    ),
    Twin(
        "fedperfix/table3",
        "From scratch as in the paper, on the embedded digits: ResNet18 at 32 px, and the demo's ViT beside it. "
        "16 clients, Dir(0.1), 12.5 % a round; AdamW at the demo's rate.",
        SMALL_TABLE3,
        ("local", "fedavg", "apfl", "per_fedavg", "fedbn", "fedbabu", "fedper"),
        {**FORK, "per_fedavg": method("per_fedavg", lr=0.0002)},
        "--model vit_micro --image-size 8",
    ),
    Twin(
        "fedperfix/table4",
        "The column of 6.25 % a round, with 32 clients of 6,000 CIFAR-100 images; Table 2's twin has 12.5 %.",
        small_fedperfix(samples=6000, clients=32, rounds=64, size=64),
        ("local", "fedavg", "apfl", "fedper", "fedperfix"),
        {**ALONE, **FORK},
    ),
    Twin(
        "fedperfix/table5",
        "The column of ViT-Tiny, pre-trained; other sizes with --model and --weights, given their weights and time.",
        small_fedperfix(samples=4000, clients=16, rounds=16, size=96),
        ("local", "fedavg", "apfl", "fedper", "fedperfix"),
        {**ALONE, **FORK},
    ),
    Twin(
        "fedperfix/table6",
        "The settings of Table 2's twin, whose finished rows are found again. On pre-trained weights fedperfix starts "
        "its prefixes at zero.",
        SMALL_TABLE2,
        ("local", "fedperfix", "fedperfix_last_block", "prefix_z", "prefix_r", "prompts", "adapters"),
        {**ALONE, **LAST_BLOCK},
    ),
    Twin(
        "pfededit/table1",
        "DH 80 % over 10 clients that all take part, one epoch a round; 2,000 CIFAR-100 images, ViT-Tiny.",
        SMALL_PFEDEDIT,
        ("local", "fedavg", "fedper", "fedbn", "fedrep", "distrans", "moon", "apfl", "pfededit"),
        ALONE,
    ),
    Twin(
        "pfededit/table6",
        "The settings of Table 1's twin, whose finished rows are found again.",
        SMALL_PFEDEDIT,
        ("local", "fedfa", "fedfed", "fedala", "fed_lamb", "fedrolex", "heterofl", "pfededit"),
        ALONE,
    ),
    Twin(
        "fedv/table2",
        "CIFAR-100, Path-10: 20 clients of 2,000 images, a tenth of them a round, 5 epochs; all rows on a pre-trained "
        "ViT-Tiny, instead of ResNet-50 with GroupNorm from scratch and DeiT-Small. Split rows keep the pre-trained "
        "head and do not train it (init=random is the paper's), and average after rounds 1 and 13.",
        SMALL_FEDV,
        ("local", "fedavg_ft", "fed_rod", "ditto", "festa", "fedv", "fedvz"),
        {**SMALL_BASELINES, **SMALL_SPLIT},
    ),
    Twin(
        "fedv/table3",
        "The settings of Table 2's twin. One of the eight backbones, ViT-Tiny, twice: with its patches of 16 px, and "
        "the same weights with patches of 8 px, whose embedding timm resamples.",
        SMALL_FEDV,
        ("local", "fedv", "fedvz"),
        {**ALONE, "fedv": SMALL_SPLIT["fedv"], "fedvz": SMALL_SPLIT["fedvz"]},
        "--patch-size 8 --image-size 40",
    ),
    Twin(
        "fedv/table5",
        "The column Path-5, on CIFAR-100 at the 64 px of Tiny-ImageNet's images; otherwise as Table 2's twin.",
        stack_tables([SMALL_FEDV, {"partition": {"classes": 5}}]),
        ("local", "fedavg_ft", "fed_rod", "ditto", "festa", "fedv", "fedvz"),
        {**SMALL_BASELINES, **SMALL_SPLIT},
    ),
]


# Writing.


def files() -> dict[Path, str]:
    """Every file by its path below experiments/."""
    written = [
        *(file for paper in PAPERS.values() for table in paper.FILES for file in table_files(table)),
        *(f for twin in TWINS for f in twin_files(twin)),
    ]
    assert len(dict(written)) == len(written), "two files of the same path"
    return dict(written)


def table_files(table: Table) -> Iterator[tuple[Path, str]]:
    paper = table.folder.split("/")[0]
    for name, column, value, settings, note in rows_of(table):
        row = fedpeft.row_name(name) if paper == "fedpeft" else PAPERS[paper].NAMES[name]
        head = f"{table.words}, {column.words}, row {row}: published {value.replace('±', ' ± ')}{table.what}."
        comment = [head, " ".join(words for words in (column.note, note, OPEN[paper]) if words)]
        yield Path(table.folder, column.folder, f"{name}.toml"), document(comment, settings)


def twin_files(twin: Twin) -> Iterator[tuple[Path, str]]:
    folder = Path("experiments", twin.folder)
    plain = [row for row in twin.rows if row not in twin.own]
    rows = " ".join([*plain, f"{folder}/small/*.toml"])
    command = f"fedvit compare --from {folder}/small.toml {rows} --seeds 0"
    commands = [command, *([f"{command} {twin.also}"] if twin.also else [])]
    title = f"{twin.folder} in small, meant for under an hour on two cores; started again, it continues."
    title = f"{title} Rates not chosen on val."
    comment = [title, twin.words, *(f"  {text}" for text in commands)]
    yield Path(twin.folder, "small.toml"), document(comment, twin.settings)
    for row, tables in twin.own.items():
        yield Path(twin.folder, "small", f"{row}.toml"), tomli_w.dumps(tables)


def document(comment: Sequence[str], tables: Tables) -> str:
    """Comment lines at the head, wrapped unless they are indented, then the tables in their usual order."""
    lines = [part for text in comment for part in ([text] if text.startswith(" ") else textwrap.wrap(text, width=118))]
    return "".join(f"# {line}\n" for line in lines) + tomli_w.dumps(settings_of(tables))


def differences() -> list[str]:
    """What --check has to say: files that are missing, differ, or are nobody's."""
    expected = files()
    found = {path.relative_to(HERE) for paper in PAPERS for path in (HERE / paper).rglob("*.toml")}
    missing = [f"{path} is missing" for path in sorted(expected.keys() - found)]
    extra = [f"{path} is not written by published.py" for path in sorted(found - expected.keys())]
    both = sorted(expected.keys() & found)
    changed = [f"{path} differs" for path in both if (HERE / path).read_text() != expected[path]]
    return [*missing, *extra, *changed]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if a file differs")
    if parser.parse_args().check:
        problems = differences()
        print("\n".join(problems) or f"{len(files())} files are as they should be")
        sys.exit(bool(problems))
    for path, text in files().items():
        (HERE / path).parent.mkdir(parents=True, exist_ok=True)
        (HERE / path).write_text(text)
    print(f"{len(files())} files written")


if __name__ == "__main__":
    main()
