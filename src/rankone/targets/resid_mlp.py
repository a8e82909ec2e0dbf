"""Residual MLPs: the networks of compressed computation and of cross-layer distributed representations.

Features enter a wide residual stream through a fixed random embedding, a few narrow MLP blocks read it and write to it, and
the transposed embedding reads the answer off (section 3.3 and 3.4 of the paper). The stream is far wider than what is ever
written to it, so its writers are `FactoredLinear`: it is never formed.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from rankone.factored import FactoredLinear


class ResidualBlock(nn.Module):
    """One MLP: reads the stream, ReLU, writes to the stream. No biases."""

    def __init__(self, d_stream: int, n_neurons: int) -> None:
        super().__init__()
        self.mlp_in = nn.Linear(d_stream, n_neurons, bias=False)
        self.mlp_out = FactoredLinear(n_neurons, d_stream)

    def forward(self, stream: Float[Tensor, "*lead stream"]) -> Float[Tensor, "*lead stream"]:
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
