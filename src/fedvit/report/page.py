"""One self-contained HTML page: who won, by how much, for whom and at what cost."""

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from fedvit.core.errors import UserError
from fedvit.core.files import write_text
from fedvit.report import svg
from fedvit.report.load import collect, differences, flat
from fedvit.report.statistics import LOCAL, POOLED, Record, Row, interval, lead, mean, rank
from fedvit.report.svg import Bar, Series
from fedvit.report.units import client, count, decimal, duration, memory, nbytes, percent, points

MOST_LINES = 10  # rows in a chart; there are as many colours
MOST_DETAILS = 8  # rows whose clients are shown one by one
MOST_BARS = 60  # clients with a bar of their own
MOST_MATRICES = 24  # clients with a confusion matrix of their own
MOST_CLASSES = 12  # in a confusion matrix
MOST_SPLIT = 60  # clients in the picture of the split
UNDER = "h-under"
MARK = b'<meta name="generator" content="fedvit">'
PARTS = ("set up", "data", "train", "aggregate", "store", "evaluate", "checkpoint")


def write_report(folders: Sequence[Path], out: Path, target: float | None = None) -> list[list[Row]]:
    """Read the runs in these folders and write the page; gives what was read."""
    groups = collect(folders)
    if out.is_dir() or not out.parent.is_dir():
        raise UserError(f"--out expects a file in a folder that exists, such as report.html, found {out}")
    if out.is_file() and MARK not in out.read_bytes()[:2000]:
        raise UserError(f"{out} is not a report of ours, so it is not written over: give another --out")
    write_text(out, page(groups, target), errors="replace")
    return groups


def page(groups: Sequence[Sequence[Row]], target: float | None = None) -> str:
    """The whole page."""
    several = len(groups) > 1
    sections = [section for number, rows in enumerate(groups) for section in group_sections(number, rows, target)]
    body, links = [], []
    for number, rows in enumerate(groups):
        mine = [section for section in sections if section.group == number]
        if several:
            body.append(f'<h2 id="g{number}">{escape(group_title(rows))}</h2><p class="sub">{subtitle(rows)}</p>')
            links.append(f'<li><a href="#g{number}"><b>{escape(group_title(rows))}</b></a></li>')
        level = 3 if several else 2
        for section in mine:
            name = f"g{number}-{section.name}"
            body.append(f'<section aria-labelledby="{name}"><h{level} id="{name}">{section.title}</h{level}>')
            body.append(f"{section.body.replace(UNDER, f'h{level + 1}')}</section>")
            links.append(f'<li><a href="#{name}">{section.title}</a></li>')
    title = "Report over several data sets or splits" if several else group_title(groups[0])
    template = Template(resources.files("fedvit.report").joinpath("page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(title),
        head="" if several else f'<p class="sub">{subtitle(groups[0])}</p>',
        contents="\n".join(links),
        body="\n".join(body),
        version=version("fedvit"),
    )


@dataclass(frozen=True)
class Section:
    group: int
    name: str
    title: str
    body: str


def group_sections(number: int, rows: Sequence[Row], target: float | None) -> list[Section]:
    """All that is said of the rows on one data set and split; what there is nothing to say of is left out."""
    ranked = rank(rows)
    colors = colors_of(ranked)
    parts: list[tuple[str, str, str]] = [
        ("result", "Result", notices(rows) + cards(ranked)),
        ("table", "Table", main_table(ranked) + view_table(ranked)),
        ("rounds", "Accuracy by round and by traffic", by_round(ranked, colors) + to_target(ranked, target)),
        ("gains", "Gain of every client over Local", gain_density(ranked, colors)),
        ("clients", "Every client", every_client(ranked)),
        ("split", "Who owns what", split_map(ranked)),
        ("time", "Where the time went", time_bars(ranked)),
        ("settings", "Settings", settings(rows)),
        ("again", "Run it again", commands(rows)),
        ("words", "What the numbers mean", GLOSSARY),
    ]
    return [Section(number, name, title, body) for name, title, body in parts if body]


def colors_of(ranked: Sequence[Row]) -> dict[str, int]:
    """The rows that charts show, each with its colour: Local is grey and always there, then the best ones."""
    shown = [row for row in ranked if row.mean is not None]
    local = [row for row in shown if row.method == LOCAL][:1]
    others = [row for row in shown if row not in local][: MOST_LINES - 1]
    return {row.label: 0 for row in local} | {row.label: number + 1 for number, row in enumerate(others)}


def group_title(rows: Sequence[Row]) -> str:
    tables = rows[0].first.tables
    name = Path(str(tables["data"]["name"])).stem
    words = rows[0].label if len(rows) == 1 else f"{len(rows)} rows compared"
    return f"{name}: {words}"


def subtitle(rows: Sequence[Row]) -> str:
    """Data, split, model, length, in one line; what differs between rows is left to the settings."""
    first = rows[0].first
    clients = len(first.split.get("clients", {})) or first.tables["partition"].get("clients", "?")

    def shared(key: str, form: str) -> str:
        values = differences(rows).get(key, ["-"])
        return form.format(values[0]) if len(set(values)) == 1 and values[0] != "-" else ""

    seeds = sorted({seed for row in rows for seed in row.seeds})
    parts = [
        f"{clients} clients, {len(first.class_names)} classes",
        shared("partition.name", "split {}"),
        shared("model.name", "{}"),
        shared("train.rounds", "{} rounds"),
        shared("train.cohort", "{} clients a round"),
        f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}",
    ]
    return escape(" · ".join(part for part in parts if part))


