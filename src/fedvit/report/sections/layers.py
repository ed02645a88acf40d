"""The layers that each client restored, for methods that let clients choose (PFedEdit)."""

from dataclasses import dataclass

from fedvit.report import svg
from fedvit.report.sections.parts import MOST_NAMES, Figure
from fedvit.report.statistics import Record


@dataclass(frozen=True)
class Layers:
    """The layers by client. There is no figure until a client has edited."""

    figure: Figure | None


def layers(record: Record) -> Layers | None:
    """Draw the share of its edits in which each client restored each layer; None if clients do not choose."""
    choices = [row["choice"] for row in record.rounds if row.get("choice")]
    if not choices:
        return None
    numbers = [number for choice in choices for chosen in choice.values() for number in chosen]
    names = (record.summary or {}).get("layers") or [f"layer {n + 1}" for n in range(max(numbers, default=0) + 1)]
    edits = {row["client"]: sum(bool(choice.get(row["client"])) for choice in choices) for row in record.clients}
    clients = [name for name in edits if edits[name]]
    if not clients:
        return Layers(None)
    share = {name: [0.0] * len(names) for name in clients}
    for choice in choices:
        for name in clients:
            for number in choice.get(name, ()):
                share[name][number] += 100 / edits[name]
    most = sorted(clients, key=lambda name: -edits[name])[:MOST_NAMES]
    shown = [name for name in clients if name in most]
    used = [number for number in range(len(names)) if any(share[name][number] for name in clients)]
    top = max(used, key=lambda number: sum(share[name][number] for name in clients))
    chart = svg.heat_map(
        [[share[name][number] for number in used] for name in shown],
        [f"{name} ({edits[name]} edit{'s' * (edits[name] != 1)})" for name in shown],
        [names[number] for number in used],
        f"Share of its edits in which each client restored each layer; most often {names[top]}",
        unit="% of its edits",
        row_label="client",
        column_label="layer",
        most=100,
    )
    caption = (
        "Percentage of its edits in which each client restored each layer of its own last model. "
        f"{len(names) - len(used)} of {len(names)} layers were never chosen."
    )
    if len(shown) < len(clients):
        caption += f" The {len(shown)} of {len(clients)} clients with the most edits are shown."
    return Layers(Figure(chart, caption, scrolls=True))
