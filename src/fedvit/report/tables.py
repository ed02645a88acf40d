"""Tables of results for the terminal."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from fedvit.report import units
from fedvit.report.statistics import LOCAL, Row, interval, mean, rank
from fedvit.runs.description import Description


def plus_minus(mean: float, std: float | None) -> str:
    return f"{mean:.1f}" if std is None else f"{mean:.1f} ± {std:.1f}"


def plain_table(title: str, *, header: bool = True) -> Table:
    """Make a table that fits into 80 columns."""
    padding = (0, 1, 0, 0)
    return Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, show_header=header, padding=padding
    )


_COLUMNS = (
    "lr",
    "accuracy %\n± clients",
    "±\nseeds",
    "gain\nover\nLocal",
    "clients\nhurt",
    "sent per\nclient,\nround",
    "time",
)


def comparison_table(entries: Sequence[Mapping[str, Any]], title: str, *, by: str = "mean") -> Table:
    """Make a table with one line per row of compare.json; the best mean, or the best of another entry, is bold."""
    table = plain_table(title)
    table.add_column("row", overflow="fold")
    areas = any("auroc" in entry for entry in entries)
    for name in (*_COLUMNS[:-2], *(["AUROC"] if areas else []), *_COLUMNS[-2:]):
        table.add_column(name, justify="right", no_wrap=True)
    best = max(entry.get(by) or 0.0 for entry in entries)
    for entry in entries:
        local = entry["label"] == "local"
        table.add_row(
            escape(entry["label"]),
            f"{entry['lr']:g}{'*' if _at_edge(entry) else ''}",
            plus_minus(entry["mean"], entry["std"]),
            "-" if entry["seed_std"] is None else f"{entry['seed_std']:.1f}",
            "-" if local else f"{entry['gain_mean']:+.1f}",
            "-" if local else units.amount(entry["hurt"]),
            *([units.decimal(entry.get("auroc"))] if areas else []),
            units.nbytes((entry["nbytes_down"] or 0) + (entry["nbytes_up"] or 0)),
            units.duration(entry["seconds"]),
            style="bold" if entry.get(by) == best else "",
        )
    if any(map(_at_edge, entries)):
        table.caption = "* the smallest or largest rate that was tried: a better one may lie beyond"
        table.caption_justify = "left"
    return table


def _at_edge(entry: Mapping[str, Any]) -> bool:
    """Return whether a row's rate was searched and lies at the edge of its grid."""
    return bool(entry.get("search", {}).get("at_edge"))


def report_table(rows: Sequence[Row]) -> Table:
    """Make a short table of the rows of a report."""
    table = plain_table(f"{rows[0].first.tables['data']['name']}, best first")
    table.add_column("row", overflow="fold")
    areas = any(row.view("auroc") is not None for row in rows)
    names = ["round", "accuracy %\n± clients", "±\nseeds", "gain over Local\n(95 % interval)", "clients\nhurt"]
    for name in [*names, *(["AUROC"] if areas else []), "sent in\nthe run", "time"]:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rank(rows):
        found = interval(row.gains)
        gain = "-" if row.method == LOCAL else units.points(mean(row.gains))
        gain += f" ({units.points(found[0])} … {units.points(found[1])})" if found and row.method != LOCAL else ""
        last = min((record.rounds[-1]["round"] if record.rounds else 0) for record in row.records)
        table.add_row(
            escape(row.label),
            str(last) if row.finished else f"{last} of {row.first.planned}",
            "-" if row.mean is None else plus_minus(row.mean, row.view("std")),
            units.percent(row.seed_std),
            gain,
            "-" if row.method == LOCAL else units.amount(row.hurt),
            *([units.decimal(row.view("auroc"))] if areas else []),
            units.nbytes(row.sent),
            units.duration(row.seconds),
        )
    return table


