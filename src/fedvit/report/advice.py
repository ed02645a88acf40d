"""Advice for the terminal: sentences and two tables."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from fedvit.report import units
from fedvit.report.tables import plain_table

HOW = {"probe": "at the pace of the probe", "measured": "measured here before", "table": "from a table"}


def advice_parts(said: Mapping[str, Any]) -> Iterator[str | Table]:
    """Yield what advice says, in the order in which a person needs it."""
    chosen = said["recommendation"]
    name, rate, rounds = escape(chosen["label"]), f"{chosen['lr']:g}", chosen["rounds"]
    yield f"[bold]Recommended: {name}[/] at learning rate {rate}, {rounds} rounds"
    yield escape(said["verdict"])
    yield ""
    yield f"Your data: {_data_line(said['data'])}"
    yield f"Cost: {_cost_line(said)}"
    yield ""
    yield "Why:"
    for reason in said["reasons"]:
        yield f"- {escape(reason)}"
    if said["probe"] is not None:
        yield _probe_table(said["probe"])
        share = said["probe"]["share_of_eight_runs"]
        yield (
            f"The probe took {units.duration(said['probe']['seconds'])} and trained on as many images as "
            f"{100 * share:.0f} % of eight full runs do."
        )
    yield _evidence_table(said["evidence"], chosen["label"])
    if said["doubts"]:
        yield "Doubts:"
        for doubt in said["doubts"]:
            yield f"- {escape(doubt)}"
        yield ""
    yield "Run it:"
    yield f"  {escape(said['commands']['run'])}"
    yield "Make sure, with three seeds and test images:"
    yield f"  {escape(said['commands']['compare'])}"


def _data_line(data: Mapping[str, Any]) -> str:
    words = (
        f"{data['clients']} clients with {data['smallest']} to {data['largest']} training images "
        f"(median {data['median']}), {data['classes']} classes, {data['classes_per_client']:g} at a typical client; "
        f"label skew {data['label_skew']:.2f} (0: the same mix everywhere; towards 1: no class shared)"
    )
    if data["feature_skew"] is not None:
        words += f"; feature skew {data['feature_skew']:.2f} (0: a class looks the same everywhere)"
    return words


def _cost_line(said: Mapping[str, Any]) -> str:
    chosen, machine = said["recommendation"], said["machine"]
    time, how = units.duration(60 * chosen["minutes"]), HOW[chosen["how"]]
    memory = f"{units.memory(chosen['memory_mb'])} of {units.memory(machine['free_ram_mb'])} free memory"
    where = machine["gpu"] or f"{machine['cores']} cores"
    sent = units.nbytes(chosen["nbytes_per_client_round"])
    words = f"about {time} on this machine ({where}; {how}) and {memory}; "
    words += f"{sent} per client and round, {units.nbytes(chosen['nbytes'])} in all"
    if chosen["nbytes"]:
        seconds = units.duration(chosen["link_seconds_per_round"])
        words += f"; sending takes {seconds} a round at {said['link_mbit']:g} Mbit/s"
    return words


def _probe_table(probe: Mapping[str, Any]) -> Table:
    """Make the table of the probe; differences are paired over clients."""
    images, clients = probe["val_images"], probe["clients"]
    table = plain_table(f"probe: {images} held-out training images, {clients} clients that trained")
    table.add_column("row", overflow="fold")
    for name in ("lr", "rounds", "accuracy %", "difference\n(95 % interval)", "loss"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in probe["rows"]:
        lead = "chosen" if row["chosen"] else _lead(row)
        loss = "-" if row["loss"] is None else f"{row['loss']:.2f}"
        style = "bold" if row["chosen"] else ""
        table.add_row(
            escape(row["label"]), f"{row['lr']:g}", str(row["rounds"]), f"{row['val']:.1f}", lead, loss, style=style
        )
    return table


def _lead(row: Mapping[str, Any]) -> str:
    if row["difference"] is None:
        return "-"
    ends = row["interval"]
    return units.points(row["difference"]) + (f" ({units.points(ends[0])} … {units.points(ends[1])})" if ends else "")


def _evidence_table(evidence: Sequence[Mapping[str, Any]], chosen: str) -> Table:
    """Make the table of our own measurements on other data, the recommended row first."""
    labels = dict.fromkeys([chosen, *(label for entry in evidence for label in entry["accuracy"])])
    table = plain_table("what we measured on other data, accuracy %")
    table.add_column("row", overflow="fold", min_width=14)
    for entry in evidence:
        table.add_column(escape(entry["setting"]), justify="right")
    for label in labels:
        cells = [units.percent(entry["accuracy"].get(label)) for entry in evidence]
        if any(cell != "-" for cell in cells):
            table.add_row(escape(label), *cells, style="bold" if label == chosen else "")
    return table
