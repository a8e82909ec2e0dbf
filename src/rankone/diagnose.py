"""What is wrong with a decomposition, and which setting to move: the heuristics of appendix A.3 of the paper, as measurements.

Nothing here needs to know the true mechanisms. Each heuristic is a number with a limit; one that is over its limit becomes a `Finding`
that says what was seen, what it means, and what to do. Limits are at the top of the file, with the reason for each.

`insert_identity` puts a known mechanism into a model of your own before decomposing it; `diagnose` looks for every such matrix.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from rankone.components import FROM_DATA
from rankone.data import Data, batches, seed_for, shares_of, to_device
from rankone.decomposition import Decomposition
from rankone.errors import LayerError
from rankone.evaluate import evaluate
from rankone.importance import clipped
from rankone.losses import Divergence, distance, divergence_named
from rankone.masks import uniform
from rankone.metrics import CERTAIN, IMPORTANT

UNMASKED = 0.01
"""Largest divergence of the sum of all subcomponents, relative to removing everything: it is the target, up to rounding and a last bit of training."""
MASKED = 0.1
"""Largest divergence under random masks, relative to removing everything; runs of the paper's experiments that are right have 0.003 to 0.02."""
NOISE = 3.0
"""How many times larger the reconstruction loss may be than the interference of inactive subcomponents explains, if it is large at all."""
ROOM = 0.005
"""Below this divergence under random masks, relative to removing everything, minimality could cost more."""
UNUSED_ROOM = 6.0
"""With so much room, how many times the interference of inactive subcomponents the reconstruction loss may be.

Runs that are right have 0.7 to 4.6; residual MLPs with a tenth and a hundredth of the right coefficient have 7.5 to 8.5: what is left of the error comes
from importances between 0 and 1, of far more subcomponents than are needed.
"""
REACHING_ONE = 0.5
"""In every layer, on at least this share of inputs some importance must be near 1. Right runs have 0.83 or more, a residual MLP with ten times the right coefficient 0.05 in W_in."""
FALLING = 0.12
"""By how much the loss, or the number of important subcomponents, may fall over the last three fifths of training.

Runs that are right stay below 0.1, and are above 0.15 at a tenth of their steps. The parts that are compared are not next to each other because a falling
learning rate makes the end of any run look settled; they are after the point where the penalty stops changing, which moves both.
"""
TOGETHER = 0.5
"""Share of a known mechanism's subcomponents that must act where any of them does. (Not all: an input may need only some directions.)"""
RARELY = 0.01
"""A subcomponent of a known mechanism that is important on a smaller share of the datapoints on which any is does not count: recovered runs of TMS 40-10+ID have one or two such, on one datapoint of 14,000."""
MISSING = 0.1
"""How far the alive subcomponents of a known mechanism may be from its matrix, relative to its size."""
SHARED = 0.95
"""Cosine of read or write vectors, and agreement of use, from which on two subcomponents are one mechanism cut in two."""


@dataclass(frozen=True)
class Finding:
    """Something that is wrong: what was seen, what it means, what to do."""

    name: str
    seen: str
    means: str
    do: str


@dataclass(frozen=True)
class Diagnosis:
    """Every number that was looked at, and what is wrong, gravest first."""

    numbers: dict[str, Any]
    findings: list[Finding] = field(default_factory=list)


@dataclass
class _Seen:
    """What the datapoints of an evaluation show one by one."""

    noise: float
    """Divergence from the target when all important subcomponents are whole and all others random."""
    reaching_one: dict[str, float]
    """Layer -> the share of inputs, each weighted by what the layers change in its output, on which some importance is near 1; without layers if they change nothing."""
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
    """Look for everything that is known to go wrong. `steps_done` is how far an unfinished run has come."""
    compare = divergence or decomposition.divergence or divergence_named(decomposition.config.divergence)
    evaluation = evaluate(decomposition, data, divergence=compare, n_batches=n_batches, seed=seed)
    reconstruction = evaluation.reconstruction
    alive = {name: len(found) for name, found in evaluation.alive.items()}
    seen = _look(decomposition, data, compare, n_batches, seed)
    scale = max(reconstruction["zero"], 1e-30)
    numbers: dict[str, Any] = {
        "divergence": reconstruction,
        "unmasked_share": reconstruction["ones"] / scale,
        "masked_share": reconstruction["stochastic"] / scale,
        "superposition_noise": seen.noise,
        "inputs_with_an_importance_near_1": seen.reaching_one,
        "alive": alive,
        "C": {name: layer.C for name, layer in decomposition.model.layers.items()},
        "still_falling": _falling(decomposition),
        "cramped": [name for name, n in alive.items() if _cramped(decomposition, name, n)],
        "cut_in_two": {name: _cut_in_two(decomposition, name, seen) for name in seen.used},
        "identities": _identities(decomposition, seen),
        "tied": dict(decomposition.config.tied),
        "init": decomposition.config.init,
        "steps": decomposition.config.steps,
        "steps_done": steps_done,
    }
    return Diagnosis(numbers, _findings(numbers))


