"""Every subcomponent of a decomposition at work, in one look at the data.

For each: how often it is on and how strongly, the datapoints on which it matters most, its importance
as a function of its inner activation, and importances on a sample of datapoints.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rankone.data import Batch, Data, batch_digest
from rankone.importance import PerLayer, clipped
from rankone.looking import datapoint, fresh_batches
from rankone.metrics import IMPORTANT
from rankone.model import DecomposedModel
from rankone.view import encode

EXAMPLES = 8
"""Datapoints that are shown for each subcomponent."""
SAMPLE = 120
"""Datapoints of the heat map."""
POINTS = 41
"""Points of an importance curve."""
POOL = 512
"""Datapoints from which the points of a curve are taken, where it is no function of one number."""

Place = tuple[int, int]
"""(batch, flat number of a datapoint in it)."""


@dataclass
class LayerHarvest:
    """What the data shows of one layer."""

    rate: Float[Tensor, " C"]
    mean: Float[Tensor, " C"]
    best: Float[Tensor, "examples C"]
    """The largest importances, largest first."""
    places: Tensor
    """Where they are: `[examples, C, 2]`."""
    low: Float[Tensor, " C"]
    high: Float[Tensor, " C"]
    """The range of inner activations."""
    pool: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Inner activations and importances of some datapoints."""
    sample: list[Tensor] = field(default_factory=list)
    sample_places: list[Place] = field(default_factory=list)
    total: float = 0.0

    @property
    def alive(self) -> list[int]:
        return self.rate.nonzero().flatten().tolist()


@dataclass
class Harvest:
    """What the data shows of a decomposition."""

    layers: dict[str, LayerHarvest]
    datapoints: dict[str, dict[str, Any]]
    """`batch:row` -> a datapoint as the page shows it."""
    leads: dict[str, dict[int, tuple[int, ...]]]
    """Layer -> batch -> the shape of its datapoints."""
    count: int = 0

    def where(self, layer: str, place: Place) -> tuple[str, tuple[int, ...]]:
        """The name of a datapoint, and the position in it."""
        batch, flat = place
        index = torch.unravel_index(torch.tensor(flat), self.leads[layer][batch])
        row, *position = (int(i) for i in index)
        return f"{batch}:{row}" if not position else f"{batch}:{row}@{position[0]}", tuple(position)


@torch.no_grad()
def harvest(model: DecomposedModel, data: Data, n_batches: int) -> Harvest:
    """Look at batches that training never drew, each once."""
    found = Harvest({}, {}, {name: {} for name in model.layers})
    kept: dict[int, Batch] = {}
    seen: set[str] = set()
    for number, batch in enumerate(fresh_batches(model, data, n_batches)):
        digest = batch_digest(batch)
        if digest in seen:  # a short list of batches comes round again
            continue
        seen.add(digest)
        kept[number] = batch
        clean = model.clean(batch)
        inner = model.inner(clean)
        raw = model.raw_importances(clean, inner)
        for name, of in raw.items():
            found.leads[name][number] = tuple(of.shape[:-1])
            weights = model.weights(name, clean, of.shape[:-1]).flatten().double().cpu()
            h, g = (x.reshape(-1, x.shape[-1]).float().cpu() for x in (inner[name], clipped(of)))
            _add(found.layers, name, number, h, g, weights)
        found.count += max(int((model.weights(n, clean, r.shape[:-1]) > 0).sum()) for n, r in raw.items())
    for layer in found.layers.values():
        layer.mean = layer.mean / layer.rate.clamp(min=1e-30)
        layer.rate = layer.rate / max(layer.total, 1e-30)
    _keep_datapoints(found, kept)
    return found


def _add(layers: dict[str, LayerHarvest], name: str, number: int, h: Tensor, g: Tensor, w: Tensor) -> None:
    C = g.shape[1]
    counts = w > 0
    on = (g > IMPORTANT) & counts.unsqueeze(1)
    if name not in layers:
        none = torch.zeros(C)
        layers[name] = LayerHarvest(
            none.double(), none.double(), torch.zeros(0, C), torch.zeros(0, C, 2, dtype=torch.long),
            torch.full((C,), torch.inf), torch.full((C,), -torch.inf),
        )  # fmt: skip
    layer = layers[name]
    layer.rate = layer.rate + w @ on.double()
    layer.mean = layer.mean + w @ (g.double() * on)
    layer.total += float(w.sum())
    layer.low = torch.minimum(layer.low, h[counts].amin(0))
    layer.high = torch.maximum(layer.high, h[counts].amax(0))
    top = torch.where(counts.unsqueeze(1), g, -1.0).topk(min(EXAMPLES, len(g)), 0)
    places = torch.stack([torch.full_like(top.indices, number), top.indices], -1)
    values, where = torch.cat([layer.best, top.values]), torch.cat([layer.places, places])
    order = values.argsort(dim=0, descending=True, stable=True)[:EXAMPLES]
    layer.best = values.gather(0, order)
    layer.places = where.gather(0, order.unsqueeze(-1).expand(-1, -1, 2))
    if sum(len(x) for x, _ in layer.pool) < POOL:
        layer.pool.append((h[counts][:POOL], g[counts][:POOL]))
    if len(layer.sample_places) < SAMPLE:
        rows = on.any(1).nonzero().flatten()[: SAMPLE - len(layer.sample_places)]
        layer.sample.append(g[rows])
        layer.sample_places += [(number, int(row)) for row in rows]


def _keep_datapoints(found: Harvest, kept: dict[int, Batch]) -> None:
    """The datapoints that are shown anywhere."""
    for name, layer in found.layers.items():
        places = [
            (int(batch), int(flat))
            for c in layer.alive
            for (batch, flat), g in zip(layer.places[:, c].tolist(), layer.best[:, c].tolist(), strict=True)
            if g > 0
        ]
        for place in [*places, *layer.sample_places]:
            key, position = found.where(name, place)
            if key not in found.datapoints:
                row = int(key.partition(":")[2].partition("@")[0])
                found.datapoints[key] = encode.datapoint(datapoint(kept[place[0]], (row,)), position)


@torch.no_grad()
def curves(model: DecomposedModel, name: str, layer: LayerHarvest) -> dict[int, dict[str, Any]]:
    """Subcomponent -> its importance against its inner activation: a curve where that is all it depends
    on, else points."""
    joint = model.importance
    if isinstance(joint, PerLayer):
        share = torch.linspace(0, 1, POINTS).unsqueeze(1)
        h = layer.low + share * (layer.high - layer.low)
        g = clipped(joint.functions[name](h.to(model.device))).cpu()
        kind = "curve"
    else:
        h, g = (torch.cat(x)[:POOL] for x in zip(*layer.pool, strict=True))
        order = h.argsort(0)
        places = torch.linspace(0, len(h) - 1, min(POINTS, len(h))).round().long()
        h, g = (x.gather(0, order)[places] for x in (h, g))
        kind = "points"
    return {
        c: {
            "kind": kind,
            "h": [encode.number(x, 4) for x in h[:, c].tolist()],
            "g": [encode.number(x, 3) for x in g[:, c].tolist()],
        }
        for c in layer.alive
    }
