"""Gains over Local, added to the files of a run that finished without knowing Local."""

import csv

from fedvit.core.files import as_written, replacing, write_json
from fedvit.runs.folder import LocalBaseline, Run
from fedvit.runs.write import gain_summary


def add_gains(run: Run, alone: Run) -> None:
    """Write Local's accuracy and the gain of every client into clients.csv, and their mean into summary.json.

    Both runs must have tested the same images. A client that Local did not evaluate has no gain.
    """
    local, path = LocalBaseline.of(alone), run.folder / "clients.csv"
    with path.open(newline="") as stream:
        reader = csv.DictReader(stream)
        header, lines = list(reader.fieldnames or ()), list(reader)
    for line in lines:
        there = local.accuracy.get(as_written(line["client"]))
        line["local_accuracy"] = "" if there is None else str(there)
        line["gain"] = "" if there is None else str(float(line["personal_accuracy"]) - there)
    with replacing(path) as partial, partial.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, header, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    summary = {**run.summary, "gain_over_local": gain_summary(run.clients, local.schedule)}
    write_json(run.folder / "summary.json", summary)
