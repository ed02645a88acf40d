"""Tables of studies for the terminal."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from fedvit.report import units
from fedvit.report.tables import plain_table, plus_minus
from fedvit.studies.cells import Cell
from fedvit.studies.definitions.study import Study

Content = Mapping[str, Any]  # study.json


def dry_table(cells: Sequence[Cell], found: Sequence[Mapping[str, Any]], runs: int, finished: int, title: str) -> Table:
    """Show a grid before it runs, with the estimates of its cells."""
    table = plain_table(title)
    for name in ("column", "row"):
        table.add_column(name, overflow="fold")
    table.add_column("differs in", overflow="fold", max_width=48)
    for name in ("rounds", "shared\nnumbers", "GB in\ntotal", "10^12\nMACs"):
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
    table.caption = _caption(runs, finished, found)
    table.caption_justify = "left"
    return table


def _caption(runs: int, finished: int, found: Iterable[Mapping[str, Any]]) -> str:
    """Sum up what all runs would take."""
    known = f" ({finished} of them have finished)" if finished else ""
    nbytes, macs = (sum(figure[key] for figure in found) for key in ("nbytes", "macs"))
    return f"{runs} runs{known}, {nbytes / 1e9:.3g} GB, {macs / 1e12:.3g} x 10^12 multiply-adds of training"


def paper_table(parts: Sequence[Mapping[str, Any]], title: str) -> Table:
    """Show the studies of a paper before they run: what each adds to those above it."""
    table = plain_table(title)
    table.add_column("study", overflow="fold")
    for name in ("runs", "shared with\nthose above", "finished", "GB to\nsend", "10^12\nMACs"):
        table.add_column(name, justify="right", no_wrap=True)
    for part in parts:
        nbytes, macs = (sum(one[key] for one in part["estimates"]) for key in ("nbytes", "macs"))
        counts = (f"{part[key]}" for key in ("runs", "shared", "finished"))
        table.add_row(escape(part["name"]), *counts, f"{nbytes / 1e9:.3g}", f"{macs / 1e12:.3g}")
    runs, shared, finished = (sum(part[key] for part in parts) for key in ("runs", "shared", "finished"))
    every = [one for part in parts for one in part["estimates"]]
    table.caption = f"{_caption(runs - shared, finished, every)}; {shared} of {runs} are shared and run once"
    table.caption_justify = "left"
    return table


def study_tables(content: Content, study: Study, title: str) -> list[Table]:
    """Make the tables of a finished study."""
    match study.kind:
        case "cost":
            return [_cost_rows(content, study, title)]
        case "target":
            return [_target_rows(content, title)]
        case "choose":
            return [_chosen_rows(content, study, title)]
        case "gains":
            return [_gain_rows(content, title)]
        case "prefix":
            return [_share_rows(content, title)]
    columns = list(dict.fromkeys(row["column"] for row in content["rows"]))
    return [_matrix(content, study, columns, title) if len(columns) > 1 else _plain_rows(content, title)]


def _accuracy(figure: Mapping[str, Any]) -> str:
    """Write an accuracy with its deviation over clients."""
    return plus_minus(figure["accuracy"], figure["std"])


def _plain_rows(content: Content, title: str) -> Table:
    """Show everything that is known about each row of a study with a single column."""
    rows = content["rows"]
    table = plain_table(title)
    table.add_column("row", overflow="fold", min_width=10)
    known = {
        "silhouette": any("silhouette" in row["figures"] for row in rows),
        "gain\nover\nLocal": any(row["figures"]["gain_over_local"] is not None for row in rows),
        "published": any(row["published"] for row in rows),
    }
    shown = ["lr", f"{_view_of(content)}\naccuracy %", "±\nseeds", *(n for n, is_there in known.items() if is_there)]
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
            _accuracy(f),
            "-" if f["seed_std"] is None else f"{f['seed_std']:.1f}",
            *(cells[name] for name, is_there in known.items() if is_there),
            units.nbytes(f["nbytes"]["down"] + (f["nbytes"]["up"] or 0)),
            style="bold" if f["accuracy"] == best else "",
        )
    return table


def _view_of(content: Content) -> str:
    """Tell whose accuracy a study shows: that of the clients' own models, of the server's, or both if rows differ."""
    return "/".join(dict.fromkeys(row["figures"]["view"] for row in content["rows"]))


def _matrix(content: Content, study: Study, columns: Sequence[str], title: str) -> Table:
    """Show rows by columns: accuracy in percent, ± the deviation over clients, with the best of a column in bold."""
    table = plain_table(f"{title}\n{_view_of(content)} accuracy %, columns: {study.columns}")
    table.add_column("row", overflow="fold", min_width=10)
    for column in columns:
        table.add_column(escape(column), justify="right", overflow="fold")
    if "overall" in content:
        table.add_column("overall", justify="right")
    if study.costs is not None:
        for name in ("storage,\nnumbers", "sent one way,\nnumbers", "training\nMACs / image"):
            table.add_column(name, justify="right", no_wrap=True)
        table.caption = f"costs: exact numbers for {columns[0]}; published: storage, FLOPs, sent, in 2^20"
        table.caption_justify = "left"
    cells = {(row["row"], row["column"]): row for row in content["rows"]}
    best = {c: max(r["figures"]["accuracy"] for r in content["rows"] if r["column"] == c) for c in columns}
    for name in dict.fromkeys(row["row"] for row in content["rows"]):
        line = []
        for column in columns:
            row = cells.get((name, column))
            if row is None:
                line.append("")
                continue
            text = _accuracy(row["figures"])
            text = f"[bold]{text}[/]" if row["figures"]["accuracy"] == best[column] else text
            line.append(f"{text}\n[dim]{row['published']}[/]" if row["published"] else text)
        if "overall" in content:
            line.append(f"{content['overall'][name]:.1f}" if name in content["overall"] else "")
        if study.costs is not None:
            line += _costs_of(cells[name, next(c for c in columns if (name, c) in cells)], study.costs, content["grid"])
        table.add_row(escape(name), *line)
    if study.note and content["grid"] == "paper":
        table.caption, table.caption_justify = study.note, "left"
    return table


def _costs_of(row: Mapping[str, Any], published: Mapping[str, str], grid: str) -> list[str]:
    """Write a row's storage, numbers sent and multiply-adds, with the published ones below if it is their model."""
    f = row["figures"]["costs"]
    ours = [f"{f[key]:,}" for key in ("storage", "communication", "training_macs_per_example")]
    if grid != "paper" or row["row"] not in published:
        return ours
    storage, flops, sent = published[row["row"]].split()
    return [f"{text}\n[dim]{theirs}M[/]" for text, theirs in zip(ours, (storage, sent, flops), strict=True)]


