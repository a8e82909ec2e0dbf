"""Single neurons among the parts that a layer starts with, where few of them matter at a time.

`init: mixed` starts from what a matrix does to single datapoints (components.py). That is the right
kind of part where few features are on at a time. Where many are on but few neurons answer, as in a
circuit of ANDs, the right kind is a row of the matrix: what one neuron reads. Where the inputs of a
matrix are neurons, few of them on at a time, it is a column: what one neuron writes. No gradient leads
from the one kind to the other, so such layers start with both, each with half of the matrix, and
training keeps the cheaper.

Whether outputs of a layer are neurons at all is seen from the outside: something acts on each of them
alone (a ReLU), so on some datapoints single ones have no effect while others do. Inputs are neurons
if single ones are often 0.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rankone.components import Factors, bounded_solution
from rankone.data import Batch, generator_for, to_device
from rankone.masks import Mask
from rankone.model import CleanPass, DecomposedLayer, DecomposedModel

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
        if name in shared:
            continue
        sizes = model.inner(clean)[name].abs() * layer.subcomponents.U.norm(dim=0)
        data = model.weights(name, clean, sizes.shape[:-1]) > 0
        at_most = FEWER * _on(sizes[data])
        generator = generator_for(seed, f"init/neurons/{name}")
        kept = layer.subcomponents.V.detach().clone()
        neurons = _rows(model, name, batch, clean, data, generator, at_most)
        if neurons is None:
            neurons = _columns(layer, layer.vectors(clean.inputs[name])[data], at_most)
        if neurons is not None:
            U, V = neurons
            others = kept[: layer.C - len(V)]
            layer.subcomponents.U.copy_(torch.cat([bounded_solution(layer.matrix(), others) / 2, U / 2], 1))
            layer.subcomponents.V.copy_(torch.cat([others, V]))
            added[name] = len(V)
    return added


def _rows(
    model: DecomposedModel,
    name: str,
    batch: Batch,
    clean: CleanPass,
    data: Bool[Tensor, "*lead"],
    generator: torch.Generator,
    at_most: float,
) -> Factors | None:
    """What single outputs read, if they are neurons and fewer are on at a time than `at_most`."""
    layer = model.layer(name)
    parts, W = layer.subcomponents, layer.matrix()
    live = W.norm(dim=1) > 0
    if not 2 <= int(live.sum()) <= layer.C // 2:
        return None
    before = parts.U.detach().clone(), parts.V.detach().clone()
    on = _neurons_on(model, name, batch, clean, live, data, generator)
    parts.U.copy_(before[0])
    parts.V.copy_(before[1])
    if on is None or on >= at_most:
        return None
    return torch.diag(W.norm(dim=1))[:, live], W[live] / W[live].norm(dim=1, keepdim=True)


def _columns(layer: DecomposedLayer, inputs: Float[Tensor, "rows d_in"], at_most: float) -> Factors | None:
    """What single inputs write, if they are neurons and fewer are on at a time than `at_most`."""
    W = layer.matrix()
    if not len(inputs):
        return None
    there = inputs.abs() > SILENT * inputs.abs().max()
    live = (W.norm(dim=0) > 0) & there.any(0)
    if not 2 <= int(live.sum()) <= layer.C // 2 or float((~there).double().mean()) < OFTEN_SILENT:
        return None
    if _on(inputs.abs() * W.norm(dim=0)) >= at_most:
        return None
    return W[:, live], torch.eye(W.shape[1], dtype=W.dtype, device=W.device)[live]


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