def notices(rows: Sequence[Row]) -> str:
    """What a reader must know first: runs that are not finished."""
    lines = []
    for row in rows:
        for record in (*row.records, *row.waiting):
            if not record.finished:
                done = record.rounds[-1]["round"] if record.rounds else 0
                scored = max(record.curve, default=0)
                words = f"round {done} of {record.planned}" if done else f"no round of {record.planned} yet"
                if done != scored:
                    words += f", scored after round {scored}" if scored else ", not scored yet"
                words += "" if record not in row.waiting else ", not counted"
                lines.append(f"{escape(row.label)}, seed {record.seed}: {words}")
    if not lines:
        return ""
    shown = lines[:12] + ([f"and {len(lines) - 12} more"] if len(lines) > 12 else [])
    return (
        f'<p class="note" role="note"><b>Not finished:</b> {"; ".join(shown)}. Where no seed of a row is finished, '
        "its numbers are those of the last evaluation so far. The command that began it, given again, goes on: "
        "<code>fedvit compare</code> and <code>fedvit study</code> as they are, <code>fedvit run</code> with "
        "<code>--resume</code>.</p>"
    )


def cards(ranked: Sequence[Row]) -> str:
    """The winner in four numbers, and whether it is one."""
    able = eligible(ranked)
    if not able:
        return "<p>No round has been scored yet, so there is nothing to show but the settings.</p>"
    best = able[0]
    clients = len(best.first.clients)
    several = len(able) > 1
    head = f"{'highest mean accuracy' if several else 'mean accuracy'} of a client's own model: {escape(best.label)}"
    items = [(f"{percent(best.mean)} % ± {percent(best.view('std'))}", f"{head} (± over clients)")]
    if best.gains and best.method != LOCAL:
        items.append((f"{points(mean(best.gains))} points", f"gain over training alone, {interval_words(best.gains)}"))
        items.append((f"{best.hurt:.1f}".removesuffix(".0") + f" of {clients}", "clients would be better off alone"))
    else:
        items.append((f"{percent(best.view('worst_decile'))} %", "mean of the worst tenth of the clients"))
    items.append((nbytes(best.per_round), f"per sampled client and round; {nbytes(best.sent)} in the whole run"))
    if best.view("auroc") is not None:
        items.append((f"{best.view('auroc'):.3f}", "mean AUROC of the clients with more than one class to test"))
    html = "".join(f'<div class="card"><b>{value}</b><span>{words}</span></div>' for value, words in items)
    return f'<div class="cards">{html}</div>{verdict(able)}'


def eligible(ranked: Sequence[Row]) -> list[Row]:
    """The rows that may be called best: federated, finished, with as many seeds as any; else whatever was scored."""
    scored = [row for row in ranked if row.mean is not None]
    done = [row for row in scored if row.finished and row.method != POOLED]
    most = max((len(row.records) for row in done), default=0)
    return [row for row in done if len(row.records) == most] or scored


def verdict(able: Sequence[Row]) -> str:
    """The best against the second best, client by client."""
    rivals = [row for row in able[1:] if row.method != LOCAL]
    if not rivals or able[0].method == LOCAL:
        return ""
    best, second = able[0], rivals[0]
    apart = lead(best, second)
    found = interval(apart)
    if found is None:
        return ""
    clear = found[0] > 0 or found[1] < 0
    words = "which excludes 0" if clear else "which includes 0: on these clients the two cannot be told apart"
    return (
        f"<p>{escape(best.label)} leads {escape(second.label)} by {points(mean(apart))} points, client by client "
        f"({interval_words(apart)}, {words}). Rows are ranked by their accuracy on the test images of the last round; one with fewer seeds than others is not called best.</p>"
    )


def interval_words(values: Sequence[float]) -> str:
    found = interval(values)
    return "one client, so no interval" if found is None else f"95 % interval {points(found[0])} to {points(found[1])}"


# Tables.


def under(title: str) -> str:
    """A heading below that of its section, whatever the level of that is."""
    return f"<{UNDER}>{title}</{UNDER}>"


def scroll(table: str, label: str) -> str:
    return f'<div class="scroll" role="region" aria-label="{escape(label)}" tabindex="0">{table}</div>'


