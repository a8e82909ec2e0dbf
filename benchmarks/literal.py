"""The paper's training step, written down as its equations stand: what the fast engine is measured
against.

Algorithm 1 over a whole batch in eager torch, with nothing clever: the gates make their `[B, C,
d_gate]` tensor, every datapoint is a row, every masked pass runs the whole network, torch's own
random numbers, torch's default Adam. It shares no code with rankone; tests/test_literal.py checks
it against the scalar oracle.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Run = Callable[[str, Tensor], Tensor]
"""(layer name, its input) -> its output."""
Network = Callable[[Tensor, Run], Tensor]
"""(inputs, how layers run) -> output."""


@dataclass
class LiteralLayer:
    """One decomposed matrix with its bias, its factors and its gates."""

    W: Tensor
    bias: Tensor | None
    U: Tensor
    V: Tensor
    w_in: Tensor
    b_in: Tensor
    w_out: Tensor
    b_out: Tensor

    def original(self, a: Tensor) -> Tensor:
        out = a @ self.W.T
        return out if self.bias is None else out + self.bias

    def masked(self, a: Tensor, m: Tensor) -> Tensor:
        out = ((a @ self.V.T) * m) @ self.U.T
        return out if self.bias is None else out + self.bias

    def raw_importance(self, a: Tensor) -> Tensor:
        h = a @ self.V.T
        hidden = torch.nn.functional.gelu(h[:, :, None] * self.w_in + self.b_in)
        return (hidden * self.w_out).sum(-1) + self.b_out


def lower_leaky(x: Tensor) -> Tensor:
    return torch.where(x <= 0, 0.01 * x, torch.where(x <= 1, x, torch.ones_like(x)))


def upper_leaky(x: Tensor) -> Tensor:
    return torch.where(x <= 0, torch.zeros_like(x), torch.where(x <= 1, x, 1 + 0.01 * (x - 1)))


def losses(
    network: Network,
    layers: Mapping[str, LiteralLayer],
    x: Tensor,
    p: float,
    draws: Sequence[Mapping[str, Tensor]] | None = None,
) -> dict[str, Tensor]:
    """The four losses; `draws` gives the random numbers of each mask sample, otherwise there is one
    and torch draws it."""
    entering: dict[str, Tensor] = {}

    def record(name: str, a: Tensor) -> Tensor:
        entering[name] = a
        return layers[name].original(a)

    with torch.no_grad():
        target = network(x, record)
    raw = {name: layer.raw_importance(entering[name]) for name, layer in layers.items()}

    all_layers, layerwise = [], []
    for sample in draws if draws is not None else [None]:
        masks: dict[str, Tensor] = {}
        for name, r in raw.items():
            g = lower_leaky(r)
            u = torch.rand_like(g) if sample is None else sample[name]
            masks[name] = g + (1 - g) * u
        out = network(x, lambda name, a, m=masks: layers[name].masked(a, m[name]))
        all_layers.append(((out - target) ** 2).mean())
        for one in layers:
            out = network(
                x,
                lambda name, a, one=one, m=masks: (
                    layers[name].masked(a, m[name]) if name == one else layers[name].original(a)
                ),
            )
            layerwise.append(((out - target) ** 2).mean())

    squared = sum(((layer.W - layer.U @ layer.V) ** 2).sum() for layer in layers.values())
    return {
        "faithfulness": squared / sum(layer.W.numel() for layer in layers.values()),
        "stochastic_recon": sum(all_layers) / len(all_layers),
        "stochastic_recon_layerwise": sum(layerwise) / len(layerwise),
        "importance_minimality": sum((upper_leaky(r) ** p).sum(-1).mean() for r in raw.values()),
    }


def tms(n_identity: int) -> Network:
    def network(x: Tensor, run: Run) -> Tensor:
        x = run("embed", x)
        for i in range(n_identity):
            x = run(f"hidden.{i}", x)
        return torch.relu(run("unembed", x))

    return network


def residual_mlp(W_E: Tensor, n_layers: int) -> Network:
    """`W_E` is `[d_resid, n_features]`; the unembedding is its transpose."""

    def network(x: Tensor, run: Run) -> Tensor:
        stream = x @ W_E.T
        for i in range(n_layers):
            stream = stream + run(f"blocks.{i}.mlp_out", torch.relu(run(f"blocks.{i}.mlp_in", stream)))
        return stream @ W_E

    return network


def mlp(names: Sequence[str]) -> Network:
    def network(x: Tensor, run: Run) -> Tensor:
        for name in names[:-1]:
            x = torch.relu(run(name, x))
        return run(names[-1], x)

    return network


def digits(x: Tensor, run: Run) -> Tensor:
    """Two convolutions as matrices over patches, one row for each position, and two linear layers."""
    for name in ("0", "2"):
        rows, _, height, width = x.shape
        patches = torch.nn.functional.unfold(x, 3, padding=1).transpose(1, 2).flatten(0, 1)
        x = torch.relu(run(name, patches)).reshape(rows, height, width, -1).permute(0, 3, 1, 2)
    x = torch.nn.functional.max_pool2d(x, 2).flatten(1)
    return run("8", torch.relu(run("6", x)))


def encoder(norms: Sequence[Callable[[Tensor], Tensor]], heads: int) -> Network:
    """Blocks of attention and MLP, each followed by a norm; one row for each position."""

    def network(x: Tensor, run: Run) -> Tensor:
        rows, time, width = x.shape

        def split(a: Tensor) -> Tensor:
            return a.reshape(rows, time, heads, -1).transpose(1, 2)

        stream = x.flatten(0, 1)
        for i in range(len(norms) // 2):
            name = f"layers.{i}.self_attn"
            q, k, v = (split(run(f"{name}.{n}", stream)) for n in "qkv")
            weights = torch.softmax(q @ k.transpose(2, 3) / (width // heads) ** 0.5, -1)
            mixed = (weights @ v).transpose(1, 2).reshape(rows * time, width)
            stream = norms[2 * i](stream + run(f"{name}.out_proj", mixed))
            hidden = torch.relu(run(f"layers.{i}.linear1", stream))
            stream = norms[2 * i + 1](stream + run(f"layers.{i}.linear2", hidden))
        return stream.reshape(x.shape)

    return network
