"""Pictures of results, drawn with matplotlib."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from fedvit.runs.folder import Run

plt.rcParams["text.parse_math"] = False  # names of sites and classes may contain dollar signs

INK, MUTED, GRID = "#222222", "#666666", "#dddddd"
COLORS = (  # those of the page in light mode; Local comes first and is gray
    "#6b7280",
    "#1f5fbf",
    "#c2410c",
    "#629422",
    "#a03277",
    "#aa6ef9",
    "#6000d9",
    "#f75f7a",
    "#65a8d6",
    "#1e293b",
)
FIGURES: dict[str, dict[str, None]] = {  # suffix -> what to leave out, so that equal content gives equal bytes
    ".png": {"Software": None},
    ".svg": {"Date": None, "Creator": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


def save_figure(figure: Figure, path: Path, *, tight: bool = True) -> None:
    """Save a figure as PNG, SVG or PDF, by its suffix, and close it; the same figure gives the same bytes."""
    still: dict[Any, Any] = {
        "svg.hashsalt": "fedvit",
        "pdf.fonttype": 42,
    }  # 42: TrueType, because publishers refuse Type 3 fonts
    with plt.rc_context(still):
        figure.savefig(path, dpi=130, bbox_inches="tight" if tight else None, metadata=FIGURES.get(path.suffix))
    plt.close(figure)


def draw_split(
    counts: Mapping[str, Mapping[str, Sequence[int]]], class_names: Sequence[str], path: Path, title: str
) -> None:
    """Draw clients by classes, darker for more training images; names that would overlap are left out."""
    table = np.array([parts["train"] for parts in counts.values()], dtype=float)
    height, width = (min(0.28 * n, 14.0) for n in table.shape)
    figure, axes = plt.subplots(figsize=(max(4.5, width) + 2.2, max(2.0, height) + 1.8))
    image = axes.imshow(np.ma.masked_equal(table, 0), cmap="Blues", vmin=0, aspect="auto")
    for axis, names, inches in (
        (axes.xaxis, class_names, max(4.5, width)),
        (axes.yaxis, list(counts), max(2.0, height)),
    ):
        step = max(1, int(np.ceil(len(names) * 0.13 / inches)))
        shown = [textwrap.shorten(name, 30, placeholder="...") if " " in name else name[:30] for name in names]
        small = 7 if len(names) > 30 else 9
        axis.set_ticks(range(0, len(names), step), shown[::step], fontsize=small)
    axes.tick_params(axis="x", rotation=90 if max(map(len, class_names)) > 2 else 0, length=2)
    axes.set_xlabel("class")
    axes.set_ylabel("client")
    if table.size <= 400:
        limit = table.max() * 0.6
        for (row, column), number in np.ndenumerate(table):
            if number:
                color = "white" if number > limit else INK
                axes.text(column, row, f"{number:.0f}", ha="center", va="center", fontsize=7, color=color)
    figure.colorbar(image, ax=axes, label="training images", shrink=0.8)
    axes.set_title(
        f"{title}: {len(counts)} clients, {len(class_names)} classes",
        loc="left",
        fontsize=11,
        color=INK,
    )
    save_figure(figure, path)


def draw_choices(run: Run, path: Path) -> None:
    """Draw clients by layers: the share of its edits in which each client restored each layer."""
    layers, clients = run.summary["layers"], [client["client"] for client in run.clients]
    chosen, edits = np.zeros((len(clients), len(layers))), np.zeros(len(clients))
    for row in run.rounds:
        for name, numbers in row.get("choice", {}).items():  # none in a round in which all clients failed
            edits[clients.index(name)] += bool(numbers)
            chosen[clients.index(name), numbers] += 1
    share = 100 * chosen / np.maximum(edits, 1)[:, None]
    figure, axes = plt.subplots(figsize=(min(4 + 0.2 * len(layers), 20), min(2.4 + 0.24 * len(clients), 14)))
    image = axes.imshow(np.ma.masked_equal(share, 0), cmap="Blues", vmin=0, vmax=100, aspect="auto")
    axes.set_xticks(range(len(layers)), layers, rotation=90, fontsize=7)
    axes.set_yticks(
        range(len(clients)), [f"{name} ({n:.0f})" for name, n in zip(clients, edits, strict=True)], fontsize=7
    )
    axes.set_xlabel("layer")
    axes.set_ylabel("client (edits)")
    figure.colorbar(image, ax=axes, label="% of its edits", shrink=0.8)
    title = f"{run.summary['label']}: layers that clients restored from their own last model"
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    save_figure(figure, path)


def draw_comparison(rows: Mapping[str, Sequence[Run]], path: Path, title: str, view: str = "personal") -> None:
    """Draw, on the left, every client of every seed and the mean of a view; on the right, the mean by round.

    Where only one round was evaluated there is no curve, and the left part stands alone.
    """
    curved = any(sum(bool(row["views"]) for row in run.rounds) > 1 for runs in rows.values() for run in runs)
    if curved:
        figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), gridspec_kw={"width_ratios": [1.15, 1]})
    else:
        figure, left = plt.subplots(figsize=(7, 4))
        right = None
    for number, (label, runs) in enumerate(rows.items()):
        color = COLORS[number % len(COLORS)]
        accuracies = np.array([client["personal_accuracy"] for run in runs for client in run.clients])
        offsets = np.linspace(-0.28, 0.28, len(accuracies))  # spread out, so that equal dots stay visible
        left.scatter(accuracies, number + offsets, s=14, color=color, alpha=0.45, linewidths=0)
        own = view if all(view in run.summary["views"] for run in runs) else "personal"
        mean = float(np.mean([run.summary["views"][own]["mean"] for run in runs]))
        left.plot([mean, mean], [number - 0.36, number + 0.36], color=color, linewidth=3)
        left.annotate(f"{mean:.1f}", (mean, number - 0.38), ha="center", va="bottom", fontsize=9, color=INK)
        if right is None:
            continue
        scored = [[row for row in run.rounds if row["views"]] for run in runs]
        curves = [{row["round"]: row["views"][own]["mean"] for row in rounds} for rounds in scored]
        x = sorted(set.intersection(*map(set, curves)))  # a seed may have stopped earlier than another
        y = [float(np.mean([curve[number] for curve in curves])) for number in x]
        right.plot(x, y, color=color, linewidth=2, label=label, marker="o" if len(x) == 1 else None)
    left.set_yticks(range(len(rows)), list(rows))
    left.invert_yaxis()
    whose = "means" if view == "personal" else f"the {view}'s model"
    left.set_xlabel(f"personal accuracy, %: dots are clients, bars are {whose}")
    if right is not None:
        right.set_xlabel("round")
        right.set_ylabel("mean personal accuracy, %" if view == "personal" else f"accuracy of the {view}'s model, %")
        right.legend(frameon=False)
    for axes in figure.axes:
        axes.grid(axis="both", color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=MUTED, labelcolor=INK)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=INK)
    figure.tight_layout()
    save_figure(figure, path, tight=False)