def _look(decomposition: Decomposition, data: Data, compare: Divergence, n_batches: int, seed: int) -> _Seen:
    model = decomposition.model
    noise = 0.0
    reaching = dict.fromkeys(model.layers, 0.0)
    concerned = dict.fromkeys(model.layers, 0.0)
    used: dict[str, list[Tensor]] = {name: [] for name in model.layers}
    weights: dict[str, list[Tensor]] = {name: [] for name in model.layers}
    for i, drawn in enumerate(islice(batches(data, seed, stream="evaluation"), n_batches)):
        batch = to_device(drawn, model.device)
        shares = shares_of(batch)
        clean = model.clean(batch)
        raw = model.raw_importances(model.inner(clean))
        importances = {name: clipped(r) for name, r in raw.items()}
        # Active subcomponents whole, inactive ones at random: what interference alone does.
        interfering = {
            name: torch.where(g > IMPORTANT, 1.0, uniform(seed_for(seed, f"diagnosis/noise/{name}", i), g))
            for name, g in importances.items()
        }
        noise += float(distance(compare, model.masked(batch, interfering), clean.output, shares)) / n_batches
        # The more these layers do on an input, the more it is to be expected that something is certainly important there.
        without = model.masked(batch, {name: torch.zeros_like(r) for name, r in raw.items()})
        moved = (without - clean.output).abs()
        per_input = moved if moved.dim() == 1 else moved.amax(-1)
        for name, g in importances.items():
            change, largest = _common([per_input, g.amax(-1)])
            change = change * _weights(shares, change)
            reaching[name] += float((change * (largest >= CERTAIN)).sum())
            concerned[name] += float(change.sum())
            used[name].append((g.reshape(-1, g.shape[-1]) > IMPORTANT).cpu())
            weights[name].append(_weights(shares, g[..., 0]).flatten().cpu())
    return _Seen(
        noise=noise,
        reaching_one={name: reaching[name] / total for name, total in concerned.items() if total},
        used={name: torch.cat(parts) for name, parts in used.items()},
        weights={name: torch.cat(parts) for name, parts in weights.items()},
    )


def _weights(shares: Tensor | None, per_datapoint: Tensor) -> Tensor:
    """How much each datapoint counts, for numbers per datapoint: all alike, or as much as its row of the batch."""
    like = torch.ones_like(per_datapoint, dtype=torch.float64)
    if shares is None or not per_datapoint.dim():
        return like / max(1, like.numel())
    rows = like.shape[0]
    return like * shares.double().reshape(rows, *[1] * (like.dim() - 1)) * rows / like.numel()


def _common(values: Sequence[Tensor]) -> list[Tensor]:
    """Numbers per datapoint of tensors with different leading dimensions, reduced (by their largest) to the dimensions they share."""
    dims = min(v.dim() for v in values)
    reduced = [v.flatten(dims - 1).amax(-1) if dims and v.dim() > dims else v for v in values]
    return list(torch.broadcast_tensors(*reduced))


def _falling(decomposition: Decomposition) -> dict[str, float] | None:
    """By what share the loss and the number of important subcomponents fell between two parts of the end of training; None for too few records."""
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
    return {n: 1 - last / first if first > (0.01 if n == "l0" else 0) else 0.0 for n, (first, last) in means.items()}


def _cramped(decomposition: Decomposition, name: str, alive: int) -> bool:
    """Whether a matrix came back as exactly its rank, as one mechanism does, although with so small a C its inputs could not have had one each."""
    layer = decomposition.model.layer(name)
    W = layer.matrix()
    return alive < layer.C < W.shape[1] and alive == int(torch.linalg.matrix_rank(W))


def _cut_in_two(decomposition: Decomposition, name: str, seen: _Seen) -> int:
    """Pairs of alive subcomponents that read or write the same direction and are important on the same datapoints.

    Their sum is a rank-one matrix (or nearly), so one subcomponent could do the work of both.
    """
    used, weights = seen.used[name], seen.weights[name]
    alive = torch.nonzero(used.any(0)).flatten()
    if len(alive) < 2:
        return 0
    view = decomposition.components(name)
    U = nn.functional.normalize(view.U.cpu()[:, alive], dim=0)
    V = nn.functional.normalize(view.V.cpu()[alive], dim=1)
    same = torch.maximum((U.T @ U).abs(), (V @ V.T).abs()) > SHARED
    on = used[:, alive].double()
    both = on.T @ (weights.unsqueeze(1) * on)
    either = both.diagonal().unsqueeze(0) + both.diagonal().unsqueeze(1) - both
    together = both > SHARED * either
    return int((same & together).triu(diagonal=1).sum())


