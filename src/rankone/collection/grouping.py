"""Whether components are grouped as they should be: the known answer, and two numbers to judge by.

The known answer: mechanisms of any layer that are needed on exactly the same datapoints are one
component, with all of their ranks; what is dense (an identity between two matrices, a W_out) is needed
always, and so is one component. In a circuit the matrices of a gate belong together, although its
answer may be needed more rarely than its bits are read.

A part that a decomposition found has the label of the mechanism that the judge gives it to; one that is
given to none has that of the mechanism it is most like. Then the grouping is compared with the labels
by the **adjusted Rand index** (1: the same grouping, 0: no better than chance) and by **exact groups**:
true components that came out as one group, with a part in each of their layers and nothing else.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from rankone.clusters import ALPHA, Component, Components, cluster
from rankone.collection.base import ENTRIES, Dense, KnownNetwork, inputs_tensor
from rankone.collection.judge import Found, Parts, assign, importances_of, with_support
from rankone.cooccurrence import Harvest, on_sets
from rankone.data import Batch, batches, given_weights, weights_for
from rankone.metrics import IMPORTANT

BATCHES = 8
"""On how many batches is looked when components are judged."""

Member = tuple[str, int]


@dataclass(frozen=True)
class GroupingJudgement:
    """How a grouping compares with the known one."""

    parts: int
    components: int
    true_components: int
    exact: int
    """True components that came out as one group, complete and with nothing else."""
    rand: float
    """The adjusted Rand index over all alive parts."""


def adjusted_rand(a: Sequence[Hashable], b: Sequence[Hashable]) -> float:
    """How much two labellings of the same things agree on pairs, beyond chance; 1 if they are the same."""

    def pairs(counts: Iterable[int]) -> float:
        return sum(n * (n - 1) / 2 for n in counts)

    both = pairs(Counter(zip(a, b, strict=True)).values())
    in_a, in_b, all_ = pairs(Counter(a).values()), pairs(Counter(b).values()), pairs([len(a)])
    expected = in_a * in_b / all_ if all_ else 0.0
    most = (in_a + in_b) / 2
    return 1.0 if most == expected else (both - expected) / (most - expected)


def components_of(network: KnownNetwork, found: Found, alpha: float = ALPHA) -> Components:
    """The components that clustering finds on what a method found, or on the truth."""
    return cluster(on_sets(_harvest(network, found.importances), IMPORTANT), alpha)


def _drawn(network: KnownNetwork) -> Iterator[Batch]:
    return islice(batches(network.data, 0, stream="evaluation"), BATCHES)


def _harvest(network: KnownNetwork, importances: Callable[[Batch], Mapping[str, Tensor]]) -> Harvest:
    for batch in _drawn(network):
        weights = given_weights(batch)
        yield {
            name: (
                g,
                g.new_ones(g.shape[:-1]) if weights is None else weights_for(weights, g.shape[:-1]),
            )
            for name, g in importances(batch).items()
        }


def true_labels(network: KnownNetwork) -> dict[Member, str]:
    """(layer, mechanism) -> the component it belongs to; a dense layer is one mechanism, number 0."""
    needed: dict[str, list[Tensor]] = defaultdict(list)
    for batch in _drawn(network):
        for name, on in network.needed(inputs_tensor(batch)).items():
            needed[name].append(on.flatten(0, -2))
    labels: dict[Member, str] = {}
    known: dict[bytes, str] = {}
    circuit = network.name in ENTRIES and ENTRIES.get(network.name).family == "circuits"
    for name, truth in network.truth.items():
        if isinstance(truth, Dense):
            labels[name, 0] = "always"
            continue
        for k, on in enumerate(torch.cat(needed[name]).T):
            label = "always" if bool(on.all()) else f"{name} {k}"
            same = f"{k}".encode() if circuit else on.numpy().tobytes()
            labels[name, k] = known.setdefault(same, label)
    return labels


def judge_grouping(network: KnownNetwork, found: Found, components: Sequence[Component]) -> GroupingJudgement:
    """Compare components of what a method found with the known ones."""
    labels = true_labels(network)
    of_part = part_labels(network, found, labels)
    members = [m for component in components for m in component.members if m in of_part]
    group = {m: i for i, component in enumerate(components) for m in component.members}
    rand = adjusted_rand([group[m] for m in members], [of_part[m] for m in members])
    wanted: dict[str, set[str]] = defaultdict(set)
    for (layer, _), label in labels.items():
        wanted[label].add(layer)
    exact = 0
    for component in components:
        own = {of_part.get(m) for m in component.members}
        if len(own) == 1 and (label := own.pop()) is not None:
            whole = sum(of_part[m] == label for m in members) == len(component.members)
            exact += whole and wanted[label] <= {layer for layer, _ in component.members}
    return GroupingJudgement(len(members), len(components), len(wanted), exact, rand)


@torch.no_grad()
def part_labels(network: KnownNetwork, found: Found, labels: dict[Member, str]) -> dict[Member, str]:
    """(layer, part) -> the true component it belongs to, for every part of the layers with a truth."""
    network = with_support(network)
    parts = {name: Parts.of(found.components(name), name) for name in network.truth}
    probed = importances_of(found, network.probe, parts)
    result: dict[Member, str] = {}
    for name, truth in network.truth.items():
        if isinstance(truth, Dense):
            result |= {(name, c): labels[name, 0] for c in range(parts[name].C)}
            continue
        like = parts[name].cosines(truth).abs().argmax(0).tolist()
        given = assign(probed[name].flatten(0, -2), network.needed_on_probe(name), truth, parts[name])
        of = dict(enumerate(like)) | {c: k for k, own in enumerate(given) for c in own}
        result |= {(name, c): labels[name, k] for c, k in of.items()}
    return result
