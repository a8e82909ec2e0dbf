"""Masks: by how much each subcomponent is kept, per datapoint, and where.

m = g + (1 - g) r: an importance g in [0, 1] says how much of a subcomponent must stay, and r says
what becomes of the rest. A mask *source* makes the masks of all layers from their raw importances,
a *routing* says which layers are masked on which datapoints and in which passes, and
`MaskSettings` are the rules that all of them follow. The sources here draw r at random or fix it;
adversary.py looks for the r that does the most harm. A source that looks at one layer at a time is
a function under `each_layer`; docs/extending.md shows one, and a routing.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from pydantic import Field, model_validator
from torch import Tensor

from rankone.errors import TrainingError
from rankone.importance import clipped, lower_leaky, straight_through
from rankone.settings import Registry, Settings
from rankone.share import WHOLE, Place, Share, place_of


class MaskSettings(Settings):
    """How masks are made from raw importances and random numbers."""

    sigmoid: Literal["leaky", "straight_through"] = "leaky"
    """How a raw importance becomes g: `leaky` is the paper's, which falls slightly below 0;
    `straight_through` is clamped to [0, 1] and leaks only the gradients that would raise it."""
    at_zero: float = Field(default=0.0, ge=0, le=1)
    """The share of random numbers r that are exactly 0."""
    at_one: float = Field(default=0.0, ge=0, le=1)
    """The share of random numbers r that are exactly 1; the others are uniform in between."""
    delta: bool = False
    """Whether W minus the sum of all subcomponents is a component of its own, whose importance is
    always 0: random masks and adversaries keep any share of it, so the sum is exact by construction."""

    @model_validator(mode="after")
    def _shares(self) -> "MaskSettings":
        if self.at_zero + self.at_one > 1:
            raise ValueError(
                f"at_zero + at_one is {self.at_zero + self.at_one:g}; they are shares of the random numbers "
                "and may be 1 together"
            )
        return self

    def importance(self, raw: Float[Tensor, "*s"]) -> Float[Tensor, "*s"]:
        """g, as masks see it."""
        return lower_leaky(raw) if self.sigmoid == "leaky" else straight_through(raw)

    @property
    def stretch(self) -> tuple[float, float]:
        """(scale, shift): r is a uniform number times scale, minus shift, clamped to [0, 1]."""
        inside = max(1 - self.at_zero - self.at_one, 1e-6)
        return 1 / inside, self.at_zero / inside

    def random(self, key: int, like: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C"]:
        """The random numbers r of one layer."""
        r = uniform(key, like)
        if self.at_zero == self.at_one == 0:
            return r
        scale, shift = self.stretch
        return (r * scale - shift).clamp(0, 1)


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


def _nothing_to_ask(masks: Masks) -> Tensor:
    raise TrainingError("This mask source asks what its masks do to the output, which is not known here.")


@dataclass(frozen=True)
class Draw:
    """What a mask source is told when it draws the masks of one sample."""

    raw: Mapping[str, Float[Tensor, "*lead C"]]
    """Raw importances of every layer."""
    key: Callable[[str], int]
    """A name -> the key of its random numbers."""
    settings: MaskSettings = field(default_factory=MaskSettings)
    harm: Callable[[Masks], Float[Tensor, ""]] = _nothing_to_ask
    """Masks -> the divergence of the output under them, differentiable; subcomponents are held fixed."""
    memory: dict[str, Tensor] = field(default_factory=dict)
    """What sources keep from step to step; it is part of a checkpoint."""
    follow: Callable[[list[Tensor], Callable[[list[Tensor | None]], None]], None] = lambda leaves, then: None
    """Tells the training loop to call a function with the gradients of the loss to these tensors."""
    share: Share = WHOLE
    """What part of a batch these datapoints are, where several processes share it."""


MaskSource = Callable[[Draw], Masks]
"""Makes the masks of all layers."""

Routing = Callable[[Masks, int], Iterator[Masks]]
"""(masks of all layers, key of its random numbers) -> the masks of each pass."""

SOURCES: Registry[MaskSource] = Registry("mask source")
ROUTINGS: Registry[Routing] = Registry("routing")


def each_layer(values: Callable[[Tensor, int, MaskSettings], Tensor]) -> MaskSource:
    """A mask source from a function of one layer's raw importances and key, and the rules of masks."""

    def source(draw: Draw) -> Masks:
        return {name: Mask(values(r, draw.key(name), draw.settings)) for name, r in draw.raw.items()}

    return source


