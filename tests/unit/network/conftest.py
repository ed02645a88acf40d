"""Folders of images that real sites would have."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def sites_folder(tmp_path: Path) -> Path:
    """Two hospitals with a folder each, small noisy images of two brightnesses."""
    rng = np.random.default_rng(0)
    for name, count in (("north", 14), ("south", 10)):
        for label, bright in (("ill", 150), ("well", 60)):
            folder = tmp_path / "all" / name / label
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = np.clip(rng.normal(bright, 30, (16, 16, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return tmp_path / "all"
