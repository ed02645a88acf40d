"""The memory that a site keeps on disk between the rounds of a run.

A state belongs to a run and a round. The server names the round that it continues from. A site cannot know whether a
state of another round belongs to a history that the server has lost or to one that a late message overlooks. So no
message deletes a state before a new one is safe, and what the server may still name is kept.
"""

from pathlib import Path
from urllib.parse import quote

from safetensors import SafetensorError

from fedvit.core.client import Memory
from fedvit.core.errors import PublicError, UserError
from fedvit.core.files import write_bytes
from fedvit.engine.client_store import memory_from_bytes, memory_to_bytes

NEWER = 2  # states of later rounds that outlive a new state


class SiteState:
    """The memories of one site, by run and round. Files are written atomically and survive restarts."""

    def __init__(self, folder: Path):
        self.folder = folder

    def get(self, run: str, after_round: int) -> Memory:
        """Return the state after this round, or {} for round 0; raise PublicError if it is missing."""
        if after_round == 0:
            return {}
        path = self.states(run).get(after_round)
        if path is None:
            raise PublicError(
                f"the server continues from the state of round {after_round}, which this site does not have"
            )
        try:
            return memory_from_bytes(path.read_bytes())
        except (OSError, ValueError, SafetensorError) as problem:
            raise UserError(f"the state {path} cannot be read ({problem}): restore it, or start a new run") from problem

    def put(self, run: str, round_: int, memory: Memory, *, after: int) -> None:
        """Commit the state after a round, which continued from round `after`; then delete what nobody can name.

        The newest state of an earlier round stays, and the newest of later rounds, which the server has lost or for
        which this message came too late.
        """
        name = f"{round_:06d}.safetensors"
        write_bytes(self.folder_of(run), name, memory_to_bytes(memory))
        states = self.states(run)
        older, newer = [n for n in states if n < round_], [n for n in states if n > round_]
        for number in {*older[:-1], *newer[:-NEWER]} - {after}:
            states[number].unlink()

    def states(self, run: str) -> dict[int, Path]:
        """Return the state files of a run by round, oldest first."""
        return {int(path.stem): path for path in sorted(self.folder_of(run).glob("*.safetensors"))}

    def folder_of(self, run: str) -> Path:
        return self.folder / quote(run, safe="").replace(".", "%2E")
