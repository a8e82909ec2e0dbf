"""Toy Models of Superposition: the networks, how they start, and what a good one looks like.

x̂ = ReLU(Wᵀ (I) W x + b), with more features than hidden dimensions (section 3.1 of the paper),
optionally with fixed identity matrices between W and Wᵀ (section 3.2).
"""

import math
from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from rankone.adapters import LinearAdapter, register_adapter
from rankone.data import generator_for
from rankone.metrics import Pattern
from rankone.targets.base import register_target
from rankone.targets.sparse import SparseTarget


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


@register_target("tms")
class TMSTarget(SparseTarget):
    """A Toy Model of Superposition."""

    kind: str = "tms"
    """The family of networks."""
    n_hidden: int = Field(default=2, ge=1, le=10_000)
    """Hidden dimensions."""
    n_identity: int = Field(default=0, ge=0, le=100)
    """Fixed identity matrices between W and its transpose."""
    similarity_of: ClassVar[str | None] = "embed"

    def build(self) -> TMS:
        return TMS(self.n_features, self.n_hidden, self.n_identity)

    def truth(self) -> dict[str, tuple[Pattern, int]]:
        """W has one subcomponent per feature; I is dense."""
        patterns: dict[str, tuple[Pattern, int]] = {"embed": ("identity", self.n_features)}
        patterns |= {f"hidden.{i}": ("dense", self.n_hidden) for i in range(self.n_identity)}
        patterns["unembed"] = ("identity", self.n_features)
        return patterns

    def train(self, seed: int) -> tuple[TMS, float]:
        model = self.build()
        init = generator_for(seed, "target/init")
        with torch.no_grad():
            bound = math.sqrt(2 / (self.n_features + self.n_hidden))
            model.embed.weight.copy_(bound * torch.randn(model.embed.weight.shape, generator=init))
        return self.fit(model, seed)

    @torch.no_grad()
    def check(self, model: nn.Module) -> tuple[bool, dict[str, float]]:
        """Every feature must come back from its own one-hot input well above whatever else comes back
        with it; a two-dimensional model must also be a regular polygon."""
        assert isinstance(model, TMS)
        W = model.embed.weight
        out = model(torch.eye(self.n_features))
        own = out.diagonal()
        other = (out - torch.diag(own)).amax(dim=1)
        norms = W.norm(dim=0)
        numbers = {
            "smallest_own_response": float(own.min()),
            "largest_other_response": float(other.max()),
            "smallest_column_norm": float(norms.min()),
            "largest_column_norm": float(norms.max()),
        }
        least = numbers["smallest_own_response"]
        good = least > 0.5 and numbers["largest_other_response"] < least / 2
        if self.n_hidden == 2:
            angles = torch.atan2(W[1], W[0]).sort().values.tolist()
            gaps = [math.degrees(b - a) for a, b in pairwise([*angles, angles[0] + 2 * math.pi])]
            regular = 360 / self.n_features
            numbers["largest_angle_error_degrees"] = max(abs(gap - regular) for gap in gaps)
            good = good and numbers["largest_angle_error_degrees"] < 3
        return good, numbers
