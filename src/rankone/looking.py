"""What next with a result: top examples, the effect of an edit, importances by class or position.

Each gives a `Table`. All of them look at batches that training never drew.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rankone.data import (
    Batch,
    Corpus,
    Data,
    batch_digest,
    batches,
    call_with,
    given_weights,
    inputs_of,
    to_device,
    weights_for,
)
from rankone.errors import BatchError, LayerError, shown
from rankone.masks import Mask
from rankone.metrics import IMPORTANT
from rankone.model import DecomposedModel
from rankone.patching import pick_output
from rankone.tables import Table
from rankone.views import index_of

SEED = 0
"""What is looked at is the same every time."""
LOOK_AT = 8
"""How many batches are looked at, if nothing else is asked for."""


def fresh_batches(model: DecomposedModel, data: Data, count: int) -> Iterator[Batch]:
    """Batches that training never drew, where data can be drawn."""
    for batch in islice(batches(data, SEED, stream="evaluation"), count):
        yield to_device(batch, model.device)


@torch.no_grad()
def alive(model: DecomposedModel, data: Data, n_batches: int) -> dict[str, list[int]]:
    """Layer -> subcomponents that are important on some datapoint."""
    found = {name: torch.zeros(layer.C, dtype=torch.bool) for name, layer in model.layers.items()}
    for batch in fresh_batches(model, data, n_batches):
        for name, (g, weights) in model.weighted_importances(batch).items():
            found[name] |= (g[weights > 0] > IMPORTANT).any(0).cpu()
    return {name: chosen.nonzero().flatten().tolist() for name, chosen in found.items()}


@dataclass(frozen=True)
class Usage:
    """How the subcomponents of one layer are used on data."""

    rate: Float[Tensor, " C"]
    """The share of datapoints on which each is important."""
    mean: Float[Tensor, " C"]
    """Its mean importance where it is; 0 where it never is."""
    sample: Float[Tensor, "rows C"]
    """Importances on some datapoints on which anything is important."""

    @property
    def alive(self) -> list[int]:
        return self.rate.nonzero().flatten().tolist()


@torch.no_grad()
def usage(model: DecomposedModel, data: Data, n_batches: int, rows: int = 48) -> dict[str, Usage]:
    """Layer -> how its subcomponents are used."""
    on, sums = (
        {name: torch.zeros(layer.C, dtype=torch.float64) for name, layer in model.layers.items()}
        for _ in range(2)
    )
    total = dict.fromkeys(model.layers, 0.0)
    found: dict[str, list[Tensor]] = {name: [] for name in model.layers}
    for batch in fresh_batches(model, data, n_batches):
        for name, (g, each) in model.weighted_importances(batch).items():
            flat, weights = g[each > 0].double(), each[each > 0].double()
            important = flat > IMPORTANT
            on[name] += (weights @ important.double()).cpu()
            sums[name] += (weights @ (flat * important)).cpu()
            total[name] += float(weights.sum())
            if sum(map(len, found[name])) < rows:
                found[name].append(flat[important.any(1)][:rows].float().cpu())
    return {
        name: Usage(
            rate=(on[name] / total[name]).float(),
            mean=(sums[name] / on[name].clamp(min=1e-30)).float(),
            sample=torch.cat(found[name])[:rows],
        )
        for name in model.layers
    }


@torch.no_grad()
def examples(model: DecomposedModel, layer: str, c: int, data: Data, count: int, n_batches: int) -> Table:
    """The datapoints on which one subcomponent is most important, most important first; of text,
    passages with the tokens marked."""
    if isinstance(data, Corpus):
        return data.examples(model, layer, c, count, n_batches)
    index = index_of(c, model.layer(layer).C, layer)
    found: list[tuple[float, int, tuple[int, ...], Any]] = []
    seen: set[str] = set()
    for number, batch in enumerate(fresh_batches(model, data, n_batches)):
        digest = batch_digest(batch)
        if digest in seen:  # a short list of batches comes round again
            continue
        seen.add(digest)
        g, weights = model.weighted_importances(batch)[layer]
        g = g[..., index].masked_fill(weights == 0, -1.0)
        best = g.flatten().topk(min(count, int((weights > 0).sum())))
        for value, place in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            where = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), g.shape))
            found.append((value, number, where, datapoint(batch, where)))
        found = sorted(found, key=lambda row: -row[0])[:count]
    head = ("importance", "batch", "row", "position", "input")
    rows = [
        (value, number, where[0] if where else 0, where[1:] if len(where) > 1 else None, x)
        for value, number, where, x in found
    ]
    note = f"subcomponent {index} of {layer}: the {len(rows)} datapoints on which it matters most"
    return Table(head, rows, note)


def joined(tables: list[Table], count: int) -> Table:
    """Examples of several subcomponents as those of one: of each datapoint the largest importance."""
    best: dict[tuple[Any, ...], Any] = {}
    for row in sorted((row for table in tables for row in table.rows), key=lambda row: -row[0]):
        best.setdefault(tuple(map(str, row[1:])), row)
    rows = list(best.values())[:count]
    return Table(
        tables[0].head, rows, f"The {len(rows)} datapoints on which any of {len(tables)} matters most"
    )


def datapoint(batch: Batch, where: tuple[int, ...]) -> Any:
    """The row of a batch that a datapoint is in: its tensor, or one for each input of the model."""
    inputs = inputs_of(batch)
    row = where[0] if where else 0

    def of(x: Any) -> Any:
        return x[row].detach().cpu() if isinstance(x, Tensor) and x.dim() and len(x) > row else x

    if isinstance(inputs, Tensor):
        return of(inputs)
    if isinstance(inputs, Mapping):
        return {key: of(x) for key, x in inputs.items()}
    return tuple(of(x) for x in inputs)


@torch.no_grad()
def effect(model: DecomposedModel, masks: Mapping[str, Mask], data: Data, n_batches: int) -> Table:
    """What an edit changes in the output, entry by entry, averaged over datapoints."""
    before_sum, after_sum, change_sum, total, same = 0.0, 0.0, 0.0, 0.0, 0.0
    for batch in fresh_batches(model, data, n_batches):
        before = pick_output(call_with(model.target, batch), model.output)
        after = model.masked(batch, masks)
        if not before.dim():
            raise BatchError("The output has no dimensions, so there is nothing to compare entry by entry.")
        if before.dim() == 1:
            before, after = before.unsqueeze(-1), after.unsqueeze(-1)
        weights = _output_weights(batch, before)
        before_sum = before_sum + _weighted(before, weights)
        after_sum = after_sum + _weighted(after, weights)
        change_sum = change_sum + _weighted((after - before).abs(), weights)
        same += float(weights @ (before.argmax(-1) == after.argmax(-1)).flatten().double())
        total += float(weights.sum())
    assert isinstance(before_sum, Tensor)
    assert isinstance(after_sum, Tensor)
    assert isinstance(change_sum, Tensor)
    rows = [
        (i, b / total, a / total, c / total)
        for i, (b, a, c) in enumerate(
            zip(before_sum.tolist(), after_sum.tolist(), change_sum.tolist(), strict=True)
        )
    ]
    rows.sort(key=lambda row: -row[3])
    head = ("output", "mean before", "mean after", "mean absolute change")
    note = "Entries that change most come first."
    if len(rows) > 1:
        note += f" The largest entry is another one on {1 - same / total:.1%} of datapoints."
    return Table(head, rows, note)


GROUPS = ("output", "position")

Grouping = str | Callable[[Any], Tensor]
"""`"output"`: by the largest entry of the output; `"position"`; or a function of what the model is given
that returns a whole number per datapoint."""


@torch.no_grad()
def by_group(
    model: DecomposedModel, layer: str, by: Grouping, data: Data, n_batches: int, most: int = 12
) -> Table:
    """Mean importances of a layer's alive subcomponents, a column for each class or position."""
    if not callable(by) and by not in GROUPS:
        raise LayerError(f"by={shown(by)}; expected 'output', 'position' or a function of the inputs.")
    C = model.layer(layer).C
    sums: dict[int, Tensor] = {}
    counts: dict[int, float] = {}
    used = torch.zeros(C, dtype=torch.bool)
    for batch in fresh_batches(model, data, n_batches):
        g, each = model.weighted_importances(batch)[layer]
        labels = _labels(model, batch, g, by)[each.flatten() > 0]
        flat, weights = g[each > 0].double(), each[each > 0].double()
        used |= (flat > IMPORTANT).any(0).cpu()
        for label in labels.unique().tolist():
            chosen = (labels == label).double() * weights
            sums[label] = sums.get(label, torch.zeros(C, dtype=torch.float64)) + (chosen @ flat).cpu()
            counts[label] = counts.get(label, 0.0) + float(chosen.sum())
    shown_groups = sorted(counts)[:most]
    means = {label: sums[label] / max(counts[label], 1e-30) for label in shown_groups}
    rows = [
        (c, *(float(means[label][c]) for label in shown_groups)) for c in used.nonzero().flatten().tolist()
    ]
    what = by if isinstance(by, str) else "group"
    note = f"Mean importance of each alive subcomponent of {layer} by {what}."
    if len(counts) > most:
        note += f" The first {most} of {len(counts)} groups."
    return Table(("subcomponent", *(f"{what} {label}" for label in shown_groups)), rows, note)


