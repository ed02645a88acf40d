"""Clinical scores for the terminal."""

from collections.abc import Iterator, Mapping, Sequence

from rich.markup import escape
from rich.table import Table

from fedvit.core.clinical import RATES, ClassScore, Interval, SiteScore, macro
from fedvit.report.paired import EVERY_CLASS, EVERYONE, PairedTest
from fedvit.report.tables import plain_table
from fedvit.report.units import client, decimal, p_value, signed_decimal
from fedvit.runs.clinical import Clinical

MOST_CLIENTS = 12
MOST_TESTS = 4  # classes whose tests are shown one by one
_HEAD = ("positive\nimages", "from", "sens.\n%", "spec.\n%", "PPV\n%", "NPV\n%", "AUROC", "Brier", "ECE")


def clinical_tables(own: Clinical) -> Iterator[Table | str]:
    """Yield the scores of every class on all images together, and of every client."""
    patient = "patients" if own.by_patient else "images"
    table = score_table(f"clinical scores, all test images, 95 % intervals over {patient}", "class")
    for one in own.pooled.classes:
        table.add_row(escape(own.name(one.number)), *class_cells(one, own.within(one.number)))
    shared = own.macro_classes
    if len(own.pooled.classes) > 1 and shared:
        table.add_row(f"mean of {len(shared)}", *_macro_cells(own.pooled, shared), style="bold")
    if not own.one_by_one:
        table.caption, table.caption_justify = "AUROC: the mean of the clients' own, by positive images", "left"
    yield table
    yield from client_table(own)


def client_table(own: Clinical) -> Iterator[Table | str]:
    single, shared = len(own.pooled.classes) == 1, own.macro_classes
    if not single and not shared:
        yield (
            "no class is tested with positive and negative images by every client, so no mean compares the clients; "
            "clinical.json has every class of every client"
        )
        return
    title = own.name(own.pooled.classes[0].number) if single else f"mean of the same {len(shared)} classes"
    table = score_table(f"every client: {escape(title)}", "client")
    for name, score in list(own.clients.items())[:MOST_CLIENTS]:
        cells = class_cells(score.classes[0]) if single else _macro_cells(score, shared)
        table.add_row(escape(client(name)), *cells)
    if len(own.clients) > MOST_CLIENTS:
        table.caption = f"{MOST_CLIENTS} of {len(own.clients)} clients; clinical.json has all"
        table.caption_justify = "left"
    yield table


def rows_table(rows: Sequence[tuple[str, Clinical]]) -> Table:
    """Make a table with a line for every row of a comparison, on all clients' test images together."""
    first = rows[0][1]
    single, shared = len(first.pooled.classes) == 1, first.macro_classes
    what = first.name(first.pooled.classes[0].number) if single else f"mean of the same {len(shared)} classes"
    by = "patients" if all(own.by_patient for _, own in rows) else "images"
    table = score_table(f"clinical scores, all test images: {escape(what)} (95 % intervals over {by})", "row")
    for label, own in rows:
        one = own.pooled.classes[0]
        cells = class_cells(one, own.within(one.number)) if single else _macro_cells(own.pooled, shared)
        table.add_row(escape(label), *cells)
    return table


def score_table(title: str, first: str) -> Table:
    table = plain_table(title)
    table.add_column(first, overflow="fold")
    for name in _HEAD:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def class_cells(one: ClassScore, within: float | None = None) -> list[str]:
    """Return the cells of a class; `within` replaces an AUROC that counts do not determine."""
    area = one.auroc if one.auroc is not None else within
    rates = [_percent(one.metric(name), one.intervals.get(name)) for name in RATES]
    cut = "several" if one.threshold is None else f"{one.threshold:.2f}"
    ends = one.intervals.get("auroc")
    shown = decimal(area) + ("" if ends is None else f"\n{ends[0]:.2f}…{ends[1]:.2f}")
    return [f"{one.positives:,}\nof {one.images:,}", cut, *rates, shown, decimal(one.brier), decimal(one.ece)]


def label_table(found: Clinical) -> Table:
    """Make the table of several labels per image: how well each is ranked, and F1 at the clients' thresholds."""
    table = plain_table("labels, all clients' test images")
    table.add_column("label", overflow="fold")
    for name in ("positive", "AUROC", "average\nprecision", "F1"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in found.pooled.classes:
        area = one.auroc if one.auroc is not None else found.within(one.number)
        figures = map(decimal, (area, one.average_precision, one.f1))
        table.add_row(escape(found.name(one.number)), f"{one.positives:,} of {one.images:,}", *figures)
    return table


def _macro_cells(score: SiteScore, shared: Sequence[int]) -> list[str]:
    means = macro(score, shared)
    rates = [_percent(means[name], None) for name in RATES]
    return [f"of {score.images:,}", "", *rates, *(decimal(means[name]) for name in ("auroc", "brier", "ece"))]


def _percent(value: float | None, ends: Interval | None) -> str:
    if value is None:
        return "-"
    return f"{100 * value:.1f}" + ("" if ends is None else f"\n{100 * ends[0]:.0f}…{100 * ends[1]:.0f}")


def paired_table(
    title: str, tests: Mapping[str, Sequence[PairedTest]], sides: tuple[str, str] = ("first", "second")
) -> Table:
    """Make the table of tests by run; a single run needs no name.

    Of many classes, only the test of all of them together is shown, if there is one.
    """
    table = plain_table(title)
    several = len(tests) > 1
    names = list(dict.fromkeys(test.name for own in tests.values() for test in own))
    shown = names if len(names) <= MOST_TESTS or EVERY_CLASS not in names else [EVERY_CLASS]
    for head in [*(["run"] if several else []), "client", *(["class"] if len(names) > 1 else [])]:
        table.add_column(head, overflow="fold")
    right = [f"only {side}\nright" for side in sides]
    for head in ("images", "AUROC\ngained", "DeLong\np", *right, "McNemar\np"):
        table.add_column(head, justify="right", no_wrap=True)
    for run, own in tests.items():
        for test in own:
            if test.name not in shown:
                continue
            area, counts = test.delong, test.mcnemar
            gained, p = "-", "-"
            if area is not None:
                low, high = map(signed_decimal, area.interval)
                gained, p = f"{signed_decimal(area.difference)}\n{low}…{high}", p_value(area.p)
            who = "all" if test.client == EVERYONE else client(test.client)
            table.add_row(
                *([escape(run)] if several else []), escape(who), *([escape(test.name)] if len(names) > 1 else []),
                f"{test.images:,}", gained, p, str(counts.first_only), str(counts.second_only), p_value(counts.p),
            )  # fmt: skip
    if len(shown) < len(names):
        table.caption, table.caption_justify = "the report tests every class by itself", "left"
    return table
