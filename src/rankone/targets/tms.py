"""Toy Models of Superposition: the networks, their data, how they are trained, and what a good one looks like.

x̂ = ReLU(Wᵀ (I) W x + b), with more features than hidden dimensions (section 3.1 of the paper), optionally with fixed
identity matrices between W and Wᵀ (section 3.2).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from rankone.adapters import LinearAdapter, register_adapter
from rankone.config import Settings
from rankone.data import WeightedBatch, generator_for
from rankone.decomposition import Decomposition
from rankone.metrics import Check, Pattern


class TransposedLinear(nn.Module):
    """A linear layer whose weight is the transpose of another layer's: one parameter, two uses."""

    _source: nn.Linear

    def __init__(self, source: nn.Linear) -> None:
        super().__init__()
        # Not registered: the weight belongs to the source and is saved and trained once.
        object.__setattr__(self, "_source", source)
        self.bias = nn.Parameter(torch.zeros(source.in_features))

    @property
    def weight(self) -> Float[Tensor, "features hidden"]:
        return self._source.weight.T

    def forward(self, x: Float[Tensor, "*lead hidden"]) -> Float[Tensor, "*lead features"]:
        return F.linear(x, self.weight, self.bias)


register_adapter(TransposedLinear)(LinearAdapter)


class TMS(nn.Module):
    """Features squeezed through a bottleneck and read out again with the same matrix."""

    def __init__(self, n_features: int, n_hidden: int, n_identity: int = 0) -> None:
        super().__init__()
        self.embed = nn.Linear(n_features, n_hidden, bias=False)
        self.hidden = nn.ModuleList(nn.Linear(n_hidden, n_hidden, bias=False) for _ in range(n_identity))
        for layer in self.hidden:
            layer.weight = nn.Parameter(torch.eye(n_hidden), requires_grad=False)
        self.unembed = TransposedLinear(self.embed)

    def forward(self, x: Float[Tensor, "*lead features"]) -> Float[Tensor, "*lead features"]:
        hidden = self.embed(x)
        for layer in self.hidden:
            hidden = layer(hidden)
        return F.relu(self.unembed(hidden))


@dataclass(frozen=True)
class SparseFeatures:
    """A sampler: each feature is on with some probability, and then uniform between `low` and `high`."""

    n_features: int
    probability: float
    batch_size: int
    low: float = 0.0
    high: float = 1.0

    def dense(self, generator: torch.Generator) -> Float[Tensor, "batch features"]:
        """A whole batch, entry by entry."""
        on = torch.rand(self.batch_size, self.n_features, generator=generator) < self.probability
        values = torch.rand(self.batch_size, self.n_features, generator=generator)
        return on * (self.low + (self.high - self.low) * values)

    def __call__(self, generator: torch.Generator) -> WeightedBatch:
        """A batch with its rows of zeros merged. Only what is on is drawn: the gaps between entries that are on are geometric."""
        places = self._places(generator)
        values = torch.rand(len(places), generator=generator).numpy()
        row, feature = np.divmod(places, self.n_features)
        begins = np.ones(len(row), bool)
        np.not_equal(row[1:], row[:-1], out=begins[1:])
        kept_row = np.cumsum(begins)
        on = int(kept_row[-1]) if len(row) else 0
        zeros = self.batch_size - on
        kept = np.zeros((on + bool(zeros), self.n_features), np.float32)
        kept[kept_row - 1, feature] = self.low + (self.high - self.low) * values
        weights = np.ones(len(kept), np.float32)
        if zeros:
            weights[-1] = zeros
        return WeightedBatch(torch.from_numpy(kept), torch.from_numpy(weights))

    def _places(self, generator: torch.Generator) -> Any:
        """Which entries of the batch are on, counted row by row, in order."""
        entries = self.batch_size * self.n_features
        if self.probability == 1:
            return np.arange(entries)
        expected = entries * self.probability
        at_once = int(expected + 6 * math.sqrt(expected) + 10)
        found = [np.array([-1])]
        while found[-1][-1] < entries:
            u = torch.rand(at_once, generator=generator, dtype=torch.float64).numpy()
            gaps = 1 + (np.log1p(-u) / math.log1p(-self.probability)).astype(np.int64)
            found.append(found[-1][-1] + np.cumsum(gaps))
        places = np.concatenate(found[1:])
        return places[: np.searchsorted(places, entries)]


