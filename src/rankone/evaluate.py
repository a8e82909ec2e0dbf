"""How good is a decomposition? Reconstruction under every kind of mask, sparsity, and recovery
where the truth is known.

All numbers are of data that training never drew (its own random stream), and are the same every time.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from rankone.data import Data, batches, to_device
from rankone.decomposition import Decomposition
from rankone.errors import ConfigError
from rankone.importance import clipped
from rankone.losses import DIVERGENCES
from rankone.masks import SOURCES
from rankone.measures import ATTACK_STEPS, Shares, attacked, deleted, union_masks, well_tempered
from rankone.metrics import IMPORTANT, Check, Pattern, l0, mmcs_ml2r, run_check
from rankone.step import Divergence, Step, faithfulness

SHARES = {"sum": "ones", "stochastic": "stochastic", "importance": "importance", "rounded": "rounded"}
"""What a share of removing everything is called -> the mask source that it is of."""
HARD_BATCHES = 2
"""On how many batches attack, union and well-temperedness are measured: they cost a hundred passes."""

GroundTruth = Mapping[str, tuple[Pattern, int]]


@dataclass(frozen=True)
class Similarity:
    """How the subcomponents of one matrix compare with its columns (equations 9 and 10 of the paper)."""

    layer: str
    mmcs: float
    ml2r: float
    mmcs_all: float
    """Over all subcomponents, dead ones included: near 1 by chance when there are many in few
    dimensions."""
    ml2r_all: float


@dataclass(frozen=True)
class Evaluation:
    """Everything measured on a finished decomposition."""

    reconstruction: dict[str, float]
    """Mask source -> divergence from the target with all layers masked that way."""
    relative: dict[str, float | None]
    """Divergences from the target as shares of what removing everything costs: of the `sum` of all
    subcomponents, `stochastic` masks, `importance`s as masks, `rounded` ones, under `attack_20`, joined
    with other datapoints' importances (`union_16`), after `deletion` of what is never important."""
    well_tempered: float | None
    """How often the more important of two subcomponents is missed more; 0.5 is chance."""
    faithfulness: float
    l0: dict[str, float]
    """Layer -> mean number of important subcomponents per datapoint."""
    alive: dict[str, list[int]]
    """Layer -> subcomponents that are important on some datapoint or probe."""
    checks: dict[str, Check]
    similarity: Similarity | None
    probe_importances: dict[str, Tensor]

    @property
    def recovered(self) -> bool | None:
        """Whether every known mechanism was found; None where no ground truth is known."""
        return all(check.recovered for check in self.checks.values()) if self.checks else None

    def to_dict(self) -> dict[str, Any]:
        """The numbers, as plain values for summary.json."""
        similar = asdict(self.similarity) if self.similarity else {}
        return {
            "recovered": self.recovered,
            "checks": {
                name: {"pattern": c.pattern, "expected": c.expected, "errors": c.errors}
                for name, c in self.checks.items()
            },
            **{key: similar.get(key) for key in ("mmcs", "ml2r", "mmcs_all", "ml2r_all")},
            "similarity_of": similar.get("layer"),
            "n_alive": {name: len(indices) for name, indices in self.alive.items()},
            "alive": self.alive,
            "l0": self.l0,
            "reconstruction": self.reconstruction,
            "relative": self.relative,
            "well_tempered": self.well_tempered,
            "faithfulness": self.faithfulness,
        }


def held_out(
    decomposition: Decomposition, data: Data, n_batches: int, seed: int, divergence: Divergence | None
) -> Iterator[Step]:
    """Plain steps on batches that training never drew, to measure on."""
    compare = divergence or decomposition.divergence or DIVERGENCES.get(decomposition.config.divergence)
    model, masks = decomposition.model, decomposition.config.masks
    for i, batch in enumerate(islice(batches(data, seed, stream="evaluation"), n_batches)):
        yield Step(model, to_device(batch, model.device), {}, compare, seed=seed, index=i, masks=masks)


