"""Full-rank matrices that are always on: dense Gaussian inputs through random two-layer networks.

There is nothing sparse to find. A right decomposition has exactly as many parts as each matrix has
rank, nearly always on, and uses nothing else. There are many more neurons than inputs, so that a
part for each neuron, off while the neuron is, would need more parts at a time than the rank.
"""

import torch
from torch import Tensor

from rankone.collection.base import Dense, KnownNetwork, register
from rankone.collection.blocks import TwoLayers
from rankone.data import generator_for


def _build(name: str, d: int, neurons: int, activation: str) -> KnownNetwork:
    generator = generator_for(0, f"collection/{name}")
    W_read = torch.randn(neurons, d, generator=generator) / d**0.5
    W_write = torch.randn(d, neurons, generator=generator) / neurons**0.5

    def data(generator: torch.Generator) -> Tensor:
        return torch.randn(512, d, generator=generator)

    model = TwoLayers(W_read, W_write, activation).eval().requires_grad_(False)
    probe = torch.randn(64, d, generator=generator)
    layers = {"read": 3 * d, "write": 3 * d}
    return KnownNetwork(name, model, data, layers, dict.fromkeys(layers, Dense(d)), probe, lambda x: {})


register("dense_relu", "dense", "6 Gaussian inputs, ReLU", lambda name: _build(name, 6, 20, "relu"))
register("dense_gelu", "dense", "10 Gaussian inputs, GELU", lambda name: _build(name, 10, 32, "gelu"))
