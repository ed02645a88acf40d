"""The tables of runs for a paper, with published figures beside ours."""

import logging
from collections.abc import Sequence

from fedvit.core.errors import UserError
from fedvit.report.paper_tables import PaperTable, paper_table
from fedvit.report.statistics import Row
from fedvit.studies.published.match import published_for

log = logging.getLogger(__name__)


def tables_of(groups: Sequence[Sequence[Row]]) -> list[PaperTable]:
    """Make one table per dataset and partition; rows that have not finished are named in a warning and left out."""
    made = []
    for rows in groups:
        waiting = [row.label for row in rows if not row.finished]
        if waiting:
            log.warning("%s: not finished, so not in the table", ", ".join(waiting))
        done = [row for row in rows if row.finished]
        found = zip(done, published_for([row.first.tables for row in done]), strict=True)
        made.append(paper_table(rows, {row.label: known for row, known in found if known is not None}))
    tables = [table for table in made if table is not None]
    if not tables:
        raise UserError("no run has finished, so there is no table yet: `fedvit report` shows how far the runs are")
    return tables
