"""One training step: Algorithm 1 of the paper, read top to bottom, in plain torch.

A `Step` takes one batch through the algorithm. The methods stand in the order of its lines: the
clean pass, inner activations, importances, masks, masked passes, distances, the penalty, and the
sum of all losses. What a loss asks for twice is computed once. `fast/` holds a second
implementation with the same results up to a stated error; losses cannot tell which of the two they
are given.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from rankone.balance import Balance
from rankone.data import Batch, OtherRows, mean_over_data, row_weights, seed_for
from rankone.errors import TargetError, TrainingError, shown
from rankone.heads import through_head
from rankone.importance import upper_leaky
from rankone.masks import ROUTINGS, SOURCES, Draw, Masks, MaskSettings, MaskSource
from rankone.model import DecomposedModel
from rankone.share import WHOLE, Share

Divergence = Callable[[Tensor, Tensor], Tensor]
"""(masked output, target output) -> a number per datapoint, or their mean as a scalar."""


class Penalty(NamedTuple):
    """What an importance g costs: (1 + saturation) q / (1 + saturation q), where q = (g + eps)^p; with
    a gamma, g^2 / (g^2 + gamma^2)."""

    p: float
    eps: float = 0.0
    saturation: float = 0.0
    gamma: float = 0.0

    def of(self, raw: Float[Tensor, "*lead C"]) -> Float[Tensor, "*lead"]:
        """The cost of all subcomponents of a layer together, per datapoint."""
        q = upper_leaky(raw)
        if self.gamma > 0:
            square = q.square()
            return (square / (square + self.gamma**2)).sum(-1)
        if self.p != 1:
            q = q.square() if self.p == 2 else (q + self.eps).pow(self.p)
        s = self.saturation
        return (q if s == 0 else (1 + s) * q / (1 + s * q)).sum(-1)


class Follower(NamedTuple):
    """Someone who wants the gradient of the loss to tensors that are no parameters: an adversary."""

    leaves: list[Tensor]
    then: Callable[[list[Tensor | None]], None]


Unit = Literal["divergence", "importance", "none"]
"""What a loss is a number of: divergence of outputs, importances, or something without a unit."""


@runtime_checkable
class Term(Protocol):
    """A term of the training loss, as losses.py defines them."""

    unit: ClassVar[Unit]

    def value(self, step: Any) -> Tensor: ...

    def coefficient_at(self, progress: float) -> float: ...


class Step:
    """One batch on its way through Algorithm 1."""

    def __init__(
        self,
        model: DecomposedModel,
        batch: Batch,
        terms: Mapping[str, Term],
        divergence: Divergence,
        *,
        seed: int = 0,
        index: int = 0,
        progress: float = 0.0,
        masks: MaskSettings | None = None,
        memory: dict[str, Tensor] | None = None,
        balance: Balance | None = None,
        share: Share = WHOLE,
    ) -> None:
        """`index` numbers the step; `progress` is how much of training lies behind it, from 0 to 1.

        `memory` is what mask sources and losses keep from step to step. With a `balance`, terms are
        shares of what removing everything costs. `share` says what part of a batch this is, where
        several processes have one.
        """
        self.model, self.batch, self.terms, self.divergence = model, batch, terms, divergence
        self.seed, self.index, self.progress = seed, index, progress
        self.mask_settings = masks or MaskSettings()
        self.memory = {} if memory is None else memory
        self.balance, self.share = balance, share
        self.followers: list[Follower] = []
        self.weights = row_weights(batch, share)
        self._masks: dict[tuple[Any, int, bool], Masks] = {}
        self._weights_of: dict[str, Tensor] = {}
        self.clean = model.clean(batch, before_head=through_head(divergence) is not None)
        self.inner = model.inner(self.clean)
        self.raw = self.importances()

    @staticmethod
    @contextmanager
    def ready(model: DecomposedModel) -> Iterator[None]:
        """What an engine keeps from step to step of one training run: here, what comes before all
        decomposed layers on batches that come again."""
        with model.target_held_fixed():
            yield

    def importances(self) -> dict[str, Tensor]:
        """Raw importances of every layer, from the clean pass."""
        return self.model.raw_importances(self.clean, self.inner)

    def masks(self, source: str | MaskSource, sample: int, routing: str = "all") -> Masks:
        """The masks of one sample; those of a named source are the same for every loss that asks."""
        key = (source, sample, torch.is_grad_enabled())
        if isinstance(source, str) and key in self._masks:
            return self._masks[key]
        masks = (SOURCES.get(source) if isinstance(source, str) else source)(self.draw(sample, routing))
        if isinstance(source, str):
            self._masks[key] = masks
        return masks

    def draw(self, sample: int, routing: str = "all") -> Draw:
        """What a mask source is told."""

        def harm(masks: Masks) -> Float[Tensor, ""]:
            with self.model.held_fixed():
                passes = self.routed(masks, routing, sample)
                return torch.stack([self.distance(self.output(routed)) for routed in passes]).mean()

        return Draw(
            self.raw,
            lambda name: self.mask_key(name, sample),
            self.mask_settings,
            harm,
            self.memory,
            lambda leaves, then: self.followers.append(Follower(leaves, then)),
            self.share,
        )

    def mask_key(self, name: str, sample: int) -> int:
        """The key of the random numbers of one layer's masks in one sample."""
        return self.share.key(seed_for(self.seed, f"masks/{name}/{sample}", self.index))

    def routed(self, masks: Masks, routing: str, sample: int) -> Iterator[Masks]:
        """The masks of each pass that a routing makes."""
        key = self.share.key(seed_for(self.seed, f"routing/{routing}/{sample}", self.index))
        return ROUTINGS.get(routing)(masks, key)

    def outputs(self, source: str | MaskSource, routing: str, samples: int) -> Iterator[Tensor]:
        """The target's output in every pass that a routing makes of every sample of masks."""
        for sample in range(samples):
            for masks in self.routed(self.masks(source, sample, routing), routing, sample):
                yield self.output(masks)

    def output(self, masks: Masks) -> Tensor:
        """The target's output when these layers are masked."""
        return self.model.masked(self.batch, self.with_others(masks), self.clean)

    def with_others(self, masks: Masks) -> Masks:
        """Masks that keep the delta component whole on rows that are not to be explained."""
        if not isinstance(self.batch, OtherRows):
            return masks
        explained = self.batch.explained()
        whole = {}
        for name, mask in masks.items():
            lead = self.inner[name].shape[:-1]
            if lead[:1] != explained.shape:
                raise TargetError(
                    f"Layer {name!r} has datapoints of shape {tuple(lead)}, which do not begin with the "
                    f"{len(explained)} rows of the batch: it cannot be told which are to be explained."
                )
            here = explained.reshape(-1, *[1] * (len(lead) - 1)).expand(lead)
            delta = mask.values.new_zeros(()) if mask.delta is None else mask.delta
            whole[name] = mask._replace(delta=torch.where(here, delta, 1.0))
        return whole

    def distance(self, output: Tensor) -> Float[Tensor, ""]:
        """How far an output is from the clean one, averaged over the data; in single precision at
        least."""
        values = self.divergences(output)
        if not isinstance(values, Tensor) or not values.is_floating_point():
            raise TargetError(
                f"The divergence returned a {type(values).__name__}; expected a floating-point tensor "
                "with one number per datapoint, or their mean."
            )
        return self.mean(values)

    def divergences(self, output: Tensor) -> Any:
        """How far an output is from the clean one, as the divergence says it: a number per datapoint, if
        it is a right one."""
        wide = torch.promote_types(output.dtype, torch.float32)
        masked, clean = output.to(wide), self.clean.output.to(wide)
        through = through_head(self.divergence)
        if through is not None and self.clean.head is not None:
            return through(self.clean.head, masked, clean)
        return self.divergence(masked, clean)

    def weights_of(self, layer: str) -> Float[Tensor, "*lead"] | None:
        """How much of a mean each datapoint of a layer is, or each row; None where all count alike."""
        if self.weights is None:
            return None
        lead = self.inner[layer].shape[:-1]
        if self.weights.dim() == 1 and lead[:1] == self.weights.shape:
            return self.weights
        if layer not in self._weights_of:
            each = self.model.weights(layer, self.clean, lead).to(self.weights)
            self._weights_of[layer] = each / self.share.mean(each.sum())
        return self._weights_of[layer]

    def each_weight(self, layer: str) -> Float[Tensor, " datapoints"]:
        """How much of a mean each datapoint of a layer is, all in a row; 0 where there is no data."""
        each = self.model.weights(layer, self.clean, self.inner[layer].shape[:-1]).flatten()
        return each / self.share.mean(each.sum())

    def mean(self, per_datapoint: Float[Tensor, "*lead"], layer: str | None = None) -> Float[Tensor, ""]:
        """The mean over the data of one number per datapoint (of a layer), as every loss takes it."""
        weights = self.weights if layer is None else self.weights_of(layer)
        return self.share.shared(mean_over_data(per_datapoint, weights, self.share))

    def mean_of_each(self, values: Float[Tensor, "*lead C"], layer: str) -> Float[Tensor, " C"]:
        """The mean over the data of one number per datapoint and subcomponent, for each subcomponent."""
        weights = self.weights_of(layer)
        if weights is not None and weights.dim() > 1:
            weighted = weights.to(values.dtype).unsqueeze(-1) * values
            return self.share.shared(weighted.flatten(0, -2).sum(0))
        rows = values.reshape(len(values), -1, values.shape[-1]).mean(1)
        return self.share.shared(rows.mean(0) if weights is None else weights.to(rows.dtype) @ rows)

    def penalty(self, shape: Penalty, prices: Mapping[str, float] | None = None) -> Float[Tensor, ""]:
        """What all importances of all layers cost, averaged over the data, at the price factor of each
        layer (1 if not named)."""
        factors = prices or {}
        costs = [self.mean(shape.of(raw), name) * factors.get(name, 1.0) for name, raw in self.raw.items()]
        return torch.stack(costs).sum()

    def total(self) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        """The training loss, and its terms without their coefficients."""
        values = {name: term.value(self) for name, term in self.terms.items()}
        for name, value in values.items():
            if not isinstance(value, Tensor) or value.dim():
                raise TrainingError(
                    f"The loss {name!r} is {shown(value)}; `value` must return a tensor with one number."
                )
        stacked = torch.stack(list(values.values()))
        if self.balance is not None:
            self.balance.watch(self.raw, self.mean, self.index)
            weights = torch.stack(self.balance.weights(self.terms, values, self.progress))
            return stacked @ weights.to(stacked.dtype), values
        coefficients = [term.coefficient_at(self.progress) for term in self.terms.values()]
        return stacked @ torch.tensor(coefficients, dtype=stacked.dtype, device=stacked.device), values

    def faithfulness(self) -> Float[Tensor, ""]:
        """How far the sums of subcomponents are from the matrices."""
        return faithfulness(self.model) if self.balance is None else relative_faithfulness(self.model)


