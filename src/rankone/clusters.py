"""From subcomponents to components: groups of them that are important together, across layers.

A mechanism may need more than one rank, and more than one matrix. Its subcomponents are then important
on the same datapoints, which is how they are found: a component is important where any of its members
is, and the best grouping is the one that says most briefly, over the data, which components are
important. A component that is on has to be named, which costs one unit, and brought along with all of its
ranks, which cost `alpha` units each:

    description length = sum over components of frequency x (1 + alpha x rank)

Joining two saves a name where both are on, and costs the ranks of each where only the other is. With
alpha = 1 two that are equally frequent are joined if they are on together more often than apart, with
alpha = 1/4, the default, if they are on together more than a quarter as often as apart. What is always on
together is joined at any alpha, and what never is, at none. In bits, with K names to choose from, a name
is log2 K bits: alpha here is the published coefficient divided by that, which makes one value serve
networks of any size.

Found greedily: the pair whose joining saves most, again and again, until none saves anything.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any, overload

import numpy as np

from rankone.cooccurrence import Lookalikes, OnSets, on_sets
from rankone.data import Data
from rankone.errors import ConfigError, shown
from rankone.looking import fresh_batches
from rankone.metrics import IMPORTANT
from rankone.model import DecomposedModel
from rankone.tables import Table

ALPHA = 0.25
"""What a rank costs, in units of what naming a component costs: of 0.25, 0.5 and 1 the best mean over the
development half of the collection (results/components.md)."""
SHOWN_MEMBERS = 6


@dataclass(frozen=True)
class Component:
    """Subcomponents that are important together."""

    members: list[tuple[str, int]]
    """(layer, index) of each, in the network's order."""
    frequency: float
    """The share of datapoints on which any of them is important."""

    def __hash__(self) -> int:
        return hash(tuple(self.members))

    @property
    def rank(self) -> int:
        """The ranks that it takes up in all of its matrices; `in_layers` has them one by one."""
        return len(self.members)

    @property
    def in_layers(self) -> dict[str, list[int]]:
        """Layer -> its members there, as `ablated(drop=...)` takes them."""
        found: dict[str, list[int]] = {}
        for layer, index in self.members:
            found.setdefault(layer, []).append(index)
        return found

    def __str__(self) -> str:
        said = [f"{layer}: {', '.join(map(str, of))}" for layer, of in self.in_layers.items()]
        return "; ".join(said)


