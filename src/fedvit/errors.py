"""The one error that is a user's mistake: shown without a traceback, exit status 2."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Says what was expected, what was found and what to do."""


def nearest(word: str, valid: Iterable[str]) -> str:
    """`word` against the valid ones: the nearest, and the whole list."""
    names = sorted(valid)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}valid: {', '.join(names)}"