def _identities(decomposition: Decomposition, seen: _Seen) -> dict[str, dict[str, Any]]:
    """Matrices that are known to be one mechanism: how many subcomponents they came back as, and whether those act together."""
    found: dict[str, dict[str, Any]] = {}
    for name in decomposition.layers:
        view = decomposition.components(name)
        W = view.target
        if W.shape[0] != W.shape[1] or not torch.equal(W.cpu(), torch.eye(W.shape[0], dtype=W.dtype)):
            continue
        used, weights = seen.used[name].double(), seen.weights[name]
        alive = used.any(0) & (weights @ used >= RARELY * (weights @ used.any(1).double()))
        remade = view.U.cpu()[:, alive] @ view.V.cpu()[alive]
        on = used[:, alive]
        acting = weights * on.any(1)
        found[name] = {
            "rank": W.shape[0],
            "alive": int(alive.sum()),
            "act_together": float(acting @ on.mean(1) / acting.sum()) if float(acting.sum()) else 0.0,
            "missing": float((remade - W.cpu()).norm() / W.cpu().norm()),
        }
    return found


def _with_tied(n: Mapping[str, Any], names: Sequence[str]) -> str:
    """Layers with those that share their parameters, which must have as many subcomponents."""
    groups = [{name, n["tied"].get(name, name), *(a for a, b in n["tied"].items() if b == name)} for name in names]
    return ", ".join(layer for layer in n["C"] if any(layer in group for group in groups))


