"""The losses of the paper, each a small class that is its own configuration.

A loss is a frozen pydantic model: its fields are its settings in a config file, `value` computes it on one training
step. A new loss is one class and the decorator line above it; nothing else in rankone has to know.

There is one reconstruction loss. What the paper calls stochastic-recon and stochastic-recon-layerwise are this one
under two routings, and both use the same mask samples, as in Algorithm 1.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Float
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

from rankone.data import Batch, weights_of
from rankone.errors import BatchError, ConfigError, near_matches
from rankone.importance import upper_leaky
from rankone.masks import ROUTINGS, Masks, source_named
from rankone.model import CleanPass, DecomposedModel

Divergence = Callable[[Tensor, Tensor], Tensor]
"""(masked output, target output) -> a number per datapoint, or their mean as a scalar."""


def mse(output: Float[Tensor, "*lead d"], target: Float[Tensor, "*lead d"]) -> Float[Tensor, "*lead"]:
    """Squared error, averaged over the output features of each datapoint."""
    return (output - target).square().mean(-1)


def kl(output: Float[Tensor, "*lead d"], target: Float[Tensor, "*lead d"]) -> Float[Tensor, "*lead"]:
    """KL(target ‖ masked) of the distributions whose logits are given, per position."""
    log_p = torch.log_softmax(target, -1)
    log_q = torch.log_softmax(output, -1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


DIVERGENCES: dict[str, Divergence] = {"mse": mse, "kl": kl}


def divergence_named(name: str) -> Divergence:
    if name not in DIVERGENCES:
        raise ConfigError(f"Unknown divergence {name!r}. {near_matches(name, DIVERGENCES)}")
    return DIVERGENCES[name]


def mean_over_data(values: Tensor, weights: Tensor | None) -> Float[Tensor, ""]:
    """The mean over datapoints; rows count by their weight where a batch has weights."""
    if weights is None:
        return values.mean()
    if values.dim() == 0 or values.shape[0] != weights.shape[0]:
        raise BatchError(
            f"The batch has {weights.shape[0]} row weights, but a divergence or importance came with shape "
            f"{tuple(values.shape)}: with a WeightedBatch its first dimension must be the rows. "
            "A divergence of your own must return one number per datapoint."
        )
    rows = values.flatten(1).mean(1) if values.dim() > 1 else values
    weights = weights.to(rows.dtype)
    return rows @ weights / weights.sum()


def distance(divergence: Divergence, output: Tensor, target: Tensor, weights: Tensor | None) -> Float[Tensor, ""]:
    """How far a masked output is from the target's, averaged over the data; never in less than single precision."""
    wide = torch.promote_types(output.dtype, torch.float32)
    return mean_over_data(divergence(output.to(wide), target.to(wide)), weights)


@dataclass
class StepContext:
    """Everything one training step shares between its losses: each thing is computed once."""

    model: DecomposedModel
    batch: Batch
    clean: CleanPass
    inner: dict[str, Tensor]
    raw: dict[str, Tensor]
    divergence: Divergence
    generator: torch.Generator
    progress: float
    """How much of training lies behind this step, from 0 to 1."""
    _samples: dict[tuple[str, int], Masks] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: DecomposedModel,
        batch: Batch,
        divergence: Divergence,
        generator: torch.Generator,
        progress: float = 0.0,
    ) -> "StepContext":
        clean = model.clean(batch)
        inner = model.inner(clean)
        return cls(model, batch, clean, inner, model.raw_importances(inner), divergence, generator, progress)

    @property
    def weights(self) -> Tensor | None:
        return weights_of(self.batch)

    def masks(self, source: str, sample: int) -> Masks:
        """The masks of one sample, the same for every loss that asks."""
        key = (source, sample)
        if key not in self._samples:
            make = source_named(source)
            self._samples[key] = {name: make(raw, self.generator) for name, raw in self.raw.items()}
        return self._samples[key]


