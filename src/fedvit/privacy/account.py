"""A client's account: what its answers have spent, on disk before each answer leaves."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedvit.core.errors import UserError
from fedvit.core.files import append_line, read_lines
from fedvit.privacy.accounting import Steps
from fedvit.privacy.secret import make_private


class Account:
    """The append-only file of one client's images.

    Each line is an answer. The same message in the same round gets the same answer, noise included, so that a round
    that is repeated after an interruption is not charged again.
    """

    def __init__(self, path: Path):
        self.path = path

    def lines(self) -> list[dict[str, Any]]:
        """Return all complete lines; a line that a kill cut short belongs to an answer that never left."""
        return read_lines(self.path)

    def history(self) -> list[Steps]:
        """Return every gradient that was answered with."""
        return [Steps(line["noise"], share, count) for line in self.lines() for share, count in line["steps"]]

    def charge(
        self, round_: int, message: str, noise: float, steps: Mapping[float, int], most: Mapping[float, int] | None
    ) -> None:
        """Add an answer's gradients, by the share of the images in a batch; refuse more than `most`."""
        lines = self.lines()
        entry = {"round": round_, "message": message, "noise": noise, "steps": [list(pair) for pair in steps.items()]}
        if entry in lines:
            return
        if most is not None:
            for share, count in steps.items():
                spent = sum(n for line in lines for s, n in line["steps"] if s == share)
                if spent + count > most.get(share, 0):
                    raise UserError(
                        f"the privacy budget in {self.path} is spent: {spent + count} gradients would be taken, and "
                        f"its noise was chosen for {most.get(share, 0)}. Nothing was sent; start a new run, whose "
                        "budget adds to this one"
                    )
        if self.path.is_file():
            self._mend()
        make_private(self.path.parent)
        append_line(self.path, entry)

    def _mend(self) -> None:
        """End a line that a kill cut short, so that the next one is read."""
        text = self.path.read_bytes()
        if text and not text.endswith(b"\n"):
            with self.path.open("r+b") as stream:
                stream.truncate(text.rfind(b"\n") + 1)
                os.fsync(stream.fileno())