class TMSTraining(Settings):
    """The recipe for the target: AdamW with a constant learning rate."""

    steps: int = Field(default=10_000, ge=1)
    """Training steps."""
    batch_size: int = Field(default=1024, ge=1)
    """Datapoints per step."""
    lr: float = Field(default=5e-3, gt=0)
    """Learning rate."""
    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay."""
    seed: int = Field(default=0, ge=0)
    """The seed of the pinned weights. train-target tries this one first, then the next, until a target passes its check."""


class TMSTarget(Settings):
    """A Toy Model of Superposition."""

    kind: Literal["tms"] = "tms"
    """The family of models."""
    n_features: int = Field(default=5, ge=1)
    """Features of the input."""
    n_hidden: int = Field(default=2, ge=1)
    """Hidden dimensions."""
    n_identity: int = Field(default=0, ge=0)
    """Fixed identity matrices between W and its transpose."""
    feature_probability: float = Field(default=0.05, gt=0, le=1)
    """How often each feature is on."""
    training: TMSTraining = TMSTraining()
    """How the target is trained."""
    weights: str = ""
    """The trained weights: the name of a pinned target, or the path of a file written by train-target."""
    sha256: str | None = None
    """The fingerprint that the loaded weights must have; null to take them as they are."""

    similarity_of: ClassVar[str | None] = "embed"
    """The matrix whose columns MMCS and ML2R are about."""

    def build(self) -> TMS:
        return TMS(self.n_features, self.n_hidden, self.n_identity)

    def sampler(self, batch_size: int) -> SparseFeatures:
        return SparseFeatures(self.n_features, self.feature_probability, batch_size)

    def probe(self) -> Float[Tensor, "features features"]:
        """One one-hot row per feature, at three quarters of its range."""
        return 0.75 * torch.eye(self.n_features)

    def ground_truth(self) -> dict[str, tuple[Pattern, int]]:
        """The pattern of importances that each matrix must show: W one subcomponent per feature, I dense."""
        patterns: dict[str, tuple[Pattern, int]] = {"embed": ("identity", self.n_features)}
        patterns |= {f"hidden.{i}": ("dense", self.n_hidden) for i in range(self.n_identity)}
        patterns["unembed"] = ("identity", self.n_features)
        return patterns

    def train(self, seed: int) -> tuple[TMS, float]:
        """Train a fresh target; also return its mean loss over the last hundredth of training."""
        model = self.build()
        init = generator_for(seed, "target/init")
        with torch.no_grad():
            bound = math.sqrt(2 / (self.n_features + self.n_hidden))
            model.embed.weight.copy_(bound * torch.randn(model.embed.weight.shape, generator=init))
        recipe = self.training
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=recipe.lr, weight_decay=recipe.weight_decay, fused=True)
        sampler = self.sampler(recipe.batch_size)
        tail = max(1, recipe.steps // 100)
        losses: list[Tensor] = []
        for step in range(recipe.steps):
            x = sampler.dense(generator_for(seed, "target/data", step))
            loss = F.mse_loss(model(x), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step >= recipe.steps - tail:
                losses.append(loss.detach())
        for p in model.parameters():
            p.grad = None
        return model.eval(), float(torch.stack(losses).mean())

    def details(self, decomposition: Decomposition, checks: Mapping[str, Check]) -> dict[str, Any]:
        """MMCS and ML2R say it all here."""
        return {}

    @torch.no_grad()
    def check(self, model: nn.Module) -> tuple[bool, dict[str, float]]:
        """Whether a trained network is a good target, and the numbers that decide it.

        Every feature must come back from its own one-hot input well above whatever else comes back with it; a two-dimensional
        model must also be a regular polygon.
        """
        assert isinstance(model, TMS)
        W = model.embed.weight
        out = model(torch.eye(self.n_features))
        own = out.diagonal()
        other = (out - torch.diag(own)).amax(dim=1)
        norms = W.norm(dim=0)
        found = {
            "smallest_own_response": float(own.min()),
            "largest_other_response": float(other.max()),
            "smallest_column_norm": float(norms.min()),
            "largest_column_norm": float(norms.max()),
        }
        good = (
            found["smallest_own_response"] > 0.5
            and found["largest_other_response"] < found["smallest_own_response"] / 2
        )
        if self.n_hidden == 2:
            angles = torch.atan2(W[1], W[0]).sort().values.tolist()
            gaps = [math.degrees(b - a) for a, b in pairwise([*angles, angles[0] + 2 * math.pi])]
            regular = 360 / self.n_features
            found["largest_angle_error_degrees"] = max(abs(gap - regular) for gap in gaps)
            good = good and found["largest_angle_error_degrees"] < 3
        return good, found
