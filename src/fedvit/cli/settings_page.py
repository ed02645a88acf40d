"""The page docs/settings.md: every setting with its type, default and meaning, from the schema and the signatures."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fedvit.core.settings import Experiment

TOP = """# Settings

This page lists every setting. An experiment file has a table for each section below; on the command line, use a flag
(see [Commands](commands.md)) or `--set TABLE.KEY=VALUE`, and in Python `settings={"TABLE.KEY": value}`. A bare key is
enough where it is unique. Flags override `--set`, which overrides the file. A dash means that there is no default, or
that it depends on other settings, as the last column says. Every run writes its settings, with all defaults filled in,
to `run.toml`, which is an experiment file itself.

`python -m fedvit.cli.docs settings > docs/settings.md` generates this page, and a test checks that it is up to date.
"""
METHODS_TOP = """## [method]

`method.name` is the method, by default fedavg; every other key is an option of that method. Methods that are not listed
here have no options. A method from another package (see [Adding a method](add_a_method.md)) has its own.
"""
TUNES_TOP = """## [tune]

`tune.name` is the tune, by default full, or a list of layer groups separated by commas, such as `norm,attn`; every
other key is an option of that tune.
"""


def settings_markdown() -> str:
    """Describe every setting of an experiment."""
    from fedvit.methods import METHODS
    from fedvit.methods.tunes import TUNES

    sections = [TOP]
    for table, field in Experiment.model_fields.items():
        model = field.annotation
        if table == "method":
            sections += [METHODS_TOP, *_option_tables(METHODS, "method")]
        elif table == "tune":
            sections += [TUNES_TOP, *_option_tables(TUNES, "tune")]
        elif inspect.isclass(model) and issubclass(model, BaseModel):
            sections.append(f"## [{table}]\n\n{model.__doc__}\n")
            rows = [
                _row(f"{table}.{key}", type_words(one.annotation, one.metadata), one.default, one.description or "")
                for key, one in model.model_fields.items()
            ]
            sections.append(_table(rows))
    return "\n".join(sections)


def _option_tables(known: Mapping[str, Callable[..., Any]], kind: str) -> list[str]:
    """Describe the options of every method or tune that has some."""
    from fedvit.cli.inspect import departures
    from fedvit.methods.options import meaning

    found = []
    for name, function in known.items():
        parameters = inspect.signature(function, eval_str=True).parameters
        if parameters:
            rows = [
                _row(f"{kind}.{key}", type_words(one.annotation), one.default, meaning(name, key))
                for key, one in parameters.items()
            ]
            differs = departures(function.__doc__ or "")  # of a tune; a method's stand in its file
            words = f"Departs from the paper: {differs}\n\n" if differs else ""
            found.append(f"### {name}\n\n{words}{_table(rows)}")
    return found


def _table(rows: list[str]) -> str:
    return "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows, ""])


def _row(key: str, kind: str, default: Any, text: str) -> str:
    return f"| `{key}` | {kind} | {default_words(default)} | {text.replace('|', '/')} |"


def default_words(value: Any) -> str:
    """Write a default as a TOML file does."""
    if value is None:
        return "-"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def type_words(annotation: Any, limits: Iterable[Any] = ()) -> str:
    """Describe a type and its limits in plain words."""
    if get_origin(annotation) is Annotated:
        inner, *marks = get_args(annotation)
        more = [limit for mark in marks for limit in (mark.metadata if isinstance(mark, FieldInfo) else [mark])]
        return type_words(inner, [*limits, *more])
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) in (Union, UnionType):  # optional: None is the dash in the column of defaults
        return " or ".join(type_words(one, limits) for one in get_args(annotation) if one is not type(None))
    names = {int: "whole number", float: "number", bool: "`true`, `false`", str: "text", Path: "path"}
    words = [names.get(annotation, "table")]
    for limit in limits:
        for mark, told in (("ge", "at least"), ("gt", "above"), ("le", "at most"), ("lt", "below")):
            if hasattr(limit, mark):
                words.append(f"{told} {getattr(limit, mark):g}")
    return ", ".join(words)