def small(words: str) -> str:
    return f'<p class="small">{words}</p>'


Column = tuple[str, Callable[[Row], str], Callable[[Row], Any]]


def main_table(ranked: Sequence[Row]) -> str:
    """One line a row, best first. A column that no row has anything in is left out."""
    columns: list[Column] = [
        ("accuracy %<br>± clients", lambda r: plus_minus(r.mean, r.view("std")), lambda r: r.mean),
        ("± seeds", lambda r: percent(r.seed_std), lambda r: r.seed_std),
        ("worst<br>tenth", lambda r: percent(r.view("worst_decile")), lambda r: r.view("worst_decile")),
        ("best<br>tenth", lambda r: percent(r.view("best_decile")), lambda r: r.view("best_decile")),
        ("gain over Local<br>(95 % interval)", lambda r: own(r, gain_words(r)), has_gain),
        ("clients<br>hurt", lambda r: own(r, f"{r.hurt:.1f}" if r.hurt is not None else "-"), has_gain),
        ("AUROC", lambda r: decimal(r.view("auroc")), lambda r: r.view("auroc")),
        ("server<br>accuracy %", lambda r: percent(r.view("mean", "server")), lambda r: r.view("mean", "server")),
        ("sent per client<br>and round", lambda r: nbytes(r.per_round), lambda r: r.per_round),
        ("sent in<br>the run", lambda r: nbytes(r.sent), lambda r: r.sent),
        ("MACs<br>per image", macs, lambda r: r.summary("macs_per_example")),
        ("time", lambda r: duration(r.seconds), lambda r: r.seconds),
        ("peak<br>memory", lambda r: memory(r.summary("peak_rss_mb")), lambda r: r.summary("peak_rss_mb")),
        ("learning<br>rate", lambda r: escape(str(r.first.tables["train"].get("lr", "-"))), lambda r: True),
        ("seeds", lambda r: ", ".join(map(str, r.seeds)), lambda r: len({str(row.seeds) for row in ranked}) > 1),
    ]
    columns = [column for column in columns if any(known(column[2](row)) for row in ranked)]
    best = next(iter(eligible(ranked)), None)
    lines = []
    for row in ranked:
        kind = "best" if row is best and len(ranked) > 1 else "reference" if row.method in (LOCAL, POOLED) else ""
        seeds = f"{len(row.records)} of {len(row.records) + len(row.waiting)} seeds" if row.waiting else ""
        words = seeds if row.finished else "not finished"
        badge = f' <span class="badge">{words}</span>' if words else ""
        cells = "".join(f"<td>{cell(row)}</td>" for _, cell, _ in columns)
        lines.append(f'<tr class="{kind}"><th scope="row">{escape(row.label)}{badge}</th>{cells}</tr>')
    head = "".join(f'<th scope="col">{name}</th>' for name, _, _ in columns)
    words = "Each client's own model on its own test images after the last round; averages over seeds where there are several."
    if any(row.gains for row in ranked):
        words += " The interval is a 95 % t interval of the mean gain over the same clients."
    if any(row.method == POOLED for row in ranked):
        words += " centralized pools all data: a reference, not federated."
    table = f'<table class="wide"><thead><tr><th scope="col">row</th>{head}</tr></thead>'
    return scroll(f"{table}<tbody>{''.join(lines)}</tbody></table>", "Results, one line a row") + small(words)


def known(value: object) -> bool:
    """Whether there is something to show: 0 is."""
    return value is not None and value is not False


def has_gain(row: Row) -> bool:
    return bool(row.gains) and row.method != LOCAL


def own(row: Row, words: str) -> str:
    """Local has no gain over itself."""
    return "-" if row.method == LOCAL else words


def gain_words(row: Row) -> str:
    found = interval(row.gains)
    return points(mean(row.gains)) + ("" if found is None else f" ({points(found[0])} … {points(found[1])})")


def macs(row: Row) -> str:
    """Of one forward pass; in split learning the client's share too."""
    words = count(row.summary("macs_per_example"))
    own_part = row.summary("client_macs_per_example")
    return words if own_part is None else f"{words} (client {count(own_part)})"


def plus_minus(value: float | None, deviation: float | None) -> str:
    return percent(value) if deviation is None else f"{percent(value)} ± {percent(deviation)}"


