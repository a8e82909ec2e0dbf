"""Every error that rankone raises on purpose.

One base class, so that a caller can catch "rankone says no" without catching bugs. A message
states what was seen, what was expected and what to do next; names that a user typed get the
nearest existing names beside them. Messages quote what a user gave, and end up in a terminal: they
are never long, and hold no control characters.
"""

import difflib
import reprlib
from collections.abc import Iterable
from itertools import islice


class RankoneError(Exception):
    """Something a user can put right; the message says how."""

    def __init__(self, message: str = "") -> None:
        if len(message) > 4000:
            message = f"{message[:3000]} [...] {message[-900:]}"
        super().__init__(printable(message))


class ConfigError(RankoneError, ValueError):
    """A setting is unknown, out of range, or contradicts another.

    A ValueError too, so that pydantic collects it with the place it belongs to.
    """


class LayerError(RankoneError):
    """A layer cannot be chosen, decomposed, or run the way it was asked for."""


class BatchError(RankoneError):
    """A batch of data cannot be used."""


class TargetError(RankoneError):
    """The target network is not what it should be."""


class CheckpointError(RankoneError):
    """A file of a run or a decomposition is missing, damaged, or belongs to something else."""


class TrainingError(RankoneError):
    """Training cannot go on."""


def printable(text: str) -> str:
    """Text with whatever could command a terminal, or cannot be encoded, spelled out (`\\x1b`)."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200


def shown(value: object) -> str:
    """`repr` of what a user gave, at most 200 characters of it."""
    try:
        text = _SHORT.repr(value)
    except ValueError:  # Python does not print integers of more than 4,300 digits
        text = "a number of thousands of digits"
    return text if len(text) <= 200 else f"{text[:150]}...{text[-47:]}"


def near_matches(name: str, candidates: Iterable[str], *, most: int = 3) -> str:
    """A sentence naming the candidates most like `name`, or all of them when they are few.

    Comparing takes time in the square of the length: long names and the rest of many are left out.
    """
    pool = sorted(set(islice(candidates, 500)))
    close = difflib.get_close_matches(name[:100], [c for c in pool if len(c) <= 100], n=most, cutoff=0.5)
    if close:
        return "Did you mean " + " or ".join(map(shown, close)) + "?"
    if not pool:
        return "There are none to choose from."
    return f"There are: {', '.join(map(shown, pool[:12]))}{', ...' if len(pool) > 12 else ''}."
