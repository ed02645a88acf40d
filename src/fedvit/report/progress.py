"""Progress on standard error: a bar on a terminal, plain lines elsewhere."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from fedvit.rounds import Round

SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Counts rounds over one or several runs and shows the newest loss, accuracy and traffic."""

    def __init__(self, console: Console, total: int, *, quiet: bool):
        self.console, self.quiet = console, quiet
        self.bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[news]}"),
            TimeRemainingColumn(),
            console=console,
            disable=quiet or not console.is_terminal,
        )
        self.task = self.bar.add_task("setting up", total=total, news="")
        self.label, self.nbytes, self.last_line = "", 0.0, time.monotonic()

    def __enter__(self) -> "Progress":
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def start(self, label: str, done: int) -> None:
        """A run begins, with so many rounds behind it already."""
        self.label, self.nbytes = label, 0.0
        self.bar.update(self.task, description=label, advance=done)

    def step(self, done: Round) -> None:
        """A round is finished."""
        row = done.row
        self.nbytes += sum(done.ledger.down) + sum(done.ledger.up)
        news = f"loss {row['loss']:.3f}" if row["loss"] is not None else "nobody answered"
        if row["views"]:
            news += f"  accuracy {row['views']['personal']['mean']:.1f} %"
        news += f"  {self.nbytes / 1e6:.1f} MB"
        self.bar.update(self.task, advance=1, news=news)
        now = time.monotonic()
        if self.bar.disable and not self.quiet and (now - self.last_line > SECONDS_BETWEEN_LINES or row["round"] == 1):
            self.last_line = now
            self.console.print(f"{self.label}: round {row['round']}  {news}", soft_wrap=True, highlight=False)