def _labels(model: DecomposedModel, batch: Batch, g: Tensor, by: Grouping) -> Tensor:
    """A whole number for each datapoint, flat."""
    lead = g.shape[:-1]
    if by == "position":
        if len(lead) < 2:
            raise LayerError("by='position': this layer has one importance per row, without positions.")
        return (
            torch.arange(lead[1], device=g.device).view(1, -1, *[1] * (len(lead) - 2)).expand(lead).flatten()
        )
    if callable(by):
        labels = by(inputs_of(batch))
    else:
        labels = pick_output(call_with(model.target, batch), model.output).argmax(-1)
    labels = torch.as_tensor(labels, device=g.device)
    if labels.shape != lead and labels.shape == lead[:1]:
        labels = labels.view(-1, *[1] * (len(lead) - 1)).expand(lead)
    if labels.shape != lead or labels.is_floating_point():
        raise LayerError(
            f"The groups have shape {tuple(labels.shape)} and type {labels.dtype}; expected whole numbers, "
            f"one per datapoint: shape {tuple(lead)} or {tuple(lead[:1])}."
        )
    return labels.flatten()


def _output_weights(batch: Batch, output: Tensor) -> Tensor:
    """How much each datapoint of an output `[*lead, entries]` counts, flat."""
    weights = given_weights(batch)
    lead = output.shape[:-1]
    each = torch.ones(lead, device=output.device) if weights is None else weights_for(weights, lead)
    return each.flatten().double()


def _weighted(values: Tensor, weights: Tensor) -> Tensor:
    return (weights @ values.reshape(-1, values.shape[-1]).double()).cpu()
