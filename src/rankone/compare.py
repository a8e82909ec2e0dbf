"""Do two decompositions of one network agree? Seeds, presets and versions, side by side.

Alive subcomponents are matched one to one by the cosine of their rank-one matrices. Matched ones should
also be important on the same datapoints.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rankone.data import Data, batches, to_device
from rankone.decomposition import Decomposition
from rankone.errors import LayerError
from rankone.files import fingerprint
from rankone.metrics import IMPORTANT
from rankone.tables import Table
from rankone.views import LayerView

SAME = 0.9
"""The cosine from which on two subcomponents count as the same."""


@dataclass(frozen=True)
class Match:
    """Subcomponent `a` of the first decomposition and `b` of the second."""

    a: int
    b: int
    cosine: float
    agreement: float | None
    """What their importances have in common over what either has; None where neither has any."""


@dataclass(frozen=True)
class LayerComparison:
    """The subcomponents of one layer in two decompositions."""

    alive: tuple[int, int]
    same: int
    """Matched subcomponents whose matrices have a cosine of at least 0.9."""
    cosine: float
    """The mean over all matches; a subcomponent without a partner counts as 0."""
    agreement: float | None
    """The same for importances, over all data and all alive subcomponents at once."""
    matches: list[Match]


@dataclass(frozen=True, repr=False)
class Comparison:
    """How two decompositions of one network compare."""

    layers: dict[str, LayerComparison]
    only_in: tuple[list[str], list[str]]
    """Layers that only one of the two decomposes."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def table(self) -> Table:
        """A row for each layer."""
        head = ("layer", "alive", "alive in the other", "same", "mean cosine", "importances agree")
        rows = [(n, *of.alive, of.same, of.cosine, of.agreement) for n, of in self.layers.items()]
        alone = [f"Only in one of them: {', '.join(names)}." for names in self.only_in if names]
        return Table(head, rows, " ".join([f"Same: a cosine of {SAME} or more.", *alone]))

    def __repr__(self) -> str:
        return repr(self.table())

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


@torch.no_grad()
def compare(
    a: Decomposition, b: Decomposition, data: Data, *, n_batches: int = 4, seed: int = 0
) -> Comparison:
    """Match the alive subcomponents of two decompositions of one network, and compare their importances."""
    first, second = (fingerprint(d.model.target) for d in (a, b))
    if first != second:
        raise LayerError(
            f"The two decompositions are of different networks: their weights have SHA-256 {first[:12]}... "
            f"and {second[:12]}... Only decompositions of the same network can be matched."
        )
    names = [name for name in a.layers if name in b.layers]
    if not names:
        raise LayerError(f"The two have no layer in common: {', '.join(a.layers)}; {', '.join(b.layers)}.")
    seen = _importances(a, b, names, data, n_batches, seed)
    layers = {n: _compare_layer(a.components(n), b.components(n), *seen[n]) for n in names}
    others = [n for n in a.layers if n not in names], [n for n in b.layers if n not in names]
    return Comparison(layers, others)


def _importances(
    a: Decomposition, b: Decomposition, names: list[str], data: Data, n_batches: int, seed: int
) -> Mapping[str, tuple[Tensor, Tensor, Tensor]]:
    """Layer -> importances of both on the same datapoints, and how much each datapoint counts."""
    found: dict[str, tuple[list[Tensor], list[Tensor], list[Tensor]]] = {n: ([], [], []) for n in names}
    for batch in islice(batches(data, seed, stream="evaluation"), n_batches):
        of_both = [d.model.weighted_importances(to_device(batch, d.model.device)) for d in (a, b)]
        for name in names:
            each = of_both[0][name][1].double().cpu()
            rows = [g[name][0].double().cpu()[each > 0] for g in of_both]
            for kept, new in zip(found[name], (*rows, each[each > 0]), strict=True):
                kept.append(new)
    return {name: (torch.cat(x), torch.cat(y), torch.cat(w)) for name, (x, y, w) in found.items()}


def _compare_layer(
    a: LayerView,
    b: LayerView,
    of_a: Float[Tensor, "rows C"],
    of_b: Float[Tensor, "rows D"],
    weights: Float[Tensor, " rows"],
) -> LayerComparison:
    from scipy.optimize import linear_sum_assignment  # a seventh of the time that `import rankone` would take

    alive = [(g > IMPORTANT).any(0).nonzero().flatten() for g in (of_a, of_b)]
    cosines = _cosines(a, b)[alive[0]][:, alive[1]]
    rows, columns = linear_sum_assignment(cosines.numpy(), maximize=True)
    matches = []
    common = either = 0.0
    partners = [set(alive[0].tolist()), set(alive[1].tolist())]
    for i, j in zip(rows.tolist(), columns.tolist(), strict=True):
        c, d = int(alive[0][i]), int(alive[1][j])
        both = float(weights @ torch.minimum(of_a[:, c], of_b[:, d]))
        any_ = float(weights @ torch.maximum(of_a[:, c], of_b[:, d]))
        matches.append(Match(c, d, float(cosines[i, j]), both / any_ if any_ > 0 else None))
        common, either = common + both, either + any_
        partners[0].discard(c)
        partners[1].discard(d)
    for alone, g in zip(partners, (of_a, of_b), strict=True):
        either += float((weights @ g[:, sorted(alone)]).sum())
    most = max(len(alive[0]), len(alive[1]))
    return LayerComparison(
        alive=(len(alive[0]), len(alive[1])),
        same=sum(match.cosine >= SAME for match in matches),
        cosine=sum(match.cosine for match in matches) / most if most else 0.0,
        agreement=common / either if either > 0 else None,
        matches=sorted(matches, key=lambda match: -match.cosine),
    )


def _cosines(a: LayerView, b: LayerView) -> Float[Tensor, "C D"]:
    """Cosines of all pairs of rank-one matrices: that of write vectors times that of read vectors."""
    units = [
        (
            view.U / view.U.norm(dim=0).clamp(min=1e-30),
            view.V / view.V.norm(dim=1, keepdim=True).clamp(min=1e-30),
        )
        for view in (a, b)
    ]
    (U, V), (U2, V2) = [(u.double().cpu(), v.double().cpu()) for u, v in units]
    return (U.T @ U2) * (V @ V2.T)
