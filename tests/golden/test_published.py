"""The published experiments, held against the papers' tables and settings, typed here a second time."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

EXPERIMENTS = Path(__file__).parents[2] / "experiments"

FEDPERFIX_2 = "apfl fedavg fedbabu fedbn fedper fedperfix local per_fedavg vanilla_attention"
PFEDEDIT_1 = "fedavg fedper fedbn fedrep distrans moon apfl pfededit"
PFEDEDIT_6 = "fedfa fedfed fedala fed_lamb fedrolex heterofl pfededit"
FEDV_2 = "fedavg fed_rod ditto festa fedv fedvz"
ROWS = {  # column: its rows, and what the paper reports of each
    "fedperfix/table2/cifar100": (FEDPERFIX_2, "44.88 23.29 41.41 23.94 44.42 48.10 34.74 33.86 44.63"),
    "fedperfix/table2/organamnist": (FEDPERFIX_2, "89.74 87.31 88.38 87.63 92.63 93.17 78.26 82.81 88.90"),
    "fedperfix/table2/office_home": (FEDPERFIX_2, "24.23 21.47 19.50 21.25 23.67 24.38 20.39 17.09 22.55"),
    "fedperfix/table3/resnet50": (
        "fedavg local apfl per_fedavg fedbn fedbabu fedper",
        "17.87 28.34 30.71 28.82 19.33 24.56 39.52",
    ),
    "fedperfix/table4/n64_k4": ("fedavg local apfl fedper fedperfix", "19.76 32.35 42.55 35.72 43.80"),
    "fedperfix/table4/n64_k8": ("fedavg local apfl fedper fedperfix", "23.29 34.74 44.88 44.42 48.10"),
    "fedperfix/table4/n128_k8": ("fedavg local apfl fedper fedperfix", "19.64 31.79 41.64 35.88 43.96"),
    "fedperfix/table4/n128_k16": ("fedavg local apfl fedper fedperfix", "23.29 36.03 43.92 44.70 46.96"),
    "fedperfix/table5/vit_tiny": ("fedavg local apfl fedper fedperfix", "19.56 33.73 37.66 41.58 44.71"),
    "fedperfix/table5/vit_base": ("fedavg local apfl fedper fedperfix", "24.82 38.93 47.57 44.34 48.40"),
    "fedperfix/table6/cifar100": ("fedperfix prefix_z prefix_r prompts adapters", "48.10 47.37 46.98 44.19 47.99"),
    "pfededit/table1/cifar10_dh0": (PFEDEDIT_1, ".942 .890 .9272 .889 .947 .922 .891 .955"),
    "pfededit/table1/cifar10_dh80": (PFEDEDIT_1, ".806 .887 .945 .933 .954 .938 .915 .962"),
    "pfededit/table1/cifar100_dh60": (PFEDEDIT_1, ".772 .748 .802 .793 .850 .768 .802 .855"),
    "pfededit/table1/lyme_dh50": (PFEDEDIT_1, ".716 .808 .821 .833 .850 .768 .781 .912"),
    "pfededit/table6/cifar10": (PFEDEDIT_6, ".887 .923 .936 .917 .792 .735 .938"),
    "pfededit/table6/cifar100": (PFEDEDIT_6, ".673 .696 .840 .822 .674 .620 .868"),
    "pfededit/table6/lyme": (PFEDEDIT_6, ".938 .943 .932 .938 .872 .831 .970"),
    "fedv/table2/cifar10_dir0.1": (FEDV_2, "86.17 91.15 82.22 75.16 96.28 96.93"),
    "fedv/table2/cifar100_path10": (FEDV_2, "68.10 75.59 62.77 71.08 93.10 94.02"),
    "fedv/table5/tiny_imagenet_path5": (FEDV_2, "60.97 56.42 49.84 66.79 96.77 96.83"),
}

FEDPERFIX: dict[str, Any] = {
    "data.name": "cifar100", "partition.clients": 64, "partition.alpha": 0.1, "model.name": "vit_small_patch16_224",
    "model.pretrained": None, "model.image_size": 224, "train.cohort": 8, "train.rounds": 50, "train.epochs": 10,
    "train.batch": 64, "train.lr": 0.01, "train.optimizer": "sgd", "train.momentum": 0, "train.weighting": "samples",
    "run.seed": 1,
}  # fmt: skip
PFEDEDIT: dict[str, Any] = {
    "data.name": "cifar10", "partition.name": "dh", "partition.clients": 10, "partition.level": 80,
    "model.name": "resnet18", "model.pretrained": True, "model.image_size": 64, "train.cohort": 10,
    "train.rounds": 100, "train.epochs": 1, "train.batch": 10, "train.lr": 0.01, "train.optimizer": "sgd",
    "train.momentum": 0, "train.weighting": "equal", "run.seed": 2023,
}  # fmt: skip
FEDV: dict[str, Any] = {
    "data.name": "cifar10", "partition.clients": 100, "partition.alpha": 0.1, "train.rounds": 500, "train.epochs": 5,
    "train.batch": 128,
}  # fmt: skip
BASELINE = {"model.name": "resnet50_gn", "train.lr": 0.1, "train.optimizer": "sgd", "train.momentum": 0.9}
SPLIT = {
    "model.name": "deit_small_patch16_224", "model.pretrained": True, "train.lr": 2e-4, "train.optimizer": "adam",
    "method.client_head_lr": 2e-4, "method.init": "random",
}  # fmt: skip
VIT_B = {"model.name": "vit_base_patch16_224.augreg_in1k", "model.image_size": 224, "train.lr": 1e-3}
SETTINGS: dict[str, dict[str, Any]] = {
    "fedperfix/table2/cifar100/fedper": FEDPERFIX,
    "fedperfix/table2/cifar100/per_fedavg": FEDPERFIX | {"train.lr": 0.001},
    "fedperfix/table2/organamnist/apfl": FEDPERFIX | {"data.name": "organamnist", "partition.alpha": 0.5},
    "fedperfix/table2/office_home/local": FEDPERFIX
    | {"data.name": "office_home", "partition.clients": 16, "partition.alpha": 1, "train.cohort": 4},
    "fedperfix/table3/resnet50/fedbn": FEDPERFIX | {"model.name": "resnet50"},
    "fedperfix/table4/n128_k8/apfl": FEDPERFIX | {"partition.clients": 128},
    "fedperfix/table4/n64_k4/fedavg": FEDPERFIX | {"train.cohort": 4},
    "fedperfix/table5/vit_base/fedperfix": FEDPERFIX | {"model.name": "vit_base_patch16_224"},
    "fedperfix/table6/cifar100/prefix_r": FEDPERFIX,
    "pfededit/table1/cifar10_dh80/fedrep": PFEDEDIT,
    "pfededit/table1/cifar10_dh80/distrans": PFEDEDIT | {"method.offset_lr": 1e-3},
    "pfededit/table1/cifar100_dh40/pfededit": PFEDEDIT
    | {"data.name": "cifar100", "partition.level": 40, "model.image_size": 224, "method.k": 4},
    "pfededit/table1/lyme_dh50/pfededit": PFEDEDIT
    | VIT_B
    | {"data.name": "lyme", "partition.level": 50, "method.k": 8},
    "pfededit/table6/cifar10/fedala": PFEDEDIT,
    "fedv/table2/cifar10_dir0.1/fedavg": FEDV | BASELINE | {"run.before_after": True},
    "fedv/table2/cifar10_dir0.1/fed_rod": FEDV | BASELINE | {"method.hyper": True},
    "fedv/table2/cifar10_dir0.1/fedv": FEDV | SPLIT | {"method.fedround": 20},
    "fedv/table2/cifar10_dir0.1/fedvz": FEDV
    | SPLIT
    | {"method.fedround": 20, "method.server_lr": 1e-6, "method.server_decay": 0.5, "method.epsilon": 1e-4},
    "fedv/table5/tiny_imagenet_dir0.1/festa": FEDV
    | SPLIT
    | {
        "data.name": "tiny-imagenet-200",
        "train.rounds": 300,
        "model.pretrained": False,
        "method.fedround": 50,
        "method.server_lr": 2e-4,
    },
    "fedv/table2/cifar100_path5/fedv": FEDV
    | SPLIT
    | {"data.name": "cifar100", "partition.name": "pathological", "partition.alpha": None, "partition.classes": 5},
}


def published(path: Path) -> str:
    found = re.search(r"published (\d*\.\d+)", path.read_text().splitlines()[0])
    assert found is not None, path
    return found[1]


@pytest.mark.parametrize("column", ROWS)
def test_a_column_has_the_papers_rows_and_figures(column: str) -> None:
    rows, figures = (part.split() for part in ROWS[column])
    assert {path.stem: published(path) for path in (EXPERIMENTS / column).glob("*.toml")} == dict(
        zip(rows, figures, strict=True)
    )


@pytest.mark.parametrize("row", SETTINGS)
def test_a_row_has_the_papers_settings(row: str) -> None:
    written = tomllib.loads((EXPERIMENTS / f"{row}.toml").read_text())
    found = {key: written.get(key.split(".")[0], {}).get(key.split(".")[1]) for key in SETTINGS[row]}
    assert found == SETTINGS[row]