def view_table(ranked: Sequence[Row]) -> str:
    """Other ways to look at the models: the server's, before and after local training, clients never seen."""
    lines = []
    for row in ranked[:MOST_DETAILS]:
        views: dict[str, Mapping[str, Any]] = dict(row.first.views)
        unseen = (row.first.summary or {}).get("unseen") or {}
        views |= {f"unseen clients, {name}": view for name, view in unseen.items()}
        if set(views) == {"personal"}:
            continue
        for name, view in views.items():
            area = f"<td>{decimal(view.get('auroc'))}</td>"
            numbers = f"<td>{plus_minus(view['mean'], view['std'])}</td><td>{percent(view['balanced_accuracy'])}</td>"
            loss = "-" if view["loss"] is None else f"{view['loss']:.3f}"
            lines.append(
                f'<tr><th scope="row">{escape(row.label)}</th><td>{escape(name)}</td>{numbers}<td>{loss}</td>{area}</tr>'
            )
    if not lines:
        return ""
    heads = ("row", "view", "accuracy %", "balanced %", "loss", "AUROC")
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    words = f"Views of each row, seed {ranked[0].seeds[0]}"
    if len(ranked) > MOST_DETAILS:
        words += f", the {MOST_DETAILS} best rows"
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
    title = "Other views: the server's model and more"
    return f"<details><summary>{title}</summary>{scroll(table, 'Views')}{small(words + '.')}</details>"


# Charts.


def figure(picture: str, caption: str, legend: str = "") -> str:
    wide = f'<div class="scroll">{picture}</div>' if "min-width" in picture[:200] else picture
    return f"<figure>{wide}{legend}<figcaption>{caption}</figcaption></figure>"


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """(class of the colour, name)."""
    items = "".join(f'<li><i class="{kind}"></i>{escape(name)}</li>' for kind, name in entries)
    return f'<ul class="legend">{items}</ul>'


def left_out(ranked: Sequence[Row], colors: Mapping[str, int]) -> str:
    scored = len([row for row in ranked if row.mean is not None])
    words = f" {len(colors)} of {scored} rows are drawn: the best, and Local where there is one."
    return words if len(colors) < scored else ""


def by_round(ranked: Sequence[Row], colors: Mapping[str, int]) -> str:
    """Accuracy by round, and against what was sent."""
    shown = [row for row in ranked if row.label in colors and row.curve]
    if not shown:
        return ""
    lines = [
        Series(row.label, colors[row.label], [p[0] for p in row.curve], [p[1] for p in row.curve]) for row in shown
    ]
    key = legend((f"s{one.color}", one.name) for one in lines)
    best = ", ".join(f"{row.label} {percent(row.mean)} %" for row in shown)
    first = svg.line_chart(lines, "round", "mean accuracy, %", f"Accuracy by round. At the end: {best}", whole=True)
    talk = [row for row in shown if row.curve[-1][2] > 0]
    quiet = [row for row in shown if row.curve[-1][2] == 0]
    html = figure(
        first, f"Mean accuracy of the clients' own models, all of them, by round.{left_out(ranked, colors)}", key
    )
    if talk:
        totals = [row.curve[-1][2] for row in talk]
        log = max(totals) > 20 * min(totals)
        sent = [
            Series(row.label, colors[row.label], [p[2] / 1e6 for p in row.curve], [p[1] for p in row.curve])
            for row in talk
        ]
        sent = [one for one in (without_zero(one) for one in sent) if one.xs] if log else sent
        levels = [Series(row.label, colors[row.label], [0], [row.curve[-1][1]]) for row in quiet]
        words = f"megabytes sent so far, both ways, all clients{' (logarithmic)' if log else ''}"
        alt = "Accuracy against traffic. In all: " + ", ".join(
            f"{row.label} {nbytes(row.curve[-1][2])}" for row in talk
        )
        chart = svg.line_chart(sent, words, "mean accuracy, %", alt, levels=levels, log=log)
        entries = [(f"s{one.color}", one.name) for one in sent]
        entries += [(f"dashed s{one.color}", f"{one.name} (sends nothing)") for one in levels]
        html += figure(
            chart, "The same accuracy against what crossed the network: up and to the left is better.", legend(entries)
        )
    return f'<div class="pair">{html}</div>'


def without_zero(one: Series) -> Series:
    kept = [(x, y) for x, y in zip(one.xs, one.ys, strict=True) if x > 0]
    return Series(one.name, one.color, [x for x, _ in kept], [y for _, y in kept])


def targets_of(ranked: Sequence[Row]) -> list[float]:
    """Three round numbers on the way to the best accuracy."""
    tops = [max(point[1] for point in row.curve) for row in ranked if row.curve and row.method != POOLED]
    if not tops:
        return []
    step = 5.0 if max(tops) > 20 else 1.0
    return sorted({max(step, step * int(share * max(tops) / step)) for share in (0.5, 0.75, 0.95)})


