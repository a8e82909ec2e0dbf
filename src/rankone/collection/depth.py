"""Depth: a stack of thirty identities, a relay through six layers, and two blocks on one stream."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankone.collection.base import KnownNetwork, Mechanisms, columns, linear, orthonormal, register
from rankone.data import WeightedBatch, generator_for


class Chain(nn.Module):
    """Layer after layer, with ReLU in between or nothing, times a number."""

    def __init__(self, matrices: list[Tensor], *, relu: bool, times: float = 1.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(linear(W) for W in matrices)
        self.relu, self.times = relu, times

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(F.relu(x) if self.relu and i else x)
        return self.times * x


class TwoBlocks(nn.Module):
    """Two MLP blocks that read one stream and add to it."""

    def __init__(self, matrices: list[Tensor]) -> None:
        super().__init__()
        self.read_1, self.write_1, self.read_2, self.write_2 = (linear(W) for W in matrices)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.write_1(F.relu(self.read_1(x)))
        return x + self.write_2(F.relu(self.read_2(x)))


def _identities(name: str) -> KnownNetwork:
    """Thirty identities, then the logits 10 x: each input has a part of its own in every layer."""
    n, depth = 20, 30
    layers = [f"layers.{i}" for i in range(depth)]

    def data(generator: torch.Generator) -> Tensor:
        on = torch.rand(256, n, generator=generator).argsort(1).argsort(1) < 2
        return on * torch.rand(256, n, generator=generator)

    def needed(x: Tensor) -> dict[str, Tensor]:
        return dict.fromkeys(layers, x != 0)

    return KnownNetwork(
        name,
        Chain([torch.eye(n)] * depth, relu=False, times=10.0).eval().requires_grad_(False),
        data,
        dict.fromkeys(layers, 30),
        dict.fromkeys(layers, Mechanisms(columns(torch.eye(n)))),
        0.75 * torch.eye(n),
        needed,
        divergence="kl",
    )


def _relay(name: str) -> KnownNetwork:
    """Ten features, each handed on from group to group of three neurons through six layers."""
    n, size, depth = 10, 3, 6
    generator = generator_for(0, f"collection/{name}")
    inputs = orthonormal(n, 16, generator)
    reads = [inputs, *[torch.zeros(n, n * size) for _ in range(depth - 1)]]
    writes = [torch.zeros(n, n * size) for _ in range(depth - 1)] + [orthonormal(n, 16, generator)]
    for i in range(n):
        for at in range(depth - 1):
            group = slice(i * size, (i + 1) * size)
            writes[at][i, group] = F.normalize(0.5 + torch.rand(size, generator=generator), dim=0)
            reads[at + 1][i, group] = F.normalize(0.5 + torch.rand(size, generator=generator), dim=0)
    parts = [torch.einsum("ko,ki->koi", w, r) for w, r in zip(writes, reads, strict=True)]
    layers = [f"layers.{i}" for i in range(depth)]

    def data(generator: torch.Generator) -> WeightedBatch:
        on = torch.rand(1024, n, generator=generator) < 0.08
        return WeightedBatch.merging_zero_rows((on * torch.rand(1024, n, generator=generator)) @ inputs)

    def needed(x: Tensor) -> dict[str, Tensor]:
        return dict.fromkeys(layers, (x @ inputs.T).abs() > 1e-5)

    return KnownNetwork(
        name,
        Chain([p.sum(0) for p in parts], relu=True).eval().requires_grad_(False),
        data,
        dict.fromkeys(layers, 25),
        {layer: Mechanisms(p) for layer, p in zip(layers, parts, strict=True)},
        0.75 * inputs,
        needed,
    )


def _two_blocks(name: str) -> KnownNetwork:
    """The first block serves features 0 to 5; the second features 6 to 11, and what the first has
    written for features 0 to 2."""
    n, d, size = 12, 40, 3
    generator = generator_for(0, f"collection/{name}")
    basis = orthonormal(27, d, generator)
    inputs, first_writes, second_writes = basis[:12], basis[12:18], basis[18:27]
    served = [range(6), [*range(6, 12), 0, 1, 2]]
    sources = [inputs[:6], torch.cat([inputs[6:], first_writes[:3]])]
    parts: list[Tensor] = []
    for source, target in zip(sources, (first_writes, second_writes), strict=True):
        reads, writes = [], []
        for i in range(len(source)):
            group = slice(i * size, (i + 1) * size)
            gain, back = torch.zeros(len(source) * size), torch.zeros(len(source) * size)
            gain[group] = 0.5 + torch.rand(size, generator=generator)
            back[group] = (0.5 + torch.rand(size, generator=generator)) / size
            reads.append(torch.outer(gain, source[i]))
            writes.append(torch.outer(target[i], back))
        parts += [torch.stack(reads), torch.stack(writes)]
    layers = ["read_1", "write_1", "read_2", "write_2"]

    def data(generator: torch.Generator) -> WeightedBatch:
        on = torch.rand(1024, n, generator=generator) < 0.08
        return WeightedBatch.merging_zero_rows((on * torch.rand(1024, n, generator=generator)) @ inputs)

    def needed(x: Tensor) -> dict[str, Tensor]:
        on = (x @ inputs.T).abs() > 1e-5
        return {layer: on[..., list(served[i // 2])] for i, layer in enumerate(layers)}

    return KnownNetwork(
        name,
        TwoBlocks([p.sum(0) for p in parts]).eval().requires_grad_(False),
        data,
        dict.fromkeys(layers, 25),
        {layer: Mechanisms(p) for layer, p in zip(layers, parts, strict=True)},
        0.75 * inputs,
        needed,
    )


register("depth_identities", "depth", "thirty identity matrices, then a softmax", _identities)
register("depth_relay", "depth", "ten features through six layers", _relay)
register("depth_two_blocks", "depth", "two blocks, the second also reads the first", _two_blocks)
