"""Gains over Local for a run over Flower."""

import subprocess
import sys
from pathlib import Path

from fedvit.runs.folder import Run
from tests.network.field import MAY_FALL_SILENT

pytestmark = MAY_FALL_SILENT


def test_a_trial_over_flower_knows_its_gains(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "fedvit", "run", "--method", "fedper", "--clients", "2", "--cohort", "2"]
    words += ["--samples", "80", "--rounds", "1", "--also", "local", "--quiet"]
    subprocess.run([*words, "--out", tmp_path / "alone"], check=True)
    subprocess.run([*words, "--engine", "flower", "--out", tmp_path / "out"], check=True)
    for name in ("clients.csv", "sites.csv"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()
    assert Run(tmp_path / "out").summary["gain_over_local"] == Run(tmp_path / "alone").summary["gain_over_local"]
