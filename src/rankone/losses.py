"""The losses of the paper, each a small class that is its own configuration.

A loss is a frozen pydantic model: its fields are its settings in a config file, `value` computes it on one training
step. A new loss is one class and the decorator line above it; nothing else in rankone has to know.

There is one reconstruction loss. What the paper calls stochastic-recon and stochastic-recon-layerwise are this one
under two routings, and both use the same mask samples, as in Algorithm 1.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

from rankone.data import Batch, seed_for, shares_of
from rankone.errors import BatchError, ConfigError, near_matches
from rankone.fast import gates as fast
from rankone.fast.factored import Activation
from rankone.fast.gates import Gate, Gated, Penalty
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


def mean_over_data(values: Tensor, shares: Tensor | None) -> Float[Tensor, ""]:
    """The mean over datapoints; where a batch has weights, `shares` says how much of it each row is."""
    if shares is None:
        return values.mean()
    if values.dim() == 0 or values.shape[0] != shares.shape[0]:
        raise BatchError(
            f"The batch has {shares.shape[0]} row weights, but a divergence or importance came with shape "
            f"{tuple(values.shape)}: with a WeightedBatch its first dimension must be the rows. "
            "A divergence of your own must return one number per datapoint."
        )
    rows = values.flatten(1).mean(1) if values.dim() > 1 else values
    return rows @ shares.to(rows.dtype)


def distance(divergence: Divergence, output: Tensor, target: Tensor, shares: Tensor | None) -> Float[Tensor, ""]:
    """How far a masked output is from the target's, averaged over the data; never in less than single precision."""
    wide = torch.promote_types(output.dtype, torch.float32)
    return mean_over_data(divergence(output.to(wide), target.to(wide)), shares)


@dataclass
class StepContext:
    """Everything one training step shares between its losses: each thing is computed once."""

    model: DecomposedModel
    batch: Batch
    clean: CleanPass
    inner: dict[str, Tensor]
    """Inner activations of every layer on the clean pass."""
    raw: dict[str, Tensor]
    """Importances before any squashing."""
    divergence: Divergence
    seed: int
    step: int
    progress: float
    """How much of training lies behind this step, from 0 to 1."""
    _penalty: Penalty | None
    _penalized: Tensor | None
    """The penalty of the layers in `_gated`, computed along with them."""
    _gated: dict[str, Gated]
    """What the kernels of fast.py said, for the layers they apply to."""
    _scaled_target: tuple[Tensor, Tensor] | None = None
    _masks: dict[tuple[str, int], Masks] = field(default_factory=dict)
    _written: dict[tuple[str, int, str], Activation] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        model: DecomposedModel,
        batch: Batch,
        divergence: Divergence,
        *,
        seed: int = 0,
        step: int = 0,
        progress: float = 0.0,
        exact: bool = False,
        penalty: Penalty | None = None,
    ) -> "StepContext":
        clean = model.clean(batch)
        inner = model.inner(clean)
        gated: dict[str, Gated] = {}
        penalized: Tensor | None = None
        if not exact:
            gates = {
                name: Gate(layer.importance, inner[name], mask_key(seed, step, name, 0))
                for name, layer in model.layers.items()
            }
            gated, penalized = fast.gated(gates, penalty, shares_of(batch))
        raw = {n: gated[n].raw if n in gated else layer.importance(inner[n]) for n, layer in model.layers.items()}
        return cls(model, batch, clean, inner, raw, divergence, seed, step, progress, penalty, penalized, gated)

    @property
    def shares(self) -> Tensor | None:
        return shares_of(self.batch)

    def masks(self, source: str, sample: int) -> Masks:
        """The masks of one sample, the same for every loss that asks."""
        key = (source, sample)
        if key not in self._masks:
            make = source_named(source)
            self._masks[key] = {
                name: self._gated[name].mask
                if source == "stochastic" and sample == 0 and name in self._gated
                else make(raw, mask_key(self.seed, self.step, name, sample))
                for name, raw in self.raw.items()
            }
            for name, mask in self._masks[key].items():
                self.model.check_mask(name, mask)
        return self._masks[key]

    def penalized(self, wanted: Penalty) -> Float[Tensor, ""]:
        """The penalty on importances, summed over all layers: what was computed along with the masks, and the rest."""
        known = self._penalized if self._penalty == wanted else None
        terms = [] if known is None else [known]
        for name, raw in self.raw.items():
            if known is None or name not in self._gated:
                terms.append(mean_over_data(_penalty_of(raw, wanted), self.shares))
        return torch.stack(terms).sum()

    def distance(self, output: Tensor) -> Float[Tensor, ""]:
        """How far an output is from the clean one, averaged over the data."""
        if self.divergence is not mse or output.dtype not in (torch.float32, torch.float64):
            return distance(self.divergence, output, self.clean.output, self.shares)
        # The same number in as few operations as there can be: in a small network they are what costs.
        if self.shares is None:
            return F.mse_loss(output, self.clean.output)
        if self._scaled_target is None:
            mean_over_data(self.clean.output, self.shares)  # raises where rows and weights do not fit
            per_row = self.clean.output.numel() // self.clean.output.shape[0]
            scale = (self.shares.to(output.dtype) / per_row).sqrt().reshape(-1, *[1] * (output.dim() - 1))
            scale = torch.empty_like(output).copy_(scale)  # in full: broadcasting is slower than reading it
            self._scaled_target = scale, scale * self.clean.output
        scale, target = self._scaled_target
        return F.mse_loss(scale * output, target, reduction="sum")

    def output(self, source: str, sample: int, routed: Masks) -> Tensor:
        """The target's output under masks of one sample."""
        return self.model.masked(self.batch, routed, self._known(source, sample, routed))

    def _known(self, source: str, sample: int, routed: Masks) -> dict[str, Activation]:
        """Outputs of layers that a masked pass need not compute.

        Up to the first masked layer the pass is the clean one, and that layer's inner activations are the clean ones.
        """
        order = list(self.clean.inputs)
        first = min((order.index(name) for name in routed), default=len(order))
        known = {name: self.clean.outputs[name] for name in order[:first] if name in self.clean.outputs}
        if routed and routed[order[first]] is self.masks(source, sample)[order[first]]:
            known[order[first]] = self._first_output(source, sample, order[first])
        return known

    def _first_output(self, source: str, sample: int, name: str) -> Activation:
        key = (source, sample, name)
        if key in self._written:
            return self._written[key]
        gated = self._gated.get(name) if source == "stochastic" and sample == 0 else None
        carried = gated.carried if gated is not None else self.masks(source, sample)[name] * self.inner[name]
        written = self.model.layer(name).write(carried)
        if name in self.clean.outputs:  # unless the target overwrites what this layer returns
            self._written[key] = written
        return written


