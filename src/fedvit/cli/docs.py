"""Generate the pages of the reference from the code itself.

python -m fedvit.cli.docs > docs/commands.md
python -m fedvit.cli.docs settings > docs/settings.md
"""

import inspect
import sys
from typing import Any

import typer

from fedvit.cli.main import app

TOP = """# Commands

This page lists every command with its arguments and options, as `fedvit COMMAND --help` does. To set something that has
no flag, use `--set TABLE.KEY=VALUE` or a line in an experiment file; flags override `--set`, which overrides the file.

`fedvit --version` prints the version.

The exit status is 0 on success, 2 for a mistake in your input (one message, no traceback), and 1 for anything else.

`python -m fedvit.cli.docs > docs/commands.md` generates this page, and a test checks that it is up to date.
"""


def markdown() -> str:
    """Describe every command with its arguments and options."""
    group: Any = typer.main.get_command(app)
    return "\n".join([TOP, *(_section(name, command) for name, command in group.commands.items())])


def _section(name: str, command: Any) -> str:
    parameters = [p for p in command.params if not getattr(p, "hidden", False)]
    arguments = [p for p in parameters if p.param_type_name == "argument"]
    usage = " ".join([f"fedvit {name}", *(p.metavar or p.name.upper() for p in arguments), "[OPTIONS]"])
    rows = [f"| {_spelling(p)} | {_cell(told(command, p))}{_needed(p)} |" for p in parameters]
    table = ["| | |", "|---|---|", *rows, ""] if rows else []
    return "\n".join([f"## {name}", "", command.help.strip(), "", "```", usage, "```", "", *table])


def _spelling(parameter: Any) -> str:
    """Return an argument's name, or an option with the type of its value."""
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`"
    value = "" if parameter.is_flag else f" {parameter.metavar or parameter.type.name.upper().removesuffix(' RANGE')}"
    return f"`{parameter.opts[0]}{value}`"


def told(command: Any, parameter: Any) -> str | None:
    """Read a parameter's help where it is declared, because typer loses that of arguments under newer click versions."""
    declared = inspect.signature(command.callback).parameters[parameter.name].annotation
    found: str | None = declared.__metadata__[0].help
    return found


def _needed(parameter: Any) -> str:
    """Say that an option is required, or name a default that its help does not mention."""
    if parameter.required and parameter.param_type_name == "option":
        return " Required."
    plain = isinstance(parameter.default, str | int | float) and not isinstance(parameter.default, bool)
    return f" Default: {parameter.default}." if plain else ""


def _cell(text: str | None) -> str:
    return (text or "").replace("|", "\\|")


if __name__ == "__main__":
    from fedvit.cli.settings_page import settings_markdown

    sys.stdout.write(settings_markdown() if sys.argv[1:] == ["settings"] else markdown())
