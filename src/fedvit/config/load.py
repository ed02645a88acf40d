"""From a TOML file, `--set` and flags to one `Experiment`.

Precedence: flag > --set > file > default. Unknown keys are errors that name the nearest valid one.
"""

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedvit.config.resolve import keys_of_tables, resolve
from fedvit.config.tables import TABLES, Tables, stack_tables
from fedvit.core.errors import UserError, nearest
from fedvit.core.settings import Experiment, FromPython
from fedvit.core.tree import fingerprint

FLAGS = {  # flag -> table.key
    "method": "method.name", "tune": "tune.name",
    "data": "data.name", "data_dir": "data.dir", "samples": "data.samples",
    "partition": "partition.name", "clients": "partition.clients",
    "model": "model.name", "image_size": "model.image_size", "patch_size": "model.patch_size",
    "weights": "model.weights", "pretrained": "model.pretrained",
    "cohort": "train.cohort", "rounds": "train.rounds", "epochs": "train.epochs", "batch": "train.batch",
    "lr": "train.lr",
    "seed": "run.seed", "eval_every": "run.eval_every", "until_accuracy": "run.until_accuracy",
    "threads": "run.threads", "precision": "run.precision", "device": "run.device",
}  # fmt: skip


def read_tables(path: Path) -> Tables:
    """The tables of an experiment file; `[versions]`, which run.toml has, is only information."""
    if not path.is_file():
        raise UserError(f"no experiment file at {path}")
    try:
        tables = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise UserError(f"{path} is not TOML: {problem}") from problem
    tables.pop("versions", None)
    for name, table in tables.items():
        if name not in TABLES:
            raise UserError(f"{path} has an unknown table [{name}]; {nearest(name, TABLES)}")
        if not isinstance(table, dict):
            raise UserError(f"{path}: {name} should be a table, [{name}], found {table!r}")
    return tables


def load_experiment(
    file: Path | None = None,
    sets: Mapping[str, Any] | None = None,
    flags: Mapping[str, Any] | None = None,
    base: Tables | None = None,
    groups: tuple[str, ...] | None = None,
    own: FromPython | None = None,
) -> Experiment:
    """The resolved experiment of these layers; `base` lies under the file.

    `groups` are sites known from Python, `own` a plan and a module from there.
    """
    own = own or FromPython()
    sets = sets or {}
    lower = [{"method": {"name": "fedavg"}, "tune": {"name": "full"}}, base or {}, read_tables(file) if file else {}]
    upper = stack_tables([_flag_tables(flags or {}), _own_tables(own)])
    names: Tables = {kind: {"name": sets[f"{kind}.name"]} for kind in ("method", "tune") if f"{kind}.name" in sets}
    chosen = stack_tables([*lower, names, upper])
    method, tune = (str(chosen[kind]["name"]) for kind in ("method", "tune"))
    return resolve(stack_tables([*lower, _set_tables(sets, method, tune), upper]), groups, own)


def _own_tables(own: FromPython) -> Tables:
    """What run.toml says of a plan or module from Python."""
    tables: Tables = {}
    if own.plan is not None:
        tables["method"] = {"name": own.plan.name, "python": True}
    if own.module is not None:
        tables["model"] = {"name": "python", "fingerprint": fingerprint(own.module.state_dict())}
    return tables


def _flag_tables(flags: Mapping[str, Any]) -> Tables:
    """Flags that were given, as tables."""
    tables: Tables = {}
    for flag, value in flags.items():
        if value is not None:
            table, key = FLAGS[flag].split(".")
            tables.setdefault(table, {})[key] = value
    return tables


def parse_sets(items: Iterable[str]) -> dict[str, Any]:
    """`table.key=value` or `key=value` items by their path."""
    sets = {}
    for item in items:
        path, equals, text = item.partition("=")
        if not equals:
            raise UserError(f"--set expects table.key=value, found {item!r}")
        sets[path.strip()] = parse_value(text.strip())
    return sets


def _set_tables(sets: Mapping[str, Any], method: str, tune: str) -> Tables:
    """Settings by path as tables; which keys there are depends on method and tune."""
    tables: Tables = {"method": {"name": method}, "tune": {"name": tune}}  # so that the options stay with their owner
    for path, value in sets.items():
        table, key = _locate_key(path, method, tune)
        tables.setdefault(table, {})[key] = value
    return tables


def _locate_key(path: str, method: str, tune: str) -> tuple[str, str]:
    """The table and key of a `--set`; a bare key must be unique."""
    if "." in path:
        table, key = path.split(".", 1)
        if table not in TABLES:
            raise UserError(f"unknown table in --set {path}; {nearest(table, TABLES)}")
        return table, key
    keys = keys_of_tables(method, tune)
    homes = [table for table, names in keys.items() if path in names]
    if not homes:
        every = {name for names in keys.values() for name in names}
        raise UserError(f"unknown key {path!r} in --set; {nearest(path, every)}")
    if len(homes) > 1:
        raise UserError(f"the key {path!r} is in several tables: write {' or '.join(f'{h}.{path}' for h in homes)}")
    return homes[0], path


def parse_value(text: str) -> Any:
    """A TOML value, or the text itself where it is none."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text