def relative_faithfulness(model: DecomposedModel) -> Float[Tensor, ""]:
    """Squared error of the summed subcomponents of each matrix, as a share of that matrix; the mean."""
    shares = []
    for name, layer in model.layers.items():
        if name not in model.tied:
            W = layer.matrix()
            size = W.square().mean()
            # A matrix of zeros has no size to be a share of.
            shares.append(F.mse_loss(layer.subcomponents.weight(), W) / torch.where(size > 0, size, 1.0))
    return torch.stack(shares).mean()


def faithfulness(model: DecomposedModel) -> Float[Tensor, ""]:
    """Squared error of the summed subcomponents, over all decomposed matrices, per parameter in them."""
    uses = Counter(
        model.tied.get(name, name) for name in model.layers
    )  # a tied layer's error is its source's
    matrices = {name: model.layers[name].matrix() for name in uses}
    parameters = sum(n * matrices[name].numel() for name, n in uses.items())
    errors = [
        F.mse_loss(model.layers[name].subcomponents.weight(), W, reduction="sum") * (uses[name] / parameters)
        for name, W in matrices.items()
    ]
    return sum(errors[1:], errors[0])


def set_gradients(
    loss: Tensor, parameters: list[torch.nn.Parameter], followers: Sequence[Follower] = ()
) -> None:
    """Gradients for our parameters only: `backward()` would also fill the target's `.grad`."""
    leaves = [leaf for follower in followers for leaf in follower.leaves]
    gradients = list(torch.autograd.grad(loss, [*parameters, *leaves], allow_unused=True))
    for p, gradient in zip(parameters, gradients, strict=False):
        if gradient is not None and gradient.stride() != p.stride():  # a fused optimiser walks through memory
            gradient = torch.empty_like(p).copy_(gradient)
        p.grad = gradient
    rest = iter(gradients[len(parameters) :])
    for follower in followers:
        follower.then([next(rest) for _ in follower.leaves])
