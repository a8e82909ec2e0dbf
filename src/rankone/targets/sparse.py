"""What the paper's toy targets have in common: sparse features as data, and how a network is trained
on them.

Each family is a `SparseTarget` that says what its network looks like and what it must compute.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from rankone.config import OptimizerSettings
from rankone.data import WeightedBatch, generator_for
from rankone.optim import learning_rate
from rankone.settings import Positive, Seed, Settings
from rankone.targets.base import TrainableTarget

Network = TypeVar("Network", bound=nn.Module)


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
        """A batch with its rows of zeros merged.

        Only what is on is drawn: the gaps between entries that are on are geometric.
        """
        places = self._places(generator)
        values = torch.rand(len(places), generator=generator).numpy()
        row, feature = np.divmod(places, self.n_features)
        begins = np.ones(len(row), bool)
        np.not_equal(row[1:], row[:-1], out=begins[1:])
        merged_row = np.cumsum(begins)
        on = int(merged_row[-1]) if len(row) else 0
        zeros = self.batch_size - on
        rows = np.zeros((on + bool(zeros), self.n_features), np.float32)
        rows[merged_row - 1, feature] = self.low + (self.high - self.low) * values
        weights = np.ones(len(rows), np.float32)
        if zeros:
            weights[-1] = zeros
        return WeightedBatch(torch.from_numpy(rows), torch.from_numpy(weights))

    def _places(self, generator: torch.Generator) -> Any:
        """Which entries of the batch are on, counted row by row, in order."""
        entries = self.batch_size * self.n_features
        if self.probability == 1:
            return np.arange(entries)
        expected = entries * self.probability
        at_once = int(expected + 6 * math.sqrt(expected) + 10)
        pieces = [np.array([-1])]
        while pieces[-1][-1] < entries:
            u = torch.rand(at_once, generator=generator, dtype=torch.float64).numpy()
            gaps = 1 + (np.log1p(-u) / math.log1p(-self.probability)).astype(np.int64)
            pieces.append(pieces[-1][-1] + np.cumsum(gaps))
        places = np.concatenate(pieces[1:])
        return places[: np.searchsorted(places, entries)]


class Recipe(Settings):
    """How a target is trained: AdamW."""

    steps: int = Field(default=10_000, ge=1, le=10**8)
    """Training steps."""
    batch_size: int = Field(default=1024, ge=1, le=10**7)
    """Datapoints per step."""
    lr: Positive = 5e-3
    """The largest learning rate."""
    weight_decay: float = Field(default=0.01, ge=0, le=1e6)
    """Decoupled weight decay."""
    seed: Seed = 0
    """The seed of the pinned weights. train-target tries this one first, then the next, until a
    network passes its check."""


class SparseTarget(TrainableTarget):
    """A network that computes something of sparse features."""

    n_features: int = Field(default=5, ge=1, le=10_000)
    """Features of the input."""
    feature_probability: float = Field(default=0.05, ge=1e-9, le=1)
    """How often each feature is on."""
    training: Recipe = Recipe()
    """How the target is trained."""

    lowest: ClassVar[float] = 0.0
    """A feature that is on is uniform between this and 1."""
    schedule: ClassVar[Literal["constant", "half_cosine"]] = "constant"
    """How the learning rate falls in the paper's recipe."""

    @property
    def first_seed(self) -> int:
        return self.training.seed

    def labels(self, x: Tensor) -> Tensor:
        """What the network is to compute: by default its input."""
        return x

    def data(self, batch_size: int) -> SparseFeatures:
        return SparseFeatures(self.n_features, self.feature_probability, batch_size, self.lowest)

    probe_in_words: ClassVar[str] = "Each input feature is switched on by itself, at 0.75"

    def probe(self) -> Float[Tensor, "features features"]:
        """One one-hot row per feature, at three quarters of its range."""
        return 0.75 * torch.eye(self.n_features)

    def fit(self, model: Network, seed: int) -> tuple[Network, float]:
        """Train what can be trained in a network by the recipe."""
        recipe = self.training
        rate = OptimizerSettings(lr=recipe.lr, schedule=self.schedule)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=recipe.lr, weight_decay=recipe.weight_decay, fused=True)
        sampler = self.data(recipe.batch_size)
        tail = max(1, recipe.steps // 100)
        losses: list[Tensor] = []
        for step in range(recipe.steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(rate, step, recipe.steps)
            x = sampler.dense(generator_for(seed, "target/data", step))
            loss = F.mse_loss(model(x), self.labels(x))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step >= recipe.steps - tail:
                losses.append(loss.detach())
        for p in model.parameters():
            p.grad = None
        return model.eval(), float(torch.stack(losses).mean())
