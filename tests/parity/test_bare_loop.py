"""The bare loop that FedViT is timed against does the same work: it ends with the same weights."""

import json
from pathlib import Path

import pytest
import torch
from benchmarks.others import bare, works
from benchmarks.others.__main__ import distance
from safetensors.torch import load_file

from fedvit.config.load import load_experiment
from fedvit.engine import net
from fedvit.runs.execute import run_rounds


def fedvit_end(folder: Path, out: Path) -> dict[str, torch.Tensor]:
    said = json.loads((folder / "work.json").read_text())
    end = {}
    for done in run_rounds(load_experiment(None, said["sets"], said["flags"]), out):
        end = done.server.shared
    return end


@pytest.mark.parametrize("name", ["digits", "head"])
def test_a_bare_loop_over_a_written_work_ends_where_fedvit_ends(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(net, "skip_unread_tokens_", lambda model: None)  # the bare loop computes all of them
    folder = works.write(name, tmp_path / "work", small=True)
    end, start = fedvit_end(folder, tmp_path / "run"), load_file(folder / "start.safetensors")
    assert distance(bare.one_process(bare.Work(folder)), end, start) < 1e-5


def test_the_distance_tells_another_work_from_this_one(tmp_path: Path) -> None:
    folder = works.write("digits", tmp_path / "work", small=True)
    start = load_file(folder / "start.safetensors")
    work, other = bare.Work(folder), bare.Work(folder)
    for key in [key for key in other.data if key.startswith("order ")]:
        other.data[key] = other.data[key][:, ::-1].copy()
    assert distance(bare.one_process(work), bare.one_process(other), start) > works.RECIPES["digits"].agrees
