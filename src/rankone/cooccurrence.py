"""On which datapoints each subcomponent is important, as sparse sets, and which sets are alike.

Only what is on is kept: four bytes for each subcomponent on each datapoint, so that 50,000
subcomponents on a million datapoints fit where the matrix of all pairs would not. Sets that are alike
are found without comparing all pairs: of many random orders of the datapoints, each set keeps which of
its datapoints comes first (MinHash). Two sets agree on one of these with a probability that is their
overlap, what they have in common over what either has, so sets that agree on several together are worth
comparing exactly.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor

from rankone.data import seed_for

MOST_ORDERS = 500
"""Random orders that sets are sketched with, at most."""
MISSED = 1e-4
"""The probability with which two sets that overlap just enough are not compared."""
CROWD = 64
"""Of more sets than this that look alike, each is compared with so many of the newest: they are merged
one after another, and what they become is compared again."""

_PRIME = np.uint64(0x9E3779B97F4A7C15)

Sets = list[np.ndarray]


@dataclass(frozen=True)
class OnSets:
    """For each subcomponent that is ever on, the datapoints on which it is."""

    items: list[tuple[str, int]]
    """Layer and index of each."""
    sets: Sets
    """Of each, the numbers of its datapoints in ascending order."""
    weights: np.ndarray
    """How much of the data each datapoint is; they sum to 1."""

    def frequency(self, among: np.ndarray) -> float:
        return float(self.weights[among].sum())


Harvest = Iterable[Mapping[str, tuple[Tensor, Tensor]]]
"""Batch by batch: layer -> importances `[*lead, C]`, and how much each datapoint counts, `[*lead]`."""


def on_sets(harvest: Harvest, threshold: float) -> OnSets:
    """Who is on where, from importances batch by batch. Layers may differ in what a datapoint is: what one
    has beyond the others (patches, heads) counts as on if any of it is."""
    from scipy.sparse import csr_matrix

    columns: list[np.ndarray] = []
    counts: list[np.ndarray] = []
    weights: list[np.ndarray] = []
    offsets: dict[str, int] = {}
    total = 0
    for batch in harvest:
        lead = _common([tuple(g.shape[:-1]) for g, _ in batch.values()])
        each = _at(next(iter(batch.values()))[1].unsqueeze(-1), lead).flatten().double().cpu()
        used = each > 0
        blocks = []
        for name, (g, _) in batch.items():
            if name not in offsets:
                offsets[name], total = total, total + g.shape[-1]
            blocks.append(_at(g, lead).flatten(0, -2).cpu()[used] > threshold)
        on = torch.cat(blocks, 1).nonzero()
        counts.append(torch.bincount(on[:, 0], minlength=int(used.sum())).numpy())
        columns.append(on[:, 1].to(torch.int32).numpy())
        weights.append(each[used].numpy())
    starts = np.concatenate([[0], *[[0]] * (not counts), np.cumsum(np.concatenate(counts or [[]]))])
    where = np.concatenate(columns or [np.zeros(0, np.int32)])
    rows = len(starts) - 1
    by_row = csr_matrix((np.ones(len(where), bool), where, starts), shape=(rows, total))
    del columns, where
    by_column = by_row.tocsc()
    del by_row
    names = [(name, c) for name, start in offsets.items() for c in _range_of(name, start, offsets, total)]
    found = [(i, by_column.indices[a:b]) for i, (a, b) in enumerate(_spans(by_column.indptr)) if b > a]
    each = np.concatenate(weights or [np.zeros(0)])
    return OnSets([names[i] for i, _ in found], [rows for _, rows in found], each / max(each.sum(), 1e-300))


def _range_of(name: str, start: int, offsets: Mapping[str, int], total: int) -> range:
    after = [other for other in offsets.values() if other > start]
    return range(min(after, default=total) - start)


def _spans(starts: np.ndarray) -> Iterator[tuple[int, int]]:
    return zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)


def _common(leads: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """What a datapoint is: the first dimensions, as far as the layers agree on them."""
    (rows, _), *_ = Counter(lead[:1] for lead in leads).most_common(1)
    fitting = zip(*(lead for lead in leads if lead[:1] == rows), strict=False)
    return tuple(sizes[0] for sizes in takewhile(lambda sizes: len(set(sizes)) == 1, fitting))


def _at(values: Tensor, lead: tuple[int, ...]) -> Tensor:
    """Values `[*own, C]` as those of datapoints `lead`: the largest of what there is beyond them. What has
    no rows (an embedding of positions) is there for every row."""
    own = tuple(values.shape[:-1])
    if own[: len(lead)] == lead:
        return values.flatten(len(lead), -2).amax(-2) if len(own) > len(lead) else values
    try:
        return values.expand(*lead, values.shape[-1])
    except RuntimeError:
        return values.flatten(0, -2).amax(0).expand(*lead, values.shape[-1])


class Lookalikes:
    """Finds sets that probably overlap by a given share or more; sets can be added, as unions of others."""

    def __init__(self, sets: Sets, weights: np.ndarray, overlap: float) -> None:
        self._width, bands = _shape(overlap)
        self._newest: list[dict[int, int]] = [{} for _ in range(bands)]
        self._before: list[list[int]] = []
        self._sketches: list[np.ndarray | None] = []
        for sketch in _sketches(sets, weights, self._width * bands):
            self._add(sketch)

    def _add(self, sketch: np.ndarray) -> None:
        """Where a set agrees with others on a whole band, link it to the newest of them."""
        i = len(self._sketches)
        self._sketches.append(sketch)
        keys = np.zeros(len(self._newest), np.uint64)
        for column in sketch.reshape(-1, self._width).T:
            keys = (keys ^ column) * _PRIME
            keys ^= keys >> np.uint64(29)
        self._before.append(
            [band.get(key, -1) for band, key in zip(self._newest, keys.tolist(), strict=True)]
        )
        for band, key in zip(self._newest, keys.tolist(), strict=True):
            band[key] = i

    def of(self, i: int) -> list[int]:
        """Those added before set i, and not joined since, that may overlap with it enough."""
        found: set[int] = set()
        for band, other in enumerate(self._before[i]):
            seen = 0
            while other >= 0 and seen < CROWD:
                if self._sketches[other] is not None:
                    found.add(other)
                    seen += 1
                other = self._before[other][band]
        return sorted(found)

    def join(self, a: int, b: int) -> int:
        """Put the union of two sets in their place; the number it gets."""
        first, second = self._sketches[a], self._sketches[b]
        assert first is not None
        assert second is not None
        self._sketches[a] = self._sketches[b] = None
        self._add(np.minimum(first, second))
        return len(self._sketches) - 1


def _shape(overlap: float) -> tuple[int, int]:
    """(orders that must agree together, how often that is tried): the most selective that misses hardly
    anything."""
    for width in range(8, 0, -1):
        agreeing = min(overlap**width, 1 - 1e-12)
        bands = max(1, math.ceil(math.log(MISSED) / math.log1p(-agreeing)))
        if bands * width <= MOST_ORDERS or width == 1:
            return width, min(bands, MOST_ORDERS)
    raise AssertionError


def _sketches(sets: Sets, weights: np.ndarray, count: int) -> list[np.ndarray]:
    """Of each set, which of its datapoints comes first in each of many random orders; one that counts more
    comes earlier, so that overlaps are shares of the data."""
    joined = np.concatenate(sets) if sets else np.zeros(0, np.int32)
    starts = np.cumsum([0, *map(len, sets)])[:-1]
    found = np.empty((len(sets), count), np.uint32)
    for k in range(count):
        generator = np.random.Generator(np.random.PCG64(seed_for(0, "cooccurrence", k)))
        race = generator.standard_exponential(len(weights)) / weights
        place = np.empty(len(weights), np.uint32)
        place[np.argsort(race, kind="stable")] = np.arange(len(weights), dtype=np.uint32)
        if len(sets):
            found[:, k] = np.minimum.reduceat(place[joined], starts)
    return list(found)
