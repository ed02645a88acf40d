"""Gains over Local between runs whose images only the sites can list."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import fedvit
from fedvit.network.server import description
from fedvit.network.site import Federation
from fedvit.report.load import collect, read_record, with_gains

SITES = ("mercy", "north", "west")


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Local and FedPer over three sites, with the split.json that the server of a network writes."""
    rng = np.random.default_rng(0)
    data = {name: (rng.integers(0, 255, (40, 8, 8), dtype=np.uint8), np.arange(40) % 2) for name in SITES}
    for method in ("local", "fedper"):
        fedvit.run(data=data, method=method, out=tmp_path / method, rounds=1, epochs=1, patch_size=4)
        told = description(Federation(SITES, ("normal", "pneumonia")))
        (tmp_path / method / "split.json").write_text(json.dumps(told))
    return [tmp_path / "local", tmp_path / "fedper"]


def gains(runs: list[Path]) -> set[str]:
    records = with_gains([read_record(folder) for folder in runs])
    return set(next(record for record in records if record.method == "fedper").gains)


def test_two_runs_of_the_same_sites_are_compared(runs: list[Path]) -> None:
    assert gains(runs) == set(SITES)
    (rows,) = collect(runs)
    fedper = next(row for row in rows if row.label == "fedper")
    assert len(fedper.gains) == 3


def change(folder: Path, name: str, edit: Callable[[str], str]) -> None:
    (folder / name).write_text(edit((folder / name).read_text()))


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("split.json", lambda text: text.replace("pneumonia", "cancer")),
        ("split.json", lambda text: text.replace("west", "south")),
        ("run.toml", lambda text: text.replace("val = 0.0", "val = 0.2")),
        ("run.toml", lambda text: text.replace("seed = 0", "seed = 1")),
    ],
)
def test_runs_that_are_not_alike_are_not_compared(name: str, edit: Callable[[str], str], runs: list[Path]) -> None:
    before = (runs[0] / name).read_text()
    change(runs[0], name, edit)
    assert (runs[0] / name).read_text() != before
    assert gains(runs) == set()


def test_a_site_whose_test_images_changed_has_no_gain(runs: list[Path]) -> None:
    cells = json.loads((runs[0] / "confusion.json").read_text())
    cells["west"][0][2] += 1
    (runs[0] / "confusion.json").write_text(json.dumps(cells))
    assert gains(runs) == {"mercy", "north"}


def test_a_site_that_missed_locals_evaluation_has_no_gain(runs: list[Path]) -> None:
    change(
        runs[0],
        "clients.csv",
        lambda text: "\n".join(line for line in text.split("\n") if not line.startswith("north,")),
    )
    assert gains(runs) == {"mercy", "west"}
