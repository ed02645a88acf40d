"""The settings of the small grids, which run in minutes on two cores, and the rows and columns that they share.

On one core, a run on the embedded digits takes about ten seconds, and one on pre-trained weights about a minute.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedvit.config.tables import Tables, stack_tables
from fedvit.studies.cases import Case, grid, of_table
from fedvit.studies.published import fedpeft, fedperfix
from fedvit.studies.published.common import method

# Settings. The small versions of the papers' tables in experiments/published.py start from SMALL as well.

SMALL: Tables = {
    "data": {"name": "cifar100_small"},
    "model": {
        "name": "vit_tiny_patch16_224", "image_size": 64, "weights": "vit_tiny_patch16_224.fp16.safetensors",
    },
    "train": {"clip_grad": 0.0, "batch": 32, "lr": 0.002, "optimizer": "sgd", "momentum": 0.9},  # as the papers
    "tune": {"name": "full"},
}  # fmt: skip
DIGITS: Tables = {
    "data": {"name": "digits"},
    "partition": {"name": "dirichlet", "clients": 24, "alpha": 0.3},
    "model": {"name": "vit_micro"},
    "train": {"cohort": 8, "rounds": 16, "epochs": 2, "batch": 32, "optimizer": "adamw"},
    "run": {"eval_every": 4},
}
DIGITS_DH = stack_tables(
    [
        DIGITS,
        {
            "partition": {"name": "dh", "clients": 10, "level": 80.0},
            "train": {"cohort": 10, "rounds": 12, "epochs": 1, "weighting": "equal"},
        },
    ]
)
DIGITS_SPLIT: Tables = {
    **DIGITS,
    "partition": {"name": "dirichlet", "clients": 16, "alpha": 0.3},
    "train": {"cohort": 4, "rounds": 12, "epochs": 2, "batch": 32, "optimizer": "adam", "lr": 0.002},
    "method": {"name": "fedv", "fedround": 5},
    "run": {"eval_every": 6},
}
IMAGENET = stack_tables(
    [
        SMALL,
        {
            "data": {"name": "office_caltech10", "samples": 1600},
            "partition": {"name": "dirichlet", "clients": 16, "alpha": 0.3},
            "train": {"cohort": 4, "rounds": 8, "epochs": 2},
            "method": {"name": "fedavg"},
            "run": {"eval_every": 4},
        },
    ]
)
BRIEF = stack_tables([IMAGENET, {"train": {"rounds": 6, "epochs": 1}, "run": {"eval_every": 0}}])  # for wide grids
SPLIT_TINY: Tables = {"train": {"lr": 5e-3, "optimizer": "adam", "momentum": 0.0}}  # of the tail, whose head is kept
IMAGENET_SPLIT = stack_tables(
    [
        IMAGENET,
        SPLIT_TINY,
        {"run": {"eval_every": 0}},
        {"method": {"name": "fedv", "fedround": 5}},
    ]
)
PNEUMONIA: Tables = {"data": {"name": "pneumoniamnist", "samples": 1500}, "partition": {"alpha": 0.5}}
# The learning rates of experiments/small; the study `lr` chooses among them.
TINY_RATES = {"full": 5e-3, "head": 5e-3, "bias": 1e-2, "adapter": 5e-3, "prompt": 1e-2}
FULL_TINY: Tables = {"train": {"lr": TINY_RATES["full"]}}
FROM_SCRATCH: Tables = {"model": {"weights": None}}
WITH_VAL: Tables = {"data": {"val": 0.2}}
MICRO_RATES = (1e-4, 5e-4, 1e-3, 5e-3, 1e-2)
TINY_PATCH8: Tables = {"model": {"patch_size": 8, "image_size": 40}}
EIGHT_PIXELS = {"image_size": 8, "patch_size": 2}
RESNET18: Tables = {"model": {"name": "resnet18", "image_size": 32}}


# Rows and columns.


def methods(*names: str) -> dict[str, Tables]:
    """Make rows of these methods, with the options of FedPerfix's tables and rates for AdamW from random weights."""
    last = fedperfix.OWN["fedperfix_last_block"][0]
    own = {
        "apfl": fedperfix.OWN["apfl"][0], "per_fedavg": method("per_fedavg", lr=2e-4), "fedperfix_last_block": last,
    }  # fmt: skip
    return {name: own.get(name, method(name)) for name in names}


def tunes(rates: Mapping[str, float] | None = None) -> dict[str, Tables]:
    """Make rows of FedPEFT's tunes, at these learning rates or at the default ones."""
    return {
        name: {"tune": {"name": name}, **({"train": {"lr": rates[name]}} if rates else {})} for name in fedpeft.TUNES
    }


def sized(rows: Mapping[str, Tables], *cohorts: tuple[str, int]) -> dict[str, Tables]:
    """Make rows TUNE_xCLIENTS, which sample that many clients per round."""
    return {f"{name}_x{cohort}": stack_tables([rows[name], {"train": {"cohort": cohort}}]) for name, cohort in cohorts}


def parts(base: Tables) -> list[Case]:
    """Make the cases of FedPerfix's Table 1 on other settings."""
    table = replace(fedperfix.TABLE1, settings=base)
    return [replace(case, published="") for case in of_table(table)]


