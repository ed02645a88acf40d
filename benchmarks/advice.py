"""Measure how good the advice is: python -m benchmarks.advice [--out runs/advice] [--try first] [--rows-only]"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from benchmarks.advice_settings import HELD_OUT, rows_of
from fedvit.config.load import load_experiment
from fedvit.config.tables import Tables, stack_tables
from fedvit.studies.compare import compare
from fedvit.studies.rows import Row


def folder_of(name: str) -> str:
    return name.replace(", ", "-").replace(" ", "")


def table_rows(setting: Tables) -> list[Row]:
    """Return the eight rows of a setting as a comparison runs them."""
    rows = []
    for label, own in rows_of(setting).items():
        experiment = load_experiment(None, {}, {}, base=stack_tables([setting, own]))
        rows.append(Row(label, {experiment.run.seed: experiment}))
    return rows


def run_tables(settings: dict[str, Tables], out: Path) -> Iterator[str]:
    """Run the eight rows of every setting; finished ones are not run again."""
    for name, setting in settings.items():
        for _ in compare(table_rows(setting), out / folder_of(name), workers=1):
            pass
        yield name


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/advice"))
    parser.add_argument("--try", dest="attempt", default="first", choices=list(HELD_OUT))
    a = parser.parse_args()
    for name in run_tables(HELD_OUT[a.attempt], a.out / a.attempt):
        print(f"{name}: the eight rows are there", flush=True)
