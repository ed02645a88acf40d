"""The tables of runs for a paper, with published figures beside ours."""

import logging
from collections.abc import Sequence
from pathlib import Path

from fedvit.core.errors import UserError
from fedvit.core.files import read_json
from fedvit.report.paper_tables import PaperTable, paper_table
from fedvit.report.statistics import Row
from fedvit.studies.published.match import published_for

log = logging.getLogger(__name__)


def tables_of(groups: Sequence[Sequence[Row]], folders: Sequence[Path]) -> list[PaperTable]:
    """Make one table per dataset and partition; rows that have not finished are named in a warning and left out."""
    made, searches = [], _searches(folders)
    for rows in groups:
        waiting = [row.label for row in rows if not row.finished]
        if waiting:
            log.warning("%s: not finished, so not in the table", ", ".join(waiting))
        done = [row for row in rows if row.finished]
        found = zip(done, published_for([row.first.tables for row in done]), strict=True)
        made.append(paper_table(rows, {row.label: known for row, known in found if known is not None}, searches))
    tables = [table for table in made if table is not None]
    if not tables:
        raise UserError("no run has finished, so there is no table yet: `fedvit report` shows how far the runs are")
    return tables


def _searches(folders: Sequence[Path]) -> dict[str, str]:
    """Return, by label, which learning rates of comparisons were searched, and which lie at the edge of their grid."""
    entries = [entry for folder in folders for entry in read_json(folder / "compare.json", [])]
    found = {entry["label"]: entry["search"] for entry in entries if entry.get("search")}
    return {label: "edge" if search.get("at_edge") else "chosen" for label, search in found.items()}
