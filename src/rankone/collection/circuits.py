"""Boolean circuits: ANDs, ORs and XORs of pairs of bits.

The first matrix reads the two bits of a gate, the second writes its answer; each gate has a part in
both. The part of an AND is needed only where both of its bits are on: with one bit its neuron stays
below its threshold whatever becomes of the part. Hand-built circuits answer in random directions.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankone.collection.base import (
    KnownNetwork,
    Mechanisms,
    descend,
    initialise,
    linear,
    orthonormal,
    register,
    rows,
    trained,
)
from rankone.data import WeightedBatch, generator_for


class Circuit(nn.Module):
    """write(ReLU(read x + b))."""

    def __init__(self, W_read: Tensor, bias: Tensor, W_write: Tensor) -> None:
        super().__init__()
        self.read, self.write = linear(W_read, bias), linear(W_write)

    def forward(self, x: Tensor) -> Tensor:
        return self.write(F.relu(self.read(x)))


def _bits(n: int, p: float, count: int = 2048) -> "BitSampler":
    return BitSampler(n, p, count)


class BitSampler:
    """Bits that are on with a probability, as numbers."""

    def __init__(self, n: int, p: float, count: int) -> None:
        self.n, self.p, self.count = n, p, count

    def dense(self, generator: torch.Generator) -> Tensor:
        return (torch.rand(self.count, self.n, generator=generator) < self.p).float()

    def __call__(self, generator: torch.Generator) -> WeightedBatch:
        return WeightedBatch.merging_zero_rows(self.dense(generator))


def _overlapping_pairs(n: int, gates: int, generator: torch.Generator) -> Tensor:
    """Different pairs of bits; a bit may belong to several."""
    pairs = torch.combinations(torch.arange(n))
    return pairs[torch.randperm(len(pairs), generator=generator)[:gates]]


def _probe(pairs: Tensor, n: int) -> Tensor:
    """For each gate both of its bits, then each bit alone."""
    both = torch.zeros(len(pairs), n).scatter(1, pairs, 1.0)
    return torch.cat([both, torch.eye(n)[pairs.flatten().unique()]])


def _built(name: str, gate: str) -> KnownNetwork:
    n, generator = 20, generator_for(0, f"collection/{name}")
    pairs = _overlapping_pairs(n, 14, generator)
    if gate != "and":  # with a shared bit, one OR could be told from another only by its neurons
        pairs = torch.randperm(n, generator=generator).reshape(-1, 2)
    gates = len(pairs)
    reads = torch.zeros(gates, n).scatter(1, pairs, 1.0)
    answers = orthonormal(gates, 20, generator)
    # Neurons of a gate: their thresholds, and what each adds to the answer.
    thresholds, weights = {
        "and": ([1.5], [2.0]),
        "or": ([0.0, 1.0], [1.0, -1.0]),
        "xor": ([0.0, 1.0], [1.0, -2.0]),
    }[gate]
    m = len(thresholds)
    own = torch.eye(gates).repeat_interleave(m, 0)  # [neurons, gates]
    read = torch.einsum("nk,ki->kni", own, reads)
    write = torch.einsum("ko,nk,n->kon", answers, own, torch.tensor(weights * gates))
    probe = _probe(pairs, n)

    def needed(x: Tensor) -> dict[str, Tensor]:
        a, b = x[..., pairs[:, 0]] > 0, x[..., pairs[:, 1]] > 0
        if gate == "and":
            return dict.fromkeys(("read", "write"), a & b)
        # Where both bits of an XOR are on, its neurons cancel only if none of them is reduced.
        return {"read": a | b, "write": a | b if gate == "or" else a ^ b}

    model = Circuit(read.sum(0), -torch.tensor(thresholds * gates), write.sum(0))
    return KnownNetwork(
        name,
        model.eval().requires_grad_(False),
        _bits(n, 0.2 if gate == "and" else 0.06),
        {"read": 40, "write": 40},
        {"read": Mechanisms(read), "write": Mechanisms(write)},
        probe,
        needed,
    )


def _trained_ands(name: str) -> KnownNetwork:
    """Eight ANDs of disjoint pairs of sixteen bits by eight neurons, learned with small weights."""
    n, gates = 16, 8
    pairs = torch.arange(n).reshape(-1, 2)
    sampler = _bits(n, 0.25, 1024)

    def answers(x: Tensor) -> Tensor:
        return x[:, pairs[:, 0]] * x[:, pairs[:, 1]]

    def fit(seed: int) -> nn.Module:
        model = Circuit(torch.zeros(gates, n), torch.zeros(gates), torch.zeros(gates, gates))
        initialise(model, seed)
        with torch.no_grad():
            # Each neuron begins with a lean towards a gate: without it most end up serving several.
            model.read.weight.abs_().add_(0.5 * torch.eye(gates).repeat_interleave(2, 1))
            model.write.weight.abs_().add_(0.5 * torch.eye(gates))

        def loss(model: Any, generator: torch.Generator) -> Tensor:
            x = sampler.dense(generator)
            size = sum(layer.weight.abs().mean() for layer in (model.read, model.write))
            return F.mse_loss(model(x), answers(x)) + 1e-3 * size

        return descend(model, loss, seed=seed, steps=6000, lr=1e-2)

    def check(model: nn.Module) -> tuple[bool, dict[str, float]]:
        x = sampler.dense(generator_for(0, "collection/check"))
        numbers = {"loss": float(F.mse_loss(model(x), answers(x))), "variance": float(answers(x).var())}
        # A neuron for each gate, which reads its two bits and nothing else.
        assert isinstance(model, Circuit)
        W = model.read.weight
        own = W.abs().reshape(gates, gates, 2).amin(-1)
        rest = (W.abs().sum(1) - 2 * own.amax(1)) / W.abs().sum(1)
        numbers["most_read_of_others"] = float(rest.max())
        alone = len(set(own.argmax(1).tolist())) == gates
        return alone and float(rest.max()) < 0.05 and numbers["loss"] < 0.01 * numbers["variance"], numbers

    model, good, quality = trained(name, {"n": n}, fit, check)
    assert isinstance(model, Circuit)
    W_read, W_write = model.read.weight.detach(), model.write.weight.detach()
    neuron = W_read.abs().reshape(gates, gates, 2).amin(-1).argmax(0)  # of each gate

    def needed(x: Tensor) -> dict[str, Tensor]:
        on = (x[..., pairs[:, 0]] > 0) & (x[..., pairs[:, 1]] > 0)
        return {"read": on, "write": on}

    return KnownNetwork(
        name,
        model,
        sampler,
        {"read": 24, "write": 24},
        {"read": Mechanisms(rows(W_read)[neuron]), "write": Mechanisms(rows(W_write))},
        _probe(pairs, n),
        needed,
        good=good,
        quality=quality,
    )


register("ands_built", "circuits", "14 ANDs of pairs of 20 bits, by hand", lambda n: _built(n, "and"))
register("ors_built", "circuits", "10 ORs of pairs of bits, by hand", lambda n: _built(n, "or"))
register("xors_built", "circuits", "10 XORs of pairs of bits, by hand", lambda n: _built(n, "xor"))
register("ands_trained", "circuits", "8 ANDs, learned", _trained_ands, trains=True)
