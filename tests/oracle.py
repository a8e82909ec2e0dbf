"""The paper's equations, transcribed literally: slow, scalar, readable, and sharing no code with
rankone.

A network here is a function f(x, [W^1, ..., W^L]) of one datapoint and plain matrices. Each
datapoint gets its own masked matrices W' = U diag(m) V, built explicitly, exactly as Algorithm 1
writes them. Equation names follow the paper.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Network = Callable[[Tensor, Sequence[Tensor]], Tensor]


@dataclass
class Layer:
    """One decomposed matrix: the original W, its factors, the gate, and the activation that enters it."""

    W: Tensor
    U: Tensor
    V: Tensor
    gate: Callable[[Tensor], Tensor]
    """All raw importances of the layer from all its inner activations."""
    activation: Callable[[Tensor], Tensor]
    """The vector a^l that W^l multiplies in the clean target, from the datapoint x."""


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.special.erf(x / math.sqrt(2)))


def sigma_lower(x: Tensor) -> Tensor:
    if x <= 0:
        return 0.01 * x
    if x <= 1:
        return x
    return x * 0 + 1


def sigma_upper(x: Tensor) -> Tensor:
    if x <= 0:
        return x * 0
    if x <= 1:
        return x
    return 1 + 0.01 * (x - 1)


class StraightThrough(torch.autograd.Function):
    """Clamp to [0, 1]; on the way back, below 0, a hundredth of a gradient that descent would follow up."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.x = float(x)
        return x.clamp(0, 1)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        if ctx.x > 1:
            return grad * 0
        if ctx.x > 0:
            return grad
        return 0.01 * grad if grad < 0 else grad * 0


def mlp_gate(w_in: Tensor, b_in: Tensor, w_out: Tensor, b_out: Tensor) -> Callable[[Tensor], Tensor]:
    """Appendix A.1: for each c its own W_out GELU(W_in h + b_in) + b_out."""

    def gate(h: Tensor) -> Tensor:
        raw = []
        for c in range(h.shape[0]):
            total = b_out[c]
            for d in range(w_in.shape[1]):
                total = total + w_out[c, d] * gelu(w_in[c, d] * h[c] + b_in[c, d])
            raw.append(total)
        return torch.stack(raw)

    return gate


