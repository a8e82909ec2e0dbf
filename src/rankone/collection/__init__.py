"""Networks with known mechanisms, one judge for all of them, and a benchmark over them.

base.py says what a network of the collection is; each family is one file; split.py says which half a
network belongs to; judge.py compares any decomposition with the truth; bench.py runs a method over
the collection, and apd.py is one, the predecessor. docs/benchmark.md shows how to do that with a
method of your own.
"""

from rankone.collection import attention, blocks, circuits, dense, depth, paper, superposition
from rankone.collection.base import ENTRIES, Dense, Entry, KnownNetwork, Mechanisms, network, register
from rankone.collection.judge import Judgement, judge, true_decomposition

FAMILIES = (attention, blocks, circuits, dense, depth, paper, superposition)
"""The files whose networks are registered by being imported."""

__all__ = [
    "ENTRIES",
    "FAMILIES",
    "Dense",
    "Entry",
    "Judgement",
    "KnownNetwork",
    "Mechanisms",
    "judge",
    "network",
    "register",
    "true_decomposition",
]