@torch.no_grad()
def evaluate(
    decomposition: Decomposition,
    data: Data,
    *,
    probe: Tensor | None = None,
    ground_truth: GroundTruth | None = None,
    similarity_of: str | None = None,
    divergence: Divergence | None = None,
    n_batches: int = 8,
    seed: int = 0,
) -> Evaluation:
    """Measure a decomposition on `n_batches` fresh batches, and on a probe where the truth is known."""
    model = decomposition.model
    sources = [source for source in SOURCES if source != "adversarial"]
    totals = dict.fromkeys(sources, 0.0)
    shares = Shares()
    counts = dict.fromkeys(model.layers, 0.0)
    important = {name: torch.zeros(layer.C, dtype=torch.bool) for name, layer in model.layers.items()}
    right = pairs = 0.0
    tempered = True
    for step in held_out(decomposition, data, n_batches, seed, divergence):
        found = {source: float(step.distance(step.output(step.masks(source, 0)))) for source in sources}
        totals = {source: totals[source] + value / n_batches for source, value in found.items()}
        for name, source in SHARES.items():
            shares.add(name, found[source], found["zero"])
        if step.index < HARD_BATCHES:
            for name, value in _stress(step):
                shares.add(name, value, found["zero"])
            counted = well_tempered(step) if tempered else None
            tempered = counted is not None
            right, pairs = (right + counted[0], pairs + counted[1]) if counted else (right, pairs)
        for name, raw in step.raw.items():
            counts[name] += l0(clipped(raw), step.weights_of(name)) / n_batches
            on = clipped(raw).flatten(0, -2)[step.each_weight(name) > 0] > IMPORTANT
            important[name] |= on.any(0).cpu()
    probed: dict[str, Tensor] = {}
    if probe is not None:
        probed = {name: g.cpu() for name, g in decomposition.importances(probe).items()}
        for name, g in probed.items():
            important[name] |= (g > IMPORTANT).any(0)
    for step in held_out(decomposition, data, n_batches, seed, divergence):
        everything = step.distance(step.output(step.masks("zero", 0)))
        shares.add("deletion", deleted(step, important), float(everything))
    checks = {
        name: run_check(pattern, k, probed[name]) for name, (pattern, k) in (ground_truth or {}).items()
    }
    return Evaluation(
        reconstruction=totals,
        relative=shares.relative(),
        well_tempered=right / pairs if tempered and pairs else None,
        faithfulness=float(faithfulness(model)),
        l0=counts,
        alive={name: torch.nonzero(chosen).flatten().tolist() for name, chosen in important.items()},
        checks=checks,
        similarity=_similarity(decomposition, similarity_of, important) if similarity_of else None,
        probe_importances=probed,
    )


def _stress(step: Step) -> Iterator[tuple[str, float]]:
    """What an adversary and other datapoints' importances do to one batch."""
    with_delta = step.mask_settings.delta
    for delta in (True, False):
        (_, harm), *_ = attacked(step, [ATTACK_STEPS], delta=delta)
        yield f"attack_{ATTACK_STEPS}_{'with' if delta else 'without'}_delta", harm
        if delta == with_delta:
            yield f"attack_{ATTACK_STEPS}", harm
    for size, masks in union_masks(step):
        yield f"union_{size}", float(step.distance(step.output(masks)))


@torch.no_grad()
def attack_ladder(
    decomposition: Decomposition,
    data: Data,
    steps: int = 320,
    *,
    divergence: Divergence | None = None,
    n_batches: int = 2,
    seed: int = 0,
) -> dict[str, dict[int, float | None]]:
    """Divergence under attack after 20, 40, 80, ... steps, relative to removing everything, with and
    without the delta component to play with."""
    if steps < 1:
        raise ConfigError(f"An attack of {steps} steps does nothing; give 1 or more, such as 20 or 320.")
    rungs = [*(n for n in (ATTACK_STEPS * 2**i for i in range(20)) if n < steps), steps]
    ladders: dict[str, dict[int, float | None]] = {}
    for delta in (True, False):
        shares = Shares()
        for step in held_out(decomposition, data, n_batches, seed, divergence):
            everything = float(step.distance(step.output(step.masks("zero", 0))))
            for rung, harm in attacked(step, rungs, delta=delta):
                shares.add(str(rung), harm, everything)
        ladders["with_delta" if delta else "without_delta"] = {
            int(rung): share for rung, share in shares.relative().items()
        }
    return ladders


def _similarity(decomposition: Decomposition, layer: str, important: Mapping[str, Tensor]) -> Similarity:
    view = decomposition.components(layer)
    U, V, W = view.U.cpu(), view.V.cpu(), view.target.cpu()
    mmcs, ml2r = mmcs_ml2r(W, U, V, important[layer])
    mmcs_all, ml2r_all = mmcs_ml2r(W, U, V)
    return Similarity(layer, mmcs, ml2r, mmcs_all, ml2r_all)
