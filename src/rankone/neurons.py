"""Single neurons among the parts that a layer starts with, where few of them matter at a time.

`init: mixed` starts from what a matrix does to single datapoints (components.py). That is the right
kind of part where few features are on at a time. Where many are on but few neurons answer, as in a
circuit of ANDs, the right kind is a row of the matrix: what one neuron reads. No gradient leads from
the one kind to the other, so such layers start with both, each with half of the matrix, and training
keeps the cheaper.

Whether outputs of a layer are neurons at all is seen from the outside: something acts on each of them
alone (a ReLU), so on some datapoints single ones have no effect while others do.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rankone.components import bounded_solution
from rankone.data import Batch, generator_for, to_device
from rankone.masks import Mask
from rankone.model import CleanPass, DecomposedModel

SILENT = 1e-3
"""A slope this small beside the others of its datapoint is none."""
OFTEN_SILENT = 0.1
"""The share of outputs without a slope from which on they are taken for neurons."""
NOTICEABLE = 0.1
"""What has this share of the largest effect on a datapoint counts as on."""
FEWER = 0.5
"""Neurons are added if so many times fewer of them than of the other parts are on at a time."""


@torch.no_grad()
def add_neurons(model: DecomposedModel, stream: Iterator[Batch], seed: int) -> dict[str, int]:
    """Give every layer whose neurons are sparser than its parts one part for each neuron; returns how
    many each such layer got. Layers that share their subcomponents with others are left alone."""
    shared = {*model.tied, *model.tied.values()}
    batch = to_device(next(stream), model.device)
    clean = model.clean(batch)
    added = {}
    for name, layer in model.layers.items():
        W = layer.matrix()
        live = W.norm(dim=1) > 0
        n = int(live.sum())
        if name in shared or not 2 <= n <= layer.C // 2:
            continue
        parts = layer.subcomponents
        before = parts.U.detach().clone(), parts.V.detach().clone()
        sizes = model.inner(clean)[name].abs() * parts.U.norm(dim=0)
        data = model.weights(name, clean, sizes.shape[:-1]) > 0
        generator = generator_for(seed, f"init/neurons/{name}")
        on = _neurons_on(model, name, batch, clean, live, data, generator)
        if on is not None and on < FEWER * _on(sizes[data]):
            others = before[1][: layer.C - n]
            norms = W[live].norm(dim=1)
            own = torch.diag(W.norm(dim=1))[:, live]
            parts.U.copy_(torch.cat([bounded_solution(W, others) / 2, own / 2], 1))
            parts.V.copy_(torch.cat([others, W[live] / norms.unsqueeze(1)]))
            added[name] = n
        else:
            parts.U.copy_(before[0])
            parts.V.copy_(before[1])
    return added


def _neurons_on(
    model: DecomposedModel,
    name: str,
    batch: Batch,
    clean: CleanPass,
    live: Bool[Tensor, " d_out"],
    data: Bool[Tensor, "*lead"],
    generator: torch.Generator,
) -> float | None:
    """How many outputs of a layer have an effect at a time; None if they are no neurons.

    Uses the layer's subcomponents: for the moment they are the rows of the matrix.
    """
    layer, n = model.layer(name), int(live.sum())
    parts = layer.subcomponents
    parts.U.zero_()
    parts.V.zero_()
    parts.V[:n] = layer.matrix()[live]
    parts.U[live.nonzero().flatten(), torch.arange(n, device=parts.U.device)] = 1.0
    y = model.inner(clean)[name]
    with torch.enable_grad():
        mask = torch.ones_like(y).requires_grad_()
        output = model.masked(batch, {name: Mask(mask)}, clean)
        if not output.requires_grad or not bool(data.any()):
            return None  # the training step says what is wrong with such a target
        direction = torch.randn(output.shape, generator=generator).to(output)
        (effect,) = torch.autograd.grad((output * direction).sum(), mask, allow_unused=True)
    if effect is None:
        return None
    y, effect = y[data][:, :n], effect[data][:, :n]
    there = y.abs() > SILENT * y.abs().max()
    slope = torch.where(there, effect / torch.where(there, y, 1.0), 0.0)
    size = (slope.square().sum(1) / there.sum(1).clamp(min=1)).sqrt()
    rows = (size > 0) & (there.sum(1) > 1)
    silent = (slope.abs() <= SILENT * size.unsqueeze(1)) & there
    if not bool(rows.any()) or float(silent[rows].sum() / there[rows].sum()) < OFTEN_SILENT:
        return None
    return _on(effect.abs())


def _on(effects: Float[Tensor, "rows n"]) -> float:
    """How many have a noticeable effect at a time, on datapoints on which any has."""
    largest = effects.amax(1, keepdim=True)
    rows = largest.squeeze(1) > 0
    if not bool(rows.any()):
        return 0.0
    return float((effects[rows] > NOTICEABLE * largest[rows]).sum(1).double().mean())
