"""Losses, prices and learning rates without units, so that one set of settings serves any network.

What the paper's coefficients mean depends on the network: multiply its output by ten, and the
divergences grow a hundredfold while the price of an importance stays. With `relative: true` in the
config, everything is measured against the network itself:

- divergences are shares of what removing everything costs, D0;
- faithfulness is the squared error of each matrix as a share of that matrix, averaged over matrices;
- what presses importances down (minimality, frequency) has a share as its coefficient, kappa: all
  importances together cost so much of what removing the layers costs, one layer at a time, added
  up: beta3 = kappa (D1 + D2 + ...) / L0, where L0 is a running mean of the penalty. Pressure is gentle
  while much is on, and grows as the decomposition becomes sparse. Layers in series each hold all
  of D0, so the price of an importance does not fall as a network gets deeper; layers side by side
  share it;
- a layer of which much is on at a time pays less for each importance than one of which little is,
  by the ratio of their L0 to the power of `EVENED`: one price for all either leaves strays in the
  sparse one or takes from the dense one what it needs;
- a guard takes that pressure away where the masked network does not work yet: what is not learned
  cannot be given up;
- read vectors start, and learn, in units of the layer's inputs, so that inner activations are about
  1, and write vectors in units of what the matrix makes of them.

The state is a few numbers in the memory of the training run, and so part of every checkpoint.
"""

import math
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from rankone.data import Batch
from rankone.errors import TrainingError
from rankone.importance import clipped
from rankone.model import DecomposedModel

REMEMBERED = 0.98
"""How much of a running mean is what it was a step before."""
GUARD = 0.1
"""The masked error, as a share of D0, at which nothing presses importances down any more."""
LEAST_COST = 1e-2
"""L0 is taken to be at least this: when everything dies, the price must not run away."""
EVENED = 0.75
"""How far the shares of layers in the price are evened out: with 0 every importance costs the same, with 1
all importances of any one layer cost as much as those of any other."""
MOST_UNEVEN = 8.0
"""By how much prices of layers may differ from their mean."""
WATCHED_EVERY = 10
"""Steps between looks at how much is on in each layer."""
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

    def set_everything(self, divergences: Iterable[float], alone: Iterable[float]) -> None:
        """D0 from its measurements, and the sum over layers of what removing one alone costs; raises
        where removing everything changes nothing."""
        mean, one_by_one = _mean(divergences), _mean(alone)
        if not math.isfinite(mean) or mean <= 0:
            raise TrainingError(
                f"Removing every decomposed layer changes the output by {mean:g} on this data, so there is "
                "nothing to explain. Check that the data makes the network do something, that the "
                "layers matter for the output, and that the divergence sees it (KL of a single output is 0)."
            )
        self.memory["balance/everything"] = torch.tensor(mean)
        # Where no layer is missed alone, because others stand in for it, all of them together are.
        self.memory["balance/layers"] = torch.tensor(one_by_one / mean if one_by_one > 0 else 1.0)

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
                weight = weight * pressed * self.memory["balance/layers"].to(known)
                weight = weight / cost.clamp(min=LEAST_COST)
            weights.append(weight)
        return weights

    def watch(self, raw: Mapping[str, Tensor], mean: Callable[[Tensor, str], Tensor], index: int) -> None:
        """Notice how much is on in each layer, for the price of its importances."""
        if index % WATCHED_EVERY == 0:
            with torch.no_grad():
                for name, values in raw.items():
                    on = mean(clipped(values).sum(-1), name)
                    self._running(f"on/{name}", on, REMEMBERED**WATCHED_EVERY)

    def prices(self, layers: Iterable[str]) -> dict[str, float]:
        """The price of an importance in each layer, beside the mean; empty before anything was seen."""
        known = {name: self.memory.get(f"balance/on/{name}") for name in layers}
        on = {name: max(float(t), LEAST_COST) for name, t in known.items() if t is not None}
        if not on or len(on) < len(known):
            return {}
        mean = math.exp(math.fsum(math.log(x) for x in on.values()) / len(on))
        factors = {name: (mean / x) ** EVENED for name, x in on.items()}
        return {name: min(max(f, 1 / MOST_UNEVEN), MOST_UNEVEN) for name, f in factors.items()}

    def _running(self, name: str, value: Tensor, remembered: float = REMEMBERED) -> Tensor:
        key = f"balance/{name}"
        before = self.memory.get(key)
        mean = value if before is None else torch.lerp(value, before.to(value), remembered)
        self.memory[key] = mean.clone()
        return mean


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return math.fsum(listed) / len(listed)


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
        clean = model.clean(batch)
        for name, layer in own.items():
            a = layer.vectors(clean.inputs[name]).double()
            rows = len(a) if a.dim() > 1 else 1
            each = model.weights(name, clean, a.shape[:-1]).to(a).reshape(rows, -1)
            per_row = each.sum(1)
            sizes = (a.square().sum(-1).reshape(rows, -1) * each).sum(1) / per_row.clamp(min=1e-30)
            per_row = per_row / per_row.sum()
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
