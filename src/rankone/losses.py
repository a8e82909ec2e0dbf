"""The losses of the paper, each a small class that is its own configuration, and the divergences
they use.

A loss is a frozen settings class: its fields are its settings in a config file, `value` computes it
on one training step. A new loss is one class under `@register_loss`; nothing else in rankone has to
know.

There is one reconstruction loss. What the paper calls stochastic-recon and
stochastic-recon-layerwise are this one under two routings, and both use the same mask samples, as
in Algorithm 1.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor

from rankone.errors import TrainingError
from rankone.settings import Coefficient, Registry, Settings
from rankone.step import Divergence, Penalty, Step, faithfulness

DIVERGENCES: Registry[Divergence] = Registry("divergence")


@DIVERGENCES.register("mse")
def mse(output: Float[Tensor, "*lead d"], target: Float[Tensor, "*lead d"]) -> Float[Tensor, "*lead"]:
    """Squared error, averaged over the output features of each datapoint."""
    return (output - target).square().mean(-1)


@DIVERGENCES.register("kl")
def kl(output: Float[Tensor, "*lead d"], target: Float[Tensor, "*lead d"]) -> Float[Tensor, "*lead"]:
    """KL(target ‖ masked) of the distributions whose logits are given, per position."""
    log_p = torch.log_softmax(target, -1)
    log_q = torch.log_softmax(output, -1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


class Loss(Settings, ABC):
    """One term of the training loss."""

    coefficient: Coefficient
    """The factor with which this term enters the total loss; 0 switches it off."""

    @abstractmethod
    def value(self, step: Step) -> Float[Tensor, ""]:
        """The term itself, without its coefficient."""

    def coefficient_at(self, progress: float) -> float:
        """The coefficient after this share of training."""
        return self.coefficient

    @property
    def settled(self) -> float:
        """The share of training after which this loss no longer changes its own settings."""
        return 0.0


LOSSES: Registry[type[Loss]] = Registry("loss")
register_loss = LOSSES.register


@register_loss("faithfulness")
class Faithfulness(Loss):
    """The subcomponents must sum to the original matrices."""

    coefficient: Coefficient = 1.0
    """Weight of faithfulness; 1 in the paper."""

    def value(self, step: Step) -> Float[Tensor, ""]:
        return faithfulness(step.model)


class Reconstruction(Loss):
    """The masked network must do what the target does: one mask source under one routing."""

    routing: ClassVar[str]
    mask: ClassVar[str]

    samples: int = Field(default=1, ge=1, le=1000)
    """S, the number of mask samples per step."""

    def value(self, step: Step) -> Float[Tensor, ""]:
        distances = [step.distance(output) for output in step.outputs(self.mask, self.routing, self.samples)]
        if not distances:
            raise TrainingError(
                f"The routing {self.routing!r} made no pass at all; it must yield at least one."
            )
        return distances[0] if len(distances) == 1 else torch.stack(distances).mean()


@register_loss("stochastic_recon")
class StochasticRecon(Reconstruction):
    """All layers stochastically masked at once (beta1 in the paper)."""

    routing: ClassVar[str] = "all"
    mask: ClassVar[str] = "stochastic"

    coefficient: Coefficient = 1.0
    """beta1."""


@register_loss("stochastic_recon_layerwise")
class StochasticReconLayerwise(Reconstruction):
    """One layer stochastically masked at a time (beta2 in the paper)."""

    routing: ClassVar[str] = "layerwise"
    mask: ClassVar[str] = "stochastic"

    coefficient: Coefficient = 1.0
    """beta2."""


@register_loss("importance_minimality")
class ImportanceMinimality(Loss):
    """As few subcomponents as possible should matter on any datapoint (beta3 in the paper)."""

    coefficient: Coefficient = 3e-3
    """beta3."""
    coefficient_start: Coefficient | None = None
    """beta3 at the start of training, from which it moves to `coefficient` along with the exponent;
    null to use `coefficient` throughout."""
    p: float = Field(default=1.0, gt=0, le=100)
    """Exponent of the penalty."""
    p_start: float | None = Field(default=None, gt=0, le=100)
    """Exponent at the start of training, from which it moves linearly to p; null to use p throughout."""
    hold: float = Field(default=0.0, ge=0, lt=1)
    """The share of training for which exponent, coefficient and saturation stay as they start."""
    anneal: float = Field(default=0.5, gt=0, le=1)
    """The share of training, after that, over which they move to where they end."""
    saturation: Coefficient = 0.0
    """How flat the penalty becomes near 1, to which it moves from 0 along with the exponent:
    importances near 1 are pressed 1 + saturation times less, those near 0 as many times more."""
    eps: Coefficient = 1e-6
    """Added to the importances when p < 1, where the slope at 0 would be infinite."""

    @model_validator(mode="after")
    def _makes_sense(self) -> "ImportanceMinimality":
        if min(self.p, self.p if self.p_start is None else self.p_start) < 1 and self.eps == 0:
            raise ValueError(
                "with p (or p_start) below 1 the slope of the penalty at 0 is infinite unless eps is above 0"
            )
        if self.coefficient == 0 and self.coefficient_start:
            raise ValueError(
                "a coefficient of 0 switches the loss off; with coefficient_start, let it end at a small one"
            )
        if self.hold + self.anneal > 1:
            raise ValueError(
                f"hold + anneal is {self.hold + self.anneal:g}, so exponent, coefficient and saturation "
                "would never arrive; they may be 1 together"
            )
        return self

    def value(self, step: Step) -> Float[Tensor, ""]:
        return step.penalty(self.penalty(step.progress))

    def penalty(self, progress: float) -> Penalty:
        """What an importance costs after this share of training."""
        p = self.exponent(progress)
        return Penalty(p, self.eps if p < 1 else 0.0, self._moving(0.0, self.saturation, progress))

    def coefficient_at(self, progress: float) -> float:
        return self._moving(self.coefficient_start, self.coefficient, progress)

    def exponent(self, progress: float) -> float:
        """The exponent after this share of training."""
        return self._moving(self.p_start, self.p, progress)

    @property
    def settled(self) -> float:
        moves = self.p_start is not None or self.coefficient_start is not None or self.saturation > 0
        return self.hold + self.anneal if moves else 0.0

    def _moving(self, start: float | None, end: float, progress: float) -> float:
        if start is None:
            return end
        ahead = 1 - (progress - self.hold) / self.anneal
        return end + (start - end) * min(max(0.0, ahead), 1.0)
