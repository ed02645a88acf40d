"""Studies as tables for the terminal and as pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from rich.markup import escape
from rich.table import Table

from fedvit.report import units
from fedvit.report.plots import COLORS, GRID, INK, MUTED
from fedvit.report.tables import plain_table, plus_minus
from fedvit.runs.write import nbytes_of_run
from fedvit.studies.definitions import Study

Content = Mapping[str, Any]  # study.json
MARKERS = "osD^vP*Xph"


# Tables.


def dry_table(cells: Sequence[Any], found: Sequence[Mapping[str, Any]], title: str) -> Table:
    """The grid before it runs."""
    table = plain_table(title)
    for name in ("column", "row"):
        table.add_column(name, overflow="fold")
    table.add_column("differs in", overflow="fold", max_width=48)
    for name in ("rounds", "shared\nnumbers", "GB in\nall", "10^12\nMACs"):
        table.add_column(name, justify="right", no_wrap=True)
    declared = [{(t, k): v for t, own in cell.case.settings.items() for k, v in own.items()} for cell in cells]
    varied = {key for one in declared for key in one if any(other.get(key) != one[key] for other in declared)}
    for cell, own, figure in zip(cells, declared, found, strict=True):
        words = ", ".join(f"{t if k == 'name' else k} {v}" for (t, k), v in own.items() if (t, k) in varied)
        again = "again" if figure["shares_run"] else f"{figure['nbytes'] / 1e9:.3g}"
        table.add_row(
            escape(cell.case.column),
            escape(cell.case.row),
            escape(words),
            str(cell.row.first.train.rounds),
            f"{figure['params']['shared']:,}",
            again,
            "-" if figure["shares_run"] else f"{figure['macs'] / 1e12:.3g}",
        )
    return table


def study_tables(content: Content, study: Study, title: str) -> list[Table]:
    """The tables of a finished study."""
    match study.kind:
        case "cost":
            return [cost_rows(content, title)]
        case "target":
            return [target_rows(content, title)]
        case "choose":
            return [chosen_rows(content, study, title)]
    columns = list(dict.fromkeys(row["column"] for row in content["rows"]))
    return [matrix(content, study, columns, title) if len(columns) > 1 else plain_rows(content, title)]


def accuracy(figure: Mapping[str, Any]) -> str:
    return plus_minus(figure["accuracy"], figure["std"])


def plain_rows(content: Content, title: str) -> Table:
    """One column: everything that is known of each row."""
    rows = content["rows"]
    table = plain_table(title)
    table.add_column("row", overflow="fold", min_width=10)
    known = {
        "silhouette": any("silhouette" in row["figures"] for row in rows),
        "gain\nover\nLocal": any(row["figures"]["gain_over_local"] is not None for row in rows),
        "published": any(row["published"] for row in rows),
    }
    shown = ["lr", f"{view_of(content)}\naccuracy %", "±\nseeds", *(n for n, is_there in known.items() if is_there)]
    for name in [*shown, "bytes per\nclient,\nround"]:
        table.add_column(name, justify="right", no_wrap=True)
    best = max(row["figures"]["accuracy"] for row in rows)
    for row in rows:
        f = row["figures"]
        cells = {
            "silhouette": f"{f['silhouette']:.2f}" if "silhouette" in f else "-",
            "gain\nover\nLocal": "-" if f["gain_over_local"] is None else f"{f['gain_over_local']:+.1f}",
            "published": row["published"] or "-",
        }
        table.add_row(
            escape(row["row"]),
            f"{f['lr']:g}",
            accuracy(f),
            "-" if f["seed_std"] is None else f"{f['seed_std']:.1f}",
            *(cells[name] for name, is_there in known.items() if is_there),
            units.nbytes(f["nbytes"]["down"] + (f["nbytes"]["up"] or 0)),
            style="bold" if f["accuracy"] == best else "",
        )
    return table


def view_of(content: Content) -> str:
    """Whose accuracy a study shows: every client's own model, or the server's; both where rows differ."""
    return "/".join(dict.fromkeys(row["figures"]["view"] for row in content["rows"]))


def matrix(content: Content, study: Study, columns: Sequence[str], title: str) -> Table:
    """Rows by columns: accuracy in %, ± the deviation over clients; the best of a column is bold."""
    table = plain_table(f"{title}\n{view_of(content)} accuracy %, columns: {study.columns}")
    table.add_column("row", overflow="fold", min_width=10)
    for column in columns:
        table.add_column(escape(column), justify="right", overflow="fold")
    if "overall" in content:
        table.add_column("overall", justify="right")
    cells = {(row["row"], row["column"]): row for row in content["rows"]}
    best = {c: max(r["figures"]["accuracy"] for r in content["rows"] if r["column"] == c) for c in columns}
    for name in dict.fromkeys(row["row"] for row in content["rows"]):
        line = []
        for column in columns:
            row = cells.get((name, column))
            if row is None:
                line.append("")
                continue
            text = accuracy(row["figures"])
            text = f"[bold]{text}[/]" if row["figures"]["accuracy"] == best[column] else text
            line.append(f"{text}\n[dim]{row['published']}[/]" if row["published"] else text)
        if "overall" in content:
            line.append(f"{content['overall'][name]:.1f}" if name in content["overall"] else "")
        table.add_row(escape(name), *line)
    return table


def chosen_rows(content: Content, study: Study, title: str) -> Table:
    """What was tried in every column, its accuracy on val and on test, and what val chooses."""
    table = plain_table(title)
    for name in (study.columns, "row"):
        table.add_column(name, overflow="fold")
    for name in ("val %", "test %\n± clients", "±\nseeds", "published"):
        table.add_column(name, justify="right", no_wrap=True)
    last = None
    for row in content["rows"]:
        f, column = row["figures"], row["column"]
        picked = content["chosen"].get(column, {}).get("row") == row["row"]
        table.add_row(
            escape(column) if column != last else "",
            ("✓ " if picked else "  ") + escape(row["row"]),
            "-" if f["val"] is None else f"{f['val']:.1f}",
            accuracy(f),
            "-" if f["seed_std"] is None else f"{f['seed_std']:.1f}",
            row["published"] or "-",
            style="bold" if picked else "",
        )
        last = column
    table.caption = "✓: chosen on validation images" if content["chosen"] else "no validation images: nothing is chosen"
    table.caption_justify = "left"
    return table


def target_rows(content: Content, title: str) -> Table:
    """Accuracy, what a round costs, and rounds and megabytes to each target."""
    table = plain_table(title)
    several = len({row["column"] for row in content["rows"]}) > 1
    for name in ("column", "row") if several else ("row",):
        table.add_column(name, overflow="fold")
    for name in (f"{view_of(content)}\naccuracy %", "bytes a\nround"):
        table.add_column(name, justify="right", no_wrap=True)
    most = max(len(row["figures"]["to_target"]) for row in content["rows"])
    for number in range(most):
        found = {
            row["figures"]["to_target"][number]["target"]
            for row in content["rows"]
            if len(row["figures"]["to_target"]) > number
        }
        targets = " / ".join(f"{t:g}" for t in sorted(found))
        table.add_column(f"{targets} %:\nrounds, bytes", justify="right", no_wrap=True)
    table.add_column("published", justify="right")
    for row in content["rows"]:
        f = row["figures"]
        table.add_row(
            *((escape(row["column"]), escape(row["row"])) if several else (escape(row["row"]),)),
            f"{f['accuracy']:.1f}",
            units.nbytes((f["nbytes_run"]["down"] + f["nbytes_run"]["up"]) / f["rounds"]),
            *(
                [
                    "-" if t["rounds"] is None else f"{t['rounds']:.3g}, {units.nbytes(t['nbytes'])}"
                    for t in f["to_target"]
                ]
            ),
            *[""] * (most - len(f["to_target"])),
            row["published"] or "-",
        )
    table.caption = "targets are fixed beforehand; bytes of all clients, both ways; -: not reached by every seed"
    table.caption_justify = "left"
    return table


def cost_rows(content: Content, title: str) -> Table:
    """Exact numbers, and the paper's units beside what it prints."""
    table = plain_table(title)
    table.add_column("row", overflow="fold", min_width=10)
    for name in (
        "storage,\nnumbers", "sent one way,\nnumbers", "training\nMACs / image", "storage,\npaper's M",
        "sent,\npaper's M", "published:\nstorage FLOPs sent",
    ):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True)
    for row in content["rows"]:
        f = row["figures"]
        table.add_row(
            escape(row["row"]),
            f"{f['storage']:,}",
            f"{f['communication']:,}",
            f"{f['training_macs_per_example']:,}",
            f"{f['paper_units']['storage']:.2f}",
            f"{f['paper_units']['communication']:.2f}",
            row["published"] or "-",
        )
    table.caption = (
        "the paper's M: 2^20 numbers, with a head of 1,000 classes; its FLOPs cannot be derived, only that APFL and "
        "Per-FedAvg double them"
    )
    table.caption_justify = "left"
    return table


