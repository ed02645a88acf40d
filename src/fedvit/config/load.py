"""Build one `Experiment` from a TOML file, `--set` and flags.

Precedence: flag > --set > file > default. Unknown keys are errors that suggest the closest valid key.
"""

import tomllib
from collections.abc import Iterable, Mapping
from inspect import signature
from pathlib import Path
from typing import Any

from fedvit.config.resolve import keys_of_tables, resolve
from fedvit.config.tables import TABLES, Tables, stack_tables
from fedvit.core.errors import UserError, nearest
from fedvit.core.settings import Experiment, FromPython, PrivacySettings
from fedvit.core.tree import fingerprint
from fedvit.methods import METHODS

FLAGS = {  # flag -> table.key
    "method": "method.name", "tune": "tune.name",
    "data": "data.name", "data_dir": "data.dir", "samples": "data.samples",
    "partition": "partition.name", "clients": "partition.clients",
    "model": "model.name", "image_size": "model.image_size", "patch_size": "model.patch_size",
    "weights": "model.weights", "pretrained": "model.pretrained",
    "cohort": "train.cohort", "rounds": "train.rounds", "epochs": "train.epochs", "batch": "train.batch",
    "lr": "train.lr", "epsilon": "privacy.epsilon",
    "seed": "run.seed", "eval_every": "run.eval_every", "until_accuracy": "run.until_accuracy",
    "threads": "run.threads", "precision": "run.precision", "device": "run.device",
}  # fmt: skip

# A bare key that meant something before one of these came keeps its meaning.
NEWER = ("run.finetune", "run.keep", *(f"privacy.{key}" for key in PrivacySettings.model_fields))


def read_tables(path: Path) -> Tables:
    """Read the tables of an experiment file; `[versions]`, which only run.toml has, is informative."""
    if not path.is_file():
        raise UserError(f"no experiment file at {path}")
    try:
        tables = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise UserError(f"{path} is not valid TOML: {problem}") from problem
    if tables.pop("versions", None) is not None:
        tables = _as_it_was_meant(tables)
    for name, table in tables.items():
        if name not in TABLES:
            raise UserError(f"{path} has an unknown table [{name}]; {nearest(name, TABLES)}")
        if not isinstance(table, dict):
            raise UserError(f"{path}: {name} should be a table, [{name}], found {table!r}")
    return tables


def _as_it_was_meant(tables: Tables) -> Tables:
    """Give what an older run.toml left out the meaning that it had: no clipping, the clients' rate, or a frozen head.

    A run.toml holds every setting, so what is missing is newer than the run.
    """
    tables = {**tables, "train": {"clip_grad": 0.0, **tables.get("train", {})}}
    table = tables.get("method", {})
    name = str(table.get("name", ""))
    if name not in METHODS or table.get("python") or "client_head_lr" not in signature(METHODS[name]).parameters:
        return tables
    lr = tables.get("train", {}).get("lr")
    old = {"client_head_lr": 0.0 if table.get("black_box") else lr, "server_lr": lr}
    return {**tables, "method": {**{key: value for key, value in old.items() if value is not None}, **table}}


def load_experiment(
    file: Path | None = None,
    sets: Mapping[str, Any] | None = None,
    flags: Mapping[str, Any] | None = None,
    base: Tables | None = None,
    sites: tuple[str, ...] | None = None,
    own: FromPython | None = None,
) -> Experiment:
    """Resolve the experiment from these layers; the file overrides `base`.

    `sites` are those known from Python; `own` holds a plan and a module from Python.
    """
    own = own or FromPython()
    sets = sets or {}
    lower = [{"method": {"name": "fedavg"}, "tune": {"name": "full"}}, base or {}, read_tables(file) if file else {}]
    upper = stack_tables([_flag_tables(flags or {}), _own_tables(own)])
    names: Tables = {kind: {"name": sets[f"{kind}.name"]} for kind in ("method", "tune") if f"{kind}.name" in sets}
    chosen = stack_tables([*lower, names, upper])
    method, tune = (str(chosen[kind]["name"]) for kind in ("method", "tune"))
    return resolve(stack_tables([*lower, _set_tables(sets, method, tune), upper]), sites, own)


def _own_tables(own: FromPython) -> Tables:
    """Return what run.toml says about a plan or module from Python."""
    tables: Tables = {}
    if own.plan is not None:
        tables["method"] = {"name": own.plan.name, "python": True}
    if own.module is not None:
        tables["model"] = {"name": "python", "fingerprint": fingerprint(own.module.state_dict())}
    return tables


def _flag_tables(flags: Mapping[str, Any]) -> Tables:
    """Return the flags that were given, as tables."""
    tables: Tables = {}
    for flag, value in flags.items():
        if value is not None:
            table, key = FLAGS[flag].split(".")
            tables.setdefault(table, {})[key] = value
    return tables


def parse_sets(items: Iterable[str]) -> dict[str, Any]:
    """Parse `table.key=value` or `key=value` items into values by path."""
    sets = {}
    for item in items:
        path, equals, text = item.partition("=")
        if not equals:
            raise UserError(f"--set expects table.key=value, found {item!r}")
        sets[path.strip()] = parse_value(text.strip())
    return sets


def _set_tables(sets: Mapping[str, Any], method: str, tune: str) -> Tables:
    """Convert settings by path to tables; which keys exist depends on the method and tune."""
    # Naming the method and tune here makes their options stay with them when layers are stacked.
    tables: Tables = {"method": {"name": method}, "tune": {"name": tune}}
    for path, value in sets.items():
        table, key = _locate_key(path, method, tune)
        tables.setdefault(table, {})[key] = value
    return tables


def _locate_key(path: str, method: str, tune: str) -> tuple[str, str]:
    """Return the table and key of a `--set`; a bare key must be unique."""
    if "." in path:
        table, key = path.split(".", 1)
        if table not in TABLES:
            raise UserError(f"unknown table in --set {path}; {nearest(table, TABLES)}")
        return table, key
    keys = keys_of_tables(method, tune)
    homes = [table for table, names in keys.items() if path in names]
    homes = [table for table in homes if f"{table}.{path}" not in NEWER] or homes
    if not homes:
        every = {name for names in keys.values() for name in names}
        raise UserError(f"unknown key {path!r} in --set; {nearest(path, every)}")
    if len(homes) > 1:
        raise UserError(f"the key {path!r} exists in several tables: write {' or '.join(f'{h}.{path}' for h in homes)}")
    return homes[0], path


def parse_value(text: str) -> Any:
    """Parse a TOML value; text that is not one is returned as it is."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text
