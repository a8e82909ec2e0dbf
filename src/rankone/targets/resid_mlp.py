"""Residual MLPs: the networks of compressed computation and of cross-layer distributed representations.

Features enter a wide residual stream through a fixed random embedding, a few narrow MLP blocks read
it and write to it, and the transposed embedding reads the answer off (section 3.3 and 3.4 of the
paper). The stream is far wider than what is ever written to it, so its writers are `FactoredLinear`:
it is never formed.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from rankone.adapters import Activation
from rankone.components import Factors
from rankone.data import generator_for
from rankone.decomposition import Decomposition
from rankone.fast.factored import FactoredLinear
from rankone.metrics import CERTAIN, IMPORTANT, Check, Pattern
from rankone.report import plots
from rankone.report.canvas import Picture
from rankone.targets.base import register_target
from rankone.targets.sparse import Recipe, SparseTarget

WELL_BELOW = 0.7
"""A good target's loss is at most this share of the naive solution's."""


class ResidualBlock(nn.Module):
    """One MLP: reads the stream, ReLU, writes to the stream. No biases."""

    def __init__(self, d_stream: int, n_neurons: int) -> None:
        super().__init__()
        self.mlp_in = nn.Linear(d_stream, n_neurons, bias=False)
        self.mlp_out = FactoredLinear(n_neurons, d_stream)

    def forward(self, stream: Activation) -> Activation:
        return self.mlp_out(F.relu(self.mlp_in(stream)))


class ResidualMLP(nn.Module):
    """y = W_Eᵀ (W_E x + what the blocks add), with unit-norm columns in the fixed embedding W_E."""

    def __init__(
        self, n_features: int, d_stream: int, n_blocks: int, n_neurons: int, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.embed = FactoredLinear(n_features, d_stream)
        columns = F.normalize(torch.randn(d_stream, n_features, generator=generator), dim=0)
        self.embed.weight = nn.Parameter(columns, requires_grad=False)
        self.blocks = nn.ModuleList(ResidualBlock(d_stream, n_neurons) for _ in range(n_blocks))
        with torch.no_grad():
            for p in self.blocks.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) / math.sqrt(p.shape[1]))

    def forward(self, x: Float[Tensor, "*lead features"]) -> Float[Tensor, "*lead features"]:
        stream = self.embed(x)
        for block in self.blocks:
            stream = stream + block(stream)
        return F.linear(stream, self.embed.weight.T)


@register_target("resid_mlp")
class ResidualTarget(SparseTarget):
    """A residual MLP that computes x + ReLU(x) of more features than it has neurons."""

    kind: str = "resid_mlp"
    """The family of networks."""
    n_features: int = Field(default=100, ge=1, le=10_000)
    """Features of the input."""
    d_stream: int = Field(default=1000, ge=1, le=100_000)
    """Width of the residual stream."""
    n_blocks: int = Field(default=1, ge=1, le=1000)
    """MLP blocks."""
    n_neurons: int = Field(default=50, ge=1, le=10_000)
    """Neurons in each of them."""
    feature_probability: float = Field(default=0.01, ge=1e-9, le=1)
    """How often each feature is on."""
    training: Recipe = Recipe(steps=1_000, batch_size=2048, lr=3e-3)
    """How the target is trained."""

    lowest: ClassVar[float] = -1.0
    schedule: ClassVar[Literal["constant", "half_cosine"]] = "half_cosine"

    def build(self, seed: int = 0) -> ResidualMLP:
        init = generator_for(seed, "target/init")
        return ResidualMLP(self.n_features, self.d_stream, self.n_blocks, self.n_neurons, init)

    def labels(self, x: Tensor) -> Tensor:
        return x + F.relu(x)

    def truth(self) -> dict[str, tuple[Pattern, int]]:
        """One subcomponent per feature going into each block, dense coming out."""
        patterns: dict[str, tuple[Pattern, int]] = {}
        for i in range(self.n_blocks):
            patterns[f"blocks.{i}.mlp_in"] = ("identity", self.n_features)
            patterns[f"blocks.{i}.mlp_out"] = ("dense", self.n_neurons)
        return patterns

    def train(self, seed: int) -> tuple[ResidualMLP, float]:
        return self.fit(self.build(seed), seed)

    @torch.no_grad()
    def check(self, model: nn.Module) -> tuple[bool, dict[str, float]]:
        """A network that computes in superposition is well below the loss of the naive solution, which
        gives each neuron to one feature and leaves the other features alone.

        Both are measured on the same data, with the same embedding, whose own interference both must
        bear.
        """
        assert isinstance(model, ResidualMLP)
        x = self.data(50_000).dense(generator_for(0, "target/check"))
        loss = float(F.mse_loss(model(x), self.labels(x)))
        naive = float(F.mse_loss(self._naive(model)(x), self.labels(x)))
        return loss / naive < WELL_BELOW, {
            "loss": loss,
            "naive_loss": naive,
            "share_of_naive_loss": loss / naive,
        }

    def details(self, result: Decomposition, checks: Mapping[str, Check]) -> dict[str, Any]:
        """Neuron contributions, and importances on negative inputs."""
        details: dict[str, Any] = {}
        contributions = self.contributions(result)
        if contributions is not None:
            details["neuron_contributions"] = contributions.to_dict()
        negative = result.importances(-self.probe())
        for name, check in checks.items():
            if check.pattern == "identity" and negative[name].shape[1] >= self.n_features:
                own = negative[name][torch.arange(self.n_features), check.order[: self.n_features]]
                details.setdefault("probe_at_minus_0.75", {})[name] = {
                    "own_certain": int((own >= CERTAIN).sum()),
                    "own_mean": float(own.mean()),
                    "stray": int((negative[name] > IMPORTANT).sum() - (own > IMPORTANT).sum()),
                }
        return details

    def figure_data(self, result: Decomposition) -> dict[str, Tensor]:
        contributions = self.contributions(result)
        if contributions is None:
            return {}
        return {IN_MODEL: contributions.model, IN_SUBCOMPONENTS: contributions.subcomponents}

    def figures(self, figure_data: Mapping[str, Tensor], details: Mapping[str, Any]) -> list[Picture]:
        """Neuron contributions: the first ten features as bars, and all of them as a scatter."""
        if "neuron_contributions" not in details or not {IN_MODEL, IN_SUBCOMPONENTS} <= set(figure_data):
            return []
        model, single = figure_data[IN_MODEL], figure_data[IN_SUBCOMPONENTS]
        match = details["neuron_contributions"]
        note = (
            f"correlation {match['correlation']:.4f}\nslope {match['slope']:.3f}\n"
            f"largest deviation {match['largest_deviation']:.3f}"
        )
        pairs = zip(model.chunk(self.n_blocks, 1), single.chunk(self.n_blocks, 1), strict=True)
        legend = [f"block {i}, slope {_match(x, y)['slope']:.3f}" for i, (x, y) in enumerate(pairs)]
        return [
            Picture(
                "contributions",
                "Neuron contributions",
                "How much each neuron contributes to computing the first ten features: in the target, "
                "and in the subcomponent of W_in that contributes most. Where the decomposition is "
                "right, the two look the same.",
                plots.contribution_bars(model, single, self.n_blocks),
            ),
            Picture(
                "scatter",
                "All neuron contributions",
                "The same of all features and neurons; a perfect match is the diagonal.",
                plots.contribution_scatter(model, single, legend, note),
            ),
        ]

    def contributions(self, result: Decomposition) -> "Contributions | None":
        """Neuron contributions, if every matrix they are about was decomposed."""
        model = result.model.target
        assert isinstance(model, ResidualMLP)
        if not set(self.truth()) <= set(result.layers):
            return None
        views = {name: result.components(name) for name in self.truth()}
        return neuron_contributions(model, {name: (view.U, view.V) for name, view in views.items()})

    def _naive(self, model: ResidualMLP) -> ResidualMLP:
        """The same embedding, with one neuron for each feature until there are no more neurons; each
        reads and writes its feature and no other."""
        naive = self.build()
        W_E = model.embed.weight
        dual = torch.linalg.pinv(W_E)  # row f is 1 on feature f and 0 on every other
        naive.embed.weight.copy_(W_E)
        first = 0
        for block in naive.blocks:
            assert isinstance(block, ResidualBlock)
            for p in block.parameters():
                p.zero_()
            own = dual[first : first + self.n_neurons]
            block.mlp_in.weight[: len(own)] = own
            block.mlp_out.weight[:, : len(own)] = own.T
            first += self.n_neurons
        return naive


IN_MODEL = "contributions/model"
IN_SUBCOMPONENTS = "contributions/subcomponents"


@dataclass(frozen=True)
class Contributions:
    """How much each neuron contributes to computing each feature: in the target, and in single
    subcomponents of W_in.

    Neurons of all blocks stand side by side, in the order of the blocks.
    """

    model: Float[Tensor, "features neurons"]
    subcomponents: Float[Tensor, "features neurons"]
    """Of the one subcomponent of each block that contributes most to the feature."""
    maxima: Float[Tensor, "features neurons"]
    """The largest of all subcomponents, neuron by neuron. It hides negative contributions: even a
    perfect decomposition deviates by them."""

    def to_dict(self) -> dict[str, Any]:
        """How well single subcomponents match the target, and the same of the maxima."""
        return _match(self.model, self.subcomponents) | {"of_maxima": _match(self.model, self.maxima)}


def _match(model: Tensor, single: Tensor) -> dict[str, float]:
    """Correlation, slope and offset of the regression of one on the other, largest deviation, and what
    it is to be compared with."""
    x, y = (t.flatten().double().numpy() for t in (model, single))
    slope, offset = np.polyfit(x, y, 1)
    return {
        "correlation": float(np.corrcoef(x, y)[0, 1]),
        "slope": float(slope),
        "offset": float(offset),
        "largest_deviation": float(np.abs(x - y).max()),
        "largest_contribution": float(np.abs(x).max()),
    }


@torch.no_grad()
def neuron_contributions(model: ResidualMLP, factors: Mapping[str, Factors]) -> Contributions:
    """The paper's two equations of neuron contributions, for all features.

    `factors` maps layer names to (U, V). The paper's maximum over subcomponents can be read in two
    ways, of single numbers or of whole subcomponents; both are here.
    """
    W_E = model.embed.weight
    in_model, in_single, largest = [], [], []
    for i, block in enumerate(model.blocks):
        assert isinstance(block, ResidualBlock)
        read_off = W_E.T @ block.mlp_out.weight  # [features, neurons]
        in_model.append(read_off * (block.mlp_in.weight @ W_E).T)
        U_in, V_in = factors[f"blocks.{i}.mlp_in"]
        U_out, V_out = factors[f"blocks.{i}.mlp_out"]
        read_off = W_E.T @ U_out @ V_out
        single = torch.einsum("fn,nc,cf->fcn", read_off, U_in, V_in @ W_E)
        chosen = single.sum(-1).argmax(1)
        in_single.append(single[torch.arange(len(chosen)), chosen])
        largest.append(single.amax(1))
    return Contributions(torch.cat(in_model, 1), torch.cat(in_single, 1), torch.cat(largest, 1))