class Loss(BaseModel, ABC):
    """One term of the training loss."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    coefficient: float = Field(ge=0, allow_inf_nan=False)
    """The factor with which this term enters the total loss; 0 switches it off."""

    @abstractmethod
    def value(self, step: StepContext) -> Float[Tensor, ""]:
        """The term itself, without its coefficient."""


LOSSES: dict[str, type[Loss]] = {}


L = TypeVar("L", bound=Loss)


def register_loss(name: str) -> Callable[[type[L]], type[L]]:
    """Class decorator: make a loss available to configs under `name`."""

    def register(cls: type[L]) -> type[L]:
        LOSSES[name] = cls
        return cls

    return register


def loss_from(name: str, settings: Any) -> Loss:
    """A loss from its settings in a config."""
    if name not in LOSSES:
        raise ConfigError(f"Unknown loss {name!r}. {near_matches(name, LOSSES)}")
    if isinstance(settings, Loss):
        return settings
    try:
        return LOSSES[name].model_validate(settings)
    except ValidationError as error:
        known = LOSSES[name].model_fields
        told = [
            f"{name} has no setting {e['loc'][-1]!r}. {near_matches(str(e['loc'][-1]), known)}"
            if e["type"] == "extra_forbidden"
            else f"{'.'.join(map(str, (name, *e['loc'])))}: {str(e['msg']).removeprefix('Value error, ')} (got {e['input']!r})"
            for e in error.errors()
        ]
        raise ConfigError("; ".join(told)) from None


def faithfulness(model: DecomposedModel) -> Float[Tensor, ""]:
    """Squared error of the summed subcomponents, over all decomposed matrices, per parameter in them."""
    total = torch.zeros((), device=model.device)
    parameters = 0
    for layer in model.layers.values():
        W = layer.matrix()
        total = total + (W - layer.subcomponents.weight()).square().sum()
        parameters += W.numel()
    return total / parameters


@register_loss("faithfulness")
class Faithfulness(Loss):
    """The subcomponents must sum to the original matrices."""

    coefficient: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Weight of faithfulness; 1 in the paper."""

    def value(self, step: StepContext) -> Float[Tensor, ""]:
        return faithfulness(step.model)


class Reconstruction(Loss):
    """The masked network must do what the target does: one mask source under one routing."""

    routing: ClassVar[str]
    mask: ClassVar[str]

    samples: int = Field(default=1, ge=1)
    """S, the number of mask samples per step."""

    def value(self, step: StepContext) -> Float[Tensor, ""]:
        terms = [
            distance(step.divergence, self._output(step, routed), step.clean.output, step.weights)
            for sample in range(self.samples)
            for routed in ROUTINGS[self.routing](step.masks(self.mask, sample))
        ]
        return torch.stack(terms).mean()

    def _output(self, step: StepContext, routed: Masks) -> Tensor:
        # With one layer masked, that layer still receives its clean input: its inner activations are known.
        known = step.inner if len(routed) == 1 else None
        return step.model.masked(step.batch, routed, known)


@register_loss("stochastic_recon")
class StochasticRecon(Reconstruction):
    """All layers stochastically masked at once (beta1 in the paper)."""

    routing: ClassVar[str] = "all"
    mask: ClassVar[str] = "stochastic"

    coefficient: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """beta1."""


@register_loss("stochastic_recon_layerwise")
class StochasticReconLayerwise(Reconstruction):
    """One layer stochastically masked at a time (beta2 in the paper)."""

    routing: ClassVar[str] = "layerwise"
    mask: ClassVar[str] = "stochastic"

    coefficient: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """beta2."""


@register_loss("importance_minimality")
class ImportanceMinimality(Loss):
    """As few subcomponents as possible should matter on any datapoint (beta3 in the paper)."""

    coefficient: float = Field(default=3e-3, ge=0, allow_inf_nan=False)
    """beta3."""
    p: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Exponent of the penalty."""
    p_start: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Exponent at the start of training, from which it moves linearly to p; null to use p throughout."""
    anneal: float = Field(default=0.5, gt=0, le=1)
    """The share of training over which the exponent moves from p_start to p."""
    eps: float = Field(default=1e-6, ge=0, allow_inf_nan=False)
    """Added to the importances when p < 1, where the slope at 0 would be infinite."""

    @model_validator(mode="after")
    def _finite_slope(self) -> "ImportanceMinimality":
        if self.p < 1 and self.eps == 0:
            raise ValueError("with p below 1 the slope of the penalty at 0 is infinite unless eps is above 0")
        return self

    def value(self, step: StepContext) -> Float[Tensor, ""]:
        total = torch.zeros((), device=step.model.device)
        p = self.exponent(step.progress)
        for raw in step.raw.values():
            total = total + mean_over_data(self._penalty(upper_leaky(raw), p).sum(-1), step.weights)
        return total

    def exponent(self, progress: float) -> float:
        """The exponent after this share of training."""
        if self.p_start is None:
            return self.p
        return self.p + (self.p_start - self.p) * max(0.0, 1 - progress / self.anneal)

    def _penalty(self, g: Tensor, p: float) -> Tensor:
        if p == 1:
            return g
        if p == 2:
            return g.square()
        return (g + self.eps).pow(p) if p < 1 else g.pow(p)
