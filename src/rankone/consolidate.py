"""Consolidation: a group of subcomponents that is more than its rank needs becomes as many as that.

A mechanism of rank three can be written as three subcomponents, or as seven that take turns, each
near some of its inputs. Gradients do not lead from seven to three: every single one of the seven is
needed by the others. What leads there is linear algebra. Subcomponents that are important together
form a tree of groups; what a group does on the inputs on which any of it is important is fitted by
one matrix; and if that matrix has a lower rank r than the group has members, and always on there
costs not much more importances than the group does, it replaces it: r subcomponents whose write
vectors are its left singular vectors.

Mechanisms that come one at a time are not touched: together they would be on far more often.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rankone.data import Batch
from rankone.importance import MLPImportance, PerLayer, clipped
from rankone.metrics import IMPORTANT
from rankone.model import DecomposedLayer, DecomposedModel
from rankone.optim import Adam

MOST_SEEN = 2048
"""Inputs of a layer that are looked at in each batch."""
MOST_ROWS = 1024
"""Inputs to which a group's matrix is fitted."""
MOST_FITS = 64
"""Groups of a layer that are fitted: those first that could save the most."""
SPANNED = 1e-3
"""A direction in which inputs are this small beside the largest does not count."""
MOST_PARTS = 1000
"""Layers with more alive subcomponents are left alone: a tree of all of them would take too long."""
LEFT_OUT = 0.002
"""The share of what a group does that its matrix may leave out."""
AT_MOST = 1.5
"""A group is replaced if it then costs at most so many times the importances that it costs now: members
that take turns are on less than a basis that is always on, but they are more than the mechanism has."""
RIDGE = 1e-3
"""How much the gates of new subcomponents are kept from following single inputs."""


@dataclass(frozen=True)
class Seen:
    """What one layer did on some inputs."""

    inputs: Float[Tensor, "rows d_in"]
    importances: Float[Tensor, "rows C"]
    weights: Float[Tensor, " rows"]
    """How often each input occurs; together 1."""

    @cached_property
    def on(self) -> Bool[Tensor, "rows C"]:
        return self.importances > IMPORTANT


@dataclass(frozen=True)
class Replacement:
    """A group of subcomponents, and the factors that do the same."""

    members: list[int]
    U: Float[Tensor, "d_out r"]
    V: Float[Tensor, "r d_in"]

    @property
    def saved(self) -> int:
        """How many subcomponents fewer."""
        return len(self.members) - len(self.V)


@torch.no_grad()
def consolidate(
    model: DecomposedModel, stream: Iterable[Batch], optimizer: Adam, generator: torch.Generator
) -> dict[str, tuple[int, int]]:
    """Replace groups in every layer; returns, by layer, how many became how many.

    Importance functions must be the paper's, one for each subcomponent. Layers that share their
    subcomponents with others are left alone.
    """
    if not isinstance(model.importance, PerLayer):
        return {}
    changed = {}
    for name, seen in observe(model, stream).items():
        layer, gate = model.layer(name), model.importance.functions[name]
        if not isinstance(gate, MLPImportance):
            continue
        for replacement in replacements(layer, seen):
            _replace(layer, gate, replacement, seen, generator)
            before, after = changed.get(name, (0, 0))
            changed[name] = before + len(replacement.members), after + len(replacement.V)
            _forget(optimizer, layer, gate, replacement.members)
    return changed


@torch.no_grad()
def observe(model: DecomposedModel, stream: Iterable[Batch]) -> dict[str, Seen]:
    """What every layer does that shares its subcomponents with no other."""
    shared = {*model.tied, *model.tied.values()}
    names = [name for name in model.layers if name not in shared]
    rows: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {name: [] for name in names}
    for batch in stream:
        clean = model.clean(batch)
        raw = model.raw_importances(clean, model.inner(clean))
        for name in names:
            a = model.layer(name).vectors(clean.inputs[name])
            g = clipped(raw[name])
            each = model.weights(name, clean, g.shape[:-1]).to(g)
            a, g, flat = a[each > 0], g[each > 0], each[each > 0] / each.sum()
            some = torch.linspace(0, len(g) - 1, min(len(g), MOST_SEEN), dtype=torch.float64).long()
            rows[name].append((a[some], g[some], flat[some] * (flat.sum() / flat[some].sum())))
    seen = {}
    for name, parts in rows.items():
        a, g, w = (torch.cat(column) for column in zip(*parts, strict=True))
        seen[name] = Seen(a, g, w / w.sum())
    return seen


@torch.no_grad()
def replacements(layer: DecomposedLayer, seen: Seen) -> list[Replacement]:
    """The groups of a layer that are worth replacing, no two of which share a member."""
    from scipy.cluster.hierarchy import linkage
    from scipy.spatial.distance import squareform

    on = seen.on.double() * seen.weights.double().sqrt().unsqueeze(1)
    both = on.T @ on
    how_often = both.diagonal()
    alive = [int(c) for c in (how_often > 0).nonzero().flatten()]
    if not 2 <= len(alive) <= MOST_PARTS:
        return []
    rarer = torch.minimum(how_often.unsqueeze(0), how_often.unsqueeze(1)).clamp(min=1e-30)
    apart = (1 - both / rarer)[alive][:, alive].clamp(min=0).cpu().numpy()
    np.fill_diagonal(apart, 0.0)
    # Every inner node of the tree is a group; the best choice for a node is itself or that of its halves.
    tree = linkage(squareform(apart, checks=False), method="average")
    members: list[list[int]] = [[c] for c in alive]
    for left, right, *_ in tree:
        members.append(members[int(left)] + members[int(right)])
    at_most = [_could_save(seen, group) for group in members]
    promising = sorted(range(len(alive), len(members)), key=lambda i: -at_most[i])[:MOST_FITS]
    fit = _Fit(layer, seen)
    best: list[list[Replacement]] = [[] for _ in alive]
    for i, (left, right, *_) in enumerate(tree, start=len(alive)):
        halves = best[int(left)] + best[int(right)]
        own = fit(sorted(members[i])) if i in promising and at_most[i] > 0 else None
        better = own is not None and own.saved > sum(r.saved for r in halves)
        best.append([own] if own is not None and better else halves)
    return best[-1]