def federations(*sizes: tuple[int, int], alpha: float) -> dict[str, Tables]:
    """Make columns of N clients, M of them per round, whose classes are mixed almost evenly or skewed."""
    return {
        f"N={n} M={m} {words}": {"partition": {"clients": n, "alpha": skew}, "train": {"cohort": m}}
        for n, m in sizes
        for words, skew in (("iid", 1000.0), ("skewed", alpha))
    }


def rates(values: Sequence[float], base: Tables) -> list[Case]:
    """Make a case of every tune at every learning rate, with a validation set to choose by."""
    columns: dict[str, Tables] = {tune: {"tune": {"name": tune}} for tune in fedpeft.TUNES}
    return grid(stack_tables([base, WITH_VAL]), {f"{rate:g}": {"train": {"lr": rate}} for rate in values}, columns)


def edits(**options: Any) -> Tables:
    """Make a row of PFedEdit that edits three layers by default."""
    return method("pfededit", **{"k": 3, **options})


def federation_of(clients: int, cohort: int) -> Tables:
    """Make a column with this many clients, and a cohort of them per round."""
    return {"partition": {"clients": clients}, "train": {"cohort": cohort}}


EIGHT_OWNERS = stack_tables(
    [IMAGENET, {"train": {"cohort": 8, "rounds": 6, "epochs": 1, "weighting": "equal"}, "run": {"eval_every": 1}}]
)
BY_CLASSES: Tables = {"partition": {"name": "dh", "clients": 10, "level": 80.0}, "train": {"cohort": 10}}
BY_DOMAIN: Tables = {"partition": {"name": "domain", "clients": 8, "alpha": 100.0}}
TIMED: Tables = {
    "data": {"name": "digits", "samples": 200},
    "partition": {"name": "iid", "clients": 2},
    "train": {"cohort": 2, "rounds": 3, "epochs": 1, "batch": 10, "optimizer": "sgd", "lr": 0.001},
    "run": {"eval_every": 0},
}
TABLE2_ROWS = methods(
    "local", "fedavg", "apfl", "per_fedavg", "fedbn", "fedbabu", "fedper", "vanilla_attention", "fedperfix",
    "fedperfix_last_block",
)  # fmt: skip
TABLE2_COLUMNS: dict[str, Tables] = {  # small images, X-rays and photos by domain, as in the paper
    "CIFAR-100": {"data": {"name": "cifar100_small", "samples": 4000}, "partition": {"alpha": 0.1}},
    "PneumoniaMNIST": PNEUMONIA,
    "Office-Caltech": {
        "data": {"layout": "domain", "test": 0.15},
        "partition": {"name": "domain", "alpha": 1.0},
    },
}
TABLE3_ROWS = methods("local", "fedavg", "apfl", "per_fedavg", "fedbn", "fedbabu", "fedper")
SCALES = {f"s={s:g}": method("fedperfix", combine="concat", s=s) for s in (0.5, 1.5, 3.0)}
TABLE6_ROWS = ("fedperfix", "prefix_z", "prefix_r", "prompts", "adapters")
TABLE4_ROWS = methods("local", "fedavg", "apfl", "fedper", "fedperfix")
ON_TINY = tunes(TINY_RATES)
SPLIT_PANELS: dict[str, dict[str, Tables]] = {
    **{f"local epochs K, T={t}": {f"{n}": {"train": {"epochs": n, "rounds": t}} for n in (1, 2, 5)} for t in (4, 12)},
    "clients M": {f"{n}": federation_of(n, n // 4) for n in (8, 16, 24)},
    "fedround": {f"{n}": {"method": {"fedround": n}} for n in (1, 3, 5, 11)},
}
FEDV_ROWS: dict[str, Tables] = {
    "local": method("local"), "fedavg, then local": method("fedavg_ft"), "fed_rod": method("fed_rod", hyper=True),
    "ditto": method("ditto", lam=0.75), "festa": method("festa", fedround=5), "fedv": method("fedv", fedround=5),
    "fedvz": method("fedvz", fedround=5),
}  # fmt: skip
FEDV_ON_TINY = {
    name: stack_tables([SPLIT_TINY if name in ("festa", "fedv", "fedvz") else FULL_TINY, row])
    for name, row in (FEDV_ROWS | {"local": method("local", lr=1e-3)}).items()
}
FEDV_COLUMNS: dict[str, Tables] = {
    **{f"Dir({a:g})": {"partition": {"name": "dirichlet", "alpha": a}} for a in (0.1, 0.3)},
    **{f"Path-{c}": {"partition": {"name": "pathological", "classes": c}} for c in (2, 5)},
}
EDIT_PANELS: dict[str, dict[str, Tables]] = {
    "layers k": {f"{k}": edits(k=k) if k else method("fedavg") for k in (0, 1, 2, 3, 5, 8)},
    "probe p": {f"{p:g}": edits(probe=p, held_out=0.3) for p in (0.05, 0.1, 0.2, 0.3)},  # as many to train on
    "metric": {name: edits(metric=name) for name in ("accuracy", "loss", "te", "prediction_list")},
    "choice": {"fixed": edits(flexible=False), "flexible": edits(flexible=True)},
}


def has_data(folder: Path | None, cases: Sequence[Case]) -> bool:
    """Tell whether the data folder has the images and weights of these cases."""
    if folder is None:
        return False
    data = {str(case.settings["data"]["name"]) for case in cases}
    weights = {str(name) for case in cases if (name := case.settings["model"].get("weights"))}
    return all((folder / name).exists() or (folder / f"{name}.npz").is_file() for name in data | weights)
