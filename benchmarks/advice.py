"""Measure how good the advice of `fedvit advise` is, on settings that its rules were not written with.

    python -m benchmarks advice            # or, with options:
    python -m benchmarks.advice [--stored] [--try first] [--out runs/advice] [--save results/small/advice.json]

For every held-out setting and seed (advice_settings.py says which, and why) it runs eight rows in full, asks for
advice, runs the advice in full if it is not one of the eight, and compares test accuracies after the last round, as
means over the seeds. Two bars: the advice is within 2 points of the best of the eight rows, and its probe costs at most
a fifth of them, counted in images trained on and in seconds. Everything resumes: what is finished is not run again. It
needs FEDVIT_DATA. `--stored` runs nothing and prints the table of the results that are saved.
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from benchmarks.advice_settings import HELD_OUT, PRESENT, SEEDS, rows_of
from benchmarks.common import Result, show
from fedvit.config.load import load_experiment
from fedvit.config.resolve import to_tables, versions
from fedvit.config.tables import Tables, stack_tables
from fedvit.core.files import write_json
from fedvit.report.statistics import interval
from fedvit.runs.folder import Run
from fedvit.runs.resume import start_or_resume
from fedvit.studies.advise import Question, look, outcome_of, run_probe
from fedvit.studies.advise_answer import answer, save_answer
from fedvit.studies.advise_probe import examples_trained
from fedvit.studies.compare import compare
from fedvit.studies.rows import Row, mean_of, run_of

POINTS, SHARE = 2.0, 0.2  # the bars


def folder_of(name: str) -> str:
    return name.replace(", ", "-").replace(" ", "")


def at_seed(setting: Tables, seed: int) -> Tables:
    return stack_tables([setting, {"run": {"seed": seed}}])


def table_rows(setting: Tables, seeds: Sequence[int]) -> list[Row]:
    """Return the eight rows of a setting as a comparison runs them."""
    rows = []
    for label, own in rows_of(setting).items():
        tables = {seed: stack_tables([at_seed(setting, seed), own]) for seed in seeds}
        rows.append(Row(label, {seed: load_experiment(None, {}, {}, base=base) for seed, base in tables.items()}))
    return rows


def run_table(setting: Tables, seeds: Sequence[int], folder: Path) -> dict[str, dict[int, Run]]:
    """Run the eight rows of a setting, by label and seed; finished ones are not run again."""
    rows = table_rows(setting, seeds)
    for _ in compare(rows, folder, workers=1):
        pass
    return {row.label: {seed: run_of(folder, row, seed) for seed in seeds} for row in rows}


def ask(setting: Tables, folder: Path) -> dict[str, Any]:
    """Ask for advice as a user would, with the setting as a file, and note the seconds that it took."""
    noted = folder / "asked.json"
    if noted.is_file():
        return json.loads(noted.read_text())
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "setting.toml"
    file.write_text(tomli_w.dumps(setting))
    begin = time.perf_counter()
    seen = look(Question(file, {}, {}), folder / "advice")
    looking = time.perf_counter() - begin
    for _ in run_probe(seen):
        pass
    outcome = outcome_of(seen)
    said = answer(seen, outcome)
    save_answer(seen, outcome, said)
    told = {**said, "favourite": seen.candidates[0].label, "looking_seconds": looking}
    write_json(noted, told)
    return told


def run_advice(setting: Tables, said: Mapping[str, Any], rows: Mapping[str, Run], folder: Path) -> Run:
    """Run the advice in full, unless it is one of the rows."""
    chosen = said["recommendation"]
    own = {
        "method": {"name": chosen["method"]},
        "tune": {"name": chosen["tune"]},
        "train": {"lr": chosen["lr"], "rounds": chosen["rounds"]},
    }
    experiment = load_experiment(None, {}, {}, base=stack_tables([setting, own]))
    same = rows.get(chosen["label"])
    if same is not None and to_tables(same.experiment) == to_tables(experiment):
        return same
    run = Run(folder / "advised")
    for _ in start_or_resume(experiment, run.folder, resume=True):
        pass
    return run


def accuracy(run: Run) -> float:
    return float(run.summary["views"]["personal"]["mean"])


def by_client(run: Run) -> dict[str, float]:
    return {row["client"]: row["personal_accuracy"] for row in run.clients}


def difference(better: Mapping[int, Run], worse: Mapping[int, Run]) -> list[float]:
    """Return by how many points every client of every seed does better under one row than under another."""
    apart = []
    for seed in better:
        first, second = by_client(better[seed]), by_client(worse[seed])
        apart += [first[client] - second[client] for client in first]
    return apart


def measure(name: str, setting: Tables, out: Path) -> dict[str, Any]:
    """Measure one setting: the rows, the advice, how far it is from the best row, and what the probe cost.

    With several seeds, advice is asked for each, and accuracies are means over them.
    """
    seeds = SEEDS.get(name, (setting["run"]["seed"],))
    runs = run_table(setting, seeds, out / folder_of(name))
    table = {label: mean_of(accuracy(run) for run in by_seed.values()) for label, by_seed in runs.items()}
    best = max(table, key=lambda label: table[label])
    said, mine = {}, dict[int, Run]()
    for seed in seeds:
        place = out / "advised" / folder_of(name) / (f"seed{seed}" if len(seeds) > 1 else "")
        said[seed] = ask(at_seed(setting, seed), place)
        rows = {label: by_seed[seed] for label, by_seed in runs.items()}
        mine[seed] = run_advice(at_seed(setting, seed), said[seed], rows, place)
    everything = [run for by_seed in runs.values() for run in by_seed.values()]
    examples = sum(sum(examples_trained(run, run.experiment)) for run in everything)
    seconds = sum(run.summary["seconds"] for run in everything)
    reached = mean_of(accuracy(run) for run in mine.values())
    return {
        "seeds": list(seeds),
        "advice": ", ".join(dict.fromkeys(one["recommendation"]["label"] for one in said.values())),
        "advice_by_seed": [one["recommendation"]["label"] for one in said.values()],
        "accuracy_by_seed": [accuracy(run) for run in mine.values()],
        "lr": [one["recommendation"]["lr"] for one in said.values()],
        "before_the_probe": ", ".join(dict.fromkeys(one["favourite"] for one in said.values())),
        "accuracy": reached,
        "best_row": best,
        "best": table[best],
        "below_best": table[best] - reached,
        "below_best_interval": interval(difference(runs[best], mine)),
        "share_of_examples": sum(one["probe"]["examples"] for one in said.values()) / examples,
        "share_of_seconds": sum(one["probe"]["seconds"] + one["looking_seconds"] for one in said.values()) / seconds,
        "rows": table,
        "by_seed": {label: [accuracy(run) for run in by_seed.values()] for label, by_seed in runs.items()},
        "rates": {label: next(iter(by_seed.values())).experiment.train.lr for label, by_seed in runs.items()},
        "data": [one["data"] for one in said.values()],
        "probe": [one["probe"] for one in said.values()],
        "verdict": [one["verdict"] for one in said.values()],
        "settings": setting,
    }


def lines(found: Mapping[str, Mapping[str, Any]]) -> list[Result]:
    """Make the lines of the table of benchmarks."""
    made = []
    for name, f in found.items():
        beside = f"{f['advice']} {f['accuracy']:.1f}, best of eight {f['best_row']} {f['best']:.1f}"
        if f.get("below_best_interval"):
            beside += ", 95 % interval of the difference {:.1f} to {:.1f}".format(*f["below_best_interval"])
        made.append(Result(f"{name}: points below the best of eight", [f["below_best"]], POINTS, beside=beside))
        for what in ("examples", "seconds"):
            share = f[f"share_of_{what}"]
            made.append(Result(f"{name}: probe / eight rows, in {what}", [share], SHARE))
    return made


def stored(attempt: str | None = None, save: Path = Path("results/small/advice.json")) -> list[Result]:
    """Read the table of a try, or of what judges the present rules, from the file of all tries."""
    tries = json.loads(save.read_text())["tries"]
    wanted = {attempt: tuple(HELD_OUT[attempt])} if attempt else PRESENT
    done = {number: tries.get(number, {}) for number in wanted}
    there = {name: done[number][name] for number, names in wanted.items() for name in names if name in done[number]}
    if not there:
        raise SystemExit(f"{save} has no results of the try {', '.join(wanted)}: run it without --stored")
    return lines(there)


def results(
    attempt: str | None = None, out: Path = Path("runs/advice"), save: Path | None = Path("results/small/advice.json")
) -> list[Result]:
    """Measure one try, or what judges the present rules, and add it to the file of all tries."""
    saved = json.loads(save.read_text()) if save is not None and save.is_file() else {"tries": {}}
    made: dict[str, dict[str, Any]] = {}
    for number, names in ({attempt: tuple(HELD_OUT[attempt])} if attempt else PRESENT).items():
        for name in names:
            found = measure(name, HELD_OUT[number][name], out / number)
            saved["tries"].setdefault(number, {})[name] = found
            print(f"{name}: {found['advice']}, {found['below_best']:.1f} points below the best", flush=True)
            if save is not None:  # after every setting, because the next one takes long
                write_json(save, {**saved, "command": "python -m benchmarks advice", "versions": versions()})
            made[name] = found
    return lines(made)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--try", dest="attempt", choices=list(HELD_OUT), help="(default: what judges the present rules)"
    )
    parser.add_argument("--stored", action="store_true", help="run nothing, print what is saved")
    parser.add_argument("--out", type=Path, default=Path("runs/advice"))
    parser.add_argument("--save", type=Path, default=Path("results/small/advice.json"))
    a = parser.parse_args()
    show(stored(a.attempt, a.save) if a.stored else results(a.attempt, a.out, a.save))
