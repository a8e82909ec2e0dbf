"""The losses, the paper's and what the field has added since, each a small class that is its own
configuration, and the divergences they use.

A loss is a frozen settings class: its fields are its settings in a config file, `value` computes it
on one training step. A new loss is one class under `@register_loss`; nothing else in rankone has to
know.

All reconstruction losses are one, under different mask sources and routings. What the paper calls
stochastic-recon and stochastic-recon-layerwise differ in the routing alone, and use the same mask
samples, as in Algorithm 1. docs/method.md says what each piece is for and what it did.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float
from pydantic import AfterValidator, Field, model_validator
from torch import Tensor

from rankone.adversary import Attack, PersistentAttack, Scope
from rankone.balance import Balance
from rankone.data import Batch, WeightedBatch
from rankone.errors import ConfigError, TargetError, TrainingError, near_matches, shown
from rankone.heads import THROUGH_HEAD, kl_through_head
from rankone.importance import upper_leaky
from rankone.masks import ROUTINGS, MaskSource
from rankone.settings import Coefficient, Positive, Registry, Settings
from rankone.step import Divergence, Penalty, Step, Unit

DIVERGENCES: Registry[Divergence] = Registry("divergence")


@DIVERGENCES.register("mse")
def mse(output: Float[Tensor, "*lead d"], target: Float[Tensor, "*lead d"]) -> Float[Tensor, "*lead"]:
    """Squared error, averaged over the output features of each datapoint."""
    return (output - target).square().mean(-1)


@DIVERGENCES.register("kl")
def kl(output: Float[Tensor, "*lead d"], target: Float[Tensor, "*lead d"]) -> Float[Tensor, "*lead"]:
    """KL(target ‖ masked) of the distributions whose logits are given, per position."""
    if target.shape[-1] == 1:
        raise TargetError(
            f"The output has shape {tuple(target.shape)}: the KL divergence of a single logit is 0 whatever "
            "happens. Use divergence='mse', or let output= give all logits."
        )
    log_p = torch.log_softmax(target, -1)
    log_q = torch.log_softmax(output, -1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


THROUGH_HEAD.append((kl, kl_through_head))


class Loss(Settings, ABC):
    """One term of the training loss."""

    unit: ClassVar[Unit] = "none"
    """What it is a number of: with `relative` settings, a divergence becomes a share of what removing
    everything costs, and the coefficient of importances the share that they cost."""

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
        return step.faithfulness()


class MaskedPasses(Loss):
    """The masked network must do what the target does: one mask source under one routing."""

    unit: ClassVar[Unit] = "divergence"

    @abstractmethod
    def source(self) -> tuple[str | MaskSource, str, int]:
        """The mask source, the routing and the number of samples."""

    def value(self, step: Step) -> Float[Tensor, ""]:
        source, routing, samples = self.source()
        distances = [step.distance(output) for output in step.outputs(source, routing, samples)]
        if not distances:
            raise TrainingError(f"The routing {routing!r} made no pass at all; it must yield at least one.")
        return distances[0] if len(distances) == 1 else torch.stack(distances).mean()


class Reconstruction(MaskedPasses):
    """A reconstruction loss whose mask source and routing are known by name."""

    routing: ClassVar[str]
    mask: ClassVar[str]

    samples: int = Field(default=1, ge=1, le=1000)
    """S, the number of mask samples per step."""

    def source(self) -> tuple[str | MaskSource, str, int]:
        return self.mask, self.routing, self.samples


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


@register_loss("stochastic_recon_subset")
class StochasticReconSubset(Reconstruction):
    """On every datapoint a random choice of layers stochastically masked, in one pass."""

    routing: ClassVar[str] = "subset"
    mask: ClassVar[str] = "stochastic"

    coefficient: Coefficient = 1.0
    """Its weight, in place of beta2."""


@register_loss("importance_recon")
class ImportanceRecon(Reconstruction):
    """All layers masked by the importances themselves: r = 0 everywhere."""

    routing: ClassVar[str] = "all"
    mask: ClassVar[str] = "importance"

    coefficient: Coefficient = 1.0
    """Its weight."""


@register_loss("adversarial_recon")
class AdversarialRecon(MaskedPasses):
    """All layers masked as an adversary would: the r that does the most harm."""

    coefficient: Coefficient = 1.0
    """Its weight."""
    persistent: bool = False
    """Whether the adversary lives across steps, moved by Adam, or starts anew in every step and takes
    steps along the sign of the gradient."""
    steps: int = Field(default=1, ge=1, le=1000)
    """Its ascents in every training step. The last one of a persistent adversary costs nothing."""
    step_size: Positive | None = None
    """How far an ascent goes, r being in [0, 1]; null for 0.1, or 0.01 (Adam's learning rate) if
    persistent."""
    scope: Scope = "batch"
    """One r for all datapoints of a `batch`, or one for each `datapoint`."""
    routing: Annotated[str, AfterValidator(ROUTINGS.known)] = "all"
    """Which layers it attacks in one pass: `all`, `layerwise` or `subset`."""
    start: float = Field(default=0.0, ge=0, lt=1)
    """The share of training after which it begins."""

    def source(self) -> tuple[str | MaskSource, str, int]:
        attack = (
            PersistentAttack("adversarial_recon", self.steps, self.step_size or 0.01, self.scope)
            if self.persistent
            else Attack(self.steps, self.step_size or 0.1, self.scope)
        )
        return attack, self.routing, 1

    def value(self, step: Step) -> Float[Tensor, ""]:
        return super().value(step) if step.progress >= self.start else step.clean.output.new_zeros(())

    @property
    def settled(self) -> float:
        return self.start


class Scheduled(Loss):
    """A loss that presses importances down, and may do so more and more."""

    unit: ClassVar[Unit] = "importance"

    ramp: float = Field(default=0.0, ge=0, le=1)
    """The share of training over which the coefficient first rises linearly from 0."""

    def ramped(self, progress: float) -> float:
        return 1.0 if self.ramp == 0 else min(1.0, progress / self.ramp)

    def coefficient_at(self, progress: float) -> float:
        return self.coefficient * self.ramped(progress)

    @property
    def settled(self) -> float:
        return self.ramp


class Sparsity(Scheduled):
    """As few subcomponents as possible should matter on any datapoint: a price for every importance."""

    hold: float = Field(default=0.0, ge=0, lt=1)
    """The share of training for which what moves stays as it starts."""
    anneal: float = Field(default=0.5, gt=0, le=1)
    """The share of training, after that, over which it moves to where it ends."""
    price_of: dict[str, Coefficient] = Field(default={}, max_length=1000)
    """Name patterns of layers -> by how much the price of their importances differs: a matrix of which
    much is needed at a time may want a lower one than its neighbours. 1 where no pattern fits."""

    @model_validator(mode="after")
    def _arrives(self) -> "Sparsity":
        if self.hold + self.anneal > 1:
            raise ValueError(
                f"hold + anneal is {self.hold + self.anneal:g}, so what moves would never arrive; they may "
                "be 1 together"
            )
        return self

    @abstractmethod
    def penalty(self, progress: float) -> Penalty:
        """What an importance costs after this share of training."""

    def value(self, step: Step) -> Float[Tensor, ""]:
        return step.penalty(self.penalty(step.progress), self.prices(step.raw, step.balance))

    def prices(self, layers: Iterable[str], balance: Balance | None = None) -> dict[str, float]:
        """The price factor of every layer; empty where all are alike."""
        names = list(layers)
        evened = balance.prices(names) if balance is not None else {}
        if not self.price_of:
            return evened
        for pattern in self.price_of:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(
                    f"price_of names {shown(pattern)}, which fits no decomposed layer. "
                    f"{near_matches(pattern, names)}"
                )
        own = {
            name: next((f for pattern, f in self.price_of.items() if fnmatchcase(name, pattern)), 1.0)
            for name in names
        }
        return {name: factor * evened.get(name, 1.0) for name, factor in own.items()}

    def ahead(self, progress: float, hold: float | None = None) -> float:
        """How much of the way is still to go after this share of training, if it begins after `hold`."""
        begins = self.hold if hold is None else hold
        return min(max(0.0, 1 - (progress - begins) / self.anneal), 1.0)


@register_loss("importance_minimality")
class ImportanceMinimality(Sparsity):
    """As few subcomponents as possible should matter on any datapoint (beta3 in the paper).

    Exponent and saturation may move, along the same way (`hold` and `anneal`), and the coefficient with
    them or later (`relax_after`).
    """

    coefficient: Coefficient = 3e-3
    """beta3."""
    coefficient_start: Coefficient | None = None
    """beta3 at the start of training, from which it moves to `coefficient`; null to use `coefficient`
    throughout."""
    relax_after: float | None = Field(default=None, ge=0, lt=1)
    """The share of training after which the coefficient moves, for as long as `anneal`; null to move
    along with the exponent. Strays go while the pressure is high and its shape steep, and what is
    important rises to 1 once the pressure is low."""
    p: float = Field(default=1.0, gt=0, le=100)
    """Exponent of the penalty."""
    p_start: float | None = Field(default=None, gt=0, le=100)
    """Exponent at the start of training, from which it moves linearly to p; null to use p throughout."""
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
        if self.relax_after is not None and self.coefficient_start is None:
            raise ValueError(
                "relax_after says when the coefficient moves, but without coefficient_start it does not"
            )
        if self.relax_after is not None and self.relax_after + self.anneal > 1:
            raise ValueError(
                f"relax_after + anneal is {self.relax_after + self.anneal:g}, so the coefficient would never "
                "arrive; they may be 1 together"
            )
        return self

    def penalty(self, progress: float) -> Penalty:
        p = self.exponent(progress)
        return Penalty(p, self.eps if p < 1 else 0.0, self._moving(0.0, self.saturation, progress))

    def coefficient_at(self, progress: float) -> float:
        hold = self.hold if self.relax_after is None else self.relax_after
        moving = self._moving(self.coefficient_start, self.coefficient, progress, hold)
        return moving * self.ramped(progress)

    def exponent(self, progress: float) -> float:
        """The exponent after this share of training."""
        return self._moving(self.p_start, self.p, progress)

    @property
    def settled(self) -> float:
        moves = self.p_start is not None or self.coefficient_start is not None or self.saturation > 0
        last = max(self.hold, self.relax_after or 0.0)
        return max(self.ramp, last + self.anneal if moves else 0.0)

    def _moving(self, start: float | None, end: float, progress: float, hold: float | None = None) -> float:
        return end if start is None else end + (start - end) * self.ahead(progress, hold)


@register_loss("smooth_l0")
class SmoothL0(Sparsity):
    """The number of important subcomponents, made smooth: g^2 / (g^2 + gamma^2), instead of a power."""

    coefficient: Coefficient = 3e-3
    """What one important subcomponent costs."""
    gamma_start: Positive = 1.0
    """gamma at the start of training; it falls geometrically."""
    gamma: Positive = 0.01
    """gamma at the end: importances far above it count as one, far below as none."""

    def penalty(self, progress: float) -> Penalty:
        ahead = self.ahead(progress)
        return Penalty(0.0, gamma=self.gamma_start**ahead * self.gamma ** (1 - ahead))

    @property
    def settled(self) -> float:
        return max(self.ramp, self.hold + self.anneal)


@register_loss("frequency")
class Frequency(Scheduled):
    """A subcomponent that is important everywhere costs more than two that share its work:
    s log2(1 + s), where s is how often it is important."""

    coefficient: Coefficient = 1e-3
    """Its weight; about half that of minimality."""
    remember: float = Field(default=0.0, ge=0, lt=1)
    """How much of s is what it was in earlier steps, for batches too small to count in; 0 counts in
    the batch alone."""

    def value(self, step: Step) -> Float[Tensor, ""]:
        costs = []
        for name, raw in step.raw.items():
            g = upper_leaky(raw)
            alone = g.shape[:-1].numel() < 2 and step.share.place is None
            if self.remember == 0 and alone and not _merged(step.batch):
                raise TrainingError(
                    "The loss 'frequency' counts how often a subcomponent is important, but a batch has only "
                    "one datapoint. Use larger batches, or set losses.frequency.remember=0.99."
                )
            s = step.mean_of_each(g, name)
            if self.remember > 0:
                key = f"frequency/{name}"
                before = step.memory.get(key, s.detach())
                s = self.remember * before + (1 - self.remember) * s
                step.memory[key] = s.detach()
            costs.append((s * torch.log2(1 + s)).sum())
        return torch.stack(costs).sum()


def _merged(batch: Batch) -> bool:
    """Whether one row stands for several datapoints, as in a sparse batch where all were zero."""
    return isinstance(batch, WeightedBatch) and bool(batch.weights.sum() > 1)
