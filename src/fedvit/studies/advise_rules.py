"""The rules of advice: which candidates suit which data, at which rates, and the measurements that say so."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fedvit.core.settings import TrainSettings
from fedvit.report.statistics import LOCAL
from fedvit.studies.advise_data import Profile

FEW_CLASSES = 2  # up to here, a single class can make up nearly all of a client's images
LABEL_SKEW = 0.25  # above this, clients' mixes of classes differ enough to matter
OWN_CLASSES = 0.85  # above this, clients share hardly any class
FEATURE_SKEW = 0.05  # above this, the same class looks different at different clients
FEW_STEPS = 40  # rounds times local steps; with fewer, a head that trains in every round is ahead of late fine-tuning
MANY_STEPS = 60  # local steps per round; beyond these, a rate that was found in short rounds is too large
MOMENTUM = 0.9  # of SGD; all rates below were chosen with it
RATES = {"full": 5e-3, "bias": 1e-2}  # chosen on validation images: results/small/rates.json
FEW_CLASSES_RATES = {"full": 1e-3, "bias": 5e-3}
ALONE_RATE = 1e-3


@dataclass(frozen=True)
class Candidate:
    """A method and tune that are worth a probe, with a learning rate (None: the default one)."""

    method: str
    tune: str
    lr: float | None
    level: bool = False  # with the favourite in our measurements, so that the probe alone decides between them

    @property
    def label(self) -> str:
        return self.method if self.tune == "full" else f"{self.method}+{self.tune}"

    @property
    def key(self) -> str:
        return self.label if self.lr is None else f"{self.label} at {self.lr:g}"


def candidates_for(profile: Profile, train: TrainSettings, rounds: int) -> list[Candidate]:
    """Return the candidates for this data and so many rounds, the favourite first; training alone is always among them.

    The order is that of our measurements in EVIDENCE. The candidates differ in kind, so that a probe has something to
    find: fine-tuning before the test, a personal head, two heads, and no federation.
    """
    level = None
    if not profile.pretrained:
        rows = [("fedrep", "full"), ("fed_rod", "full"), (LOCAL, "full")]
    elif profile.classes <= FEW_CLASSES:
        rows = [("fed_rod", "bias"), ("fedper", "bias"), (LOCAL, "full"), ("fedavg_ft", "bias")]
    elif profile.label_skew > OWN_CLASSES:
        rows = [("fedper", "full"), ("fed_rod", "full"), (LOCAL, "full"), ("fedavg_ft", "full")]
    elif rounds * steps_per_round(profile, train) < FEW_STEPS:
        rows = [("fed_rod", "bias"), ("fedavg_ft", "full"), (LOCAL, "full")]
        level = ("fedavg_ft", "full")
    else:
        rows = [("fedavg_ft", "bias"), ("fed_rod", "bias"), (LOCAL, "full"), ("fedavg_ft", "full")]
    return [Candidate(*row, rate_for(*row, profile, train), level=row == level) for row in rows]


def rate_for(method: str, tune: str, profile: Profile, train: TrainSettings) -> float | None:
    """Return the rate that was best in our measurements, or None for the default where they do not apply."""
    if not profile.pretrained or train.optimizer != "sgd" or train.momentum != MOMENTUM:
        return None
    few = profile.classes <= FEW_CLASSES
    rate = ALONE_RATE if method == LOCAL else (FEW_CLASSES_RATES if few else RATES)[tune]
    return rate / 2 if steps_per_round(profile, train) > MANY_STEPS else rate


def steps_per_round(profile: Profile, train: TrainSettings) -> float:
    """Return how many steps the median client takes in a round."""
    return profile.median * train.epochs / train.batch


def rounds_for(profile: Profile, cohort: int) -> int:
    """Return enough rounds for a client to train four times on average, or eight times from random weights."""
    visits = 4 if profile.pretrained else 8
    return int(min(100, max(8, math.ceil(visits * profile.clients / cohort))))


# What the rules rest on.


@dataclass(frozen=True)
class Evidence:
    """One measured setting, and what the rows reached in it, in percent."""

    setting: str
    source: str
    pretrained: bool
    classes: int
    accuracy: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


EVIDENCE = (
    Evidence(
        "CIFAR-100, Dir(0.1)",
        "results/small/cifar100_seeds.json and advice_development.json, 16 clients, 15 rounds, seeds 0, 1, 2",
        pretrained=True,
        classes=100,
        accuracy={
            "fedavg_ft+bias": 71.9, "fed_rod+bias": 69.0, "fed_rod": 68.0, "fedavg_ft": 64.8, "pfededit": 63.2,
            "fedrep": 62.8, "fedperfix": 59.5, "fedper": 59.4, "fedavg+bias": 49.6, "fedper+bias": 44.3,
            "fedavg": 44.2, "local": 43.8,
        },
    ),
    Evidence(
        "Office-Caltech, 4 domains",
        "results/small/office_caltech.json and advice_development.json, 16 clients, 6 rounds, seed 0",
        pretrained=True,
        classes=10,
        accuracy={
            "fedavg_ft+bias": 77.2, "fed_rod+bias": 73.1, "fedavg_ft": 73.5, "fedper": 71.6, "fedavg+bias": 70.4,
            "fedperfix": 68.0, "fedavg": 67.4, "fedrep": 66.9, "fedper+bias": 58.4, "local": 46.1,
        },
    ),
    Evidence(
        "the same as 4 sites, few steps",
        "results/small/advice.json, second try, 4 rounds, seed 12",
        pretrained=True,
        classes=10,
        accuracy={
            "fedavg_ft": 71.9, "fed_rod+bias": 71.2, "fedavg": 68.4, "fedavg_ft+bias": 68.0, "fedavg+bias": 65.0,
            "fedper": 59.3, "fedper+bias": 51.3, "local": 50.0,
        },
    ),
    Evidence(
        "CIFAR-100, own classes",
        "results/small/advice.json, third try, 10 classes per client, 7 rounds, seed 12",
        pretrained=True,
        classes=100,
        accuracy={
            "fedper": 52.4, "fedavg_ft": 46.8, "fedavg_ft+bias": 46.0, "fed_rod+bias": 43.8, "fedper+bias": 42.7,
            "local": 35.6, "fedavg+bias": 11.9, "fedavg": 11.2,
        },
    ),
    Evidence(
        "PneumoniaMNIST, Dir(0.5)",
        "results/small/pneumonia.json and advice_development.json, 16 clients, 6 rounds, seed 0",
        pretrained=True,
        classes=2,
        accuracy={
            "fed_rod+bias": 95.0, "fed_rod": 94.0, "fedrep": 94.0, "fedperfix": 92.4, "fedper+bias": 92.2,
            "fedper": 91.3, "fedavg_ft+bias": 89.0, "fedavg_ft": 88.6, "local": 84.4, "fedavg+bias": 51.6,
            "fedavg": 51.6,
        },
    ),
    Evidence(
        "digits, Dir(0.3)",
        "results/small/advice_development.json, random weights, 24 clients, 16 rounds, seeds 0, 1",
        pretrained=False,
        classes=10,
        accuracy={
            "fedper": 57.8, "fedrep": 57.6, "fedperfix": 57.2, "fedavg_ft": 56.0, "apfl": 53.9, "ditto": 53.8,
            "fed_rod": 53.6, "local": 51.4, "fedavg": 17.6,
        },
    ),
    Evidence(
        "digits, 40 rounds",
        "results/small/advice_development.json, random weights, 12 clients, Dirichlet 0.3, seed 0",
        pretrained=False,
        classes=10,
        accuracy={"fedrep": 89.7, "fedper": 89.6, "fed_rod": 89.3, "fedavg_ft": 82.8, "local": 76.1},
    ),
    Evidence(
        "digits, Dir(0.2)",
        "results/small/advice_development.json, random weights, 12 clients, 16 rounds, seeds 0, 1",
        pretrained=False,
        classes=10,
        accuracy={
            "fedrep": 71.7, "fedperfix": 71.3, "local": 70.0, "fedavg_ft": 69.9, "fedper": 69.5, "ditto": 67.6,
            "fed_rod": 65.8, "fedavg": 27.4,
        },
    ),
)  # fmt: skip


def evidence_for(profile: Profile) -> list[Evidence]:
    """Return the measurements that are most like this data: weights of the same kind, and two classes or more."""
    alike = [e for e in EVIDENCE if e.pretrained == profile.pretrained]
    few = [e for e in alike if (e.classes <= FEW_CLASSES) == (profile.classes <= FEW_CLASSES)]
    return few or alike


METHOD_REASONS = {
    "fedavg_ft": "each client fine-tunes the common model on its own images before using it, so that it suits its own "
    "mix of classes, and a client that never took part is served as well",
    "fed_rod": "a shared head learns all classes evenly and a personal head corrects it, so that a client with one "
    "frequent class does not spoil the common model",
    "fedrep": "from random weights, what clients share is the body, and a head of their own keeps label skew out of it",
    "fedper": "a head of its own keeps a client's mix of classes out of what is shared",
    LOCAL: "in the probe, nothing that federates was as good as training alone",
}


def reasons_for(profile: Profile, chosen: Candidate) -> list[str]:
    """Say in sentences why this candidate suits this data."""
    found = []
    if profile.label_skew > LABEL_SKEW:
        found.append(
            f"clients differ in their classes (label skew {profile.label_skew:.2f}): one model for all without any "
            "personal part would fit few of them"
        )
    else:
        found.append(
            f"clients have similar mixes of classes (label skew {profile.label_skew:.2f}), so they can share a lot"
        )
    if profile.feature_skew is not None and profile.feature_skew > FEATURE_SKEW:
        found.append(
            f"the same class looks different at different clients (feature skew {profile.feature_skew:.2f}), which "
            "fine-tuning or a personal part makes up for"
        )
    if chosen.method in METHOD_REASONS:
        found.append(f"{chosen.method}: {METHOD_REASONS[chosen.method]}")
    if chosen.tune == "bias":
        found.append("bias tuning on pre-trained weights sends a hundredth of what training everything does")
    found += _best_in(profile, chosen)
    return found


def _best_in(profile: Profile, chosen: Candidate) -> list[str]:
    """Say where the candidate stood in our measurements."""
    places = []
    for entry in evidence_for(profile):
        if chosen.label in entry.accuracy:
            rank = sorted(entry.accuracy.values(), reverse=True).index(entry.accuracy[chosen.label]) + 1
            places.append(f"{rank} of {len(entry.accuracy)} on {entry.setting}")
    return [f"its rank in our measurements: {', '.join(places)}"] if places else []
