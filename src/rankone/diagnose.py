"""What is wrong with a decomposition, and which setting to move: the heuristics of appendix A.3 of
the paper, as measurements.

Nothing here needs to know the true mechanisms. Each heuristic is a number with a limit; one that is
over its limit becomes a `Finding` that says what was seen, what it means, and what to do. `Numbers`
are what is measured, the rules below them say what the numbers mean. Limits are at the top of the
file, with the reason for each.

`patching.insert_identity` puts a known mechanism into a model of your own before it is decomposed;
`diagnose` looks for every such matrix.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from rankone.components import DATA_INITS
from rankone.data import Data, seed_for
from rankone.decomposition import Decomposition
from rankone.evaluate import evaluate, held_out
from rankone.importance import clipped
from rankone.masks import Mask, uniform
from rankone.metrics import CERTAIN, IMPORTANT
from rankone.step import Divergence

UNMASKED = 0.01
"""Largest divergence of the sum of all subcomponents, relative to removing everything: it is the
target, up to rounding and a last bit of training."""
MASKED = 0.1
"""Largest divergence under random masks, relative to removing everything; runs of the paper's
experiments that are right have 0.003 to 0.02."""
NOISE = 3.0
"""How many times larger the reconstruction loss may be than the interference of inactive
subcomponents explains, if it is large at all."""
ROOM = 0.005
"""Below this divergence under random masks, relative to removing everything, minimality could cost
more."""
UNUSED_ROOM = 6.0
"""With so much room, how many times the interference of inactive subcomponents the reconstruction
loss may be.

Runs that are right have 0.7 to 4.6; residual MLPs with a tenth and a hundredth of the right
coefficient have 7.5 to 8.5: what is left of the error comes from importances between 0 and 1, of
far more subcomponents than are needed.
"""
REACHING_ONE = 0.5
"""In every layer, on at least this share of inputs some importance must be near 1. Right runs have
0.83 or more, a residual MLP with ten times the right coefficient 0.05 in W_in."""
FALLING = 0.12
"""By how much the loss, or the number of important subcomponents, may fall over the last three
fifths of training.

