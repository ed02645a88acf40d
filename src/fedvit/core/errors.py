"""Errors for a user's mistake: they are shown without a traceback and end with exit status 2."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A user's mistake; the message says what was expected, what was found and what to do."""


class PublicError(UserError):
    """A mistake whose message reveals nothing about a site's files or images, so the server may show it."""


class DivergedError(PublicError):
    """Training left the numbers that a computer can hold, most often because of a learning rate that is too large."""


def one_line(text: object, longest: int = 300) -> str:
    """Return a text from outside as one short line of printable characters, so that it cannot forge a line of a log."""
    return "".join(letter for letter in " ".join(str(text)[: 4 * longest].split()) if letter.isprintable())[:longest]


def hint(word: str, valid: Iterable[str]) -> str:
    """Suggest the closest valid word, if one is close."""
    close = difflib.get_close_matches(word, sorted(valid), n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}? " if close else ""


def nearest(word: str, valid: Iterable[str]) -> str:
    """Suggest the closest valid word, if one is close, and list all valid ones."""
    names = sorted(valid)
    return f"{hint(word, names)}valid: {', '.join(names)}"