def _could_save(seen: Seen, members: list[int]) -> int:
    """How many subcomponents fewer a group could be; 0 if one alone would already be on too often."""
    now, always = _costs(seen, members)
    return len(members) - 1 if always <= AT_MOST * now else 0


def _costs(seen: Seen, members: list[int]) -> tuple[float, float]:
    """(importances per datapoint of a group, how often any of it is important)."""
    on = seen.on[:, members]
    now = float(seen.weights @ on.to(seen.weights.dtype).sum(1))
    return now, float(seen.weights[on.any(1)].sum())


class _Fit:
    """One matrix in place of a group of subcomponents, if that saves anything.

    What all groups of a layer need is computed once: inputs in the directions that occur, and what is
    missing of the layer's output when every subcomponent is kept as far as it is important.
    """

    def __init__(self, layer: DecomposedLayer, seen: Seen) -> None:
        self.seen, self.parts = seen, layer.subcomponents
        a = seen.inputs.double() * seen.weights.double().sqrt().unsqueeze(1)
        sizes, basis = torch.linalg.eigh(a.T @ a)
        self.directions = basis[:, sizes > SPANNED**2 * sizes[-1]].T.to(seen.inputs)
        self.inputs = seen.inputs @ self.directions.T
        self.kept = seen.inputs @ self.parts.V.T * seen.importances
        self.missing = seen.inputs @ layer.matrix().T - self.kept @ self.parts.U.T

    def __call__(self, members: list[int]) -> Replacement | None:
        seen = self.seen
        if not len(self.directions):  # all inputs are 0
            return None
        now, always = _costs(seen, members)
        rows = seen.on[:, members].any(1).nonzero().flatten()
        rows = rows[torch.linspace(0, len(rows) - 1, min(len(rows), MOST_ROWS)).long()]
        scale = seen.weights[rows].double().sqrt().unsqueeze(1)
        a = self.inputs[rows].double() * scale
        own = self.kept[rows][:, members].double() @ self.parts.U[:, members].double().T
        y = (self.missing[rows].double() + own) * scale
        sizes, basis = torch.linalg.eigh(a.T @ a)
        occur = sizes > SPANNED**2 * sizes[-1]
        whiten = basis[:, occur] / sizes[occur].sqrt()
        coordinates = (a @ whiten).T @ y
        _, values, directions = torch.linalg.svd(coordinates, full_matrices=False)
        total = y.square().sum()
        enough = (total - values.square().cumsum(0) <= LEFT_OUT * total).nonzero().flatten()
        r = int(enough[0]) + 1 if len(enough) else len(members)
        if r * always > AT_MOST * now or r >= len(members):
            return None
        U = directions[:r].T
        V = (whiten @ coordinates @ U).T
        size = ((a @ V.T).square().sum(0) / seen.weights[rows].double().sum()).sqrt().clamp(min=1e-30)
        V = V @ self.directions.double() / size.unsqueeze(1)
        return Replacement(members, (U * size).to(self.parts.U), V.to(self.parts.U))


def _replace(
    layer: DecomposedLayer, gate: MLPImportance, new: Replacement, seen: Seen, generator: torch.Generator
) -> None:
    """Put the factors of a replacement in place of its members, with gates that are on where any of
    them was. What is left over becomes nothing: a place for something that is still to be found."""
    anywhere = seen.on[:, new.members].any(1)
    parts, r = layer.subcomponents, len(new.V)
    used, free = new.members[:r], new.members[r:]
    parts.U[:, used], parts.V[used] = new.U, new.V
    parts.U[:, free] = 0.0
    fresh = torch.randn(r, gate.w_in.shape[1], generator=generator) * 2**0.5
    gate.w_in[used], gate.b_in[used] = fresh.to(gate.w_in), 0.0
    h = seen.inputs @ new.V.T
    share = torch.where(
        anywhere, seen.weights / seen.weights[anywhere].sum(), seen.weights / seen.weights[~anywhere].sum()
    ).double()
    for i, c in enumerate(used):
        hidden = torch.nn.functional.gelu(h[:, i : i + 1] * gate.w_in[c] + gate.b_in[c]).double()
        features = torch.cat([hidden, torch.ones_like(hidden[:, :1])], 1)
        gram = features.T @ (share.unsqueeze(1) * features)
        wanted = features.T @ (share * anywhere)
        ridge = RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        solution = torch.linalg.solve(gram + ridge, wanted).to(gate.w_out)
        gate.w_out[c], gate.b_out[c] = solution[:-1], solution[-1]
    gate.w_out[free], gate.b_out[free] = 0.0, -0.1


def _forget(optimizer: Adam, layer: DecomposedLayer, gate: MLPImportance, members: list[int]) -> None:
    """Where the optimiser was heading with subcomponents that are no longer the same."""
    for p in (*layer.subcomponents.parameters(), *gate.parameters()):
        if p in optimizer.state:
            heading = optimizer.state[p]["exp_avg"]
            (heading.T if p is layer.subcomponents.U else heading)[members] = 0.0
