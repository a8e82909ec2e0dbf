"""The fast engine: step.py with compiled gates, and nothing computed twice.

What it adds to a plain `Step`: the gates of all layers, the first sample of stochastic masks, the
masked inner activations and the penalty come out of one walk through memory (gates.py); a pass that
begins like the clean one takes over what is known of it; products are made in the order that suits
memory and remembered for the step (products.py). README.md beside this file says when it applies
and what it promises.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from rankone.adapters import Activation, Adapter, LinearAdapter
from rankone.data import weights_for
from rankone.fast.factored import Factored
from rankone.fast.gates import Gate, Gated, gated
from rankone.fast.products import Memo, keeping_constants, rows_times, sharing
from rankone.importance import PerLayer
from rankone.layer import Calls
from rankone.losses import Sparsity, mse
from rankone.masks import SOURCES, Mask, Masks, MaskSource, random_delta
from rankone.model import DecomposedModel
from rankone.step import Penalty, Step


class FastStep(Step):
    """One batch on its way through Algorithm 1, on compiled kernels where they apply."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._memo: Memo = {}
        self._gated: dict[str, Gated] = {}
        self._shape: Penalty | None = None
        self._prices: Mapping[str, float] = {}
        self._written: dict[tuple[Any, ...], tuple[Mask, Activation]] = {}
        self._rest: dict[str, tuple[Tensor, Tensor | None]] = {}
        self._scaled_target: tuple[Tensor, Tensor] | None = None
        with sharing(self._memo):
            super().__init__(*args, **kwargs)

    @staticmethod
    @contextmanager
    def ready(model: DecomposedModel) -> Iterator[None]:
        """Linear layers multiply in the order that suits memory; products of frozen weights are kept."""
        plain = [(layer, layer.adapter) for layer in model.layers.values()]
        for layer, adapter in plain:
            if isinstance(adapter, LinearAdapter):
                layer.adapter = OrderedLinear(adapter)
        try:
            with model.target_held_fixed(), keeping_constants():
                yield
        finally:
            for layer, adapter in plain:
                layer.adapter = adapter

    def importances(self) -> dict[str, Tensor]:
        if not isinstance(self.model.importance, PerLayer):
            return super().importances()
        functions = self.model.importance.functions
        losses = [term for term in self.terms.values() if isinstance(term, Sparsity)]
        self._shape = losses[0].penalty(self.progress) if losses else None
        self._prices = losses[0].prices(self.inner, self.balance) if losses else {}
        gates = {
            name: Gate(f, self.inner[name], self.mask_key(name, 0), self._flat_weights(name))
            for name, f in functions.items()
        }
        self._gated, penalty = gated(gates, self._shape, self.mask_settings, self._prices, self.share)
        self._penalty = None if penalty is None else self.share.shared(penalty)
        return {
            name: self._gated[name].raw if name in self._gated else f(self.inner[name])
            for name, f in functions.items()
        }

    def _flat_weights(self, name: str) -> Tensor | None:
        """How much of a mean each datapoint of a layer is, all in a row."""
        weights = self.weights_of(name)
        if weights is None or weights.numel() == self.inner[name].shape[:-1].numel():
            return None if weights is None else weights.flatten()
        return self.each_weight(name)

    def masks(self, source: str | MaskSource, sample: int, routing: str = "all") -> Masks:
        key = (source, sample, torch.is_grad_enabled())
        if (source, sample) != ("stochastic", 0) or key in self._masks:
            return super().masks(source, sample, routing)
        draw = self.draw(sample, routing)
        plain = {name: raw for name, raw in self.raw.items() if name not in self._gated}
        masks = dict(SOURCES["stochastic"](replace(draw, raw=plain)))
        masks |= {name: Mask(g.mask, delta=random_delta(draw, name)) for name, g in self._gated.items()}
        self._masks[key] = {name: masks[name] for name in self.raw}
        return self._masks[key]

    def output(self, masks: Masks) -> Tensor:
        """Up to the first masked layer a pass is the clean one, and so is that layer's input."""
        masks = self.with_others(masks)
        for name, mask in masks.items():
            self.model.check_mask(name, mask)
        first = next((name for name in self.clean.inputs if name in masks), None)
        if first is None or isinstance(self.clean.inputs[first], Calls):
            return self.model.masked(self.batch, masks, self.clean)
        known = first, self._first_output(first, masks[first])
        return self.model.masked(self.batch, masks, self.clean, known)

    def _first_output(self, name: str, mask: Mask) -> Activation:
        key = (name, id(mask.values), id(mask.where), id(mask.delta), torch.is_grad_enabled())
        if key in self._written:
            return self._written[key][1]
        gate, layer = self._gated.get(name), self.model.layer(name)
        h = self.inner[name]
        known = gate.masked if gate is not None and mask.values is gate.mask else None
        if mask.where is None and mask.delta is None:
            output = layer.write(mask.values * h if known is None else known)
        else:
            if name not in self._rest:
                self._rest[name] = layer.rest(self.clean.inputs[name])
            output = layer.write_with_rest(h, mask, self._rest[name], known)
        if name not in self.clean.overwritten:
            self._written[key] = mask, output
        return output

    def distance(self, output: Tensor) -> Float[Tensor, ""]:
        if (
            self.divergence is not mse
            or output.dim() < 2
            or output.dtype not in (torch.float32, torch.float64)
        ):
            return super().distance(output)
        # The same number in as few operations as there can be: in a small network they are what costs.
        if self.weights is None:
            return self.share.shared(F.mse_loss(output, self.clean.output))
        if self._scaled_target is None:
            each = weights_for(self.weights, output.shape[:-1]).to(output.dtype)  # raises if they do not fit
            positions = each.numel() // len(self.weights)
            total = positions if self.weights.dim() == 1 else self.share.mean(each.sum())
            scale = (each / (total * output.shape[-1])).sqrt().unsqueeze(-1)
            scale = torch.empty_like(output).copy_(scale)  # in full: broadcasting is slower than reading it
            self._scaled_target = scale, scale * self.clean.output
        scale, target = self._scaled_target
        return self.share.shared(F.mse_loss(scale * output, target, reduction="sum"))

    def penalty(self, shape: Penalty, prices: Mapping[str, float] | None = None) -> Float[Tensor, ""]:
        factors = prices or {}
        if self._shape != shape or self._penalty is None or self._prices != factors:
            return super().penalty(shape, prices)
        plain = [
            self.mean(shape.of(raw), name) * factors.get(name, 1.0)
            for name, raw in self.raw.items()
            if name not in self._gated
        ]
        return torch.stack([self._penalty, *plain]).sum()

    def total(self) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
        with sharing(self._memo):
            return super().total()


class OrderedLinear(Adapter):
    """A linear layer's adapter, with products in the order that suits the kernels."""

    plain: LinearAdapter

    def __init__(self, plain: LinearAdapter) -> None:
        super().__init__(plain.module)
        self.plain = plain
        self.input, self.vectors = plain.input, plain.vectors
        # A subclass that reads or writes in its own way goes on doing so.
        if type(plain).read is not LinearAdapter.read:
            self.read = plain.read
        if type(plain).write is not LinearAdapter.write:
            self.write, self.write_sum = plain.write, plain.write_sum

    def matrix(self) -> Tensor:
        return self.plain.matrix()

    def read(self, x: Activation, V: Tensor) -> Tensor:
        return x.read(V) if isinstance(x, Factored) else rows_times(x, V)  # pyright: ignore[reportArgumentType]

    def write(self, z: Tensor, U: Tensor) -> Activation:
        return self.plain.with_bias(rows_times(z, U, rows_first=True))

    def write_sum(self, z: Tensor, U: Tensor, rest: Tensor, W: Tensor | None) -> Activation:
        return self.plain.with_bias(
            rows_times(z, U, rows_first=True) + (rest if W is None else rows_times(rest, W, rows_first=True))
        )