def to_target(ranked: Sequence[Row], target: float | None) -> str:
    """Rounds and bytes until a row first reaches an accuracy (FedPEFT's second table)."""
    goals = [target] if target is not None else targets_of(ranked)
    rows = [row for row in ranked if row.curve and row.method != POOLED]
    if not goals or not rows:
        return ""
    lines = []
    for row in rows:
        cells = ""
        for goal in goals:
            reached = next((point for point in row.curve if point[1] >= goal), None)
            cells += f"<td>{f'round {reached[0]}, {nbytes(reached[2])}' if reached else '-'}</td>"
        lines.append(f'<tr><th scope="row">{escape(row.label)}</th>{cells}</tr>')
    head = "".join(f'<th scope="col">to {goal:g} %</th>' for goal in goals)
    words = "The first round whose evaluation reaches the accuracy, and what was sent until then, both ways and all clients, of the mean over seeds; a dash: not reached."
    words += "" if target is not None else " Another target: <code>fedvit report --target X</code>."
    table = f'<table><thead><tr><th scope="col">row</th>{head}</tr></thead>'
    title = "Cost to reach a target"
    return under(title) + scroll(f"{table}<tbody>{''.join(lines)}</tbody></table>", title) + small(words)


def density(values: Sequence[float], grid: Sequence[float]) -> list[float]:
    """A Gaussian kernel estimate with Scott's bandwidth, at least one point wide."""
    data = np.asarray(values)
    width = max(1.0, float(data.std()) * len(data) ** -0.2)
    apart = (np.asarray(grid)[:, None] - data[None, :]) / width
    return [float(v) for v in np.exp(-0.5 * apart**2).sum(1) / (len(data) * width * np.sqrt(2 * np.pi)) * 100]


def gain_density(ranked: Sequence[Row], colors: Mapping[str, int]) -> str:
    """The distribution of the clients' gains over Local (FedPerfix's third figure)."""
    shown = [row for row in ranked if row.label in colors and row.method != LOCAL and len(row.gains) > 1]
    if not shown:
        if any(row.method != LOCAL for row in ranked):
            return "<p>Gains need Local on the same split: <code>fedvit compare</code> runs it, or give <code>fedvit report</code> the folder of a run with <code>--method local</code> too.</p>"
        return ""
    every = [gain for row in shown for gain in row.gains]
    grid = np.linspace(min(every) - 6, max(every) + 6, 121).tolist()
    lines = [Series(row.label, colors[row.label], grid, density(row.gains, grid)) for row in shown]
    shares = [f"{row.label} {100 * np.mean(np.asarray(row.gains) > 0):.0f} %" for row in shown]
    alt = f"Density of the clients' gains over Local. Share of clients that gain: {', '.join(shares)}"
    chart = svg.line_chart(lines, "gain over Local, points", "clients", alt, bare_y=True, zero=True)
    units = "client" if shown[0].first.tables["partition"].get("name") == "site" else "client and seed"
    words = f"How the gains of the clients are spread; right of the dotted line a client is better off than alone. One value a {units}."
    pair = figure(chart, words + left_out(ranked, colors), legend((f"s{one.color}", one.name) for one in lines))
    head = "".join(f'<th scope="col">{name}</th>' for name in ("row", "gain", "least", "median", "most", "gaining"))
    body = ""
    for row in shown:
        low, middle, high = (points(float(v)) for v in np.percentile(row.gains, (0, 50, 100)))
        gaining = f"{100 * np.mean(np.asarray(row.gains) > 0):.0f} %"
        body += f'<tr><th scope="row">{escape(row.label)}</th><td>{points(mean(row.gains))}</td><td>{low}</td><td>{middle}</td><td>{high}</td><td>{gaining}</td></tr>'
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="pair">{pair}<div>{scroll(table, "Gains over Local")}{small("Gain over Local in points, and the share of clients that gain.")}</div></div>'


# Clients, one by one.


def every_client(ranked: Sequence[Row]) -> str:
    """Bars, confusion and chosen layers, a fold for every row; the best is open."""
    rows = [row for row in ranked if row.mean is not None and row.first.clients]
    html = []
    for number, row in enumerate(rows[:MOST_DETAILS]):
        record = row.first
        parts = client_bars(record) + confusion(record) + layers(record)
        mark = " open" if number == 0 else ""
        words = f"{escape(row.label)}: {percent(record.views['personal']['mean'])} % (seed {record.seed})"
        html.append(f"<details{mark}><summary>{words}</summary>{parts}</details>")
    if not html:
        return ""
    intro = (
        f"Clients of the first seed. The {MOST_DETAILS} best of {len(rows)} rows." if len(rows) > MOST_DETAILS else ""
    )
    if not intro and any(len(row.records) > 1 for row in rows):
        intro = "Clients of the first seed; with another seed clients hold other images."
    return f"<p>{intro}</p>" * bool(intro) + "".join(html)