def uniform(key: int, like: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead C"]:
    """Random numbers in [0, 1) of the shape and type of `like`: a function of the key and the place
    alone.

    Each number is a hash of its counter, so it is the same on every device and in the compiled kernels,
    which draw theirs on the fly. Counters run along the datapoints first, as the kernels do.
    """
    C, place = like.shape[-1], place_of(key)
    if place is None or like.dim() == 1:
        counter = torch.arange(like.numel(), device=like.device).reshape(C, -1).T.reshape(like.shape)
    else:
        counter = _counted_in_the_whole(like, place)
    mixed = _mix((_mix(counter ^ (key & _32)) + (key >> 32)) & _32)
    wide = torch.promote_types(like.dtype, torch.float32)  # half precision cannot hold the integers
    return ((mixed >> 8).to(wide) * 2.0**-24).to(like.dtype)


def _counted_in_the_whole(like: Float[Tensor, "*lead C"], place: Place) -> Tensor:
    """The counters that rows of a larger batch have there."""
    rows, C = like.shape[0], like.shape[-1]
    if rows != place.here:
        raise TrainingError(
            f"A process has {place.here} rows of a batch of {place.total}, but random numbers were asked for "
            f"{tuple(like.shape)}: rows must come first. Use one process for this."
        )
    each = like.numel() // (rows * C)  # datapoints in a row
    datapoint = torch.arange(place.before * each, (place.before + rows) * each, device=like.device)
    first = torch.arange(C, device=like.device) * (place.total * each)
    return (datapoint.unsqueeze(1) + first).reshape(like.shape)


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
def ones(raw: Float[Tensor, "*s"], key: int, settings: MaskSettings) -> Float[Tensor, "*s"]:
    """Keep everything: the sum of all subcomponents in place of the matrix."""
    return torch.ones_like(raw)


@SOURCES.register("stochastic")
def stochastic(draw: Draw) -> Masks:
    """m = g + (1 - g) r with r drawn anew for every datapoint and subcomponent, and for delta."""
    masks = {}
    for name, raw in draw.raw.items():
        one = torch.ones((), dtype=raw.dtype, device=raw.device)
        r = draw.settings.random(draw.key(name), raw)
        masks[name] = Mask(torch.lerp(r, one, draw.settings.importance(raw)), delta=random_delta(draw, name))
    return masks


def random_delta(draw: Draw, name: str) -> Float[Tensor, "*lead"] | None:
    """By how much the rest of one layer is kept on each datapoint: r itself, as its importance is 0."""
    if not draw.settings.delta:
        return None
    raw = draw.raw[name].detach()
    return draw.settings.random(draw.key(f"{name}/delta"), raw[..., :1]).squeeze(-1)


@SOURCES.register("importance")
@each_layer
def importance(raw: Float[Tensor, "*s"], key: int, settings: MaskSettings) -> Float[Tensor, "*s"]:
    """The importances themselves: ablate everything as far as it is said to be ablatable."""
    return clipped(raw)


@SOURCES.register("rounded")
@each_layer
def rounded(raw: Float[Tensor, "*s"], key: int, settings: MaskSettings) -> Float[Tensor, "*s"]:
    """Importances rounded to 0 or 1: keep the important subcomponents, drop the others."""
    return clipped(raw).round()


@SOURCES.register("zero")
@each_layer
def zero(raw: Float[Tensor, "*s"], key: int, settings: MaskSettings) -> Float[Tensor, "*s"]:
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


@ROUTINGS.register("subset")
def route_subset(masks: Masks, key: int) -> Iterator[Masks]:
    """One pass: on every datapoint k random layers are masked, k anew from 1 to all; the others are
    original.

    Where layers see the data in different shapes (a convolution's positions, a linear layer's rows),
    the choice is made once per row.
    """
    shapes = {mask.values.shape[:-1] for mask in masks.values()}
    lead = shapes.pop() if len(shapes) == 1 else next(iter(shapes))[:1]
    like = next(iter(masks.values())).values.detach().new_empty(*lead, len(masks) + 1)
    u = uniform(key, like)
    k = 1 + (u[..., -1:] * len(masks)).long()  # from 1 to the number of layers
    rank = u[..., :-1].argsort(-1).argsort(-1)
    chosen = rank < k
    routed = {}
    for i, (name, mask) in enumerate(masks.items()):
        positions = mask.values.dim() - 1 - len(lead)
        routed[name] = mask._replace(where=chosen[..., i].reshape(*lead, *[1] * positions))
    yield routed
