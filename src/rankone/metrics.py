"""Numbers that say how good a decomposition is, from matrices alone.

The recovery checks compare importances on one-hot probes with the pattern a known mechanism must
show; MMCS and ML2R compare subcomponents with the columns of the target's matrix (equations 9 and
10 of the paper).
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rankone.data import mean_over_data
from rankone.share import WHOLE, Share

IMPORTANT = 0.1
"""Above this a subcomponent counts as important: for L0, for being alive, and for what a check
calls an error."""
CERTAIN = 0.9
"""A mechanism that is there must reach this importance on its own probe."""

Pattern = Literal["identity", "dense"]


@dataclass(frozen=True)
class Check:
    """The outcome of one recovery check on the importances of one matrix."""

    pattern: Pattern
    expected: int
    """identity: the number of features, one subcomponent each; dense: the number of subcomponents
    that serve many features each."""
    errors: int
    order: list[int]
    """The columns as the check sorted them, for plotting."""

    @property
    def recovered(self) -> bool:
        return self.errors == 0

    def wrong(self, ordered: Float[Tensor, "features C"]) -> list[tuple[int, int]]:
        """(feature, column) of the entries that are errors, of importances with their columns in
        `order`.

        A subcomponent of a dense pattern that is certain nowhere has no one entry to show.
        """
        stray = ordered > IMPORTANT
        if self.pattern == "dense":
            stray[:, : self.expected] = False
        else:
            n = min(ordered.shape)
            stray[range(n), range(n)] = ordered.diagonal() < CERTAIN
        return [(int(row), int(column)) for row, column in stray.nonzero()]


def identity_check(importances: Float[Tensor, "features C"]) -> Check:
    """One subcomponent per feature and nothing else: errors are missing diagonal entries and stray
    others."""
    from scipy.optimize import linear_sum_assignment  # a seventh of the time that `import rankone` would take

    n, C = importances.shape
    g = importances.numpy().astype(np.float64)
    rows, columns = linear_sum_assignment(g, maximize=True)
    own = dict(zip(rows.tolist(), columns.tolist(), strict=True))
    order = [own[i] for i in range(n) if i in own]
    order += [c for c in range(C) if c not in set(order)]
    missing = sum(g[i, own[i]] < CERTAIN if i in own else 1 for i in range(n))
    stray = (g > IMPORTANT).sum() - sum(g[i, c] > IMPORTANT for i, c in own.items())
    return Check("identity", n, int(missing + stray), order)


def dense_check(importances: Float[Tensor, "features C"], k: int) -> Check:
    """k subcomponents that serve everything: each must be certain somewhere, and no other may be
    important."""
    order = torch.argsort(importances.sum(0), descending=True, stable=True).tolist()
    g = importances[:, order]
    uncertain = int((g[:, :k].amax(0) < CERTAIN).sum()) + max(0, k - g.shape[1])
    stray = int((g[:, k:] > IMPORTANT).sum())
    return Check("dense", k, uncertain + stray, order)


def run_check(pattern: Pattern, expected: int, importances: Float[Tensor, "features C"]) -> Check:
    return identity_check(importances) if pattern == "identity" else dense_check(importances, expected)


def mmcs_ml2r(
    W: Float[Tensor, "d_out d_in"],
    U: Float[Tensor, "d_out C"],
    V: Float[Tensor, "C d_in"],
    among: Bool[Tensor, " C"] | None = None,
) -> tuple[float, float]:
    """Mean max cosine similarity and mean L2 ratio between the columns of W and those of the
    subcomponents.

    `among` limits the search to some subcomponents. In few dimensions a crowd of dead ones contains
    every direction by chance, so the numbers mean something over the alive ones only. Without any
    subcomponent both are 0.
    """
    if among is not None:
        U, V = U[:, among], V[among]
    if U.shape[1] == 0:
        return 0.0, 0.0
    columns = torch.einsum("oc,ci->coi", U, V)
    norms = columns.norm(dim=1)
    W_norms = W.norm(dim=0)
    cosine = torch.einsum("coi,oi->ci", columns, W) / (norms * W_norms).clamp(min=1e-12)
    best, index = cosine.max(dim=0)
    ratio = norms.gather(0, index.unsqueeze(0)).squeeze(0) / W_norms.clamp(min=1e-12)
    return float(best.mean()), float(ratio.mean())


def l0(importances: Float[Tensor, "*lead C"], weights: Tensor | None = None, share: Share = WHOLE) -> float:
    """The mean number of important subcomponents per datapoint."""
    count = (importances > IMPORTANT).sum(-1).to(torch.float64)
    return float(share.mean(mean_over_data(count, weights, share)))


def wilson(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """The Wilson score interval of a share: what its true value may be after so few trials (95 %
    for z = 1.96)."""
    share = successes / trials
    middle = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return max(0.0, middle - half), min(1.0, middle + half)