Runs that are right stay below 0.1, and are above 0.15 at a tenth of their steps. The parts that are
compared are not next to each other because a falling learning rate makes the end of any run look
settled; they are after the point where the penalty stops changing, which moves both.
"""
TOGETHER = 0.5
"""Share of a known mechanism's subcomponents that must act where any of them does. (Not all: an
input may need only some directions.)"""
RARELY = 0.01
"""A subcomponent of a known mechanism that is important on a smaller share of the datapoints on
which any is does not count: recovered runs of TMS 40-10+ID have one or two such, on one datapoint
of 14,000."""
MISSING = 0.1
"""How far the alive subcomponents of a known mechanism may be from its matrix, relative to its size."""
SHARED = 0.95
"""Cosine of read or write vectors, and agreement of use, from which on two subcomponents are one
mechanism cut in two."""


@dataclass(frozen=True)
class Finding:
    """Something that is wrong: what was seen, what it means, what to do."""

    name: str
    seen: str
    means: str
    do: str


@dataclass(frozen=True)
class Identity:
    """A matrix that is known to be one mechanism, and how it came back."""

    rank: int
    alive: int
    act_together: float
    """The share of its subcomponents that are important where any is."""
    missing: float
    """How far the sum of the alive ones is from it, relative to its size."""


@dataclass(frozen=True)
class Numbers:
    """Everything that is measured. Dictionaries are by layer, unless they say otherwise."""

    divergence: dict[str, float]
    """Mask source -> divergence from the target."""
    superposition_noise: float
    """Divergence from the target when all important subcomponents are whole and all others random."""
    near_one: dict[str, float]
    """The share of inputs, each weighted by what the layers change in its output, on which some
    importance is near 1; without layers if they change nothing."""
    alive: dict[str, int]
    C: dict[str, int]
    falling: dict[str, float] | None
    """By what share `loss` and `l0` fell between two late parts of training; None for too few records."""
    cramped: list[str]
    """Layers that came back as exactly their rank although their inputs could not have had one part
    each."""
    split_pairs: dict[str, int]
    """Pairs of subcomponents that are one mechanism cut in two."""
    identities: dict[str, Identity]
    tied: dict[str, str]
    init: str
    steps: int
    steps_done: int | None

    @property
    def unmasked_share(self) -> float:
        """Divergence of the sum of all subcomponents, relative to removing everything."""
        return self.divergence["ones"] / max(self.divergence["zero"], 1e-30)

    @property
    def masked_share(self) -> float:
        """Divergence under random masks, relative to removing everything."""
        return self.divergence["stochastic"] / max(self.divergence["zero"], 1e-30)


@dataclass(frozen=True)
class Diagnosis:
    """Every number that was looked at, and what is wrong, gravest first."""

    numbers: Numbers
    findings: list[Finding] = field(default_factory=list)


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


def _with_tied(n: Numbers, names: Sequence[str]) -> str:
    """Layers with those that share their parameters, which must have as many subcomponents."""
    groups = [{name, n.tied.get(name, name), *(a for a, b in n.tied.items() if b == name)} for name in names]
    return ", ".join(layer for layer in n.C if any(layer in group for group in groups))


BETA3 = "`losses.importance_minimality.coefficient`"


def findings(numbers: Numbers) -> list[Finding]:
    """What the numbers mean."""
    return [finding for rule in RULES for finding in rule(numbers)]


def _unfinished(n: Numbers) -> Iterator[Finding]:
    if n.steps_done is not None and n.steps_done < n.steps:
        yield Finding(
            "unfinished",
            f"training has reached step {n.steps_done:,} of {n.steps:,}",
            "whatever else is found may be gone at the end",
            "finish the run, with --resume",
        )


def _unconverged(n: Numbers) -> Iterator[Finding]:
    names = {"loss": "the loss", "l0": "the number of important subcomponents"}
    fell = [f"{names[k]} fell by {share:.0%}" for k, share in (n.falling or {}).items() if share > FALLING]
    if fell:
        yield Finding(
            "unconverged",
            f"late in training {' and '.join(fell)} (limit {FALLING:.0%})",
            "training stopped before it had settled",
            "raise `steps`",
        )


def _unfaithful(n: Numbers) -> Iterator[Finding]:
    if n.unmasked_share > UNMASKED:
        warm_up = "" if n.init in DATA_INITS else "give `faithfulness_warmup.steps` 200, "
        yield Finding(
            "unfaithful",
            f"with all subcomponents kept, the output differs from the target by {n.unmasked_share:.1%} "
            f"of what removing all of them does (limit {UNMASKED:.0%})",
            "the subcomponents do not sum to the network",
            f"raise `losses.faithfulness.coefficient`, {warm_up}or raise `steps`",
        )


def _too_few(n: Numbers) -> Iterator[Finding]:
    if n.cramped:
        parts = [
            f"{name} came back as {n.alive[name]} subcomponents, exactly its rank, out of {n.C[name]}, "
            "which is less than it has inputs"
            for name in n.cramped
        ]
        yield Finding(
            "C perhaps too small",
            "; ".join(parts),
            "it is one mechanism, or there was too little room for a sparser decomposition",
            f"raise C for {_with_tied(n, n.cramped)} to twice as many; if as few are alive then, "
            "it is one mechanism",
        )
    full = [name for name, alive in n.alive.items() if alive == n.C[name]]
    if full:
        yield Finding(
            "C too small",
            f"no subcomponent is dead in {', '.join(full)} (C = "
            f"{', '.join(str(n.C[name]) for name in full)})",
            "there may be more mechanisms than subcomponents, so that some must share one",
            f"raise C for {_with_tied(n, full)}, until some stay dead",
        )


def _shrunken(n: Numbers) -> dict[str, float]:
    return {name: share for name, share in n.near_one.items() if share < REACHING_ONE}


def _coefficient_too_high(n: Numbers) -> Iterator[Finding]:
    if shrunken := _shrunken(n):
        shares = ", ".join(f"{share:.0%} of the inputs in {name}" for name, share in shrunken.items())
        yield Finding(
            "importance coefficient too high",
            f"some importance reaches {CERTAIN} on {shares}, weighted by how much they need these "
            f"layers (at least {REACHING_ONE:.0%})",
            "minimality costs more than it is worth to reconstruct the output, so everything is "
            "ablated in part",
            f"lower {BETA3}, to a third at first",
        )


def _far_from_target(n: Numbers) -> Iterator[Finding]:
    if n.masked_share > MASKED:
        yield Finding(
            "masked model too far from the target",
            f"under random masks the output differs from the target by {n.masked_share:.1%} of what "
            f"removing everything does (limit {MASKED:.0%})",
            "subcomponents that matter are ablated",
            f"lower {BETA3}, to a third at first; if the loss is still falling, raise `steps`",
        )
    if n.divergence["stochastic"] > NOISE * n.superposition_noise and n.masked_share > UNMASKED:
        yield Finding(
            "more error than superposition explains",
            f"reconstruction under random masks is {n.divergence['stochastic']:.1e}; inactive "
            f"subcomponents alone give {n.superposition_noise:.1e} (limit {NOISE:.0f} times that)",
            "more than interference is lost: active mechanisms are ablated in part",
            f"lower {BETA3}, or raise `steps`",
        )


def _coefficient_too_low(n: Numbers) -> Iterator[Finding]:
    split = ", ".join(f"{pairs} in {name}" for name, pairs in n.split_pairs.items() if pairs)
    excess = n.divergence["stochastic"] / max(n.superposition_noise, 1e-30)
    signs = []
    if split:
        signs.append(
            f"pairs of subcomponents read or write one direction and are always used together: {split}"
        )
    if n.masked_share < ROOM and excess > UNUSED_ROOM:
        signs.append(
            f"random masks change the output by {n.masked_share:.2%} of what removing everything does, "
            f"so minimality could cost more, yet inactive subcomponents explain only 1/{excess:.0f} of "
            "that: the rest comes from importances between 0 and 1"
        )
    if signs and not _shrunken(n):
        yield Finding(
            "importance coefficient too low",
            "; ".join(signs),
            "one mechanism is spread over several subcomponents, which costs too little",
            f"raise {BETA3}, to three times as much at first",
        )


def _identity_lost(n: Numbers) -> Iterator[Finding]:
    for name, identity in n.identities.items():
        whole = identity.act_together >= TOGETHER and identity.missing <= MISSING
        if identity.alive == identity.rank and whole:
            continue
        yield Finding(
            "known mechanism not recovered",
            f"{name} is an identity of rank {identity.rank}: one mechanism. It came back as "
            f"{identity.alive} subcomponents, of which {identity.act_together:.0%} act when any does "
            f"and which lack {identity.missing:.0%} of it",
            "the settings do not recover what is known, so what they say about the rest cannot be trusted",
            f"{'raise' if identity.alive > identity.rank else 'lower'} {BETA3}, or raise `steps`",
        )


RULES: tuple[Callable[[Numbers], Iterator[Finding]], ...] = (
    _unfinished,
    _unconverged,
    _unfaithful,
    _too_few,
    _coefficient_too_high,
    _far_from_target,
    _coefficient_too_low,
    _identity_lost,
)
"""Gravest first."""
