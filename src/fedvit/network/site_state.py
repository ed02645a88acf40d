"""The memory that a site keeps on disk between the rounds of a run: the last two states that it committed.

A state belongs to a run and a round. The server names the round that it continues from; states of later rounds belong
to a history that was lost, and are deleted.
"""

from pathlib import Path
from urllib.parse import quote

from safetensors import SafetensorError

from fedvit.core.client import Memory
from fedvit.core.errors import PublicError, UserError
from fedvit.core.files import write_bytes
from fedvit.engine.client_store import memory_from_bytes, memory_to_bytes

KEPT = 2
FORGOTTEN = "forgotten"  # a file with the newest round whose state was deleted as too old
LAST = "last"  # a file with the time at which the last message was sent


class SiteState:
    """The memories of one site, by run and round. Files are written atomically and survive restarts."""

    def __init__(self, folder: Path):
        self.folder = folder

    def get(self, run: str, after_round: int, *, drop: bool = True) -> Memory:
        """Return the newest state of this run up to a round, or {} if there is none; `drop` deletes newer ones."""
        states = self.states(run)
        known = [round_ for round_ in states if round_ <= after_round]
        lost = self.folder_of(run) / FORGOTTEN
        if not known and lost.is_file() and after_round > 0:
            raise UserError(
                f"{self.folder} only has the states of rounds {', '.join(map(str, states))} of run {run}, but the "
                f"server continues from round {after_round}, which is older: start a new run"
            )
        for round_ in states:
            if drop and round_ > after_round:
                states[round_].unlink()
        if not known:
            if drop:
                lost.unlink(missing_ok=True)
            return {}
        path = states[known[-1]]
        try:
            return memory_from_bytes(path.read_bytes())
        except (OSError, ValueError, SafetensorError) as problem:
            raise UserError(f"the state {path} cannot be read ({problem}): restore it, or start a new run") from problem

    def put(self, run: str, round_: int, memory: Memory) -> None:
        """Commit the state after a round, keep the previous one, and delete older and newer ones."""
        name = f"{round_:06d}.safetensors"
        write_bytes(self.folder_of(run), name, memory_to_bytes(memory))
        states = self.states(run)
        for newer in [number for number in states if number > round_]:
            states.pop(newer).unlink()
        for older in list(states)[:-KEPT]:
            write_bytes(self.folder_of(run), FORGOTTEN, str(older).encode())
            states[older].unlink()

    def advance(self, run: str, sent: float) -> None:
        """Refuse a message that was sent before the last one: it was delayed, and its round is over."""
        last = self.folder_of(run) / LAST
        if last.is_file() and float(last.read_text()) > sent:
            raise PublicError(
                "this message was sent before the last one that arrived, or the server's clock was set back"
            )
        write_bytes(self.folder_of(run), LAST, repr(sent).encode())

    def states(self, run: str) -> dict[int, Path]:
        """Return the state files of a run by round, oldest first."""
        return {int(path.stem): path for path in sorted(self.folder_of(run).glob("*.safetensors"))}

    def folder_of(self, run: str) -> Path:
        return self.folder / quote(run, safe="").replace(".", "%2E")
