"""What commands say about doubtful results, below their tables."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedvit.cli.flags import err

if TYPE_CHECKING:
    from fedvit.runs.folder import Run


_MOST_LINES = 12  # the logs and the report have all of them


def show_doubts(runs: "Sequence[Run]", *, searched: bool) -> None:
    """Print the warnings of these runs, and the command to give if a learning rate may be to blame."""
    from fedvit.runs.doubts import AUTO, with_auto_rate

    lines = [f"{_name(run, runs)}: {doubt}" for run in runs for doubt in run.summary.get("warnings", [])]
    for line in lines[:_MOST_LINES]:
        err.print(f"WARNING: {line}", soft_wrap=True, highlight=False, markup=False, style="yellow")
    if len(lines) > _MOST_LINES:
        err.print(f"and {len(lines) - _MOST_LINES} more warnings, which the report shows", highlight=False)
    if not searched and any(AUTO in line for line in lines):
        command = with_auto_rate(sys.argv[1:])
        err.print(f"to search for better rates: {command}", soft_wrap=True, highlight=False, markup=False)


def _name(run: "Run", runs: "Sequence[Run]") -> str:
    label = run.folder.parent.name if len(runs) > 1 else run.summary["label"]
    return f"{label}, seed {run.summary['seed']}" if len(runs) > 1 else str(label)
