"""Progress on standard error: a bar on a terminal, elsewhere plain lines from the start, at least twice a minute."""

import threading
import time
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as RichProgress

from fedvit.report.units import duration
from fedvit.runs.tracking import sent_in

SECONDS_BETWEEN_LINES = 10.0
LONGEST_SILENCE = 30.0  # seconds without a line, after which one says that the work goes on


class SeenRound(Protocol):
    """A finished round as an observer sees it: its line in rounds.jsonl, and its seconds by phase."""

    @property
    def row(self) -> dict[str, Any]: ...

    @property
    def seconds(self) -> dict[str, float]: ...


class Progress:
    """A display that counts rounds over one or more runs, with the latest loss, accuracy, traffic and time left."""

    def __init__(self, console: Console, total: int, *, quiet: bool):
        self.console, self.quiet, self.total = console, quiet, total
        self.bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[news]}"),
            console=console,
            disable=quiet or not console.is_terminal,
        )
        self.task = self.bar.add_task("setting up", total=total, news="")
        self.label, self.nbytes, self.last_line = "", 0.0, time.monotonic()
        self.round, self.since = 1, time.monotonic()  # the round that is being worked on, and since when
        self.over = threading.Event()
        self.spent, self.done, self.here = 0.0, 0, 0  # seconds of the rounds run here, rounds done, rounds run here

    @property
    def in_lines(self) -> bool:
        """Whether progress is shown as plain lines."""
        return bool(self.bar.disable) and not self.quiet

    def __enter__(self) -> "Progress":
        self.bar.start()
        if self.in_lines:
            threading.Thread(target=self.break_silence, name="fedvit-progress", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.over.set()
        self.bar.stop()

    def break_silence(self) -> None:
        """Print a line whenever there was none for long, until the display ends."""
        while not self.over.wait(LONGEST_SILENCE / 10):
            self.tell_if_silent(time.monotonic())

    def tell_if_silent(self, now: float) -> None:
        if now - self.last_line >= LONGEST_SILENCE:
            self.line(f"working on round {self.round}, for {duration(now - self.since)} so far")

    def line(self, text: str) -> None:
        self.last_line = time.monotonic()
        self.console.print(f"{self.label or 'fedvit'}: {text}", soft_wrap=True, highlight=False, markup=False)

    def start(self, label: str, done: int, nbytes: float = 0.0, *, announced: bool = False) -> None:
        """Begin a run that has already finished `done` rounds and sent `nbytes` bytes.

        It gets a line of its own unless something else that is printed announces it.
        """
        self.label, self.nbytes = label, nbytes
        self.done += done
        self.bar.update(self.task, description=label, advance=done)
        self.round, self.since = done + 1, time.monotonic()
        if self.in_lines and not announced:
            self.line(f"{done} rounds are done" if done else "started; reading data, then round 1")

    def step(self, done: SeenRound) -> None:
        """Count a finished round and show it."""
        row, now = done.row, time.monotonic()
        self.nbytes += sent_in(row)
        self.spent += sum(done.seconds.values())
        self.done, self.here = self.done + 1, self.here + 1
        silent = len(row["failed"]) == len(row["cohort"])
        news = "no client answered" if silent else "" if row["loss"] is None else f"loss {row['loss']:.3f}"
        if row["views"]:
            news += f"  accuracy {row['views']['personal']['mean']:.1f} %"
        news += f"  {self.nbytes / 1e6:.1f} MB"
        left = self.total - self.done
        if left > 0:
            news += f"  {duration(self.seconds_left())} left"
        self.bar.update(self.task, advance=1, news=news)
        due = now - self.last_line > SECONDS_BETWEEN_LINES or row["round"] == 1 or left <= 0
        self.round, self.since = row["round"] + 1, now
        if self.in_lines and due:
            self.line(f"round {row['round']}  {news}")

    def seconds_left(self) -> float:
        """Estimate the time left at the pace of the rounds that were run here."""
        return self.spent / max(self.here, 1) * max(self.total - self.done, 0)