def _penalty_of(raw: Float[Tensor, "*lead C"], penalty: Penalty) -> Float[Tensor, "*lead"]:
    """The penalty per datapoint, from raw importances."""
    p, eps, saturation = penalty
    q = upper_leaky(raw)
    if p != 1:
        q = q.square() if p == 2 else (q + eps).pow(p)
    return (q if saturation == 0 else (1 + saturation) * q / (1 + saturation * q)).sum(-1)


def mask_key(seed: int, step: int, layer: str, sample: int) -> int:
    """The key of the random numbers of one layer's masks in one sample of one step."""
    return seed_for(seed, f"masks/{layer}/{sample}", step)


class Loss(BaseModel, ABC):
    """One term of the training loss."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    coefficient: float = Field(ge=0, allow_inf_nan=False)
    """The factor with which this term enters the total loss; 0 switches it off."""

    @abstractmethod
    def value(self, step: StepContext) -> Float[Tensor, ""]:
        """The term itself, without its coefficient."""

    def coefficient_at(self, progress: float) -> float:
        """The coefficient after this share of training."""
        return self.coefficient

    @property
    def settled(self) -> float:
        """The share of training after which this loss no longer changes its own settings."""
        return 0.0

    def penalty(self, progress: float) -> Penalty | None:
        """The penalty on importances that this loss will ask for after this share of training, if it is of that kind.

        Only for speed: one that is announced is computed along with the masks.
        """
        return None


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
    times = Counter(model.tied.get(name, name) for name in model.layers)  # a tied layer's error is its source's
    parameters = sum(n * model.layers[name].n_weights for name, n in times.items())
    total: Tensor | None = None
    for name, n in times.items():
        layer = model.layers[name]
        error = F.mse_loss(layer.subcomponents.weight(), layer.matrix(), reduction="sum") * (n / parameters)
        total = error if total is None else total + error
    assert total is not None
    return total


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
            step.distance(step.output(self.mask, sample, routed))
            for sample in range(self.samples)
            for routed in ROUTINGS[self.routing](step.masks(self.mask, sample))
        ]
        return terms[0] if len(terms) == 1 else torch.stack(terms).mean()


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
    coefficient_start: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """beta3 at the start of training, from which it moves to `coefficient` along with the exponent; null to use `coefficient` throughout."""
    p: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Exponent of the penalty."""
    p_start: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Exponent at the start of training, from which it moves linearly to p; null to use p throughout."""
    hold: float = Field(default=0.0, ge=0, lt=1)
    """The share of training for which exponent, coefficient and saturation stay as they start."""
    anneal: float = Field(default=0.5, gt=0, le=1)
    """The share of training, after that, over which they move to where they end."""
    saturation: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """How flat the penalty becomes near 1, to which it moves from 0 along with the exponent: importances near 1 are pressed 1 + saturation times less, those near 0 as many times more."""
    eps: float = Field(default=1e-6, ge=0, allow_inf_nan=False)
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
                f"hold + anneal is {self.hold + self.anneal:g}, so exponent, coefficient and saturation would never arrive; they may be 1 together"
            )
        return self

    def value(self, step: StepContext) -> Float[Tensor, ""]:
        return step.penalized(self.penalty(step.progress))

    def penalty(self, progress: float) -> Penalty:
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