def _gain_rows(content: Content, title: str) -> Table:
    """Show the gains over Local of every row's clients: their mean, their range and how many lose."""
    table = plain_table(f"{title}\npoints of personal accuracy over Local, per client and seed")
    table.add_column("row", overflow="fold", min_width=10)
    for name in ("accuracy %", "mean\ngain", "smallest", "median", "largest", "clients\nthat lose"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in content["rows"]:
        found = row["figures"]["gains"]
        ranks = (found[0], found[len(found) // 2], found[-1]) if found else ()
        table.add_row(
            escape(row["row"]),
            _accuracy(row["figures"]),
            "-" if not found else f"{sum(found) / len(found):+.1f}",
            *(f"{value:+.1f}" for value in ranks) if found else ("-",) * 3,
            f"{sum(gain < 0 for gain in found)} of {len(found)}" if found else "-",
        )
    return table


def _share_rows(content: Content, title: str) -> Table:
    """Show the share of attention that goes to the prefix, by block."""
    table = plain_table(f"{title}\nlambda: share of attention to the prefix, mean over heads, tokens and test images")
    table.add_column("row", overflow="fold", min_width=7)
    table.add_column("accuracy %", justify="right", no_wrap=True)
    blocks = len(content["rows"][0]["figures"]["prefix_share"])
    for number in range(1, blocks + 1):
        table.add_column(f"block\n{number}", justify="right", no_wrap=True)
    for row in content["rows"]:
        f = row["figures"]
        table.add_row(escape(row["row"]), _accuracy(f), *(f"{share:.2f}" for share in f["prefix_share"]))
    return table


def _chosen_rows(content: Content, study: Study, title: str) -> Table:
    """Show what was tried in every column, its accuracy on validation and test images, and which row is chosen."""
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
            "diverged" if f.get("diverged") else _accuracy(f),
            "-" if f.get("seed_std") is None else f"{f['seed_std']:.1f}",
            row["published"] or "-",
            style="bold" if picked else "",
        )
        last = column
    table.caption = (
        "✓: chosen on validation images"
        if content["chosen"]
        else "nothing is chosen, because there are no validation images"
    )
    table.caption_justify = "left"
    return table


def _target_rows(content: Content, title: str) -> Table:
    """Show the accuracy, the bytes per round, and the rounds and bytes that each target takes."""
    table = plain_table(title)
    several = len({row["column"] for row in content["rows"]}) > 1
    for name in ("column", "row") if several else ("row",):
        table.add_column(name, overflow="fold")
    for name in (f"{_view_of(content)}\naccuracy %", "bytes per\nround"):
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
            _beside(units.nbytes((f["nbytes_run"]["down"] + f["nbytes_run"]["up"]) / f["rounds"]), row, 0),
            *(
                _beside(
                    "-" if t["rounds"] is None else f"{t['rounds']:.3g}, {units.nbytes(t['nbytes'])}",
                    row,
                    number,
                    "" if t["paper_mb"] is None else f"one way {t['paper_mb']:.4g}MB, ",
                )
                for number, t in enumerate(f["to_target"], 1)
            ),
            *[""] * (most - len(f["to_target"])),
            row["published"] or "-",
        )
    table.caption = (
        "targets are fixed in advance; bytes are of all clients, both ways; - means not reached by every seed"
    )
    if any(row.get("published_costs") for row in content["rows"]):
        table.caption += "; in the second lines, as the paper counts: one way, in units of 2^20 bytes"
    table.caption_justify = "left"
    return table


def _beside(ours: str, row: Mapping[str, Any], number: int, same_units: str = "") -> str:
    """Put a paper's cost below ours, and ours in the paper's units before it."""
    costs = row.get("published_costs")
    return f"{ours}\n[dim]{same_units}published {costs[number]}[/]" if costs else ours


def _cost_rows(content: Content, study: Study, title: str) -> Table:
    """Show exact numbers, and numbers in the paper's units next to the published ones."""
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
    table.caption = study.note
    table.caption_justify = "left"
    return table
