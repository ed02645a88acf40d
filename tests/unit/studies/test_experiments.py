"""The published settings: the files are those of the generator, and valid as far as can be seen without data."""

import importlib.util
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from fedvit.config.load import load_experiment, parse_value, read_tables
from fedvit.config.resolve import resolve, to_tables
from fedvit.config.tables import TABLES
from fedvit.data.dataset import Dataset
from fedvit.data.partition.split import partition_dataset
from fedvit.engine.net import make_net
from fedvit.studies import compare
from fedvit.studies.rows import Row

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "experiments").rglob("*.toml"))
PUBLISHED = [path for path in FILES if len(path.relative_to(ROOT).parts) == 5 and path.parent.name != "small"]
TWINS = sorted((ROOT / "experiments").glob("*/table*/small.toml"))
SIZES = {  # classes, training and test images of each
    "cifar10": (10, 5000, 1000),
    "cifar100": (100, 500, 100),
    "cifar100_small": (100, 100, 50),
    "tiny-imagenet-200": (200, 500, 50),
}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT / "experiments").with_suffix(""))


@cache
def generator() -> ModuleType:
    """experiments/published.py, which is a script."""
    spec = importlib.util.spec_from_file_location("published", ROOT / "experiments" / "published.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["published"] = module  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    return module


def test_the_files_are_what_the_generator_would_write() -> None:
    command = [sys.executable, str(ROOT / "experiments" / "published.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_check_tells_a_missing_a_changed_and_a_foreign_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = generator()
    monkeypatch.setattr(module, "HERE", tmp_path)
    for path, text in module.files().items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert module.differences() == []
    missing, changed = sorted(module.files())[:2]
    (tmp_path / missing).unlink()
    (tmp_path / changed).write_text("")
    (tmp_path / "fedv" / "foreign.toml").write_text("")
    assert module.differences() == [
        f"{missing} is missing", "fedv/foreign.toml is not written by published.py", f"{changed} differs",
    ]  # fmt: skip


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_experiment_file_resolves(path: Path) -> None:
    experiment = load_experiment(path)
    assert resolve(to_tables(experiment)) == experiment


@pytest.mark.parametrize("path", PUBLISHED, ids=name_of)
def test_a_published_row_is_complete_and_says_where_it_comes_from(path: Path) -> None:
    tables, head = read_tables(path), path.read_text().splitlines()[0]
    assert list(tables) == [table for table in TABLES if table != "privacy"]
    _, paper, table, _, _ = path.relative_to(ROOT).parts
    if paper == "fedpeft":  # its rows are what is tuned
        tune = {"scratch": "full", "shufflenet": "full"}.get(path.stem.partition("_x")[0], path.stem.partition("_x")[0])
        assert (tables["method"]["name"], tables["tune"]["name"]) == ("fedavg", tune)
    else:
        assert tables["method"]["name"] == path.stem.removesuffix("_last_block")
    assert head.startswith("# ")
    assert f", Table {table.removeprefix('table')}, " in head
    assert head.lower().startswith(f"# {paper}")
    assert ": published " in head
    assert {"cohort", "rounds", "epochs", "batch", "lr", "optimizer", "momentum", "weighting"} <= set(tables["train"])
    assert {"name", "clients"} <= set(tables["partition"])
    assert "seed" in tables["run"]


@pytest.mark.parametrize("path", [p for p in PUBLISHED if p.stem in ("fedv", "fedvz", "festa")], ids=name_of)
def test_a_published_split_row_has_its_own_model_and_optimizer(path: Path) -> None:
    experiment = load_experiment(path)
    model, train = experiment.model, experiment.train
    assert model.name.startswith(("deit_", "vit_"))
    assert model.pretrained is (path.stem != "festa")
    assert (train.optimizer, train.momentum, train.lr) == ("adam", 0.0, 0.0002)
    assert (train.cohort, train.epochs, train.batch) == (10, 5, 128)
    assert train.rounds == (300 if "tiny_imagenet" in path.parent.name else 500)
    assert experiment.method["fedround"] == (50 if path.stem == "festa" else 20)
    assert experiment.method["init"] == "random"


def test_the_split_rows_of_a_twin_can_learn_and_its_last_round_does_not_average_their_parts() -> None:
    """Right after an average, the test would see the same head and tail at every client."""
    rows = [row.first for path in TWINS for rows in compared(path) for row in rows]
    split = [row for row in rows if "fedround" in row.method]
    assert {row.method["name"] for row in split} == {"fedv", "fedvz", "festa"}
    for row in split:
        assert (row.method["client_head_lr"], row.train.optimizer, row.train.lr) == (0, "adam", 0.005), "it can learn"
        assert row.method["receives"] == "sampled"
        assert 0 < row.method["fedround"] < row.train.rounds
        assert (row.train.rounds - 1) % row.method["fedround"] > 0


def models() -> dict[str, Path]:
    """One file for every pair of model and method among the published rows and twins."""
    found: dict[str, Path] = {}
    for path in [*PUBLISHED, *TWINS]:
        tables = read_tables(path)
        method = tables.get("method", {"name": "fedavg"})
        found.setdefault(" ".join(f"{v}" for v in [tables["model"]["name"], *method.values()]), path)
    return found


@pytest.mark.parametrize("pair", models())
def test_method_and_model_meet(pair: str) -> None:
    """Roles, plugins and checks of the plan on the real architecture; shapes only, so no weights are needed."""
    experiment = load_experiment(models()[pair])
    model = experiment.model.model_copy(update={"pretrained": False, "weights": None})
    meta = torch.device("meta")
    with meta:
        net = make_net(experiment.model_copy(update={"model": model}), 100, meta)
    assert net.params()["trainable"] > 0


def splits() -> list[Path]:
    """One file for every split of a data set whose class sizes are known."""
    found: dict[str, Path] = {}
    for path in [*PUBLISHED, *TWINS]:
        tables = read_tables(path)
        if tables["data"]["name"] in SIZES:
            parts = [tables["data"], tables["partition"], tables["train"]["batch"], tables["run"].get("seed")]
            found.setdefault(str(parts), path)
    return list(found.values())


@pytest.mark.parametrize("path", splits(), ids=lambda path: name_of(path.parent))
def test_the_split_is_possible(path: Path) -> None:
    experiment = load_experiment(path, flags={"method": "fedavg"})  # the split is the same for all rows
    data, train = experiment.data, experiment.train
    classes, size, test_size = SIZES[data.name]
    labels = np.tile(np.arange(classes), size + test_size)
    is_test = np.repeat([False, True], [classes * size, classes * test_size])
    images = np.broadcast_to(np.zeros((), np.uint8), (len(labels), 1, 1, 3))
    dataset = Dataset("labels only", images, labels, tuple(map(str, range(classes))), is_test)
    split = partition_dataset(dataset, experiment.partition, data, batch=train.batch, seed=experiment.run.seed)
    assert len(split.clients) == experiment.partition.clients


def commands(path: Path) -> list[list[str]]:
    """The commands at the head of a twin, wildcards expanded as a shell would."""
    lines = [line[1:].split() for line in path.read_text().splitlines() if line.startswith("#   fedvit compare ")]
    return [[str(f) for word in line for f in (sorted(ROOT.glob(word)) if "*" in word else [word])] for line in lines]


def compared(path: Path) -> list[list[Row]]:
    """The rows of a twin's commands, resolved as `fedvit compare` would."""
    tables = []
    for program, verb, option, base, *rest in commands(path):
        assert (program, verb, option, ROOT / base) == ("fedvit", "compare", "--from", path)
        seeds, flags = rest.index("--seeds"), dict[str, Any]()
        for flag, value in zip(rest[seeds + 2 :: 2], rest[seeds + 3 :: 2], strict=True):
            flags[flag.removeprefix("--").replace("-", "_")] = parse_value(value)
        tables.append(compare.make_rows(rest[:seeds], [int(rest[seeds + 1])], path, {}, flags))
    return tables


@pytest.mark.parametrize("path", TWINS, ids=name_of)
def test_a_twin_has_all_rows_of_its_table(path: Path) -> None:
    published = {file.stem for file in PUBLISHED if file.is_relative_to(path.parent)}
    tables = compared(path)
    assert tables
    for rows in tables:
        assert {row.label for row in rows} == published | {"local"}


@pytest.mark.parametrize("pair", [("fedperfix/table2", "fedperfix/table6"), ("pfededit/table1", "pfededit/table6")])
def test_twins_of_the_same_settings_find_each_others_rows(pair: tuple[str, str]) -> None:
    first, second = (
        {compare.comparison_folder(rows, {}) for rows in compared(ROOT / "experiments" / table / "small.toml")}
        for table in pair
    )
    assert first == second
