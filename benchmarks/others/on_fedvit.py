"""FedViT itself, as `fedvit run --workers 2 --threads 1` does it, with its checkpoints, files and report.

    python on_fedvit.py WORK OUT

What it does beside the work, and the others do not: per-client scores and a confusion matrix (where the work
evaluates), one evaluation at the end (where it does not), a checkpoint after every round, a report.
"""

import json
import sys
from pathlib import Path

from fedvit.engine.processes import end_at_once, prepare


def main(folder: str, out: str) -> None:
    prepare(2)  # first of all, as the command does
    import bare

    from fedvit.report.page import write_report
    from fedvit.runs.resume import settle, start_or_resume

    said = json.loads((Path(folder) / "work.json").read_text())
    run = Path(out) / "run"
    experiment, place = settle(None, said["sets"], said["flags"], run, resume=False)
    marks, end = [], {}
    for done in start_or_resume(experiment, place, resume=False, workers=said["processes"]):
        marks.append(bare.now())
        end = done.server.shared
    write_report([place], place / "report.html")
    bare.report(out, marks, end, "fedvit", "torch")


if __name__ == "__main__":
    with end_at_once():  # as the command
        main(*sys.argv[1:])
