"""Measures what can be wrong with a decomposition. findings.py says what the numbers mean.

Nothing here needs to know the true mechanisms. `patching.insert_identity` puts a known mechanism into a
model of your own before it is decomposed; `diagnose` looks for every such matrix.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rankone.data import Data, seed_for
from rankone.decomposition import Decomposition
from rankone.evaluate import evaluate, held_out
from rankone.findings import Diagnosis, Identity, Numbers, findings
from rankone.importance import clipped
from rankone.masks import Mask, uniform
from rankone.metrics import CERTAIN, IMPORTANT
from rankone.step import Divergence

RARELY = 0.01
"""A subcomponent of a known mechanism that is important on a smaller share of the datapoints on
which any is does not count: recovered runs of TMS 40-10+ID have one or two such, on one datapoint
of 14,000."""
SHARED = 0.95
"""Cosine of read or write vectors, and agreement of use, from which on two subcomponents are one
mechanism cut in two."""


@dataclass
class _Datapoints:
    """What the datapoints of an evaluation show one by one."""

    noise: float
    near_one: dict[str, float]
    used: dict[str, Tensor]
    """Layer -> `[datapoints, C]`, whether each subcomponent is important."""
    weights: dict[str, Tensor]
    """Layer -> `[datapoints]`, how much each counts."""


@torch.no_grad()
def diagnose(
    decomposition: Decomposition,
    data: Data,
    *,
    divergence: Divergence | None = None,
    steps_done: int | None = None,
    n_batches: int = 4,
    seed: int = 0,
) -> Diagnosis:
    """Look for everything that is known to go wrong. `steps_done` is how far an unfinished run has
    come."""
    evaluation = evaluate(decomposition, data, divergence=divergence, n_batches=n_batches, seed=seed)
    points = _datapoints(decomposition, data, divergence, n_batches, seed)
    alive = {name: len(indices) for name, indices in evaluation.alive.items()}
    numbers = Numbers(
        divergence=evaluation.reconstruction,
        relative=evaluation.relative,
        superposition_noise=points.noise,
        near_one=points.near_one,
        alive=alive,
        C={name: layer.C for name, layer in decomposition.model.layers.items()},
        falling=_falling(decomposition),
        cramped=[name for name, n in alive.items() if _cramped(decomposition, name, n)],
        split_pairs={name: _split_pairs(decomposition, name, points) for name in points.used},
        identities=_identities(decomposition, points),
        tied=dict(decomposition.config.tied),
        init=decomposition.config.init,
        steps=decomposition.config.steps,
        steps_done=steps_done,
    )
    return Diagnosis(numbers, findings(numbers))


def _datapoints(
    decomposition: Decomposition, data: Data, divergence: Divergence | None, n_batches: int, seed: int
) -> _Datapoints:
    layers = decomposition.layers
    noise = 0.0
    reaching, concerned = dict.fromkeys(layers, 0.0), dict.fromkeys(layers, 0.0)
    used: dict[str, list[Tensor]] = {name: [] for name in layers}
    weights: dict[str, list[Tensor]] = {name: [] for name in layers}
    for step in held_out(decomposition, data, n_batches, seed, divergence):
        importances = {name: clipped(raw) for name, raw in step.raw.items()}
        # Active subcomponents whole, inactive ones at random: what interference alone does.
        interfering = {}
        for name, g in importances.items():
            inactive = uniform(seed_for(seed, f"diagnosis/noise/{name}", step.index), g)
            interfering[name] = Mask(torch.where(g > IMPORTANT, 1.0, inactive))
        noise += float(step.distance(step.output(interfering))) / n_batches
        # The more these layers do on an input, the more should something be certainly important there.
        change = (step.output(step.masks("zero", 0)) - step.clean.output).abs()
        per_input = change if change.dim() == 1 else change.amax(-1)
        for name, g in importances.items():
            needed, largest = _common([per_input, g.amax(-1)])
            needed = needed * _weights(step.weights, needed)
            reaching[name] += float((needed * (largest >= CERTAIN)).sum())
            concerned[name] += float(needed.sum())
            used[name].append((g.reshape(-1, g.shape[-1]) > IMPORTANT).cpu())
            weights[name].append(_weights(step.weights, g[..., 0]).flatten().cpu())
    return _Datapoints(
        noise=noise,
        near_one={name: reaching[name] / total for name, total in concerned.items() if total},
        used={name: torch.cat(parts) for name, parts in used.items()},
        weights={name: torch.cat(parts) for name, parts in weights.items()},
    )


def _weights(row_weights: Tensor | None, per_datapoint: Tensor) -> Tensor:
    """How much each datapoint counts: all alike, or as much as its row of the batch."""
    like = torch.ones_like(per_datapoint, dtype=torch.float64)
    if row_weights is None or not per_datapoint.dim():
        return like / max(1, like.numel())
    rows = like.shape[0]
    return like * row_weights.double().reshape(rows, *[1] * (like.dim() - 1)) * rows / like.numel()


def _common(values: Sequence[Tensor]) -> list[Tensor]:
    """Numbers per datapoint of tensors with different leading dimensions, reduced (by their
    largest) to the dimensions they share."""
    dims = min(v.dim() for v in values)
    reduced = [v.flatten(dims - 1).amax(-1) if dims and v.dim() > dims else v for v in values]
    return list(torch.broadcast_tensors(*reduced))


def _falling(decomposition: Decomposition) -> dict[str, float] | None:
    """By what share the loss and the number of important subcomponents fell late in training."""
    config = decomposition.config
    settled = max((loss.settled for loss in config.losses.values()), default=0.0)
    reached = max((record["step"] for record in decomposition.history), default=0)
    history = [r for r in decomposition.history if r["step"] >= max(0.4 * reached, settled * config.steps)]
    third = len(history) // 3
    if third < 2:
        return None
    curves = {
        "loss": [record["loss"]["total"] for record in history],
        "l0": [sum(record["l0"].values()) for record in history],
    }
    means = {name: (sum(c[:third]) / third, sum(c[-third:]) / third) for name, c in curves.items()}
    # Where hardly anything is important, there is nothing to fall.
    return {
        n: 1 - last / first if first > (0.01 if n == "l0" else 0) else 0.0
        for n, (first, last) in means.items()
    }


def _cramped(decomposition: Decomposition, name: str, alive: int) -> bool:
    """Whether a matrix came back as exactly its rank, as one mechanism does, although with so small
    a C its inputs could not have had one each."""
    layer = decomposition.model.layer(name)
    W = layer.matrix()
    return alive < layer.C < W.shape[1] and alive == int(torch.linalg.matrix_rank(W))


def _split_pairs(decomposition: Decomposition, name: str, points: _Datapoints) -> int:
    """Pairs of alive subcomponents that read or write the same direction and are important on the
    same datapoints.

    Their sum is a rank-one matrix (or nearly), so one subcomponent could do the work of both.
    """
    used, weights = points.used[name], points.weights[name]
    alive = torch.nonzero(used.any(0)).flatten()
    if len(alive) < 2:
        return 0
    view = decomposition.components(name)
    U = F.normalize(view.U.cpu()[:, alive], dim=0)
    V = F.normalize(view.V.cpu()[alive], dim=1)
    same = torch.maximum((U.T @ U).abs(), (V @ V.T).abs()) > SHARED
    on = used[:, alive].double()
    both = on.T @ (weights.unsqueeze(1) * on)
    either = both.diagonal().unsqueeze(0) + both.diagonal().unsqueeze(1) - both
    together = both > SHARED * either
    return int((same & together).triu(diagonal=1).sum())


def _identities(decomposition: Decomposition, points: _Datapoints) -> dict[str, Identity]:
    """Matrices that are known to be one mechanism: how many parts they came back as, and how those act."""
    identities: dict[str, Identity] = {}
    for name in decomposition.layers:
        view = decomposition.components(name)
        W = view.target.cpu()
        if W.shape[0] != W.shape[1] or not torch.equal(W, torch.eye(W.shape[0], dtype=W.dtype)):
            continue
        used, weights = points.used[name].double(), points.weights[name]
        alive = used.any(0) & (weights @ used >= RARELY * (weights @ used.any(1).double()))
        total = view.U.cpu()[:, alive] @ view.V.cpu()[alive]
        on = used[:, alive]
        acting = weights * on.any(1)
        identities[name] = Identity(
            rank=W.shape[0],
            alive=int(alive.sum()),
            act_together=float(acting @ on.mean(1) / acting.sum()) if float(acting.sum()) else 0.0,
            missing=float((total - W).norm() / W.norm()),
        )
    return identities
