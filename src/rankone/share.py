"""A batch that several processes share, as a training step sees it.

A step is written for a whole batch. Where it is one process's share of one, three things differ, and
nothing else: random numbers are numbered in the whole batch (`key`), means are means over all
processes (`mean`, `shared`), and so are the ranges of what is interpolated (`largest`). Every process
computes a share so that the mean over processes is what one process alone would compute: losses and
gradients are averaged, and what does not look at data is the same everywhere. The whole batch is the
share of one process, for which all of this is nothing at all. processes.py has the other kind.
"""

from typing import NamedTuple

from torch import Tensor


class Place(NamedTuple):
    """Which rows of a whole batch a share has."""

    here: int
    """How many."""
    before: int
    """How many come before them."""
    total: int


class Key(int):
    """The key of random numbers for the rows of a share."""

    place: Place


class Share:
    """A whole batch."""

    place: Place | None = None

    def key(self, key: int) -> int:
        """A key whose numbers for these rows are those that the whole batch would have there."""
        return key

    def mean(self, value: Tensor) -> Tensor:
        """The mean over processes, without a gradient."""
        return value

    def shared(self, value: Tensor) -> Tensor:
        """The mean over processes; the gradient is that of this process's part of it."""
        return value

    def largest(self, values: Tensor) -> Tensor:
        """The largest over processes, of each number."""
        return values


WHOLE = Share()


def place_of(key: int) -> Place | None:
    """Which rows of a whole batch random numbers are for; None for all of them."""
    return key.place if isinstance(key, Key) else None
