"""A manifest of small images with several labels each, three sites and patients, for tests."""

import csv
from pathlib import Path

import numpy as np
from PIL import Image

LABELS = ("effusion", "mass", "edema")
CHANCE = (0.4, 0.25, 0.1)  # of each label


def write_manifest(folder: Path, *, images: int = 90, one_column: bool = False, seed: int = 0) -> Path:
    """Write images in which every label brightens a part of its own, and their manifest."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    truth = rng.random((images, 3)) < CHANCE
    names = ["labels"] if one_column else [f"label_{name}" for name in LABELS]
    with (folder / "manifest.csv").open("w", newline="") as stream:
        table = csv.writer(stream)
        table.writerow(["path", *names, "patient", "site"])
        for number, own in enumerate(truth):
            pixels = rng.integers(0, 120, (8, 8), dtype=np.uint8)
            for place, has in zip((slice(0, 2), slice(3, 5), slice(6, 8)), own, strict=True):
                pixels[place] += 130 * np.uint8(has)
            Image.fromarray(pixels).save(folder / f"{number:03d}.png")
            cells = ["|".join(np.array(LABELS)[own])] if one_column else own.astype(int).tolist()
            patient = number // 2
            table.writerow([f"{number:03d}.png", *cells, f"P{patient}", ("north", "south", "east")[patient % 3]])
    return folder / "manifest.csv"