# Pictures.


def plain(axes: Axes) -> None:
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=MUTED, labelcolor=INK)


def finish(figure: Any, path: Path, title: str) -> None:
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=INK)
    figure.tight_layout()
    figure.savefig(path, dpi=130, metadata={"Software": None}, bbox_inches="tight")
    plt.close(figure)


def style(number: int) -> dict[str, Any]:
    return {"color": COLORS[number % len(COLORS)], "marker": MARKERS[number // len(COLORS) % len(MARKERS)]}


def names(content: Content, key: str) -> list[str]:
    return list(dict.fromkeys(row[key] for row in content["rows"]))


def draw_columns(content: Content, study: Study, path: Path, title: str) -> None:
    """Accuracy of every row in every column; bars are the deviation over seeds."""
    columns, rows = names(content, "column"), names(content, "row")
    figure, axes = plt.subplots(figsize=(min(3.5 + 1.1 * len(columns), 16), 4.2))
    for number, name in enumerate(rows):
        mine = [row for row in content["rows"] if row["row"] == name]
        x = [columns.index(row["column"]) + (number - (len(rows) - 1) / 2) * 0.3 / len(rows) for row in mine]
        y = [row["figures"]["accuracy"] for row in mine]
        error = [row["figures"]["seed_std"] or 0.0 for row in mine]
        axes.errorbar(x, y, yerr=error if any(error) else None, label=name, linewidth=1.4, capsize=2, **style(number))
    axes.set_xticks(range(len(columns)), columns, rotation=30 if max(map(len, columns)) > 10 else 0,
                    ha="right" if max(map(len, columns)) > 10 else "center")  # fmt: skip
    axes.set_xlabel(study.columns)
    axes.set_ylabel(f"{content['rows'][0]['figures']['view']} accuracy, %, last round")
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)
    plain(axes)
    finish(figure, path, title)


def draw_chosen(content: Content, study: Study, path: Path, title: str) -> None:
    """One panel a column: accuracy on val, by which it is chosen, and on test."""
    columns = names(content, "column")
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
        test = [row["figures"]["accuracy"] for row in mine]
        val = [row["figures"]["val"] for row in mine]
        if None not in val:
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
        plain(axes)
    for axes in grid[:, 0]:
        axes.set_ylabel("accuracy, %, last round")
    grid.flat[0].legend(frameon=False, fontsize=8)
    finish(figure, path, title)


def draw_targets(content: Content, runs: Mapping[str, Sequence[Any]], study: Study, path: Path, title: str) -> None:
    """Accuracy by megabytes sent and by round, the first seed of every row; lines are the targets."""
    columns = names(content, "column")
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
            look = {**style(number), "markersize": 3.5, "linewidth": 1.5, "label": row["row"]}
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
        plain(left)
        plain(right)
    finish(figure, path, title)


def draw_costs(content: Content, path: Path, title: str) -> None:
    """Bars of what is stored, sent and computed."""
    rows = content["rows"]
    figure, panels = plt.subplots(1, 3, figsize=(11, 0.9 + 0.34 * len(rows)), sharey=True)
    for axes, key, scale, words in zip(
        panels,
        ("storage", "communication", "training_macs_per_example"),
        (1e6, 1e6, 1e9),
        (
            "stored at a client, 10^6 numbers",
            "sent one way a round, 10^6 numbers",
            "training, 10^9 multiply-adds an image",
        ),
        strict=True,
    ):
        values = [row["figures"][key] / scale for row in rows]
        axes.barh(range(len(rows)), values, color=COLORS[2])
        for y, value in enumerate(values):
            axes.annotate(f" {value:.2f}", (value, y), va="center", fontsize=8, color=INK)
        axes.set_xlim(0, 1.18 * max(values) or 1)
        axes.set_xlabel(words)
        plain(axes)
        axes.grid(axis="y", visible=False)
    panels[0].set_yticks(range(len(rows)), [row["row"] for row in rows])
    panels[0].invert_yaxis()
    finish(figure, path, title)


def draw_features(pictures: Mapping[str, Any], path: Path, title: str) -> None:
    """One panel a row: test images as points, coloured by class."""
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
    finish(figure, path, title)