def _findings(n: Mapping[str, Any]) -> list[Finding]:
    """What the numbers mean."""
    found: list[Finding] = []
    if n["steps_done"] is not None and n["steps_done"] < n["steps"]:
        found.append(
            Finding(
                "unfinished",
                f"training has reached step {n['steps_done']:,} of {n['steps']:,}",
                "whatever else is found may be gone at the end",
                "finish the run, with --resume",
            )
        )
    falling = n["still_falling"]
    if falling is not None and max(falling.values()) > FALLING:
        named = {"loss": "the loss", "l0": "the number of important subcomponents"}
        fell = [f"{named[name]} fell by {share:.0%}" for name, share in falling.items() if share > FALLING]
        found.append(
            Finding(
                "unconverged",
                f"late in training {' and '.join(fell)} (limit {FALLING:.0%})",
                "training stopped before it had settled",
                "raise `steps`",
            )
        )
    if n["unmasked_share"] > UNMASKED:
        found.append(
            Finding(
                "unfaithful",
                f"with all subcomponents kept, the output differs from the target by {n['unmasked_share']:.1%} of what removing all of them does (limit {UNMASKED:.0%})",
                "the subcomponents do not sum to the network",
                "raise `losses.faithfulness.coefficient`, "
                + ("" if n["init"] == FROM_DATA else "give `faithfulness_warmup.steps` 200, ")
                + "or raise `steps`",
            )
        )
    full = [name for name, alive in n["alive"].items() if alive == n["C"][name]]
    if n["cramped"]:
        found.append(
            Finding(
                "C perhaps too small",
                "; ".join(
                    f"{name} came back as {n['alive'][name]} subcomponents, exactly its rank, out of {n['C'][name]}, which is less than it has inputs"
                    for name in n["cramped"]
                ),
                "it is one mechanism, or there was too little room for a sparser decomposition",
                f"raise C for {_with_tied(n, n['cramped'])} to twice as many; if as few are alive then, it is one mechanism",
            )
        )
    if full:
        found.append(
            Finding(
                "C too small",
                f"no subcomponent is dead in {', '.join(full)} (C = {', '.join(str(n['C'][name]) for name in full)})",
                "there may be more mechanisms than subcomponents, so that some must share one",
                f"raise C for {_with_tied(n, full)}, until some stay dead",
            )
        )
    near_1 = n["inputs_with_an_importance_near_1"]
    shrunken = {name: share for name, share in near_1.items() if share < REACHING_ONE}
    if shrunken:
        found.append(
            Finding(
                "importance coefficient too high",
                f"some importance reaches {CERTAIN} on "
                + ", ".join(f"{share:.0%} of the inputs in {name}" for name, share in shrunken.items())
                + f", weighted by how much they need these layers (at least {REACHING_ONE:.0%})",
                "minimality costs more than it is worth to reconstruct the output, so everything is ablated in part",
                "lower `losses.importance_minimality.coefficient`, to a third at first",
            )
        )
    if n["masked_share"] > MASKED:
        found.append(
            Finding(
                "masked model too far from the target",
                f"under random masks the output differs from the target by {n['masked_share']:.1%} of what removing everything does (limit {MASKED:.0%})",
                "subcomponents that matter are ablated",
                "lower `losses.importance_minimality.coefficient`, to a third at first; if the loss is still falling, raise `steps`",
            )
        )
    if n["divergence"]["stochastic"] > NOISE * n["superposition_noise"] and n["masked_share"] > UNMASKED:
        found.append(
            Finding(
                "more error than superposition explains",
                f"reconstruction under random masks is {n['divergence']['stochastic']:.1e}; inactive subcomponents alone give {n['superposition_noise']:.1e} (limit {NOISE:.0f} times that)",
                "more than interference is lost: active mechanisms are ablated in part",
                "lower `losses.importance_minimality.coefficient`, or raise `steps`",
            )
        )
    cut = {name: pairs for name, pairs in n["cut_in_two"].items() if pairs}
    excess = n["divergence"]["stochastic"] / max(n["superposition_noise"], 1e-30)
    roomy = n["masked_share"] < ROOM and excess > UNUSED_ROOM
    if (cut or roomy) and not shrunken:
        pairs = ", ".join(f"{pairs} in {name}" for name, pairs in cut.items())
        seen = (
            [f"pairs of subcomponents read or write one direction and are always used together: {pairs}"] if cut else []
        )
        if roomy:
            seen.append(
                f"random masks change the output by {n['masked_share']:.2%} of what removing everything does, so minimality could cost more, yet "
                f"inactive subcomponents explain only 1/{excess:.0f} of that: the rest comes from importances between 0 and 1"
            )
        found.append(
            Finding(
                "importance coefficient too low",
                "; ".join(seen),
                "one mechanism is spread over several subcomponents, which costs too little",
                "raise `losses.importance_minimality.coefficient`, to three times as much at first",
            )
        )
    for name, identity in n["identities"].items():
        whole = identity["act_together"] >= TOGETHER and identity["missing"] <= MISSING
        if identity["alive"] != identity["rank"] or not whole:
            more = identity["alive"] > identity["rank"]
            found.append(
                Finding(
                    "known mechanism not recovered",
                    f"{name} is an identity of rank {identity['rank']}: one mechanism. It came back as {identity['alive']} subcomponents, "
                    f"of which {identity['act_together']:.0%} act when any does and which lack {identity['missing']:.0%} of it",
                    "the settings do not recover what is known, so what they say about the rest cannot be trusted",
                    f"{'raise' if more else 'lower'} `losses.importance_minimality.coefficient`, or raise `steps`",
                )
            )
    return found


class WithIdentity(nn.Module):
    """A module followed by a fixed identity matrix: the same function, with one more mechanism, which is known."""

    def __init__(self, module: nn.Module, width: int) -> None:
        super().__init__()
        self.module = module
        self.identity = nn.Linear(width, width, bias=False)
        self.identity.weight = nn.Parameter(torch.eye(width), requires_grad=False)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.identity(self.module(*args, **kwargs))


def insert_identity(model: nn.Module, layer: str, width: int | None = None) -> nn.Module:
    """A copy of a model with a fixed identity matrix after `layer`; decompose `LAYER.identity` along with the rest.

    `width` is the size of the layer's output; it need not be given for layers with `out_features`.
    """
    changed = copy.deepcopy(model)
    try:
        module = changed.get_submodule(layer)
    except AttributeError:
        names = [name for name, _ in model.named_modules() if name]
        raise LayerError(
            f"There is no layer {layer!r} in {type(model).__name__}. Its layers: {', '.join(names)}."
        ) from None
    if not layer:
        raise LayerError("Name the layer after which the identity is to stand.")
    size = width if width is not None else getattr(module, "out_features", None)
    if not isinstance(size, int):
        raise LayerError(f"The output of {layer!r} ({type(module).__name__}) may have any width; pass width=.")
    with_identity = WithIdentity(module, size)
    like = next(module.parameters(), next(changed.parameters(), torch.zeros(())))
    with_identity.identity.to(device=like.device, dtype=like.dtype)
    with_identity.train(module.training)
    parent, _, leaf = layer.rpartition(".")
    setattr(changed.get_submodule(parent), leaf, with_identity)
    return changed
