"""How subcomponents drive each other: on which earlier ones the inner activation of a later one rests.

An edge from i to j is what i adds to the inner activation h_j = v_j · a of a later layer, as a share of
it: the slope of h_j with respect to the mask of i, where both are important, with nothing masked
(gradient times activation). Slopes are cheap and may mislead where something saturates, so the
strongest edges are also checked by ablation: what becomes of h_j when i alone is taken out.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rankone.data import Batch, to_device
from rankone.errors import LayerError
from rankone.masks import Mask
from rankone.metrics import IMPORTANT
from rankone.model import DecomposedModel
from rankone.patching import frozen
from rankone.tables import Table

MOST_DRIVEN = 256
"""Subcomponents whose edges are looked for, those first that are important most often: each takes a
backward pass."""


@dataclass(frozen=True)
class Edge:
    """How much of the inner activation of `to` is due to `source`."""

    source: tuple[str, int]
    to: tuple[str, int]
    share: float


def attributions(model: DecomposedModel, batch: Batch, *, count: int, checked: int) -> Table:
    """The strongest edges on a batch, and what ablation says of the very strongest."""
    batch = to_device(batch, model.device)
    with torch.inference_mode(False), frozen(model.target):
        on = {name: g > IMPORTANT for name, g in model.importances(batch).items()}
        values = {name: torch.ones(o.shape, device=o.device, requires_grad=True) for name, o in on.items()}
        with torch.enable_grad():
            inner = _inner(model, batch, values)
        edges = sorted(_edges(inner, values, on), key=lambda edge: -abs(edge.share))[:count]
        with torch.no_grad():
            rows = [
                (*edge.source, *edge.to, edge.share, _by_ablation(model, batch, inner, on, edge))
                if k < checked
                else (*edge.source, *edge.to, edge.share, None)
                for k, edge in enumerate(edges)
            ]
    note = (
        "share: of the inner activation of the later one, by its slope; by ablation: the same when the "
        "earlier one alone is taken out."
    )
    left_out = [name for name in model.layers if name not in inner]
    if left_out:
        note += f" Not looked at, because they are no modules of their own: {', '.join(left_out)}."
    return Table(("layer", "c", "drives", "d", "share", "by ablation"), rows, note)


def _inner(model: DecomposedModel, batch: Batch, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inner activations of a pass under masks, in the order in which layers are called."""
    masks = {name: Mask(v, delta=torch.ones_like(v[..., 0])) for name, v in values.items()}
    with _read(model) as inner:
        model.masked(batch, masks)
    if len(inner) < 2:
        raise LayerError(
            "Attributions are between decomposed layers, and fewer than two could be looked at here. "
            f"Decomposed are: {', '.join(model.layers)}. Decompose at least two that follow each other."
        )
    return inner


@contextmanager
def _read(model: DecomposedModel) -> Iterator[dict[str, Tensor]]:
    """What every layer that is a module of its own reads when it is first called."""
    inner: dict[str, Tensor] = {}

    def reader(name: str) -> Any:
        layer = model.layer(name)

        def read(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if name not in inner:
                inner[name] = layer.read(layer.adapter.input(name, args, kwargs))

        return read

    modules = [layer.adapter.module for layer in model.layers.values()]
    handles = [
        layer.adapter.module.register_forward_pre_hook(reader(name), with_kwargs=True)
        for name, layer in model.layers.items()
        if modules.count(layer.adapter.module) == 1
    ]
    try:
        yield inner
    finally:
        for handle in handles:
            handle.remove()


def _edges(
    inner: Mapping[str, Tensor], values: Mapping[str, Tensor], on: Mapping[str, Tensor]
) -> Iterator[Edge]:
    names = [name for name in inner if inner[name].shape == on[name].shape]
    often = {(n, int(d)): int(on[n][..., d].sum()) for n in names for d in _ever(on[n])}
    for name, d in sorted(often, key=lambda key: -often[key])[:MOST_DRIVEN]:
        earlier = names[: names.index(name)]
        h = inner[name][..., d] * on[name][..., d]
        size = float(h.detach().abs().sum())
        if not earlier or size == 0:
            continue
        signed = (h * h.detach().sign()).sum()
        slopes = torch.autograd.grad(
            signed, [values[n] for n in earlier], retain_graph=True, allow_unused=True
        )
        for source, slope in zip(earlier, slopes, strict=True):
            if slope is None:
                continue
            shares = (slope * on[source]).flatten(0, -2).sum(0) / size
            for c in shares.nonzero().flatten().tolist():
                yield Edge((source, c), (name, d), float(shares[c]))


def _ever(on: Tensor) -> list[int]:
    return on.flatten(0, -2).any(0).nonzero().flatten().tolist()


def _by_ablation(
    model: DecomposedModel, batch: Batch, inner: Mapping[str, Tensor], on: Mapping[str, Tensor], edge: Edge
) -> float:
    """What the inner activation of a later subcomponent loses, as a share, without an earlier one."""
    (source, c), (name, d) = edge.source, edge.to
    values = {n: torch.ones(o.shape, device=o.device) for n, o in on.items()}
    values[source][..., c] = (~on[source][..., c]).to(values[source])
    before = inner[name][..., d] * on[name][..., d]
    after = _inner(model, batch, values)[name][..., d] * on[name][..., d]
    return float(((before - after) * before.sign()).sum() / before.abs().sum())
