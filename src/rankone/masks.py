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

MaskSource = Callable[[Tensor, int], Tensor]
"""(raw importances, key of its random numbers) -> mask."""


def uniform(key: int, like: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C"]:
    """Random numbers in [0, 1) of the shape and type of `like`: a function of the key and the place alone.

    Each number is a hash of its counter, so it is the same on every device and in the compiled kernels, which draw theirs
    on the fly. Counters run along the datapoints first, as the kernels do.
    """
    C = like.shape[-1]
    counter = torch.arange(like.numel(), device=like.device).reshape(C, -1).T.reshape(like.shape)
    mixed = _mix((_mix(counter ^ (key & _32)) + (key >> 32)) & _32)
    wide = torch.promote_types(like.dtype, torch.float32)  # half precision cannot hold the integers
    return ((mixed >> 8).to(wide) * 2.0**-24).to(like.dtype)


_32 = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """A well-mixed 32-bit number from another (the finaliser known as lowbias32), in 64-bit integers."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _32
    return x ^ (x >> 16)


def stochastic(raw: Float[Tensor, "*s"], key: int) -> Float[Tensor, "*s"]:
    """m = g + (1 - g) r with r ~ U(0, 1), drawn anew for every datapoint and subcomponent."""
    g = lower_leaky(raw)
    return torch.lerp(uniform(key, raw), torch.ones((), dtype=raw.dtype, device=raw.device), g)


def ones(raw: Float[Tensor, "*s"], key: int) -> Float[Tensor, "*s"]:
    """Keep everything: the sum of all subcomponents in place of the matrix."""
    return torch.ones_like(raw)


def importance(raw: Float[Tensor, "*s"], key: int) -> Float[Tensor, "*s"]:
    """The importances themselves: ablate everything as far as it is said to be ablatable."""
    return clipped(raw)


def rounded(raw: Float[Tensor, "*s"], key: int) -> Float[Tensor, "*s"]:
    """Importances rounded to 0 or 1: keep the important subcomponents, drop the others."""
    return clipped(raw).round()


def zero(raw: Float[Tensor, "*s"], key: int) -> Float[Tensor, "*s"]:
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
