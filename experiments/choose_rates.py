"""Choose a learning rate per tune on validation images, never on test.

    python experiments/choose_rates.py experiments/small/cifar100.toml --tune full --rates 5e-4,1e-3,5e-3
    python experiments/choose_rates.py experiments/small/cifar100.toml --method fedadam --lr 5e-3 --vary server_lr \
        --rates 1e-3,3e-3,1e-2

Runs the method at each rate with a fifth of every client's training images held out, prints the accuracy on them after
the last round, and adds the figures to a JSON file. Finished runs are not run again.
"""

import argparse
import json
from pathlib import Path

from fedvit.config.load import load_experiment, parse_sets
from fedvit.runs.folder import Run
from fedvit.runs.resume import start_or_resume


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", type=Path)
    parser.add_argument("--method", default="fedper")
    parser.add_argument("--tune", default="full")
    parser.add_argument("--rates", default="1e-4,5e-4,1e-3,5e-3,1e-2,5e-2")
    parser.add_argument("--vary", default="lr", help="the setting that is a rate: lr, or a method's option")
    parser.add_argument("--lr", type=float, help="the local rate where another one is varied")
    parser.add_argument("--set", action="append", default=[], help="any other setting, as for fedvit run")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/rates"))
    parser.add_argument("--save", type=Path, help="JSON file to add the figures to")
    a = parser.parse_args()
    sets = {"data.val": 0.2, **parse_sets(a.set)}
    found = {}
    for rate in map(float, a.rates.split(",")):
        flags = {
            "method": a.method, "tune": a.tune, "rounds": a.rounds, "seed": a.seed,
            "threads": a.threads, "eval_every": 0, "lr": rate if a.vary == "lr" else a.lr,
        }  # fmt: skip
        experiment = load_experiment(a.experiment, sets if a.vary == "lr" else {**sets, a.vary: rate}, flags)
        folder = a.out / a.experiment.stem / f"{experiment.label}-{a.vary}{rate:g}-seed{a.seed}"
        for _ in start_or_resume(experiment, folder, resume=True):
            pass
        found[f"{rate:g}"] = Run(folder).summary["views"]["personal"]["val"]
        print(f"{experiment.label} at {a.vary} {rate:g}: {found[f'{rate:g}']:.1f} % on val", flush=True)
    best = max(found, key=lambda rate: found[rate])
    print(f"chosen for {experiment.label}: {best}")
    if a.save:
        saved = json.loads(a.save.read_text()) if a.save.is_file() else {}
        figures = {"rounds": a.rounds, "seed": a.seed, "varied": a.vary, "val": found, "chosen": float(best)}
        key = experiment.label if a.vary == "lr" else f"{experiment.label} {a.vary}"
        saved.setdefault(a.experiment.stem, {})[key] = figures
        a.save.write_text(json.dumps(saved, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