def client_bars(record: Record) -> str:
    """Every client's accuracy, sorted; where Local is known, a mark."""
    ordered = sorted(record.clients, key=lambda row: -row["personal_accuracy"])
    bars: list[Bar | str] = []
    for row in ordered:
        gain = record.gains.get(row["client"])
        alone = None if gain is None or record.method == LOCAL else row["personal_accuracy"] - gain
        told = f"{client(row['client'])}: {row['personal_accuracy']:.1f} % of {row['test_samples']} test images"
        told += "" if alone is None else f", alone {alone:.1f} %"
        bars.append(Bar(row["client"], row["personal_accuracy"], alone, told))
    hidden = len(bars) - MOST_BARS
    if hidden > 0:
        half = MOST_BARS // 2
        bars = [*bars[:half], f"… {hidden} clients between …", *bars[-half:]]
    marked = any(isinstance(bar, Bar) and bar.mark is not None for bar in bars)
    low, high = ordered[-1], ordered[0]
    alt = f"Accuracy of every client, sorted: from {client(low['client'])} with {low['personal_accuracy']:.1f} % to {client(high['client'])} with {high['personal_accuracy']:.1f} %"
    words = "Accuracy of each client's own model, best first."
    words += (
        " The black or white mark is Local; a bar that ends before it, in the other colour, is a client that is hurt."
        if marked
        else ""
    )
    words += f" The {MOST_BARS // 2} best and worst of {len(ordered)} clients." if hidden > 0 else ""
    columns = [bars] if len(bars) <= 24 else [bars[: (len(bars) + 1) // 2], bars[(len(bars) + 1) // 2 :]]
    charts = "".join(f"<div>{svg.bar_chart(part, alt, 'accuracy, %')}</div>" for part in columns)
    never = sum(row["rounds_trained"] == 0 for row in record.clients)
    words += f" {never} of them {'was' if never == 1 else 'were'} never sampled." if never else ""
    return f'<figure><div class="pair">{charts}</div><figcaption>{words}</figcaption></figure>'


def square(cells: Iterable[Sequence[int]], names: Sequence[str]) -> tuple[list[list[int]], list[str]]:
    """A confusion matrix of the classes that occur; of many, the most frequent ones and the rest together."""
    kept = [tuple(cell) for cell in cells]
    weight: dict[int, int] = {}
    for true, predicted, images in kept:
        weight[true] = weight.get(true, 0) + 2 * images  # what is there matters more than what is said
        weight[predicted] = weight.get(predicted, 0) + images
    frequent = sorted(weight, key=lambda c: (-weight[c], c))
    some = sorted(weight) if len(weight) <= MOST_CLASSES else sorted(frequent[: MOST_CLASSES - 1])
    place = {c: number for number, c in enumerate(some)}
    shown = [names[c] if c < len(names) else str(c) for c in some]
    if len(some) < len(weight):
        shown.append(f"{len(weight) - len(some)} others")
    table = [[0] * len(shown) for _ in shown]
    for true, predicted, images in kept:
        table[place.get(true, len(some))][place.get(predicted, len(some))] += images
    return table, shown


def confusion(record: Record) -> str:
    """One matrix for all clients together and one for each."""
    if not record.confusion:
        return '<p class="small">This run did not write down which classes were taken for which.</p>'
    names = record.class_names
    pooled: dict[tuple[int, int], int] = {}
    for cells in record.confusion.values():
        for true, predicted, images in cells:
            pooled[true, predicted] = pooled.get((true, predicted), 0) + images
    scores = {row["client"]: row["personal_accuracy"] for row in record.clients}
    order = sorted(record.confusion, key=lambda name: -scores.get(name, 0))
    hidden = len(order) - MOST_MATRICES
    if hidden > 0:
        order = order[: MOST_MATRICES // 2] + order[-MOST_MATRICES // 2 :]
    cuts = len({c for cell in pooled for c in cell}) > MOST_CLASSES
    whole = [(true, predicted, images) for (true, predicted), images in sorted(pooled.items())]
    classes = max(len({c for cell in cells for c in cell[:2]}) for cells in record.confusion.values())
    figures = [one_matrix("all clients together", whole, names)]
    figures += [
        one_matrix(f"{client(name)}: {scores.get(name, 0):.0f} %", record.confusion[name], names) for name in order
    ]
    words = "True classes by row, predicted ones by column; the colour is the share of the true class."
    words += (
        f" At most {MOST_CLASSES} classes are drawn, the most frequent; the last one is all others." if cuts else ""
    )
    words += f" The {MOST_MATRICES // 2} best and worst of {len(record.confusion)} clients." if hidden > 0 else ""
    return f'{under("Which class is taken for which")}<p class="small">{words}{worst_pairs(pooled, names)}</p><div class="many{" large" * (classes > 6)}">{"".join(figures)}</div>'


def one_matrix(title: str, cells: Iterable[Sequence[int]], names: Sequence[str]) -> str:
    kept = list(cells)
    table, shown = square(kept, names)
    right, whole = sum(n for true, predicted, n in kept if true == predicted), sum(n for _, _, n in kept)
    rest = len({c for cell in kept for c in cell[:2]}) > len(shown)
    picture = svg.matrix(table, shown, f"Confusion matrix, {title}, {right} of {whole} images right", rest=rest)
    return f"<figure><figcaption>{escape(title)}</figcaption>{picture}</figure>"


def worst_pairs(pooled: Mapping[tuple[int, int], int], names: Sequence[str]) -> str:
    """The confusions that happen most."""
    totals: dict[int, int] = {}
    for (true, _), images in pooled.items():
        totals[true] = totals.get(true, 0) + images
    worst = sorted(((n, t, p) for (t, p), n in pooled.items() if t != p), key=lambda x: (-x[0], x[1:]))[:3]
    if not worst:
        return ""
    words = [f"{names[t]} taken for {names[p]} ({n} of {totals[t]})" for n, t, p in worst if max(t, p) < len(names)]
    return f" Most often: {escape('; '.join(words))}."


def layers(record: Record) -> str:
    """Which layers each client put back, where the method lets it choose (PFedEdit)."""
    choices = [row["choice"] for row in record.rounds if row.get("choice")]
    if not choices:
        return ""
    numbers = [number for choice in choices for chosen in choice.values() for number in chosen]
    known = (record.summary or {}).get("layers") or [f"layer {n + 1}" for n in range(max(numbers, default=0) + 1)]
    clients = [row["client"] for row in record.clients if any(row["client"] in choice for choice in choices)]
    edits = {name: sum(bool(choice.get(name)) for choice in choices) for name in clients}
    clients = [name for name in clients if edits[name]]
    if not clients:
        return (
            under("Layers chosen by editing")
            + "<p>No client has edited yet: that takes a model from an earlier round.</p>"
        )
    share = {name: [0.0] * len(known) for name in clients}
    for choice in choices:
        for name in clients:
            for number in choice.get(name, ()):
                share[name][number] += 100 / edits[name]
    shown = sorted(clients, key=lambda name: -edits[name])[:MOST_SPLIT]
    shown = [name for name in clients if name in shown]
    used = [number for number in range(len(known)) if any(share[name][number] for name in clients)]
    table = [[share[name][number] for number in used] for name in shown]
    rows = [f"{name} ({edits[name]} edit{'s' * (edits[name] != 1)})" for name in shown]
    top = max(used, key=lambda number: sum(share[name][number] for name in clients))
    alt = f"Share of its edits in which each client put back each layer; most often {known[top]}"
    chart = svg.heat_map(
        table, rows, [known[number] for number in used], alt, unit="% of its edits", row_label="client",
        column_label="layer", most=100,
    )  # fmt: skip
    words = f"In which share of its edits, in percent, a client put back which layer of its own last model. {len(known) - len(used)} of {len(known)} layers were never chosen."
    words += f" The {len(shown)} clients with most edits of {len(clients)}." if len(shown) < len(clients) else ""
    return f"{under('Layers chosen by editing')}{figure(chart, words)}"


def split_map(ranked: Sequence[Row]) -> str:
    """Clients by classes."""
    record = next((row.first for row in ranked if row.first.split.get("class_counts")), None)
    if record is None:
        return ""
    train = {name: parts["train"] for name, parts in record.split["class_counts"].items()}  # class number -> images
    names = list(train)
    if len(names) > MOST_SPLIT:
        by_size = sorted(names, key=lambda name: -sum(train[name].values()))
        names = [by_size[round(i * (len(by_size) - 1) / (MOST_SPLIT - 1))] for i in range(MOST_SPLIT)]
    sizes = [sum(counts.values()) for counts in train.values()]
    held = [len(counts) for counts in train.values()]
    table = [[train[name].get(str(number), 0) for number in range(len(record.class_names))] for name in names]
    alt = f"Training images of every client and class: {len(train)} clients of {min(sizes)} to {max(sizes)} images"
    chart = svg.heat_map(
        table, names, record.class_names, alt, unit="training images", row_label="client",
        column_label="class",
    )  # fmt: skip
    words = f"Training images of each client (row) by class (column), seed {record.seed}. Clients hold {min(sizes)} to {max(sizes)} images (median {np.median(sizes):g}) of {min(held)} to {max(held)} classes."
    if len(train) > len(names):
        words += f" {len(names)} of {len(train)} clients are drawn, evenly from the largest to the smallest."
    unseen = record.split.get("unseen", [])
    words += f" Never trained: {', '.join(map(str, unseen[:10]))}{' …' if len(unseen) > 10 else ''}." if unseen else ""
    return figure(chart, escape(words))


def time_bars(ranked: Sequence[Row]) -> str:
    rows = [row for row in ranked if row.seconds]
    if not rows:
        return ""
    parts = list(dict.fromkeys(phase for row in rows for record in row.records for phase in record.phases))
    parts.sort(key=lambda phase: PARTS.index(phase) if phase in PARTS else len(PARTS))
    bars = []
    for row in rows:
        values = [
            mean([record.phases.get(phase, 0.0) for record in row.records if record.phases]) or 0.0 for phase in parts
        ]
        bars.append((row.label, values, duration(sum(values))))
    alt = "Time of each row: " + ", ".join(f"{name} {words}" for name, _, words in bars[:12])
    key = legend((f"p{number}", phase) for number, phase in enumerate(parts))
    head = "".join(f'<th scope="col">{name}</th>' for name in ("row", *parts))
    lines = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{duration(value)}</td>" for value in values)}</tr>'
        for name, values, _ in bars
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"
    words = "Wall time of one run by phase, averaged over seeds. Times of rows that shared a machine with other work are not comparable."
    chart = figure(svg.stacked_bars(bars, parts, alt), words, key)
    return f'<div class="pair">{chart}<div>{scroll(table, "Time by phase")}</div></div>'


# Settings and commands.


def settings(rows: Sequence[Row]) -> str:
    """What all rows share, what each has of its own, and each run.toml in full."""
    every = {key: values for key, values in differences(rows).items() if key != "run.seed"}
    shared = {key: values[0] for key, values in every.items() if len(set(values)) == 1}
    lines = "".join(
        f'<tr><th scope="row"><code>{escape(key)}</code></th><td class="words">{escape(value)}</td></tr>'
        for key, value in shared.items()
    )
    versions = " · ".join(f"{name} {version}" for name, version in rows[0].first.versions.items())
    title = "Shared by all rows" if len(rows) > 1 else "All settings"
    table = f'<table><thead><tr><th scope="col">{title}</th><th scope="col">value</th></tr></thead><tbody>{lines}</tbody></table>'
    html = f"<p>Versions: {escape(versions)}.</p><details><summary>{title}</summary>{scroll(table, title)}</details>"
    if len(rows) > 1:
        items = ""
        for row in rows:
            mine = flat(row.first.tables)
            words = ", ".join(f"{key} = {mine[key]}" for key in every if key not in shared and key in mine)
            items += f"<dt>{escape(row.label)}</dt><dd><code>{escape(words)}</code></dd>"
        html += f"<details open><summary>What differs between rows</summary><dl>{items}</dl></details>"
    return html


def commands(rows: Sequence[Row]) -> str:
    """How it was started, and how any one run is repeated exactly."""
    started = list(dict.fromkeys(words for row in rows for record in row.records for words in record.commands))
    html = ""
    if started:
        html += f"<p>As it was started:</p><pre><code>{escape(chr(10).join(started))}</code></pre>"
    again = [
        shlex.join(["fedvit", "run", str(record.folder / "run.toml"), "--out", again_name(row, record)])
        for row in rows
        for record in row.records
        if "python" not in (record.tables["data"].get("name"), record.tables["model"].get("name"))
        and not record.tables["method"].get("python")
    ]
    if not again:
        return html + "<p>Parts of these runs came from Python: only the program that made them can repeat them.</p>"
    html += "<p>Any one run again, with all settings resolved (the data folder is FEDVIT_DATA or <code>--data-dir</code>):</p>"
    shown = again[:12]
    html += f"<pre><code>{escape(chr(10).join(shown))}</code></pre>"
    if len(again) > len(shown):
        rest = escape("\n".join(again[12:]))
        html += f"<details><summary>{len(again) - 12} more</summary><pre><code>{rest}</code></pre></details>"
    return html


def again_name(row: Row, record: Record) -> str:
    return f"again/{row.label}-seed{record.seed}".replace(" ", "_")


GLOSSARY = """<dl>
<dt>accuracy ± clients</dt><dd>Mean over all clients, sampled or not, of each one's own model on its own test images after
the last round, and the deviation over clients. Never the best round.</dd>
<dt>± seeds</dt><dd>Deviation of that mean over seeds; a seed also draws the split.</dd>
<dt>worst and best tenth</dt><dd>Mean accuracy of that tenth of the clients.</dd>
<dt>gain over Local, clients hurt</dt><dd>A client's accuracy less that of the same client trained alone on the same
images; hurt are those below it. The interval is a 95 % t interval of the mean over clients (and seeds, since another seed
makes other clients; sites stay the same, so theirs are averaged over seeds first). Clients of one seed share one training,
so it says how sure the mean over clients is, not how another training would come out.</dd>
<dt>AUROC</dt><dd>Area under the ROC curve of the softmax scores, 0 to 1; with more than two classes the mean of each class
against the rest, over the classes that a client has. Clients with one class to test have none.</dd>
<dt>sent</dt><dd>Bytes of the tensors in the training messages, down and up, in MB of 10<sup>6</sup>; evaluation and framing are
not in it.</dd>
<dt>MACs</dt><dd>Multiply-adds of one forward pass of one image.</dd>
<dt>time, peak memory</dt><dd>Of one run on the machine it ran on; memory is that of the main process.</dd>
</dl>"""