def linear_gate(w: Tensor, b: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda h: torch.stack([w[c] * h[c] + b[c] for c in range(h.shape[0])])


def layer_mlp_gate(w_in: Tensor, b_in: Tensor, w_out: Tensor, b_out: Tensor) -> Callable[[Tensor], Tensor]:
    """Every raw importance from all inner activations of the layer."""
    return lambda h: w_out @ gelu(w_in @ h + b_in) + b_out


def raw_importances(layer: Layer, x: Tensor) -> Tensor:
    """gamma(h) with h_c = sum_j V_cj a_j."""
    a = layer.activation(x)
    h = torch.stack([(layer.V[c] * a).sum() for c in range(layer.V.shape[0])])
    return layer.gate(h)


def mask(raw: Tensor, r: Tensor, sigma: Callable[[Tensor], Tensor] = sigma_lower) -> Tensor:
    """m_c = g_c + (1 - g_c) r_c, with g the lower-leaky hard sigmoid."""
    g = torch.stack([sigma(x) for x in raw])
    return g + (1 - g) * r


def with_ends(u: float, at_zero: float, at_one: float) -> float:
    """A random number with some of its weight at 0 and 1, from a uniform one."""
    if u < at_zero:
        return 0.0
    if u >= 1 - at_one:
        return 1.0
    return (u - at_zero) / (1 - at_zero - at_one)


def masked_matrix(layer: Layer, m: Tensor) -> Tensor:
    """W'_ij = sum_c U_ic m_c V_cj."""
    total = torch.zeros_like(layer.W)
    for c in range(layer.U.shape[1]):
        total = total + m[c] * torch.outer(layer.U[:, c], layer.V[c])
    return total


def mse(y: Tensor, target: Tensor) -> Tensor:
    return ((y - target) ** 2).mean()


def kl(y: Tensor, target: Tensor) -> Tensor:
    p = torch.exp(target) / torch.exp(target).sum()
    q = torch.exp(y) / torch.exp(y).sum()
    return (p * torch.log(p / q)).sum()


def faithfulness(layers: Sequence[Layer]) -> Tensor:
    total = torch.zeros((), dtype=layers[0].W.dtype)
    N = 0
    for layer in layers:
        for i in range(layer.W.shape[0]):
            for j in range(layer.W.shape[1]):
                total = total + (layer.W[i, j] - (layer.U[i, :] * layer.V[:, j]).sum()) ** 2
                N += 1
    return total / N


def importance_minimality(layers: Sequence[Layer], X: Sequence[Tensor], p: float, eps: float = 0.0) -> Tensor:
    total = torch.zeros((), dtype=layers[0].W.dtype)
    for x in X:
        for layer in layers:
            for raw in raw_importances(layer, x):
                total = total + (sigma_upper(raw) + eps) ** p
    return total / len(X)


def stochastic_recon(
    f: Network,
    layers: Sequence[Layer],
    X: Sequence[Tensor],
    R: Sequence[Sequence[Tensor]],
    D: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """R[s][l] has one row of random numbers per datapoint."""
    total = torch.zeros((), dtype=layers[0].W.dtype)
    for r in R:
        for b, x in enumerate(X):
            target = f(x, [layer.W for layer in layers])
            masked = [
                masked_matrix(layer, mask(raw_importances(layer, x), r[l][b]))
                for l, layer in enumerate(layers)
            ]
            total = total + D(f(x, masked), target)
    return total / (len(R) * len(X))


def stochastic_recon_layerwise(
    f: Network,
    layers: Sequence[Layer],
    X: Sequence[Tensor],
    R: Sequence[Sequence[Tensor]],
    D: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """One layer masked at a time, every other layer the original."""
    total = torch.zeros((), dtype=layers[0].W.dtype)
    for r in R:
        for one, layer in enumerate(layers):
            for b, x in enumerate(X):
                matrices = [other.W for other in layers]
                target = f(x, matrices)
                matrices[one] = masked_matrix(layer, mask(raw_importances(layer, x), r[one][b]))
                total = total + D(f(x, matrices), target)
    return total / (len(R) * len(layers) * len(X))


def masked_with_delta(layer: Layer, m: Tensor, delta: Tensor) -> Tensor:
    """W' = sum_c U_c m_c V_c + delta (W - sum_c U_c V_c)."""
    return masked_matrix(layer, m) + delta * (layer.W - masked_matrix(layer, torch.ones_like(m)))


def smooth_l0(layers: Sequence[Layer], X: Sequence[Tensor], gamma: float) -> Tensor:
    total = torch.zeros((), dtype=layers[0].W.dtype)
    for x in X:
        for layer in layers:
            for raw in raw_importances(layer, x):
                g = sigma_upper(raw)
                total = total + g**2 / (g**2 + gamma**2)
    return total / len(X)


def frequency(layers: Sequence[Layer], X: Sequence[Tensor]) -> Tensor:
    total = torch.zeros((), dtype=layers[0].W.dtype)
    for layer in layers:
        rows = [raw_importances(layer, x) for x in X]
        for c in range(layer.U.shape[1]):
            s = torch.stack([sigma_upper(row[c]) for row in rows]).mean()
            total = total + s * torch.log2(1 + s)
    return total


def recon(
    f: Network,
    layers: Sequence[Layer],
    X: Sequence[Tensor],
    matrix: Callable[[int, Layer, int], Tensor],
    D: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """The mean divergence when layer l of datapoint b has the matrix(l, layer, b)."""
    total = torch.zeros((), dtype=layers[0].W.dtype)
    for b, x in enumerate(X):
        target = f(x, [layer.W for layer in layers])
        total = total + D(f(x, [matrix(i, layer, b) for i, layer in enumerate(layers)]), target)
    return total / len(X)
