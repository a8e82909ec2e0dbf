"""Every error that rankone raises on purpose.

One base class, so that a caller can catch "rankone says no" without catching bugs. A message
states what was seen, what was expected and what to do next; names that a user typed get the
nearest existing names beside them.
"""

import difflib
from collections.abc import Iterable


class RankoneError(Exception):
    """Something a user can put right; the message says how."""


class ConfigError(RankoneError):
    """A setting is unknown, out of range, or contradicts another."""


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


def near_matches(name: str, candidates: Iterable[str], *, most: int = 3) -> str:
    """A sentence naming the candidates most like `name`, or all of them when they are few."""
    pool = sorted(set(candidates))
    close = difflib.get_close_matches(name, pool, n=most, cutoff=0.5)
    if close:
        return "Did you mean " + " or ".join(repr(c) for c in close) + "?"
    if not pool:
        return "There are none to choose from."
    shown = ", ".join(repr(c) for c in pool[:12])
    return f"There are: {shown}{', ...' if len(pool) > 12 else ''}."
