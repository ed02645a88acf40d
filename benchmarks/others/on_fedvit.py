"""Run FedViT itself, as `fedvit run --workers 2 --threads 1` does, with its checkpoints, files and report.

    python on_fedvit.py WORK OUT

In addition to the work, and unlike the others, it makes per-client scores and a confusion matrix (if the work
evaluates), one evaluation at the end (if it does not), a checkpoint after every round, and a report.
"""

import json
import sys
from pathlib import Path

from fedvit.engine.processes import end_at_once, prepare


def main(folder: str, out: str) -> None:
    prepare(2)  # first, as the command does
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
    with end_at_once():  # as the command does
        main(*sys.argv[1:])
