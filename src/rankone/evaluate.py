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
from rankone.importance import clipped
from rankone.losses import DIVERGENCES
from rankone.masks import SOURCES
from rankone.metrics import IMPORTANT, Check, Pattern, l0, mmcs_ml2r, run_check
from rankone.step import Divergence, Step, faithfulness

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
            "l0": self.l0,
            "reconstruction": self.reconstruction,
            "faithfulness": self.faithfulness,
        }


def held_out(
    decomposition: Decomposition, data: Data, n_batches: int, seed: int, divergence: Divergence | None
) -> Iterator[Step]:
    """Plain steps on batches that training never drew, to measure on."""
    compare = divergence or decomposition.divergence or DIVERGENCES.get(decomposition.config.divergence)
    model = decomposition.model
    for i, batch in enumerate(islice(batches(data, seed, stream="evaluation"), n_batches)):
        yield Step(model, to_device(batch, model.device), {}, compare, seed=seed, index=i)


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
    totals = dict.fromkeys(SOURCES, 0.0)
    counts = dict.fromkeys(model.layers, 0.0)
    important = {name: torch.zeros(layer.C, dtype=torch.bool) for name, layer in model.layers.items()}
    for step in held_out(decomposition, data, n_batches, seed, divergence):
        for source in SOURCES:
            totals[source] += float(step.distance(step.output(step.masks(source, 0)))) / n_batches
        for name, raw in step.raw.items():
            counts[name] += l0(clipped(raw), step.weights) / n_batches
            important[name] |= (clipped(raw).flatten(0, -2) > IMPORTANT).any(0).cpu()
    probed: dict[str, Tensor] = {}
    if probe is not None:
        probed = {name: g.cpu() for name, g in decomposition.importances(probe).items()}
        for name, g in probed.items():
            important[name] |= (g > IMPORTANT).any(0)
    checks = {
        name: run_check(pattern, k, probed[name]) for name, (pattern, k) in (ground_truth or {}).items()
    }
    return Evaluation(
        reconstruction=totals,
        faithfulness=float(faithfulness(model)),
        l0=counts,
        alive={name: torch.nonzero(chosen).flatten().tolist() for name, chosen in important.items()},
        checks=checks,
        similarity=_similarity(decomposition, similarity_of, important) if similarity_of else None,
        probe_importances=probed,
    )


def _similarity(decomposition: Decomposition, layer: str, important: Mapping[str, Tensor]) -> Similarity:
    view = decomposition.components(layer)
    U, V, W = view.U.cpu(), view.V.cpu(), view.target.cpu()
    mmcs, ml2r = mmcs_ml2r(W, U, V, important[layer])
    mmcs_all, ml2r_all = mmcs_ml2r(W, U, V)
    return Similarity(layer, mmcs, ml2r, mmcs_all, ml2r_all)
