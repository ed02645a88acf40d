"""The section "Who owns what": training images by client and class."""

from collections.abc import Sequence

import numpy as np

from fedvit.report import svg
from fedvit.report.sections.parts import MOST_NAMES, Figure, Group


def _range(numbers: Sequence[int]) -> str:
    return str(min(numbers)) if min(numbers) == max(numbers) else f"{min(numbers)} to {max(numbers)}"


def partition(group: Group) -> Figure | None:
    """Prepare the section; None if no run recorded its classes."""
    record = next((row.first for row in group.ranked if row.first.split.get("class_counts")), None)
    if record is None:
        return None
    train = {name: parts["train"] for name, parts in record.split["class_counts"].items()}  # class number -> images
    names = list(train)
    if len(names) > MOST_NAMES:
        by_size = sorted(names, key=lambda name: -sum(train[name].values()))
        names = [by_size[round(i * (len(by_size) - 1) / (MOST_NAMES - 1))] for i in range(MOST_NAMES)]
    sizes = [sum(counts.values()) for counts in train.values()]
    held = [len(counts) for counts in train.values()]
    chart = svg.heat_map(
        [[train[name].get(str(number), 0) for number in range(len(record.class_names))] for name in names],
        names,
        record.class_names,
        f"Training images of every client and class: {len(train)} clients of {min(sizes)} to {max(sizes)} images",
        unit="training images",
        row_label="client",
        column_label="class",
    )
    caption = (
        f"Training images of each client (row) by class (column), seed {record.seed}. Clients hold {_range(sizes)} "
        f"images (median {np.median(sizes):g}) of {_range(held)} classes."
    )
    if len(train) > len(names):
        caption += f" {len(names)} of {len(train)} clients are drawn, evenly from the largest to the smallest."
    unseen = record.split.get("unseen", [])
    if unseen:
        caption += f" Never trained: {', '.join(map(str, unseen[:10]))}{' …' if len(unseen) > 10 else ''}."
    return Figure(chart, caption, scrolls=True)