def summary_table(summary: Mapping[str, Any]) -> Table:
    """Make the table of a run's views after its last round."""
    title = f"{summary['label']} on {summary['data']}, {summary['clients']} clients, round {summary['rounds']}"
    table = plain_table(title)
    table.add_column("view", no_wrap=True)
    areas = any("auroc" in view for view in summary["views"].values())
    names = ("accuracy %", "balanced %", *(["AUROC"] if areas else []), "loss")
    for name in (*names, "worst\ntenth", "best\ntenth", "best\nround"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, view in summary["views"].items():
        table.add_row(
            name,
            plus_minus(view["mean"], view["std"]),
            f"{view['balanced_accuracy']:.1f}",
            *([units.decimal(view.get("auroc"))] if areas else []),
            "-" if view["loss"] is None else f"{view['loss']:.3f}",
            "-" if view["worst_decile"] is None else f"{view['worst_decile']:.1f}",
            "-" if view["best_decile"] is None else f"{view['best_decile']:.1f}",
            f"{view['best_round']:.1f} ({view['best_round_number']})",
        )
    if summary.get("kept"):
        table.caption, table.caption_justify = kept_words(summary), "left"
    return table


def privacy_line(summary: Mapping[str, Any]) -> str | None:
    """Say what a run with differential privacy spent, and what such privacy does not cover."""
    found = summary.get("privacy")
    if found is None:
        return None
    bound = "no bound" if found["epsilon"] is None else f"epsilon {found['epsilon']:.2f}"
    return (
        f"privacy: {bound} at delta {found['delta']:g} for each training image, the most of any client; not covered: "
        f"{', '.join(found['unprotected'])}"
    )


def kept_words(summary: Mapping[str, Any]) -> str:
    """Say which round a run has kept, why, and how it does on test images beside the last one."""
    kept = summary["kept"]
    there, last = (views["personal"]["mean"] for views in (kept["views"], summary["views"]))
    return (
        f"kept: round {kept['round']}, the best on validation images ({units.percent(kept['val'])} %). On test images "
        f"it has {units.percent(there)} %, and the last round, {summary['rounds']}, has {units.percent(last)} %"
    )


def time_line(summary: Mapping[str, Any], timings: Sequence[Mapping[str, Any]]) -> str:
    """Say how the time of a run was spent."""
    phases: dict[str, float] = {}
    for timing in timings:
        for phase, seconds in timing["seconds"].items():
            phases[phase] = phases.get(phase, 0.0) + seconds
    parts = {"set up": summary["seconds"] - sum(phases.values()), **phases}
    words = ", ".join(f"{name} {units.duration(value)}" for name, value in parts.items())
    return f"time: {units.duration(summary['seconds'])} ({words})"


def split_table(
    counts: Mapping[str, Mapping[str, list[int]]], title: str, patients: Mapping[str, Mapping[str, int]]
) -> Table:
    """Make the table of every client's sizes and number of classes, and of its patients where they are known."""
    table = plain_table(title)
    table.add_column("client", overflow="fold")
    known = ("patients in train", "val", "test") if patients else ()
    for name in ("train", "val", "test", "classes", *known):
        table.add_column(name, justify="right", no_wrap=True)
    for client, parts in counts.items():
        sizes = [str(sum(parts[part])) for part in ("train", "val", "test")]
        whose = [str(patients[client][part]) for part in ("train", "val", "test")] if patients else []
        table.add_row(escape(client), *sizes, str(sum(number > 0 for number in parts["train"])), *whose)
    return table


def datasets_table(entries: Sequence[Mapping[str, Any]], folder: object) -> Table:
    """Make the table that `fedvit datasets` prints."""
    table = plain_table(f"data folder: {folder or 'none; give --data-dir or set FEDVIT_DATA'}")
    for name in ("data", "kind", "images", "classes", "here"):
        table.add_column(name, justify="right" if name in ("images", "classes") else "left", overflow="fold")
    for entry in entries:
        numbers = ["" if entry[key] is None else f"{entry[key]:,}" for key in ("images", "classes")]
        table.add_row(entry["name"], entry["kind"], *numbers, "yes" if entry["present"] else "-")
    return table


def cost_table(cost: Mapping[str, Any], label: str, model: str) -> Table:
    """Make the table that `fedvit cost` prints."""
    table = plain_table(f"{label} on {model}", header=False)
    table.add_column("what")
    table.add_column("number", justify="right")
    for role, count in cost["params"].items():
        table.add_row(f"{role} parameters", units.count(count))
    for way, nbytes in () if "step_nbytes" in cost else cost["nbytes"].items():
        table.add_row(f"sent {way}, per sampled client and round", units.nbytes(nbytes))
    table.add_row("multiply-adds of one forward pass, per image", units.count(cost["macs_per_example"]))
    table.add_row("a client keeps between rounds", units.nbytes(cost["memory_nbytes"]))
    table.add_row("training passes per image (FedAvg: 1)", f"{cost['training_passes']:.3g}")
    if cost.get("finetune_epochs"):
        table.add_row("epochs of training before each test, for every client", f"{cost['finetune_epochs']:,}")
    if cost["probe_passes"]:
        table.add_row("forward passes over the probe images, per choice", f"{cost['probe_passes']:,}")
    for way, nbytes in cost.get("nbytes_last_round", {}).items():
        table.add_row(f"sent {way} in the last round", units.nbytes(nbytes))
    if "nbytes_once_per_image" in cost:
        once = units.nbytes(cost["nbytes_once_per_image"])
        table.add_row("per training image, sent up once and down once to every client", once)
    for rate, other in cost.get("by_rate", {}).items():
        sizes = (units.count(other["params"]["total"]), units.nbytes(other["nbytes"]["down"]))
        numbers = f"{sizes[0]} / {sizes[1]} / {units.count(other['macs_per_example'])}"
        table.add_row(f"rate {rate}: parameters / sent down / multiply-adds", numbers)
    if "step_nbytes" in cost:
        table.add_row("multiply-adds at the client, per image", units.count(cost["client_macs_per_example"]))
        table.add_row("multiply-adds at the server, per image", units.count(cost["server_macs_per_example"]))
        table.add_row("the client's weights", units.nbytes(cost["client_weight_nbytes"]))
        for way, nbytes in cost["step_nbytes"].items():
            table.add_row(f"sent {way}, per step", units.nbytes(nbytes))
    run = cost.get("run")
    if run:
        source = "measured here" if run["how"] == "measured" else "by a table; --calibrate measures"
        table.add_row(f"the run: time, about ({source})", units.duration(60 * run["minutes"]))
        processes = "1 process" if run["workers"] == 1 else f"{run['workers']} worker processes"
        table.add_row(f"the run: memory of all processes, about ({processes})", units.memory(run["memory_mb"]))
        table.add_row("the run: sent in all, with evaluation", units.nbytes(run["nbytes"]))
    return table


def exported_line(name: str, path: Path, description: Description) -> str:
    """Describe an exported model: what it is, how to open it, and how well it was checked."""
    check = description.checked
    assert check is not None
    form = "one ONNX graph" if path.suffix == ".onnx" else "plain timm"
    if path.suffix != ".onnx" and description.timm is None:
        form = f"for fedvit.load_model, not plain timm: {description.not_timm}"
    near = f"within {check.difference:.1g} of the run's own model on {check.images} images"
    return f"{name}: {path} ({form}; logits {near})"
