"""Masks: by how much each subcomponent is kept, per datapoint.

A mask *source* makes a layer's mask from its raw importances; a *routing* says which layers are masked
in one pass of the target. Training uses `stochastic` under both routings; the other sources are what
evaluation compares with.
"""

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from rankone.errors import ConfigError, near_matches
from rankone.importance import clipped, lower_leaky

Masks = dict[str, Tensor]
"""Layer name -> mask `[*lead, C]`. A layer without an entry runs as the original."""

MaskSource = Callable[[Tensor, torch.Generator], Tensor]


def stochastic(raw: Float[Tensor, "*s"], generator: torch.Generator) -> Float[Tensor, "*s"]:
    """m = g + (1 - g) r with r ~ U(0, 1), drawn anew for every datapoint and subcomponent."""
    g = lower_leaky(raw)
    r = torch.rand(raw.shape, generator=generator, dtype=raw.dtype, device=raw.device)
    return torch.lerp(r, torch.ones((), dtype=raw.dtype, device=raw.device), g)


def ones(raw: Float[Tensor, "*s"], generator: torch.Generator) -> Float[Tensor, "*s"]:
    """Keep everything: the sum of all subcomponents in place of the matrix."""
    return torch.ones_like(raw)


def importance(raw: Float[Tensor, "*s"], generator: torch.Generator) -> Float[Tensor, "*s"]:
    """The importances themselves: ablate everything as far as it is said to be ablatable."""
    return clipped(raw)


def rounded(raw: Float[Tensor, "*s"], generator: torch.Generator) -> Float[Tensor, "*s"]:
    """Importances rounded to 0 or 1: keep the important subcomponents, drop the others."""
    return clipped(raw).round()


def zero(raw: Float[Tensor, "*s"], generator: torch.Generator) -> Float[Tensor, "*s"]:
    """Drop everything: what the network does with only its biases and undecomposed parts."""
    return torch.zeros_like(raw)


SOURCES: dict[str, MaskSource] = {
    "ones": ones,
    "stochastic": stochastic,
    "importance": importance,
    "rounded": rounded,
    "zero": zero,
}


def route_all(masks: Masks) -> Iterator[Masks]:
    """One pass with every layer masked."""
    yield masks


def route_layerwise(masks: Masks) -> Iterator[Masks]:
    """One pass per layer, with that layer masked and every other layer original."""
    for name, mask in masks.items():
        yield {name: mask}


ROUTINGS: dict[str, Callable[[Masks], Iterator[Masks]]] = {"all": route_all, "layerwise": route_layerwise}


def source_named(name: str) -> MaskSource:
    if name not in SOURCES:
        raise ConfigError(f"Unknown mask source {name!r}. {near_matches(name, SOURCES)}")
    return SOURCES[name]
