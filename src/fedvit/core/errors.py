"""The one error that is a user's mistake: shown without a traceback, exit status 2."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Says what was expected, what was found and what to do."""


class PublicError(UserError):
    """A mistake whose words tell nothing of a site's files or images: they may be shown at the server."""


def hint(word: str, valid: Iterable[str]) -> str:
    """The nearest valid word, if one is near."""
    close = difflib.get_close_matches(word, sorted(valid), n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}? " if close else ""


def nearest(word: str, valid: Iterable[str]) -> str:
    """`word` against the valid ones: the nearest, and the whole list."""
    names = sorted(valid)
    return f"{hint(word, names)}valid: {', '.join(names)}"
