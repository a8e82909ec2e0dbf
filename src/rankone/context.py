"""Importance functions that see context: what enters a layer, or what enters all layers, everywhere.

Whether a part of a language model matters depends on what came before, which its own inner activation
does not say. `input_mlp` asks one MLP per layer about the layer's whole input. `transformer` asks one small
transformer about the inputs of all layers at all positions: normalised, side by side, brought to one
width, a few blocks of attention and MLP, and from there to every importance of every layer. Inputs are
normalised, so neither has units.

The rows of a batch go through some at a time, and what is inside is computed again on the way back, so
that memory holds one chunk and the importances themselves.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rankone.errors import ConfigError, LayerError
from rankone.importance import (
    JointImportance,
    LayerActivations,
    LayerShape,
    register_importance,
    stretch,
    whole,
)

AT_ONCE = 2**22
"""How many numbers inside a function are held at a time."""


def normed(x: Float[Tensor, "*lead d"]) -> Float[Tensor, "*lead d"]:
    """A vector with entries of mean square 1."""
    return x * (x.square().mean(-1, keepdim=True) + 1e-12).rsqrt()


def by_chunks(function: Callable[[Tensor], Tensor], x: Tensor, inside: int) -> Tensor:
    """`function(x)`, some rows at a time; `inside` is how many numbers it holds for each row."""
    rows = max(1, AT_ONCE // max(1, inside))
    if len(x) <= rows:
        return function(x)
    wanted = torch.is_grad_enabled()
    parts = [
        checkpoint(function, part, use_reentrant=False) if wanted else function(part)
        for part in x.split(rows)
    ]
    return torch.cat(parts)


def _random(generator: torch.Generator, out: int, into: int, gain: float = 1.0) -> nn.Parameter:
    return nn.Parameter(math.sqrt(gain / into) * torch.randn(out, into, generator=generator))


class InputMLP(nn.Module):
    """The function of one layer."""

    def __init__(self, shape: LayerShape, width: int, generator: torch.Generator) -> None:
        super().__init__()
        self.w_in, self.b_in = _random(generator, width, shape.d_in, 2.0), nn.Parameter(torch.zeros(width))
        self.w_out, self.b_out = _random(generator, shape.C, width), nn.Parameter(torch.zeros(shape.C))

    def forward(self, a: Float[Tensor, "*lead d_in"]) -> Float[Tensor, "*lead C"]:
        flat = a.reshape(-1, a.shape[-1])
        raw = by_chunks(self._of_rows, flat, 2 * len(self.w_in) + a.shape[-1])
        return raw.reshape(*a.shape[:-1], -1)

    def _of_rows(self, a: Float[Tensor, "rows d_in"]) -> Float[Tensor, "rows C"]:
        return F.linear(F.gelu(F.linear(normed(a), self.w_in, self.b_in)), self.w_out, self.b_out)


@register_importance("input_mlp")
class InputMLPImportance(JointImportance):
    """One MLP per layer on the layer's input: `width` GELU neurons, shared by all subcomponents."""

    def __init__(
        self, shapes: Mapping[str, LayerShape], generator: torch.Generator, *, width: Any = 64
    ) -> None:
        super().__init__()
        whole("width", width)
        self.names = list(shapes)
        self.functions = nn.ModuleList(InputMLP(shape, width, generator) for shape in shapes.values())

    def forward(self, layers: Mapping[str, LayerActivations]) -> dict[str, Tensor]:
        return {n: f(layers[n].vectors()) for n, f in zip(self.names, self.functions, strict=True)}

    def stretch(self, factor: float) -> None:
        for function in self.functions:
            assert isinstance(function, InputMLP)
            stretch(function.w_out, function.b_out, factor)


class ContextBlock(nn.Module):
    """Attention over the positions of a row, then an MLP, both added to the stream."""

    def __init__(self, width: int, heads: int, causal: bool, generator: torch.Generator) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.o = _random(generator, 3 * width, width), _random(generator, width, width)
        self.up, self.down = _random(generator, 4 * width, width, 2.0), _random(generator, width, 4 * width)

    def forward(self, x: Float[Tensor, "rows positions d"]) -> Float[Tensor, "rows positions d"]:
        rows, positions, width = x.shape
        split = F.linear(normed(x), self.qkv).reshape(rows, positions, 3, self.heads, -1)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=self.causal)
        x = x + F.linear(seen.transpose(1, 2).reshape(rows, positions, width), self.o)
        return x + F.linear(F.gelu(F.linear(normed(x), self.up)), self.down)


def turned(x: Float[Tensor, "*lead positions d"]) -> Float[Tensor, "*lead positions d"]:
    """Rotary positions: the two halves of a vector as pairs, turned the further the later they stand."""
    half = x.shape[-1] // 2
    speeds = 10_000.0 ** (-torch.arange(half, dtype=x.dtype, device=x.device) / half)
    angles = torch.arange(x.shape[-2], dtype=x.dtype, device=x.device).unsqueeze(1) * speeds
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


@register_importance("transformer")
class TransformerImportance(JointImportance):
    """One small transformer for all layers: `blocks` blocks of `width` with `heads` heads each, over the
    inputs of all layers at once. With `causal`, a position sees only what came before it."""

    def __init__(
        self,
        shapes: Mapping[str, LayerShape],
        generator: torch.Generator,
        *,
        width: Any = 64,
        blocks: Any = 2,
        heads: Any = 4,
        causal: Any = False,
    ) -> None:
        super().__init__()
        for name, number in (("width", width), ("blocks", blocks), ("heads", heads)):
            whole(name, number)
        if width % (2 * heads):
            raise ConfigError(
                f"Importance option width is {width}; with heads={heads} it must be a multiple of {2 * heads}."
            )
        self.sizes = {name: shape.C for name, shape in shapes.items()}
        self.w_in = _random(generator, width, sum(shape.d_in for shape in shapes.values()))
        self.blocks = nn.ModuleList(
            ContextBlock(width, heads, bool(causal), generator) for _ in range(blocks)
        )
        C = sum(self.sizes.values())
        self.w_out, self.b_out = _random(generator, C, width), nn.Parameter(torch.zeros(C))

    def forward(self, layers: Mapping[str, LayerActivations]) -> dict[str, Tensor]:
        inputs = {name: layers[name].vectors() for name in self.sizes}
        shapes = {tuple(a.shape[:-1]) for a in inputs.values()}
        if len(shapes) > 1 or len(next(iter(shapes))) > 2:
            found = ", ".join(f"{name} {tuple(a.shape[:-1])}" for name, a in inputs.items())
            raise LayerError(
                f"The importance function 'transformer' needs layers with the same rows and positions; here are "
                f"{found}. Leave some out, or use 'input_mlp', which looks at each layer alone."
            )
        lead = shapes.pop()
        joined = torch.cat([normed(a) for a in inputs.values()], -1)
        joined = joined.reshape(lead[0], -1, joined.shape[-1])  # rows without positions have one
        width, positions = len(self.w_in), joined.shape[1]
        inside = positions * 16 * width * len(self.blocks)
        raw = by_chunks(self._of_rows, joined, inside).reshape(*lead, -1)
        return dict(zip(self.sizes, raw.split(list(self.sizes.values()), -1), strict=True))

    def _of_rows(self, x: Float[Tensor, "rows positions d"]) -> Float[Tensor, "rows positions C"]:
        x = F.linear(x, self.w_in)
        for block in self.blocks:
            x = block(x)
        return F.linear(normed(x), self.w_out, self.b_out)

    def stretch(self, factor: float) -> None:
        stretch(self.w_out, self.b_out, factor)
