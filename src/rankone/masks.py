"""Masks: by how much each subcomponent is kept, per datapoint, and where.

A mask *source* makes the masks of all layers from their raw importances; a *routing* says which
layers are masked in which pass of the target. Training uses `stochastic` under both routings; the
other sources are what evaluation compares with. A source that looks at one layer at a time is a
function of (raw importances, key) under `each_layer`; docs/extending.md shows one, and a routing.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rankone.importance import clipped, lower_leaky
from rankone.settings import Registry


class Mask(NamedTuple):
    """How one layer is masked in one pass."""

    values: Float[Tensor, "*lead C"]
    """By how much each subcomponent is kept."""
    where: Bool[Tensor, "*lead"] | None = None
    """The datapoints on which the layer is masked; on the others it is the original. None: on all."""
    delta: Float[Tensor, "*lead"] | None = None
    """By how much the rest, W minus the sum of all subcomponents, is kept. None: not at all."""


Masks = Mapping[str, Mask]
"""Layer name -> mask. A layer without an entry runs as the original."""

MaskSource = Callable[[Mapping[str, Tensor], Callable[[str], int]], Masks]
"""(raw importances of all layers, layer name -> key of its random numbers) -> masks."""

Routing = Callable[[Masks, int], Iterator[Masks]]
"""(masks of all layers, key of its random numbers) -> the masks of each pass."""

SOURCES: Registry[MaskSource] = Registry("mask source")
ROUTINGS: Registry[Routing] = Registry("routing")


def each_layer(values: Callable[[Tensor, int], Tensor]) -> MaskSource:
    """A mask source from a function of one layer's raw importances and key."""

    def source(raw: Mapping[str, Tensor], key: Callable[[str], int]) -> Masks:
        return {name: Mask(values(r, key(name))) for name, r in raw.items()}

    return source


def uniform(key: int, like: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C"]:
    """Random numbers in [0, 1) of the shape and type of `like`: a function of the key and the place
    alone.

    Each number is a hash of its counter, so it is the same on every device and in the compiled kernels,
    which draw theirs on the fly. Counters run along the datapoints first, as the kernels do.
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


@SOURCES.register("ones")
@each_layer
def ones(raw: Float[Tensor, "*s"], key: int) -> Float[Tensor, "*s"]:
    """Keep everything: the sum of all subcomponents in place of the matrix."""
    return torch.ones_like(raw)


@SOURCES.register("stochastic")
@each_layer
def stochastic(raw: Float[Tensor, "*s"], key: int) -> Float[Tensor, "*s"]:
    """m = g + (1 - g) r with r ~ U(0, 1), drawn anew for every datapoint and subcomponent."""
    one = torch.ones((), dtype=raw.dtype, device=raw.device)
    return torch.lerp(uniform(key, raw), one, lower_leaky(raw))


@SOURCES.register("importance")
@each_layer
def importance(raw: Float[Tensor, "*s"], key: int) -> Float[Tensor, "*s"]:
    """The importances themselves: ablate everything as far as it is said to be ablatable."""
    return clipped(raw)


@SOURCES.register("rounded")
@each_layer
def rounded(raw: Float[Tensor, "*s"], key: int) -> Float[Tensor, "*s"]:
    """Importances rounded to 0 or 1: keep the important subcomponents, drop the others."""
    return clipped(raw).round()


@SOURCES.register("zero")
@each_layer
def zero(raw: Float[Tensor, "*s"], key: int) -> Float[Tensor, "*s"]:
    """Drop everything: what the network does with only its biases and undecomposed parts."""
    return torch.zeros_like(raw)


@ROUTINGS.register("all")
def route_all(masks: Masks, key: int) -> Iterator[Masks]:
    """One pass with every layer masked."""
    yield masks


@ROUTINGS.register("layerwise")
def route_layerwise(masks: Masks, key: int) -> Iterator[Masks]:
    """One pass per layer, with that layer masked and every other layer original."""
    for name, mask in masks.items():
        yield {name: mask}