@dataclass(frozen=True, repr=False)
class Components(Sequence[Component]):
    """All components of a decomposition, the most frequent first: `components[0].members`."""

    found: tuple[Component, ...]
    datapoints: int
    """So many datapoints were looked at."""
    length: float
    """The description length of the data, in names."""
    length_apart: float
    """The same with every subcomponent by itself."""
    alpha: float

    @overload
    def __getitem__(self, i: int) -> Component: ...
    @overload
    def __getitem__(self, i: slice) -> tuple[Component, ...]: ...
    def __getitem__(self, i: int | slice) -> Component | tuple[Component, ...]:
        return self.found[i]

    def __len__(self) -> int:
        return len(self.found)

    def __iter__(self) -> Iterator[Component]:
        return iter(self.found)

    def of(self, layer: str, index: int) -> int | None:
        """Which component a subcomponent belongs to; None if it is never important."""
        for i, component in enumerate(self.found):
            if (layer, index) in component.members:
                return i
        return None

    def table(self) -> Table:
        rows = [(i, c.rank, c.frequency, _briefly(c)) for i, c in enumerate(self.found)]
        return Table(("component", "rank", "on, of datapoints", "subcomponents"), rows, self._note())

    def _note(self) -> str:
        if not self.found:
            return f"No subcomponent is important on any of {self.datapoints:,} datapoints."
        parts = sum(c.rank for c in self.found)
        return (
            f"{parts:,} alive subcomponents in {len(self.found):,} components, on {self.datapoints:,} "
            f"datapoints. Description length {self.length:.4g} instead of {self.length_apart:.4g} (alpha "
            f"{self.alpha:g})."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a file."""
        return {
            "alpha": self.alpha,
            "datapoints": self.datapoints,
            "description_length": self.length,
            "description_length_apart": self.length_apart,
            "components": [
                {"members": [list(m) for m in c.members], "rank": c.rank, "frequency": c.frequency}
                for c in self.found
            ],
        }

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def _briefly(component: Component) -> str:
    """The members of a component, of many the first."""
    said = []
    for layer, of in component.in_layers.items():
        more = f" and {len(of) - SHOWN_MEMBERS} more" if len(of) > SHOWN_MEMBERS else ""
        said.append(f"{layer} {', '.join(map(str, of[:SHOWN_MEMBERS]))}{more}")
    return "; ".join(said)


def clusters(
    model: DecomposedModel, data: Data, n_batches: int, *, alpha: float = ALPHA, threshold: float = IMPORTANT
) -> Components:
    """The components of a decomposed model on data."""
    harvest = (model.weighted_importances(batch) for batch in fresh_batches(model, data, n_batches))
    return cluster(on_sets(harvest, checked(threshold, "threshold")), alpha)


def checked(value: Any, name: str) -> float:
    """A number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ConfigError(f"{name} is {shown(value)}; expected a number above 0, such as {name}={ALPHA:g}.")
    return float(value)


def cluster(on: OnSets, alpha: float = ALPHA) -> Components:
    """Group subcomponents by when they are on; the same sets give the same groups."""
    groups = _Groups(on, checked(alpha, "alpha"))
    apart = groups.length()
    groups.join_equals()
    groups.join_while_it_saves()
    order = {name: i for i, name in enumerate(dict.fromkeys(layer for layer, _ in on.items))}
    components = [
        Component(sorted((on.items[i] for i in members), key=lambda m: (order[m[0]], m[1])), frequency)
        for members, frequency in groups.alive()
    ]
    components.sort(key=lambda c: (-c.frequency, order[c.members[0][0]], c.members[0][1]))
    return Components(tuple(components), len(on.weights), groups.length(), apart, alpha)


class _Groups:
    """Groups that are joined; each has a number, a joined one a new number."""

    def __init__(self, on: OnSets, alpha: float) -> None:
        self._weights, self._alpha = on.weights, alpha
        self._sets: dict[int, np.ndarray] = dict(enumerate(on.sets))
        self._members: dict[int, list[int]] = {i: [i] for i in self._sets}
        self._frequency = {i: on.frequency(rows) for i, rows in self._sets.items()}
        self._marked = np.zeros(len(on.weights), bool)

    def length(self) -> float:
        return math.fsum(self._frequency[i] * (1 + self._alpha * len(m)) for i, m in self._members.items())

    def alive(self) -> Iterator[tuple[list[int], float]]:
        return ((members, self._frequency[i]) for i, members in self._members.items())

    def join_equals(self) -> None:
        """Join what is on at exactly the same datapoints: it saves a name and costs nothing."""
        first: dict[bytes, int] = {}
        for i in list(self._sets):
            other = first.setdefault(self._sets[i].tobytes(), i)
            if other != i:
                self._members[other] += self._members.pop(i)
                del self._sets[i], self._frequency[i]

    def join_while_it_saves(self) -> None:
        numbers = list(self._sets)
        alike = Lookalikes([self._sets[i] for i in numbers], self._weights, self._least_overlap())
        self._renumber(numbers)
        heap = [entry for i in self._sets for entry in self._savings(i, alike.of(i))]
        heapify(heap)
        while heap:
            _, a, b = heappop(heap)
            if a not in self._sets or b not in self._sets:
                continue
            new = alike.join(a, b)
            self._join(a, b, new)
            for entry in self._savings(new, alike.of(new)):
                heappush(heap, entry)

    def _least_overlap(self) -> float:
        """Two groups that have less in common, of what either has, save nothing: a saving of `common` is
        more than alpha times what each has alone only if common / alpha is more than all that is not
        common."""
        return self._alpha / (1 + self._alpha)

    def _renumber(self, numbers: list[int]) -> None:
        for name in ("_sets", "_members", "_frequency"):
            old = getattr(self, name)
            setattr(self, name, {new: old[i] for new, i in enumerate(numbers)})

    def _savings(self, i: int, others: list[int]) -> Iterator[tuple[float, int, int]]:
        """(minus what is saved, other, i) of every pair that saves something."""
        self._marked[self._sets[i]] = True
        for other in others:
            rows = self._sets[other]
            common = float(self._weights[rows[self._marked[rows]]].sum())
            alone, alone_other = self._frequency[i] - common, self._frequency[other] - common
            ranks = len(self._members[other]) * alone + len(self._members[i]) * alone_other
            saved = common - self._alpha * ranks
            if saved > 1e-12:
                yield -saved, other, i
        self._marked[self._sets[i]] = False

    def _join(self, a: int, b: int, new: int) -> None:
        self._sets[new] = np.union1d(self._sets.pop(a), self._sets.pop(b))
        self._members[new] = self._members.pop(a) + self._members.pop(b)
        del self._frequency[a], self._frequency[b]
        self._frequency[new] = float(self._weights[self._sets[new]].sum())
