"""The published experiments, held against the papers' tables and settings, typed here a second time."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedvit.studies.published.fedpeft_costs import COSTS, MISPRINTS, TO_TARGET, cost_of_round, cost_of_rounds

EXPERIMENTS = Path(__file__).parents[2] / "experiments"

FEDPERFIX_2 = "apfl fedavg fedbabu fedbn fedper fedperfix local per_fedavg vanilla_attention"
PFEDEDIT_1 = "fedavg fedper fedbn fedrep distrans moon apfl pfededit"
PFEDEDIT_8 = "cd2_pfed partialfed pfededit"
PFEDEDIT_6 = "fedfa fedfed fedala fed_lamb fedrolex heterofl pfededit"
FEDPEFT_TUNES = "full head bias adapter prompt"
FEDV_2 = "fedavg_ft fed_rod ditto festa fedv fedvz"
ROWS = {  # column: its rows, and what the paper reports of each
    "fedperfix/table2/cifar100": (
        f"{FEDPERFIX_2} fedperfix_last_block",
        "44.88 23.29 41.41 23.94 44.42 48.10 34.74 33.86 44.63 48.10",
    ),
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
    "fedperfix/table6/cifar100": (
        "fedperfix fedperfix_last_block prefix_z prefix_r prompts adapters",
        "48.10 48.10 47.37 46.98 44.19 47.99",
    ),
    "fedpeft/table1/cifar100": (
        "full_x8 full_x4 full_x2 full_x1 head_x8 head_x64 shufflenet_x8 bias_x8 adapter_x8 prompt_x8",
        "92.09 89.84 86.96 73.10 72.55 75.47 51.44 91.02 88.05 89.90",
    ),
    "fedpeft/table1/pcam": (
        "full_x8 full_x4 full_x2 full_x1 head_x8 head_x64 shufflenet_x8 bias_x8 adapter_x8 prompt_x8",
        "84.82 82.64 81.31 78.29 72.38 78.24 72.91 85.29 79.63 87.25",
    ),
    "fedpeft/table3/n16_m16_iid": (f"scratch {FEDPEFT_TUNES}", "38.44 93.70 78.11 91.89 90.21 92.09"),
    "fedpeft/table3/n16_m16_skewed": (f"scratch {FEDPEFT_TUNES}", "35.72 93.50 77.59 90.25 88.77 90.37"),
    "fedpeft/table3/n16_m2_iid": (FEDPEFT_TUNES, "93.32 76.65 91.35 89.48 91.60"),
    "fedpeft/table3/n16_m2_skewed": (FEDPEFT_TUNES, "87.01 62.80 86.18 80.08 85.54"),
    "fedpeft/table3/n64_m64_iid": (FEDPEFT_TUNES, "93.66 78.45 92.71 90.50 91.87"),
    "fedpeft/table3/n64_m64_skewed": (FEDPEFT_TUNES, "92.81 75.51 91.71 89.26 90.96"),
    "fedpeft/table3/n64_m8_iid": (FEDPEFT_TUNES, "93.50 77.59 92.49 90.39 92.00"),
    "fedpeft/table3/n64_m8_skewed": (FEDPEFT_TUNES, "92.09 72.55 91.02 88.05 89.90"),
    "fedpeft/table4/cifar100": (FEDPEFT_TUNES, "92.09 72.55 91.02 88.05 89.90"),
    "fedpeft/table4/pcam": (FEDPEFT_TUNES, "84.82 72.38 84.98 79.63 87.25"),  # as printed; 85.29 is meant
    "fedpeft/table6/k1000": (FEDPEFT_TUNES, "66.52 52.13 76.40 71.34 63.77"),
    "fedpeft/table6/k1500": (FEDPEFT_TUNES, "67.47 56.52 81.14 76.91 71.94"),
    "fedpeft/table6/k2000": (FEDPEFT_TUNES, "77.67 60.15 83.83 79.22 76.89"),
    "fedpeft/table7/vit_b_in21k": (FEDPEFT_TUNES, "92.09 72.55 91.02 87.99 89.63"),
    "fedpeft/table7/vit_b_in1k": (FEDPEFT_TUNES, "92.09 80.78 90.73 88.69 89.29"),
    "fedpeft/table7/vit_s_in21k": (FEDPEFT_TUNES, "89.33 74.40 88.40 84.15 87.39"),
    **{
        f"fedpeft/table8/{column}": (FEDPEFT_TUNES, "0.001 0.005 0.01 0.005 0.01")
        for column in (
            "n16_m16_iid",
            "n16_m16_skewed",
            "n16_m2_iid",
            "n16_m2_skewed",
            "n64_m64_iid",
            "n64_m64_skewed",
            "n64_m8_iid",
            "k1500",
            "k2000",
        )
    },
    "fedpeft/table8/n64_m8_skewed": (FEDPEFT_TUNES, "0.0005 0.01 0.01 0.005 0.01"),
    "fedpeft/table8/k1000": (FEDPEFT_TUNES, "0.001 0.005 0.01 0.001 0.01"),
    "pfededit/table1/cifar10_dh0": (PFEDEDIT_1, ".942 .890 .9272 .889 .947 .922 .891 .955"),
    "pfededit/table1/cifar10_dh80": (PFEDEDIT_1, ".806 .887 .945 .933 .954 .938 .915 .962"),
    "pfededit/table1/cifar100_dh60": (PFEDEDIT_1, ".772 .748 .802 .793 .850 .768 .802 .855"),
    "pfededit/table1/lyme_dh50": (PFEDEDIT_1, ".716 .808 .821 .833 .850 .768 .781 .912"),
    "pfededit/table6/cifar10": (PFEDEDIT_6, ".887 .923 .936 .917 .792 .735 .938"),
    "pfededit/table6/cifar100": (PFEDEDIT_6, ".673 .696 .840 .822 .674 .620 .868"),
    "pfededit/table6/lyme": (PFEDEDIT_6, ".938 .943 .932 .938 .872 .831 .970"),
    "pfededit/table8/cifar10": (PFEDEDIT_8, ".915 .903 .938"),
    "pfededit/table8/cifar100": (PFEDEDIT_8, ".833 .825 .868"),
    "pfededit/table8/lyme": (PFEDEDIT_8, ".903 .926 .970"),
    "pfededit/table8/lyme_skin": (PFEDEDIT_8, ".897 .908 .921"),
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
FEDPEFT: dict[str, Any] = {
    "data.name": "cifar100", "data.samples": None, "data.val": None, "partition.name": "dirichlet_train",
    "partition.clients": 64, "partition.alpha": 0.1, "model.name": "vit_base_patch16_224.augreg_in21k",
    "model.pretrained": True, "model.image_size": 224, "train.cohort": 8, "train.rounds": 50, "train.epochs": 10,
    "train.batch": 64, "train.lr": 0.01, "train.optimizer": "sgd", "train.momentum": 0, "train.weight_decay": 1e-4,
    "train.weighting": "samples", "train.augment": "crop", "method.name": "fedavg", "tune.init": None,
}  # fmt: skip
FEDPEFT_PCAM = {
    "data.name": "pcam", "data.samples": 20_000, "data.join_val": False, "partition.alpha": 0.5,
    "train.augment": "flip",
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
COUNTED = {"method.k": None, "method.ratio": 0.07, "method.layers": "paper"}  # 4 of 54 layers, or 8 of 111
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
    "fedperfix/table6/cifar100/fedperfix_last_block": FEDPERFIX | {"method.last_block": True},
    "fedpeft/table1/cifar100/full_x8": FEDPEFT | {"tune.name": "full", "train.lr": 5e-4},
    "fedpeft/table1/cifar100/head_x8": FEDPEFT | {"tune.name": "head"},
    "fedpeft/table1/cifar100/head_x64": FEDPEFT | {"tune.name": "head", "train.cohort": 64, "train.lr": 5e-3},
    "fedpeft/table1/cifar100/bias_x8": FEDPEFT | {"tune.name": "bias"},
    "fedpeft/table1/cifar100/adapter_x8": FEDPEFT
    | {"tune.name": "adapter", "tune.init": "random", "tune.per_layer": None, "train.lr": 5e-3},
    "fedpeft/table1/cifar100/prompt_x8": FEDPEFT | {"tune.name": "prompt"},
    "fedpeft/table1/cifar100/shufflenet_x8": FEDPEFT | {"model.name": "shufflenet_v2_x0_5", "train.lr": 5e-2},
    "fedpeft/table1/pcam/shufflenet_x8": FEDPEFT | FEDPEFT_PCAM | {"model.name": "shufflenet_v2_x0_5", "train.lr": 0.1},
    "fedpeft/table1/pcam/full_x8": FEDPEFT | FEDPEFT_PCAM | {"train.lr": 1e-3},
    "fedpeft/table3/n16_m16_skewed/scratch": FEDPEFT
    | {"partition.clients": 16, "train.cohort": 16, "model.pretrained": False},
    "fedpeft/table3/n64_m64_skewed/head": FEDPEFT | {"tune.name": "head", "train.cohort": 64, "train.lr": 5e-3},
    "fedpeft/table3/n64_m8_iid/full": FEDPEFT | {"partition.name": "iid", "train.lr": 1e-3},
    "fedpeft/table4/pcam/bias": FEDPEFT | FEDPEFT_PCAM | {"tune.name": "bias"},
    "fedpeft/table6/k1000/adapter": FEDPEFT
    | {
        "tune.name": "adapter",
        "tune.init": "random",
        "data.samples": 1000,
        "train.lr": 1e-3,
        "partition.min_samples": 2,
    },
    "fedpeft/table7/vit_s_in21k/bias": FEDPEFT | {"model.name": "vit_small_patch16_224.augreg_in21k"},
    "fedpeft/table8/n64_m8_skewed/full": FEDPEFT | {"data.val": 0.2, "train.lr": 5e-4},
    "pfededit/table1/cifar10_dh80/fedrep": PFEDEDIT,
    "pfededit/table1/cifar10_dh80/distrans": PFEDEDIT | {"method.offset_lr": 1e-3, "method.offsets": None},
    "pfededit/table1/cifar10_dh0/distrans": PFEDEDIT
    | {"partition.level": 0, "method.a": 0.3, "method.offsets": "server"},
    "pfededit/table1/cifar100_dh40/pfededit": PFEDEDIT
    | {"data.name": "cifar100", "partition.level": 40, "model.image_size": 224, **COUNTED},
    "pfededit/table1/lyme_dh50/pfededit": PFEDEDIT | VIT_B | {"data.name": "lyme", "partition.level": 50, **COUNTED},
    "pfededit/table6/cifar10/fedala": PFEDEDIT,
    "pfededit/table8/cifar100/partialfed": PFEDEDIT | {"data.name": "cifar100", "model.image_size": 224},
    "pfededit/table8/lyme_skin/pfededit": PFEDEDIT
    | VIT_B
    | COUNTED
    | {"data.name": "lyme_skin", "data.layout": "domain", "partition.name": "domain", "partition.level": None},
    "fedv/table2/cifar10_dir0.1/fedavg_ft": FEDV | BASELINE | {"method.epochs": 5, "run.finetune": None},
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


@pytest.mark.parametrize(
    "path", sorted((EXPERIMENTS / "fedpeft" / "table8").glob("*/*.toml")), ids=lambda p: p.parent.name
)
def test_a_file_of_fedpefts_table_8_trains_at_the_rate_that_is_printed(path: Path) -> None:
    assert tomllib.loads(path.read_text())["train"]["lr"] == float(published(path))


def test_fedpefts_printed_costs_follow_from_its_rounded_counts() -> None:
    """Every figure of Table 1, and of Table 2 from those of Table 1; the one that does not is a misprint."""
    for row, printed in COSTS.items():
        tune, _, clients = row.partition("_x")
        assert cost_of_round(tune, int(clients)) == printed, row
    wrong = {}
    for rows in TO_TARGET.values():
        for row, cells in rows.items():
            for cost, rounds in filter(None, cells):
                derived = cost_of_rounds(COSTS[row], rounds)
                wrong |= {cost: derived} if derived != cost else {}
    assert wrong == MISPRINTS == {"38.34MB": "38.43MB"}


def test_fedpefts_printed_costs_are_those_of_the_paper() -> None:
    """Typed a second time, target by target."""
    columns = {
        name: [[cell and cell[0] for cell in cells] for cells in rows.values()] for name, rows in TO_TARGET.items()
    }
    assert list(zip(*columns["CIFAR-100"], strict=True)) == [
        ("10.24GB", "16.64GB", "19.22GB", None, "38.34MB", "42.12MB", "31.14MB"),
        ("25.6GB", "51.2GB", None, None, "115.29MB", None, "88.23MB"),
    ]
    assert list(zip(*columns["PCam"], strict=True)) == [
        ("7.68GB", "3.84GB", "1.92GB", "1.28GB", "16.47MB", "63.18MB", "15.57MB"),
        ("30.72GB", "14.08GB", "12.17GB", None, "54.9MB", "287.82MB", "15.57MB"),
    ]
