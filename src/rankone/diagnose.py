"""Measures what can be wrong with a decomposition. findings.py says what the numbers mean.

Nothing here needs to know the true mechanisms. `patching.insert_identity` puts a known mechanism into a
model of your own before it is decomposed; `diagnose` looks for every such matrix.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor

from rankone.compare import compare
from rankone.consolidate import observe, replacements
from rankone.data import Batch, Data, batches, seed_for, tensors_of, to_device, weights_for
from rankone.decomposition import Decomposition
from rankone.errors import ConfigError
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
MOST_DIFFERENT = 100
"""How many inputs of a batch are compared with each other."""
SHARED = 0.95
"""Cosine of read or write vectors, and agreement of use, from which on two subcomponents are one
mechanism cut in two."""


@dataclass
class _Datapoints:
    """What the datapoints of an evaluation show one by one."""

    noise: float
    near_one: dict[str, float]
    unsure: dict[str, float]
    used: dict[str, Tensor]
    """Layer -> `[datapoints, C]`, whether each subcomponent is important."""
    weights: dict[str, Tensor]
    """Layer -> `[datapoints]`, how much each counts."""
    different: int | None
    """How many datapoints differ from each other; None where batches do not consist of rows."""


@torch.no_grad()
def diagnose(
    decomposition: Decomposition,
    data: Data,
    *,
    divergence: Divergence | None = None,
    steps_done: int | None = None,
    against: Decomposition | None = None,
    n_batches: int = 4,
    seed: int = 0,
) -> Diagnosis:
    """Look for everything that is known to go wrong. `steps_done` is how far an unfinished run has
    come; `against` is a decomposition of the same network from another seed, which should agree."""
    evaluation = evaluate(decomposition, data, divergence=divergence, n_batches=n_batches, seed=seed)
    if decomposition.evaluation is None:
        decomposition.evaluation = evaluation
    points = _datapoints(decomposition, data, divergence, n_batches, seed)
    alive = {name: len(indices) for name, indices in evaluation.alive.items()}
    minimality = decomposition.config.losses.get("importance_minimality")
    numbers = Numbers(
        divergence=evaluation.reconstruction,
        relative=evaluation.relative,
        superposition_noise=points.noise,
        near_one=points.near_one,
        unsure=points.unsure,
        too_many=_too_many(decomposition, data, n_batches, seed),
        l0=evaluation.l0,
        rank={name: rank(layer.matrix()) for name, layer in decomposition.model.layers.items()},
        well_tempered=evaluation.well_tempered,
        datapoints=points.different,
        coefficient_start=getattr(minimality, "coefficient_start", None),
        alive=alive,
        C={name: layer.C for name, layer in decomposition.model.layers.items()},
        falling=_falling(decomposition),
        cramped=[name for name, n in alive.items() if _cramped(decomposition, name, n)],
        split_pairs={name: _split_pairs(decomposition, name, points) for name in points.used},
        identities=_identities(decomposition, points),
        tied=dict(decomposition.model.tied),
        agreement=_agreement(decomposition, against, data, n_batches, seed),
        init=decomposition.config.init,
        steps=decomposition.config.steps,
        steps_done=steps_done,
    )
    return Diagnosis(numbers, findings(numbers))


def _agreement(
    decomposition: Decomposition, against: Decomposition | None, data: Data, n_batches: int, seed: int
) -> dict[str, float]:
    if against is None:
        return {}
    if against.config.seed == decomposition.config.seed:
        raise ConfigError(
            f"Both decompositions have seed {against.config.seed}, so that they agree says nothing. Make the "
            "one to hold it against with another seed."
        )
    layers = compare(decomposition, against, data, n_batches=n_batches, seed=seed).layers
    return {name: layer.agreement for name, layer in layers.items() if layer.agreement is not None}


def _datapoints(
    decomposition: Decomposition, data: Data, divergence: Divergence | None, n_batches: int, seed: int
) -> _Datapoints:
    layers = decomposition.layers
    noise = 0.0
    reaching, concerned = dict.fromkeys(layers, 0.0), dict.fromkeys(layers, 0.0)
    unsure, on = dict.fromkeys(layers, 0.0), dict.fromkeys(layers, 0.0)
    used: dict[str, list[Tensor]] = {name: [] for name in layers}
    weights: dict[str, list[Tensor]] = {name: [] for name in layers}
    different: set[bytes] = set()
    for step in held_out(decomposition, data, n_batches, seed, divergence):
        importances = {name: clipped(raw) for name, raw in step.raw.items()}
        # Active subcomponents whole, inactive ones at random: what interference alone does.
        interfering = {}
        for name, g in importances.items():
            inactive = uniform(seed_for(seed, f"diagnosis/noise/{name}", step.index), g)
            interfering[name] = Mask(torch.where(g > IMPORTANT, 1.0, inactive))
        noise += float(step.distance(step.output(interfering))) / n_batches
        different |= _rows_of(step.batch)
        # The more these layers do on an input, the more should something be certainly important there.
        change = (step.output(step.masks("zero", 0)) - step.clean.output).abs()
        per_input = change if change.dim() == 1 else change.amax(-1)
        for name, g in importances.items():
            each = step.each_weight(name).reshape(g.shape[:-1])
            needed, largest = _common([per_input, g.amax(-1) * (each > 0)])
            needed = needed * _weights(step.weights, needed)
            reaching[name] += float((needed * (largest >= CERTAIN)).sum())
            concerned[name] += float(needed.sum())
            # By what each does: on a small input a small importance is no wonder.
            size = (step.inner[name] * decomposition.model.layer(name).subcomponents.U.norm(dim=0)).square()
            important = (size * (g > IMPORTANT)).sum(-1).double()
            between = (size * ((g > IMPORTANT) & (g < CERTAIN))).sum(-1).double()
            on[name] += float((each * important).sum())
            unsure[name] += float((each * between).sum())
            used[name].append((g[each > 0] > IMPORTANT).cpu())
            weights[name].append(each[each > 0].double().cpu())
    return _Datapoints(
        noise=noise,
        near_one={name: reaching[name] / total for name, total in concerned.items() if total},
        unsure={name: unsure[name] / total for name, total in on.items() if total},
        used={name: torch.cat(parts) for name, parts in used.items()},
        weights={name: torch.cat(parts) for name, parts in weights.items()},
        different=len(different) or None,
    )


def _rows_of(batch: Batch) -> set[bytes]:
    """The first datapoints of a batch, each as its bytes."""
    given = [t for t in tensors_of(batch) if t.dim()]
    if not given or any(len(t) != len(given[0]) for t in given):
        return set()
    flat = [
        t[:MOST_DIFFERENT].detach().reshape(min(len(t), MOST_DIFFERENT), -1).double().cpu() for t in given
    ]
    return {row.numpy().tobytes() for row in torch.cat(flat, 1)}


def _too_many(
    decomposition: Decomposition, data: Data, n_batches: int, seed: int
) -> dict[str, tuple[int, int]]:
    """By layer, how many subcomponents are in groups that could do with fewer, and with how many."""
    model = decomposition.model
    drawn = [to_device(b, model.device) for b in islice(batches(data, seed, stream="evaluation"), n_batches)]
    groups = {name: replacements(model.layer(name), seen) for name, seen in observe(model, drawn).items()}
    return {
        name: (sum(len(group.members) for group in found), sum(len(group.V) for group in found))
        for name, found in groups.items()
        if found
    }


def _weights(weights: Tensor | None, per_datapoint: Tensor) -> Tensor:
    """How much each datapoint counts: all alike, or as much as its row or position of the batch."""
    like = torch.ones_like(per_datapoint, dtype=torch.float64)
    if weights is None or not per_datapoint.dim():
        return like / max(1, like.numel())
    each = weights_for(weights.double(), like.shape)
    return each / each.sum()


def _common(values: Sequence[Tensor]) -> list[Tensor]:
    """Numbers per datapoint of tensors with different leading dimensions, reduced (by their
    largest) to the dimensions they share."""
    dims = 0
    for sizes in zip(*(v.shape for v in values), strict=False):
        if len({*sizes} - {1}) > 1:
            break
        dims += 1
    return list(torch.broadcast_tensors(*(v.flatten(dims).amax(-1) if v.dim() > dims else v for v in values)))


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
    if config.relative:  # the price relaxes late, so that the loss falls to the end in any run
        del curves["loss"]
    means = {name: (sum(c[:third]) / third, sum(c[-third:]) / third) for name, c in curves.items()}
    # Where hardly anything is important, there is nothing to fall.
    return {
        n: 1 - last / first if first > (0.01 if n == "l0" else 0) else 0.0
        for n, (first, last) in means.items()
    }


def rank(W: Tensor) -> int:
    """The rank of a matrix, up to what single precision can tell."""
    return int(torch.linalg.matrix_rank(W.float()))


def _cramped(decomposition: Decomposition, name: str, alive: int) -> bool:
    """Whether a matrix came back as exactly its rank, as one mechanism does, although with so small
    a C its inputs could not have had one each."""
    layer = decomposition.model.layer(name)
    W = layer.matrix()
    return alive < layer.C < W.shape[1] and alive == rank(W)


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
