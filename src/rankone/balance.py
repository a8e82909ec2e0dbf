"""Losses, prices and learning rates without units, so that one set of settings serves any network.

What the paper's coefficients mean depends on the network: multiply its output by ten, and the
divergences grow a hundredfold while the price of an importance stays. With `relative: true` in the
config, everything is measured against the network itself:

- divergences are shares of what removing everything costs, D0;
- faithfulness is the squared error of each matrix as a share of that matrix, averaged over matrices;
- what presses importances down (minimality, frequency) has a share of D0 as its coefficient, kappa:
  all importances together cost so much, beta3 = kappa D0 / L0, where L0 is a running mean of the
  penalty. Pressure is gentle while much is on, and grows as the decomposition becomes sparse;
- a guard takes that pressure away where the masked network does not work yet: what is not learned
  cannot be given up;
- read vectors start, and learn, in units of the layer's inputs, so that inner activations are about
  1, and write vectors in units of what the matrix makes of them.

The state is a few numbers in the memory of the training run, and so part of every checkpoint.
"""

import math
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from rankone.data import Batch, row_weights
from rankone.errors import TrainingError
from rankone.model import DecomposedModel

REMEMBERED = 0.98
"""How much of a running mean is what it was a step before."""
GUARD = 0.1
"""The masked error, as a share of D0, at which nothing presses importances down any more."""
LEAST_COST = 1e-2
"""L0 is taken to be at least this: when everything dies, the price must not run away."""
MEASURED_BATCHES = 8
"""From how many batches D0 and the units of the factors are measured."""


class Balance:
    """What each term of the loss weighs in a training step."""

    def __init__(self, memory: MutableMapping[str, Tensor]) -> None:
        self.memory = memory

    @property
    def everything(self) -> Tensor:
        """D0, the divergence of removing everything."""
        return self.memory["balance/everything"]

    def set_everything(self, divergences: Iterable[float]) -> None:
        """D0 from its measurements; raises where removing everything changes nothing."""
        values = list(divergences)
        mean = math.fsum(values) / len(values)
        if not math.isfinite(mean) or mean <= 0:
            raise TrainingError(
                f"Removing every decomposed layer changes the output by {mean:g} on this data, so there is "
                "nothing to explain. Check that the data makes the network do something, that the "
                "layers matter for the output, and that the divergence sees it (KL of a single output is 0)."
            )
        self.memory["balance/everything"] = torch.tensor(mean)

    def weights(
        self, terms: Mapping[str, Any], values: Mapping[str, Tensor], progress: float
    ) -> list[Tensor]:
        """What the value of each term is multiplied by; also moves the running means on."""
        known = next(iter(values.values()))
        everything = self.everything.to(known)
        shares = [
            values[name].detach() / everything
            for name, term in terms.items()
            if term.unit == "divergence" and term.coefficient_at(progress) > 0
        ]
        error = torch.stack(shares).max() if shares else known.new_zeros(())
        pressed = (1 - self._running("error", error) / GUARD).clamp(min=0)
        weights = []
        for name, term in terms.items():
            weight = torch.as_tensor(term.coefficient_at(progress), dtype=known.dtype, device=known.device)
            if term.unit == "divergence":
                weight = weight / everything
            elif term.unit == "importance":
                cost = self._running(f"cost/{name}", values[name].detach())
                weight = weight * pressed / cost.clamp(min=LEAST_COST)
            weights.append(weight)
        return weights

    def _running(self, name: str, value: Tensor) -> Tensor:
        key = f"balance/{name}"
        before = self.memory.get(key)
        mean = value if before is None else torch.lerp(value, before.to(value), REMEMBERED)
        self.memory[key] = mean.clone()
        return mean


@torch.no_grad()
def in_units_of_data(model: DecomposedModel, stream: Iterable[Batch]) -> dict[str, float]:
    """Scale read and write vectors so that inner activations are about 1; their sum stays as it is.

    Returns the unit of every factor, by the name it has in `model.trained()`: how large its entries are
    expected to be, and so how fast they should learn. An input's size is its norm,
    averaged with its square as the weight, so that data that is mostly 0 counts where it is not.
    """
    own = {name: layer for name, layer in model.layers.items() if name not in model.tied}
    square, fourth = dict.fromkeys(own, 0.0), dict.fromkeys(own, 0.0)
    for batch in stream:
        clean, weights = model.clean(batch), row_weights(batch)
        for name, layer in own.items():
            a = layer.adapter.vectors(clean.inputs[name]).double()
            sizes = a.square().sum(-1).reshape(a.shape[0], -1).mean(1) if a.dim() > 1 else a.square()
            per_row = torch.full_like(sizes, 1 / len(sizes)) if weights is None else weights.double()
            square[name] += float(per_row @ sizes)
            fourth[name] += float(per_row @ sizes.square())
    units: dict[str, float] = {}
    for name, layer in own.items():
        size = math.sqrt(fourth[name] / square[name]) if square[name] > 0 else 1.0
        rms = float(layer.matrix().double().square().mean().sqrt())
        read, write = layer.subcomponents.V, layer.subcomponents.U
        norms = read.norm(dim=1, keepdim=True).clamp(min=1e-30)
        scale = 1 / (size * norms)
        read.mul_(scale)
        write.div_(scale.T)
        units[f"{name}.V"] = 1 / size
        units[f"{name}.U"] = size * rms if rms > 0 else 1.0
    return units
