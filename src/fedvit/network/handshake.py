"""Compare, part by part, everything that a server and its sites must agree on before round 1."""

import json
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from fedvit.config.resolve import to_tables
from fedvit.core import tree
from fedvit.core.errors import one_line
from fedvit.core.settings import PLANNED, Experiment
from fedvit.core.tree import fingerprint
from fedvit.engine.net import Net
from fedvit.split.plan import SplitPlan

HERE = {  # settings that each machine chooses for itself
    "model": ("weights", "pretrained"),  # the weights themselves are compared instead
    "train": ("rounds", "cohort", "dropout"),  # rounds must agree if the learning rate depends on them
    "run": (
        "eval_every",
        "until_accuracy",
        "keep",
        "patience",
        "track",
        "predictions",
        "threads",
        "device",
        "cache_mb",
    ),
}
PARTS = ("version", "model", "weights", "inputs", "classes", "settings")


def common(experiment: Experiment, net: Net, class_names: tuple[str, ...]) -> dict[str, Any]:
    """Return the parts that must be equal.

    In split learning, only the weights at the client are compared, because those of the body never leave the server.
    """
    tables = to_tables(experiment)
    planned = {("train", "rounds")} if experiment.train.schedule in PLANNED else set()
    if experiment.run.clinical:  # it is measured after the last round
        planned |= {("train", "rounds"), ("run", "until_accuracy")}
    kept = {
        f"{name}.{key}": value
        for name in ("model", "method", "tune", "train", "run")
        for key, value in tables[name].items()
        if key not in HERE.get(name, ()) or (name, key) in planned
    }
    weights = {**net.initial, **net.frozen}
    if isinstance(net.plan, SplitPlan):
        weights = tree.pick(weights, net.plan.cut.names(net.module, "client_head", "client_tail"))
    return {
        "version": version("fedvit"),
        "model": {key: value for key, value in kept.items() if key.startswith("model.")},
        "weights": fingerprint(dict(sorted(weights.items()))),
        "inputs": {"size": net.inputs.size, "mean": list(net.inputs.mean), "std": list(net.inputs.std)},
        "classes": list(class_names),
        "settings": {key: value for key, value in kept.items() if not key.startswith("model.")},
    }


def differences(server: Mapping[str, Any], client: Mapping[str, Any]) -> list[str]:
    """Describe every part in which the two differ."""
    words = {"version": "the fedvit version", "inputs": "the input settings", "classes": "the class list"}
    found = []
    for part in PARTS:
        a, b = server[part], client.get(part)
        if json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True):
            continue
        if isinstance(a, dict) and isinstance(b, dict):
            keys = [key for key in sorted({*a, *b}) if a.get(key) != b.get(key)]
            found.append(f"{words.get(part, f'the {part}')} ({'; '.join(_told(key, a, b) for key in keys[:5])})")
        elif part == "weights":
            found.append("the initial weights (another weights file or another seed)")
        else:
            found.append(f"{words.get(part, part)} (server {_short(a)}, client {_short(b)})")
    return found


def _told(key: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    return f"{one_line(key, 60)}: server {_short(a.get(key))}, client {_short(b.get(key))}"


def _short(value: Any) -> str:
    text = one_line(", ".join(map(str, value)) if isinstance(value, list) else value, 200)
    return text if len(text) <= 100 else text[:97] + "..."
