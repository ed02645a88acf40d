"""Runs of different models are never compared, and no row has a fingerprint of 64 digits for a name."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import fedvit
from fedvit.report.load import collect, read_record, rows_of
from fedvit.report.page import write_report
from tests.conftest import finish, tiny

SMALL = {"samples": 200, "clients": 2, "rounds": 1, "epochs": 1, "cohort": 2}


def test_runs_of_different_models_are_in_different_groups_and_give_no_gains(tmp_path: Path) -> None:
    finish(tiny("local", rounds=1), tmp_path / "local")
    finish(tiny("fedavg", rounds=1), tmp_path / "fedavg")
    finish(tiny("fedper", rounds=1, patch_size=2), tmp_path / "smaller_patches")
    finish(tiny("fedrep", rounds=1, image_size=16), tmp_path / "larger_images")
    groups = collect([tmp_path])
    assert sorted(sorted(row.label for row in rows) for rows in groups) == [["fedavg", "local"], ["fedper"], ["fedrep"]]
    gains = {row.label: bool(row.first.gains) for rows in groups for row in rows}
    assert gains == {"local": True, "fedavg": True, "fedper": False, "fedrep": False}


@pytest.fixture
def module() -> Callable[[int], nn.Module]:
    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 10))

    return make


def test_a_fingerprint_is_not_part_of_a_name(tmp_path: Path, module: Callable[[int], nn.Module]) -> None:
    for seed in (0, 1):
        out = tmp_path / f"module{seed}"
        fedvit.run(model=module(seed), image_size=8, groups={"head": ["1"]}, out=out, **SMALL)
    assert len(collect([tmp_path])) == 2
    rows = rows_of([read_record(tmp_path / f"module{seed}") for seed in (0, 1)])
    assert len({row.label for row in rows}) == 2
    for row in rows:
        assert not re.search(r"[0-9a-f]{9}", row.label), row.label
    write_report([tmp_path], tmp_path / "report.html")
