"""One judge for every network of the collection and for every method that decomposes it.

A method's result is any object with

- `importances(batch)`: layer -> `[*lead, C]`, numbers from 0 to 1;
- `components(layer)`: an object with factors `.U` `[d_out, C]` and `.V` `[C, d_in]`, or with whole
  matrices `.matrices` `[C, d_out, d_in]`.

A `rankone.Decomposition` is one. All of them are measured in the same way, through the clipped
importances and the factors alone.

**Errors** are counted on the probe, as the paper's check does. Each mechanism of rank r is given the
r parts that are most important where it is needed (whole matrices: one, of any rank). Then every
one of these is one error:

- *missing*: a needed mechanism whose part stays below 0.9. Parts of a mechanism of higher rank need
  not serve every input of it: each must reach 0.9 on one of its rows;
- *merged*: a part that belongs to one mechanism and is above 0.1 where only others are needed;
- *split*: a part that belongs to no mechanism and is above 0.1 only where one and the same
  mechanism is needed: that mechanism is spread over more parts than it has ranks;
- *stray*: any other entry above 0.1.

Where only k dense parts are known, missing are those of the k largest that are certain nowhere, and
stray is every entry of another part above 0.1. Whole matrices are not counted there: nothing is
known of how many there should be.

**Opposites.** Where a network writes (or reads) two features in opposite directions, the two together
are one matrix of rank one, a channel with a sign: one part may serve both, and costs no more. Nothing
tells two parts from one there, so the judge takes whichever reading leaves fewer errors.

**Cosine** is between the true matrix of a mechanism and the sum of the parts it was given, on the
inputs that occur. A network is **recovered** if there is no error and the mean cosine is at least 0.9.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rankone.collection.base import Dense, KnownNetwork, Mechanisms, inputs_tensor
from rankone.collection.opposites import joined, opposites
from rankone.data import Batch, batches, mean_over_data, row_weights
from rankone.errors import ConfigError, LayerError
from rankone.evaluate import HARD_BATCHES, SHARES
from rankone.losses import DIVERGENCES
from rankone.masks import MaskSettings
from rankone.measures import ATTACK_STEPS, Shares, attacked, deleted
from rankone.metrics import CERTAIN, IMPORTANT, dense_check, l0
from rankone.model import DecomposedModel
from rankone.step import Step

SIMILAR = 0.9
"""The least mean cosine of a recovered network."""
SUPPORT_BATCHES = 4
"""From how many batches the span of a layer's inputs is taken."""
SPANNED = 1e-4
"""A direction in which inputs are this small beside the largest does not occur."""
NEGLIGIBLE = 1e-3
"""A whole matrix that is this small beside the layer's is not there: a component may span several
layers and leave others alone."""


@runtime_checkable
class Found(Protocol):
    """What a method makes of a network."""

    def importances(self, batch: Any, /) -> Mapping[str, Tensor]: ...

    def components(self, layer: str, /) -> Any: ...


