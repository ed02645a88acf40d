"""The tables of an experiment as plain dictionaries, and how layers of them stack. This module is fast to import."""

from collections.abc import Iterable
from typing import Any

from fedvit.core.settings import Experiment

Tables = dict[str, dict[str, Any]]
TABLES = tuple(Experiment.model_fields)  # in the order of an experiment file


def stack_tables(layers: Iterable[Tables]) -> Tables:
    """Merge layers; later ones win, and one that names another method or tune drops the options of the previous one."""
    result: Tables = {}
    for layer in layers:
        for name, table in layer.items():
            mine = result.setdefault(name, {})
            if name in ("method", "tune") and "name" in table and table["name"] != mine.get("name"):
                mine.clear()
            mine.update(table)
    return result
