"""Pictures of studies."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from fedvit.report.plots import COLORS, GRID, INK, MUTED, save_figure
from fedvit.runs.write import nbytes_of_run
from fedvit.studies.definitions.study import Study

Content = Mapping[str, Any]  # study.json
MARKERS = "osD^vP*Xph"


def _plain(axes: Axes) -> None:
    """Draw a light grid and no frame."""
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=MUTED, labelcolor=INK)


def _finish(figure: Any, path: Path, title: str) -> None:
    """Add the title and save the picture."""
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=INK)
    figure.tight_layout()
    save_figure(figure, path)


def _style(number: int) -> dict[str, Any]:
    """Choose the color and marker of a line by its number."""
    return {"color": COLORS[number % len(COLORS)], "marker": MARKERS[number // len(COLORS) % len(MARKERS)]}


def _names(content: Content, key: str) -> list[str]:
    """List the rows or columns of a study, each of them once."""
    return list(dict.fromkeys(row[key] for row in content["rows"]))


def draw_columns(content: Content, study: Study, path: Path, title: str) -> None:
    """Draw the accuracy of every row in every column; error bars are the deviation over seeds."""
    columns, rows = _names(content, "column"), _names(content, "row")
    figure, axes = plt.subplots(figsize=(min(3.5 + 1.1 * len(columns), 16), 4.2))
    for number, name in enumerate(rows):
        mine = [row for row in content["rows"] if row["row"] == name]
        x = [columns.index(row["column"]) + (number - (len(rows) - 1) / 2) * 0.3 / len(rows) for row in mine]
        y = [row["figures"]["accuracy"] for row in mine]
        error = [row["figures"]["seed_std"] or 0.0 for row in mine]
        axes.errorbar(x, y, yerr=error if any(error) else None, label=name, linewidth=1.4, capsize=2, **_style(number))
    axes.set_xticks(range(len(columns)), columns, rotation=30 if max(map(len, columns)) > 10 else 0,
                    ha="right" if max(map(len, columns)) > 10 else "center")  # fmt: skip
    axes.set_xlabel(study.columns)
    axes.set_ylabel(f"{content['rows'][0]['figures']['view']} accuracy, %, last round")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)
    _plain(axes)
    _finish(figure, path, title)


def draw_chosen(content: Content, study: Study, path: Path, title: str) -> None:
    """Draw a panel per column: the accuracy on validation images, which decides, and that on test images."""
    columns = _names(content, "column")
    across = min(len(columns), 5)
    down = -(-len(columns) // across)
    figure, grid = plt.subplots(
        down, across, figsize=(0.8 + 2.7 * across, 0.6 + 3.1 * down), squeeze=False, sharey=True
    )
    for axes in grid.flat[len(columns) :]:
        axes.set_visible(False)
    for axes, column in zip(grid.flat, columns, strict=False):
        mine = [row for row in content["rows"] if row["column"] == column]
        labels = [row["row"] for row in mine]
        test, val = (
            [math.nan if (value := row["figures"][key]) is None else value for row in mine]  # a gap where it diverged
            for key in ("accuracy", "val")
        )
        if not all(map(math.isnan, val)):
            axes.plot(labels, val, color=COLORS[2], marker="o", label="val, clients' mean")
        axes.plot(
            labels, test, color=COLORS[0], marker="s", linestyle="--", label=f"test, {mine[0]['figures']['view']}"
        )
        pick = content["chosen"].get(column)
        if pick:
            at = labels.index(pick["row"])
            axes.plot([at], [val[at]], marker="*", markersize=15, color=COLORS[1], linestyle="", label="chosen on val")
        axes.set_xlabel(f"{study.columns}: {column}")
        axes.tick_params(axis="x", rotation=45 if max(map(len, labels)) > 4 else 0)
        _plain(axes)
    for axes in grid[:, 0]:
        axes.set_ylabel("accuracy, %, last round")
    grid.flat[0].legend(frameon=False, fontsize=8)
    _finish(figure, path, title)


def draw_targets(content: Content, runs: Mapping[str, Sequence[Any]], path: Path, title: str) -> None:
    """Draw accuracy by megabytes sent and by round, for the first seed of every row; dotted lines are the targets."""
    columns = _names(content, "column")
    figure, grid = plt.subplots(len(columns), 2, figsize=(10, 0.6 + 3.6 * len(columns)), squeeze=False, sharey="row")
    for (left, right), column in zip(grid, columns, strict=True):
        mine = [row for row in content["rows"] if row["column"] == column]
        for number, row in enumerate(mine):
            lines = runs[row["runs"]][0].rounds
            view = row["figures"]["view"]
            tested = [i for i, line in enumerate(lines) if line["views"]]
            accuracies = [lines[i]["views"][view]["mean"] for i in tested]
            totals = [nbytes_of_run(lines[: i + 1]) for i in tested]
            sent = [(total["down"] + total["up"]) / 1e6 for total in totals]
            look = {**_style(number), "markersize": 3.5, "linewidth": 1.5, "label": row["row"]}
            left.plot(sent, accuracies, **look)
            right.plot([lines[i]["round"] for i in tested], accuracies, **look)
        for target in mine[0]["figures"]["to_target"]:
            for axes in (left, right):
                axes.axhline(target["target"], color=MUTED, linewidth=0.8, linestyle=":")
            right.annotate(f"{target['target']:g} %", (1.005, target["target"]), xycoords=("axes fraction", "data"),
                           va="center", fontsize=8, color=MUTED)  # fmt: skip
        if any(row["figures"]["nbytes_run"]["up"] for row in mine):
            left.set_xscale("log")
            left.xaxis.set_major_formatter("{x:g}")
        left.set_xlabel("megabytes sent, all clients, both ways")
        right.set_xlabel("round")
        right.xaxis.set_major_locator(MaxNLocator(integer=True))
        left.set_ylabel(f"{column + ': ' if column else ''}{mine[0]['figures']['view']} accuracy, %")
        right.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.06, 0.5))
        _plain(left)
        _plain(right)
    _finish(figure, path, title)


def draw_costs(content: Content, path: Path, title: str) -> None:
    """Draw bars of what a client stores, sends and computes."""
    rows = content["rows"]
    figure, panels = plt.subplots(1, 3, figsize=(11, 0.9 + 0.34 * len(rows)), sharey=True)
    for axes, key, scale, words in zip(
        panels,
        ("storage", "communication", "training_macs_per_example"),
        (1e6, 1e6, 1e9),
        (
            "stored at a client, 10^6 numbers",
            "sent one way per round, 10^6 numbers",
            "training, 10^9 multiply-adds per image",
        ),
        strict=True,
    ):
        values = [row["figures"][key] / scale for row in rows]
        axes.barh(range(len(rows)), values, color=COLORS[2])
        for y, value in enumerate(values):
            axes.annotate(f" {value:.2f}", (value, y), va="center", fontsize=8, color=INK)
        axes.set_xlim(0, 1.18 * max(values) or 1)
        axes.set_xlabel(words)
        _plain(axes)
        axes.grid(axis="y", visible=False)
    panels[0].set_yticks(range(len(rows)), [row["row"] for row in rows])
    panels[0].invert_yaxis()
    _finish(figure, path, title)


def draw_gains(content: Content, path: Path, title: str) -> None:
    """Draw a curve per row: what each client gains over Local, from the smallest gain to the largest."""
    figure, axes = plt.subplots(figsize=(8, 4.4))
    shown = [row for row in content["rows"] if row["figures"]["gains"]]
    for number, row in enumerate(shown):
        gains = row["figures"]["gains"]
        share = [100 * (i + 0.5) / len(gains) for i in range(len(gains))]
        axes.plot(share, gains, label=row["row"], linewidth=1.4, markersize=3, **_style(number))
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.set_xlabel("clients, %, by their gain")
    axes.set_ylabel("gain over Local, points, last round")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)
    _plain(axes)
    _finish(figure, path, title)


def draw_shares(content: Content, path: Path, title: str) -> None:
    """Draw the share of attention that goes to the prefix, by block, with a line per row."""
    figure, axes = plt.subplots(figsize=(7, 4))
    for number, row in enumerate(content["rows"]):
        shares = row["figures"]["prefix_share"]
        axes.plot(range(1, len(shares) + 1), shares, label=row["row"], linewidth=1.4, **_style(number))
    axes.set_ylim(0, 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("block")
    axes.set_ylabel("share of attention to the prefix")
    axes.legend(frameon=False, fontsize=9)
    _plain(axes)
    _finish(figure, path, title)


def draw_features(pictures: Mapping[str, Any], path: Path, title: str) -> None:
    """Draw a panel per row: test images as points, colored by class."""
    across = min(len(pictures), 3)
    down = -(-len(pictures) // across)
    figure, grid = plt.subplots(down, across, figsize=(3.4 * across + 1.2, 3.4 * down + 0.4), squeeze=False)
    for axes in grid.flat[len(pictures) :]:
        axes.set_visible(False)
    classes = sorted({int(label) for seen in pictures.values() for label in seen.labels})
    for axes, (name, seen) in zip(grid.flat, pictures.items(), strict=False):
        for number, label in enumerate(classes):
            points = seen.points[seen.labels == label]
            axes.scatter(points[:, 0], points[:, 1], s=9, color=plt.get_cmap("tab10")(number % 10), linewidths=0,
                         label=seen.class_names[label])  # fmt: skip
        whose = "server's model" if seen.model == "server" else "clients' own models"
        axes.set_title(f"{name}: {whose}, silhouette {seen.silhouette:.2f}", fontsize=9, color=INK)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_color(GRID)
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, title="class", frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5),
                  fontsize=8, markerscale=2)  # fmt: skip
    _finish(figure, path, title)
