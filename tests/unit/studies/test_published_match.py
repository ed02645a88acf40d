"""A published figure stands beside ours only where a paper has the row, and says where the settings differ."""

from pathlib import Path
from typing import Any

import pytest

from fedvit.config.load import load_experiment
from fedvit.config.resolve import resolve, to_tables
from fedvit.studies.published.match import Cell, cells, published_for

ROOT = Path(__file__).parents[3] / "experiments"


def tables(file: str, sets: dict[str, Any] | None = None, **flags: Any) -> Any:
    return to_tables(load_experiment(ROOT / file, sets, flags))


def alone(file: str, sets: dict[str, Any] | None = None, **flags: Any) -> Any:
    return published_for([tables(file, sets, **flags)])[0]


def test_every_published_cell_finds_its_own_figure() -> None:
    assert len(cells()) > 400
    for cell in cells():
        (found,) = published_for([to_tables(resolve({name: dict(table) for name, table in cell.settings.items()}))])
        assert found is not None, cell
        assert found.note.startswith("same settings"), cell
        assert found.value == pytest.approx(_percent(cell), abs=1e-9) or _elsewhere(cell, found.value), cell


def _percent(cell: Cell) -> float:
    value = cell.value.partition("±")[0]
    return float(value) * (100 if value.startswith(".") else 1)


def _elsewhere(cell: Cell, value: float) -> bool:
    """Whether the paper prints another figure for the same settings in another table."""
    twins = [other for other in cells() if other.paper == cell.paper and _percent(other) == pytest.approx(value)]
    return bool(twins)


def test_the_papers_own_settings_are_comparable_whatever_the_seed() -> None:
    found = alone("fedperfix/table2/cifar100/fedperfix.toml", seed=7, eval_every=0)
    assert (found.value, found.deviation, found.comparable) == (48.10, 7.76, True)
    assert found.source == "FedPerfix (Sun et al. 2023), Table 2, CIFAR-100"


@pytest.mark.parametrize("flags", [{"rounds": 49}, {"lr": 0.02}, {"cohort": 7}, {"model": "vit_tiny_patch16_224"}])
def test_one_other_setting_makes_a_figure_incomparable_and_is_named(flags: dict[str, Any]) -> None:
    found = alone("fedperfix/table2/cifar100/fedbn.toml", **flags)
    assert not found.comparable
    assert found.note.startswith("other settings")
    words = {"rounds": "50 rounds", "lr": "lr 0.01", "cohort": "8 per round", "model": "vit_small_patch16_224"}
    assert words[next(iter(flags))] in found.note


def test_small_scale_runs_name_what_differs() -> None:
    found = alone("fedperfix/table2/small.toml", method="fedper")
    assert not found.comparable
    for words in ("from scratch", "64 clients", "50 rounds", "all images"):
        assert words in found.note


def test_figures_that_measure_something_else_are_never_comparable() -> None:
    assert not alone("pfededit/table1/cifar100_dh80/fedper.toml").comparable
    assert "best round" in alone("pfededit/table1/cifar100_dh80/fedper.toml").note
    found = alone("small/cifar100.toml", method="fedavg", tune="bias", partition="dirichlet_train")
    assert "server's model" in found.note
    assert not found.comparable


def test_how_an_adapter_starts_is_a_setting_and_not_another_row() -> None:
    """The published rows start it at random, as FedPEFT's pseudo-code does; by default it starts at zero."""
    found = alone("small/cifar100.toml", method="fedavg", tune="adapter", partition="dirichlet_train")
    assert found.value == 88.77  # Table 3, N=16 M=16 skewed, is the nearest setting
    assert "init random" in found.note


@pytest.mark.parametrize(
    ("file", "sets", "flags"),
    [
        ("small/cifar100.toml", {}, {"method": "ditto"}),  # no paper has Ditto on this partition
        ("small/cifar100.toml", {}, {"method": "fedper", "tune": "bias"}),  # nor FedPer with only biases
        ("small/cifar100.toml", {"alpha": 0.2}, {"method": "fedper"}),
        ("small/cifar100.toml", {}, {"method": "fedper", "data": "digits"}),
        ("fedperfix/table2/small.toml", {}, {"method": "apfl"}),  # the paper's row is the authors' variant
        ("fedv/table2/small.toml", {}, {"method": "fedavg"}),  # the paper's row is a ResNet
    ],
)
def test_without_the_same_row_there_is_no_figure(file: str, sets: dict[str, Any], flags: dict[str, Any]) -> None:
    assert alone(file, sets, **flags) is None


def test_rows_of_one_table_take_their_figures_from_one_column() -> None:
    rows = [tables("small/cifar100.toml", method=name) for name in ("local", "fedavg", "fedper", "fedbn", "fedbabu")]
    found = published_for(rows)
    assert {one.source for one in found if one} == {"FedPerfix (Sun et al. 2023), Table 2, CIFAR-100"}
    assert len({one.footnote for one in found if one}) == 1, "one footnote serves them all"