@dataclass(frozen=True)
class Parts:
    """The components of one layer as rank-one factors, and which component each belongs to."""

    U: Float[Tensor, "d_out parts"]
    V: Float[Tensor, "parts d_in"]
    owner: Tensor
    """Of each part, the component whose importance it has."""
    matrices: Float[Tensor, "C d_out d_in"] | None
    """The components, where they are given as whole matrices."""

    @classmethod
    def of(cls, components: Any, layer: str) -> "Parts":
        whole = getattr(components, "matrices", None)
        if isinstance(whole, Tensor):
            return cls._cut(whole.detach().cpu())
        U, V = getattr(components, "U", None), getattr(components, "V", None)
        if not isinstance(U, Tensor) or not isinstance(V, Tensor) or U.shape[1:] != V.shape[:1]:
            raise LayerError(
                f"components({layer!r}) has neither factors U [d_out, C] and V [C, d_in] nor "
                "matrices [C, d_out, d_in]."
            )
        U, V = U.detach().cpu(), V.detach().cpu()
        return cls(U, V, torch.arange(U.shape[1]), None)

    @classmethod
    def _cut(cls, whole: Float[Tensor, "C d_out d_in"]) -> "Parts":
        """Whole matrices, each cut into rank-one parts that share its importance."""
        left, sizes, right = torch.linalg.svd(whole, full_matrices=False)
        kept = sizes > 1e-6 * sizes.max().clamp(min=1e-30)
        kept[:, 0] = True  # so that there is something even of an empty one
        owner, which = kept.nonzero(as_tuple=True)
        U = (left * sizes.unsqueeze(1))[owner, :, which].T
        return cls(U.contiguous(), right[owner, which].contiguous(), owner, whole)

    @property
    def C(self) -> int:
        return len(self.U.T) if self.matrices is None else len(self.matrices)

    def sum_of(self, chosen: list[int]) -> Float[Tensor, "d_out d_in"]:
        if self.matrices is not None:
            return self.matrices[chosen].sum(0)
        return self.U[:, chosen] @ self.V[chosen]

    def cosines(self, truth: Mechanisms) -> Float[Tensor, "K C"]:
        """Between every mechanism and every component, on the inputs that occur."""
        true = truth.on_support(truth.matrices).flatten(1)
        if self.matrices is not None:
            parts = truth.on_support(self.matrices).flatten(1)
            return _unit(true) @ _unit(parts).T
        V = self.V if truth.support is None else self.V @ truth.support
        overlap = torch.einsum("koi,oc,ci->kc", truth.on_support(truth.matrices), self.U, V)
        sizes = self.U.norm(dim=0) * V.norm(dim=1)
        return overlap / (true.norm(dim=1).unsqueeze(1) * sizes).clamp(min=1e-30)


@dataclass(frozen=True)
class LayerJudgement:
    """What the judge says of one layer."""

    missing: int
    stray: int
    split: int
    merged: int
    cosine: float | None
    """None where the truth has no matrices."""
    l0: float = 0.0
    true_l0: float = 0.0

    @property
    def errors(self) -> int:
        return self.missing + self.stray + self.split + self.merged


