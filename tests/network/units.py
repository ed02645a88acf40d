"""The services that `fedvit provision` wrote, started as systemd would start them."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen

from fedvit.network.flower.trial import Trial, daemon


def read_unit(file: Path) -> list[tuple[str, str]]:
    """The settings of a unit, in order; a key may come more than once."""
    lines = [line for line in file.read_text().splitlines() if "=" in line and not line.startswith("#")]
    return [(key, value) for key, _, value in (line.partition("=") for line in lines)]


def command_of(file: Path) -> list[str]:
    """What the unit runs, in its own environment."""
    told = read_unit(file)
    variables = [value.strip('"') for key, value in told if key == "Environment"]
    (command,) = (value for key, value in told if key == "ExecStart")
    return ["env", *variables, *shlex.split(command)]


@contextmanager
def started(file: Path) -> Iterator["Popen[bytes]"]:
    """Run the service of a server's or a site's folder; its output is in flower/UNIT.log."""
    with daemon(command_of(file), Trial(file.parent, 0), file.stem) as process:
        yield process


def output_of(file: Path) -> str:
    return Trial(file.parent, 0).log_of(file.stem).read_text(errors="replace")
