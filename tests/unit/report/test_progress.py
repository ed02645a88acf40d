"""Without a terminal, progress is told from the first minute."""

import io
import threading
import time

from rich.console import Console

from fedvit.core.server import Server
from fedvit.engine.ledger import Ledger
from fedvit.engine.loop import Round
from fedvit.report.progress import LONGEST_SILENCE, Progress

ROW = {"round": 1, "loss": 1.0, "views": None, "cohort": [], "failed": [], "nbytes_down": 0, "nbytes_up": 0}


def lines(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "fedvit-progress"]


def test_a_line_is_printed_before_the_first_round() -> None:
    stream = io.StringIO()
    with Progress(Console(file=stream), 4, quiet=False) as progress:
        progress.start("fedavg, seed 0", 0)
        assert lines(stream) == ["fedavg, seed 0: started; reading data, then round 1"]
        progress.step(Round(Server(1, {}), ROW, None, Ledger(seconds={"train": 4.0})))
        progress.start("fedper [x], seed 0", 2)
        assert lines(stream)[-1] == "fedper [x], seed 0: 2 rounds are done"


def test_a_long_round_breaks_the_silence() -> None:
    stream = io.StringIO()
    with Progress(Console(file=stream), 4, quiet=False) as progress:
        assert threads()
        progress.start("fedavg", 0)
        progress.tell_if_silent(time.monotonic())
        assert len(lines(stream)) == 1
        progress.tell_if_silent(time.monotonic() + LONGEST_SILENCE)
        assert lines(stream)[1].startswith("fedavg: working on round 1, for 30")
        progress.step(Round(Server(1, {}), ROW, None, Ledger(seconds={"train": 4.0})))
        progress.tell_if_silent(time.monotonic() + LONGEST_SILENCE)
        assert lines(stream)[-1].startswith("fedavg: working on round 2")
    progress.over.wait()


def test_a_terminal_and_quiet_get_no_lines() -> None:
    for console, quiet in (
        (Console(file=io.StringIO(), force_terminal=True), False),
        (Console(file=io.StringIO()), True),
    ):
        with Progress(console, 4, quiet=quiet) as progress:
            assert not progress.in_lines
            progress.start("fedavg", 0)
            assert "started" not in console.file.getvalue()  # type: ignore[attr-defined]