@dataclass(frozen=True)
class Judgement:
    """What the judge says of one decomposition."""

    layers: dict[str, LayerJudgement]
    shares: dict[str, float | None] = field(default_factory=dict)
    """Divergences from the network as shares of what removing everything costs: of the `sum` of all
    parts, `importance`s as masks, `rounded` ones, after `deletion` of what is never important, and
    under `attack_20`."""

    @property
    def errors(self) -> int:
        return sum(layer.errors for layer in self.layers.values())

    @property
    def cosine(self) -> float | None:
        """The mean over the layers whose matrices are known."""
        known = [layer.cosine for layer in self.layers.values() if layer.cosine is not None]
        return sum(known) / len(known) if known else None

    @property
    def l0(self) -> float:
        return sum(layer.l0 for layer in self.layers.values())

    @property
    def true_l0(self) -> float:
        return sum(layer.true_l0 for layer in self.layers.values())

    @property
    def recovered(self) -> bool:
        return self.errors == 0 and (self.cosine is None or self.cosine >= SIMILAR)

    def total(self, kind: str) -> int:
        """How many errors of one kind: missing, stray, split, merged."""
        return sum(getattr(layer, kind) for layer in self.layers.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a file."""
        return {
            "recovered": self.recovered,
            "errors": self.errors,
            **{kind: self.total(kind) for kind in ("missing", "stray", "split", "merged")},
            "cosine": self.cosine,
            "l0": self.l0,
            "true_l0": self.true_l0,
            "shares": self.shares,
            "layers": {name: asdict(layer) | {"errors": layer.errors} for name, layer in self.layers.items()},
        }


def judge(network: KnownNetwork, found: Found, *, n_batches: int = 4, seed: int = 0) -> Judgement:
    """Compare what a method found with the truth, and measure how well it holds."""
    parts = {name: Parts.of(found.components(name), name) for name in network.truth}
    network = with_support(network)
    with torch.no_grad():
        probed = importances_of(found, network.probe, parts)
        layers = {
            name: _judge_layer(network, name, parts[name], probed[name].flatten(0, -2)) for name in parts
        }
        return _measure(network, found, parts, layers, probed, n_batches, seed)


@torch.no_grad()
def with_support(network: KnownNetwork) -> KnownNetwork:
    """The network with the support of every matrix filled in: the directions that its inputs span.

    What a part does to inputs that never occur is decided by nothing, so it is not compared. Neurons
    that always fire together are such a case: only what is read of them together is real.
    """
    wanted = [n for n, t in network.truth.items() if isinstance(t, Mechanisms) and t.support is None]
    if not wanted:
        return network
    model = DecomposedModel(network.model, dict.fromkeys(wanted, 1), importance="linear")
    inputs: dict[str, list[Tensor]] = {name: [] for name in wanted}
    for batch in islice(batches(network.data, 0, stream="evaluation"), SUPPORT_BATCHES):
        clean = model.clean(batch)
        for name in wanted:
            a = model.layer(name).vectors(clean.inputs[name])
            inputs[name].append(a.reshape(-1, a.shape[-1]).double())
    truth = dict(network.truth)
    for name in wanted:
        _, sizes, right = torch.linalg.svd(torch.cat(inputs[name]), full_matrices=False)
        spanned = right[sizes > SPANNED * sizes[0]]
        old = network.truth[name]
        assert isinstance(old, Mechanisms)
        truth[name] = replace(old, support=spanned.T.float().contiguous())
    return replace(network, truth=truth)


def importances_of(found: Found, batch: Batch, parts: Mapping[str, Parts]) -> dict[str, Tensor]:
    """Importances of all components, checked; those of whole matrices that are not there are 0."""
    given = found.importances(batch)
    result = {}
    for name, of in parts.items():
        g = given.get(name)
        if g is None or g.shape[-1] != of.C:
            shape = None if g is None else tuple(g.shape)
            raise ConfigError(
                f"importances() gives {shape} for layer {name!r}, which has {of.C} components; expected "
                f"[*lead, {of.C}]."
            )
        g = g.detach().cpu().float().clamp(0, 1)
        if of.matrices is not None:
            sizes = of.matrices.flatten(1).norm(dim=1)
            g = g * (sizes > NEGLIGIBLE * of.matrices.sum(0).norm())
        result[name] = g
    return result


def _judge_layer(
    network: KnownNetwork, name: str, parts: Parts, g: Float[Tensor, "rows C"]
) -> LayerJudgement:
    truth = network.truth[name]
    if isinstance(truth, Dense):
        if parts.matrices is not None:
            return LayerJudgement(0, 0, 0, 0, None)
        check = dense_check(g, truth.k)
        missing = int((g[:, check.order[: truth.k]].amax(0) < CERTAIN).sum()) + max(0, truth.k - parts.C)
        return LayerJudgement(missing, check.errors - missing, 0, 0, None)
    needed = network.needed_on_probe(name)
    best = _judge_mechanisms(truth, needed, parts, g)
    for pair in opposites(truth):
        together = _judge_mechanisms(*joined(truth, needed, pair), parts, g)
        if together.errors < best.errors:
            truth, needed = joined(truth, needed, pair)
            best = together
    return best


def _judge_mechanisms(
    truth: Mechanisms, needed: Bool[Tensor, "rows K"], parts: Parts, g: Float[Tensor, "rows C"]
) -> LayerJudgement:
    given = assign(g, needed, truth, parts)
    missing, stray, split, merged = count_errors(g, needed, given, _slots(truth, parts))
    cosines = []
    for k in needed.any(0).nonzero().flatten().tolist():
        true = truth.on_support(truth.matrices[k])
        own = truth.on_support(parts.sum_of(given[k]))
        cosines.append(float(torch.sum(_unit(true.flatten()) * _unit(own.flatten()))) if given[k] else 0.0)
    return LayerJudgement(missing, stray, split, merged, sum(cosines) / len(cosines))


def assign(
    g: Float[Tensor, "rows C"], needed: Bool[Tensor, "rows K"], truth: Mechanisms, parts: Parts
) -> list[list[int]]:
    """Which components each mechanism is given: together the most important where it is needed.

    Between components that are equally important, the one more like the mechanism is chosen.
    """
    from scipy.optimize import linear_sum_assignment

    score = (needed.float().T @ g) / needed.sum(0).clamp(min=1).unsqueeze(1)
    score = score + 1e-3 * parts.cosines(truth)
    seen = needed.any(0).tolist()
    slots = [k for k, n in enumerate(_slots(truth, parts)) if seen[k] for _ in range(n)]
    chosen_slots, chosen = linear_sum_assignment(score[slots].numpy().astype(np.float64), maximize=True)
    given: list[list[int]] = [[] for _ in truth.ranks]
    for slot, c in zip(chosen_slots.tolist(), chosen.tolist(), strict=True):
        given[slots[slot]].append(c)
    return given


def _slots(truth: Mechanisms, parts: Parts) -> tuple[int, ...]:
    """How many components each mechanism must have: one whole matrix, or as many parts as its rank."""
    return truth.ranks if parts.matrices is None else (1,) * len(truth.ranks)


def count_errors(
    g: Float[Tensor, "rows C"],
    needed: Bool[Tensor, "rows K"],
    given: list[list[int]],
    expected: tuple[int, ...],
) -> tuple[int, int, int, int]:
    """(missing, stray, split, merged), as the head of this file defines them.

    `expected` says how many components each mechanism must have.
    """
    missing = stray = split = merged = 0
    important = g > IMPORTANT
    for k, own in enumerate(given):
        on = needed[:, k]
        if not bool(on.any()):
            continue
        if expected[k] == 1:
            missing += int((g[on][:, own] < CERTAIN).sum()) if own else int(on.sum())
        else:
            missing += int((g[on][:, own].amax(0) < CERTAIN).sum()) + expected[k] - len(own)
        wrong = important[:, own] & ~on.unsqueeze(1)
        for_others = wrong & needed.any(1, keepdim=True)
        merged += int(for_others.sum())
        stray += int(wrong.sum()) - int(for_others.sum())
    taken = {c for own in given for c in own}
    for c in range(g.shape[1]):
        rows = important[:, c]
        if c in taken or not bool(rows.any()):
            continue
        of_one = bool(needed[rows].all(0).any())
        split += int(rows.sum()) if of_one else 0
        stray += 0 if of_one else int(rows.sum())
    return missing, stray, split, merged


class GivenStep(Step):
    """A step whose importances are not computed by the decomposed model but given."""

    def __init__(self, given: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> None:
        self.given = given
        super().__init__(*args, **kwargs)

    def importances(self) -> dict[str, Tensor]:
        return dict(self.given)


def _measure(
    network: KnownNetwork,
    found: Found,
    parts: Mapping[str, Parts],
    layers: dict[str, LayerJudgement],
    probed: Mapping[str, Tensor],
    n_batches: int,
    seed: int,
) -> Judgement:
    """L0 beside the true one, and the shares of what removing everything costs."""
    model = decomposed(network, parts)
    settings = getattr(getattr(found, "config", None), "masks", None)
    masks = MaskSettings(delta=settings.delta if isinstance(settings, MaskSettings) else False)
    shares = Shares()
    l0s, true_l0s = dict.fromkeys(parts, 0.0), dict.fromkeys(parts, 0.0)
    important = {name: (g.flatten(0, -2) > IMPORTANT).any(0) for name, g in probed.items()}
    drawn = list(islice(batches(network.data, seed, stream="evaluation"), n_batches))
    steps: list[GivenStep] = []
    for i, batch in enumerate(drawn):
        g = importances_of(found, batch, parts)
        weights = row_weights(batch)
        needed = network.needed(inputs_tensor(batch))
        for name, truth in network.truth.items():
            l0s[name] += l0(g[name], weights) / n_batches
            if isinstance(truth, Dense):
                true_l0s[name] += truth.k / n_batches
            else:
                on = (needed[name] * torch.tensor(truth.ranks)).sum(-1).double()
                true_l0s[name] += float(mean_over_data(on, weights)) / n_batches
            important[name] |= (g[name].flatten(0, -2) > IMPORTANT).any(0)
        expanded = {name: g[name][..., of.owner] for name, of in parts.items()}
        divergence = DIVERGENCES.get(network.divergence)
        steps.append(GivenStep(expanded, model, batch, {}, divergence, seed=seed, index=i, masks=masks))
    for step in steps:
        everything = float(step.distance(step.output(step.masks("zero", 0))))
        for name in ("sum", "importance", "rounded"):
            shares.add(name, step.distance(step.output(step.masks(SHARES[name], 0))), everything)
        alive = {name: important[name][of.owner] for name, of in parts.items()}
        shares.add("deletion", deleted(step, alive), everything)
        if step.index < HARD_BATCHES:
            ((_, harm),) = attacked(step, [ATTACK_STEPS])
            shares.add(f"attack_{ATTACK_STEPS}", harm, everything)
    judged = {
        name: LayerJudgement(of.missing, of.stray, of.split, of.merged, of.cosine, l0s[name], true_l0s[name])
        for name, of in layers.items()
    }
    return Judgement(judged, shares.relative())


def decomposed(network: KnownNetwork, parts: Mapping[str, Parts]) -> DecomposedModel:
    """The network with these factors, whoever found them."""
    model = DecomposedModel(
        network.model,
        {name: of.U.shape[1] for name, of in parts.items()},
        init="kaiming",
        importance="linear",
        output=network.output,
    )
    with torch.no_grad():
        for name, of in parts.items():
            model.layers[name].subcomponents.U.copy_(of.U)
            model.layers[name].subcomponents.V.copy_(of.V)
    return model


@dataclass(frozen=True)
class Factors:
    """Write and read vectors of one layer."""

    U: Float[Tensor, "d_out C"]
    V: Float[Tensor, "C d_in"]


@dataclass(frozen=True)
class TrueDecomposition:
    """The truth in the form of a method's result: its factors, and importances of exactly 0 or 1."""

    network: KnownNetwork

    def components(self, layer: str) -> Factors:
        truth = self.network.truth[layer]
        if isinstance(truth, Dense):
            W = DecomposedModel(self.network.model, {layer: 1}, importance="linear").layer(layer).matrix()
            matrices, ranks = W.unsqueeze(0), (truth.k,)
        else:
            matrices, ranks = truth.matrices, truth.ranks
        left, sizes, right = torch.linalg.svd(matrices.double(), full_matrices=False)
        U = torch.cat([(left * sizes.unsqueeze(1))[k, :, :r] for k, r in enumerate(ranks)], 1)
        V = torch.cat([right[k, :r] for k, r in enumerate(ranks)])
        return Factors(U.float(), V.float())

    def importances(self, batch: Batch) -> dict[str, Tensor]:
        inputs = inputs_tensor(batch)
        needed = self.network.needed(inputs)
        lead = next(iter(needed.values())).shape[:-1] if needed else inputs.shape[:-1]
        result = {}
        for name, truth in self.network.truth.items():
            if isinstance(truth, Dense):
                result[name] = torch.ones(*lead, truth.k)
            else:
                result[name] = needed[name].float().repeat_interleave(torch.tensor(truth.ranks), -1)
        return result


def true_decomposition(network: KnownNetwork) -> TrueDecomposition:
    """What a perfect method would find.

    Judging it shows how the right answer itself fares under masks and attack: where a method's own
    answer has lower shares at the same L0, it is the objective that is at fault and not the search.
    """
    return TrueDecomposition(network)


def _unit(x: Tensor) -> Tensor:
    return x / x.norm(dim=-1, keepdim=True).clamp(min=1e-30)
