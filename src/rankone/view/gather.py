"""What the page shows of one decomposition, from as much of it as is at hand.

With data, everything; without data, what the weights and the history of training say; without the network,
what its artifact holds. Whatever could not be had is said on the page, in a sentence each.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rankone.clusters import Components
from rankone.data import Data
from rankone.decomposition import COMPONENTS, HISTORY, Decomposition
from rankone.errors import RankoneError
from rankone.evaluate import attack_ladder, held_out
from rankone.files import load_sealed
from rankone.looking import LOOK_AT
from rankone.masks import Mask
from rankone.metrics_log import Record, parse_metrics
from rankone.step import Step
from rankone.view import encode
from rankone.view.harvest import Harvest, LayerHarvest, curves, harvest

MOST_PARTS = 10_000
"""Subcomponents on a page: the most used ones of all."""
MOST_ABLATED = 1_000
"""Subcomponents that are taken out one by one, to see what each is missed for."""
VECTOR_BYTES = 4_000_000
"""What the read and write vectors of a page may take up; beyond it only their largest entries are kept."""
SHARES = {
    "sum": "all subcomponents together, is their sum the network?",
    "stochastic": "random masks, as in training",
    "importance": "every subcomponent scaled by its importance",
    "rounded": "the important ones alone",
    "attack_20": "the masks that an adversary finds in 20 steps",
    "union_16": "what is important to a datapoint or to 16 others",
    "deletion": "what is never important, deleted",
}


@dataclass
class Chosen:
    """The subcomponents on the page, in their order."""

    layers: list[str]
    """Of each, its layer."""
    indices: list[int]

    def __len__(self) -> int:
        return len(self.layers)

    def pairs(self) -> Iterator[tuple[str, int]]:
        return zip(self.layers, self.indices, strict=True)


def gather(
    result: Decomposition, name: str, data: Data | None = None, *, attack: int = 80, n_batches: int = LOOK_AT
) -> dict[str, Any]:
    """Everything about a decomposition whose network is at hand."""
    given = data if data is not None else result.data
    missing: list[str] = []
    page = _described(result, name)
    if given is None:
        missing.append(
            "There is no data at hand, so this page cannot show when a subcomponent matters, examples, "
            "components, or what taking one out changes. Give data: rankone.open(DIRECTORY, model=..., "
            "data=...).view(), or rankone view DIRECTORY --model FILE.py:FUNCTION."
        )
        chosen = _largest({n: result.components(n).norms() for n in result.layers})
    else:
        seen = harvest(result.model, given, n_batches)
        chosen = _most_used(seen)
        if not len(chosen):
            missing.append(
                f"No subcomponent is important on any of {seen.count:,} datapoints: importances are 0.1 or "
                "less everywhere. The decomposition found nothing that matters on this data, or the data is "
                "not what it was made on. Listed here are all subcomponents, the largest first."
            )
            chosen = _largest({n: result.components(n).norms() for n in result.layers})
        page |= _at_work(result, given, seen, chosen, attack, n_batches, missing)
    vectors = {n: (result.components(n).U, result.components(n).V) for n in result.layers}
    page |= _parts(chosen, vectors) | {"history": history(result.history), "missing": missing}
    return page


def gather_artifact(path: Path, name: str, why: str) -> dict[str, Any]:
    """What a saved decomposition says without its network; `why` is why that is all."""
    page: dict[str, Any] = {
        "name": name,
        "version": None,
        "target": "",
        "steps": 0,
        "layers": [],
        "history": {},
    }
    missing = [why]
    artifact = next(
        (p for p in (path / COMPONENTS, path / "decomposition" / COMPONENTS) if p.is_file()), None
    )
    vectors: dict[str, tuple[Tensor, Tensor]] = {}
    if artifact is None:
        missing.append("There is no decomposition in this directory yet, so there is nothing to list.")
    else:
        try:
            tensors, about = load_sealed(artifact)
        except RankoneError as error:
            missing.append(str(error))
        else:
            vectors = _factors(tensors)
            page |= _described_by(about, vectors)
            if HISTORY in tensors:
                page["history"] = history(parse_metrics(tensors[HISTORY].numpy().tobytes(), str(artifact)))
            if page["version"] != version("rankone"):
                missing.append(
                    f"It was made by rankone {page['version']}; this is {version('rankone')}. What could be "
                    "read is shown."
                )
    chosen = _largest({n: U.norm(dim=0) * V.norm(dim=1) for n, (U, V) in vectors.items()})
    return page | _parts(chosen, vectors) | {"missing": missing}


def _described(result: Decomposition, name: str) -> dict[str, Any]:
    facts = result.facts
    return {
        "name": name,
        "version": version("rankone"),
        "target": facts.target,
        "steps": facts.steps_done,
        "planned": facts.steps,
        "seed": result.config.seed,
        "layers": [
            {
                "name": n,
                "shape": list(facts.shapes[n]),
                "C": facts.C[n],
                "tied": facts.tied.get(n),
                "l0": encode.number(facts.l0.get(n)),
                "module": type(result.model.layer(n).adapter.module).__name__,
                "patch": _patch(result.model.layer(n).adapter.module),
            }
            for n in result.layers
        ],
    }


def _described_by(about: Mapping[str, Any], vectors: Mapping[str, Any]) -> dict[str, Any]:
    layers = about.get("layers", {})
    return {
        "version": about.get("rankone"),
        "target": str(about.get("target", {}).get("class", "")),
        "steps": about.get("config", {}).get("steps", 0),
        "seed": about.get("config", {}).get("seed"),
        "layers": [
            {
                "name": n,
                "shape": [U.shape[0], V.shape[1]],
                "C": U.shape[1],
                "tied": layers.get(n, {}).get("tied_to"),
                "module": str(layers.get(n, {}).get("module", "")),
            }
            for n, (U, V) in vectors.items()
        ],
    }


def _factors(tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    names = [key.removesuffix(".U") for key in tensors if key.endswith(".U")]
    return {n: (tensors[f"{n}.U"], tensors[f"{n}.V"]) for n in names if f"{n}.V" in tensors}


def _patch(module: Any) -> list[int] | None:
    """What a read vector of a convolution looks like: channels, height, width."""
    kernel, channels = getattr(module, "kernel_size", None), getattr(module, "in_channels", None)
    if isinstance(kernel, tuple) and isinstance(channels, int):
        return [channels // getattr(module, "groups", 1), *kernel]
    return None


def _most_used(seen: Harvest) -> Chosen:
    """Alive subcomponents in the order of layers and indices; of too many the most used."""
    alive = [(name, c, float(layer.rate[c])) for name, layer in seen.layers.items() for c in layer.alive]
    if len(alive) > MOST_PARTS:
        least = sorted((rate for _, _, rate in alive), reverse=True)[MOST_PARTS - 1]
        alive = [part for part in alive if part[2] >= least][:MOST_PARTS]
    return Chosen([name for name, _, _ in alive], [c for _, c, _ in alive])


def _largest(norms: Mapping[str, Tensor]) -> Chosen:
    every = sorted(
        ((float(n), name, c) for name, of in norms.items() for c, n in enumerate(of)), reverse=True
    )
    kept = every[:MOST_PARTS]
    return Chosen([name for _, name, _ in kept], [c for _, _, c in kept])


def _parts(chosen: Chosen, vectors: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """The table of subcomponents and their vectors."""
    order = list(dict.fromkeys(chosen.layers))
    sizes = sum(vectors[n][0].shape[0] + vectors[n][1].shape[1] for n in chosen.layers)
    most = sizes if sizes <= VECTOR_BYTES else max(8, VECTOR_BYTES // (10 * max(1, len(chosen))))
    return {
        "order": order,
        "part_layers": [order.index(n) for n in chosen.layers],
        "part_indices": chosen.indices,
        "norms": [
            encode.number(float(vectors[n][0][:, c].norm() * vectors[n][1][c].norm()))
            for n, c in chosen.pairs()
        ],
        "write": [encode.sparse(vectors[n][0][:, c], most) for n, c in chosen.pairs()],
        "read": [encode.sparse(vectors[n][1][c], most) for n, c in chosen.pairs()],
    }


def _at_work(
    result: Decomposition,
    data: Data,
    seen: Harvest,
    chosen: Chosen,
    attack: int,
    n_batches: int,
    missing: list[str],
) -> dict[str, Any]:
    """What data adds: usage, curves, examples, components, importances, ablations, how good it is."""
    of = seen.layers
    by_layer = {name: curves(result.model, name, layer) for name, layer in of.items()}
    found: dict[str, Any] = {
        "datapoint_count": seen.count,
        "rates": [encode.number(float(of[n].rate[c])) for n, c in chosen.pairs()],
        "means": [encode.number(float(of[n].mean[c])) for n, c in chosen.pairs()],
        "curves": [by_layer[n].get(c) for n, c in chosen.pairs()],
        "examples": [_examples(seen, n, c) for n, c in chosen.pairs()],
        "datapoints": seen.datapoints,
        "heat": {name: _heat(seen, name, layer) for name, layer in of.items() if layer.alive},
    }
    try:
        components = result.clusters(data, n_batches=n_batches)
        found |= _components(components, chosen) | _ablations(result, data, chosen, components)
        found["verdict"] = _verdict(result)
        measured = result.evaluation or result.evaluate(data)
        found["shares"] = [
            [name, meaning, encode.number(measured.relative.get(name))] for name, meaning in SHARES.items()
        ]
        ladders = attack_ladder(result, data, attack)
        found["ladder"] = {kind: {str(n): encode.number(v) for n, v in of.items()} for kind, of in
                           ladders.items()}  # fmt: skip
    except RankoneError as error:
        missing.append(f"Not everything could be measured: {error}")
    return found


def _verdict(result: Decomposition) -> dict[str, Any]:
    verdict = result.verdict
    recovered = getattr(result.evaluation, "recovered", None)
    return {
        "good": verdict.good,
        "word": verdict.word,
        "reasons": list(verdict.reasons),
        "recovered": recovered,
    }


def _examples(seen: Harvest, name: str, c: int) -> list[list[Any]]:
    """[importance, datapoint, position] of the datapoints on which it matters most."""
    layer = seen.layers[name]
    found = []
    for g, (batch, flat) in zip(layer.best[:, c].tolist(), layer.places[:, c].tolist(), strict=True):
        if g > 0:
            key, position = seen.where(name, (batch, flat))
            found.append([encode.number(g, 3), key, list(position)])
    return found


def _heat(seen: Harvest, name: str, layer: LayerHarvest) -> dict[str, Any]:
    """Importances of the alive subcomponents on a sample of datapoints, rows sorted by who matters there."""
    g = torch.cat(layer.sample)[:, layer.alive]
    order = torch.argsort((g - g.mean(0)).argmax(1), stable=True)
    rows = [seen.where(name, layer.sample_places[i])[0] for i in order.tolist()]
    return {"columns": layer.alive, "rows": rows, "q": encode.as_bytes(g[order])}


def _components(components: Components, chosen: Chosen) -> dict[str, Any]:
    number = {pair: i for i, pair in enumerate(chosen.pairs())}
    listed = [
        [[number[m] for m in c.members if m in number], c.rank, encode.number(c.frequency)]
        for c in components
    ]
    of_part: list[int | None] = [None] * len(chosen)
    for i, (members, _, _) in enumerate(listed):
        for part in members:
            of_part[part] = i
    return {"components": listed, "part_components": of_part}


@torch.no_grad()
def _ablations(result: Decomposition, data: Data, chosen: Chosen, components: Components) -> dict[str, Any]:
    """What each subcomponent and component is missed for: the divergence without it, as a share of what
    removing everything costs, and the entries of the output that change most."""
    step = next(iter(held_out(result, data, 1, 0, None)))
    everything = float(step.distance(step.output(step.masks("zero", 0))))

    def without(dropped: Mapping[str, list[int]]) -> tuple[float | None, Tensor]:
        masks = {}
        for name, indices in dropped.items():
            values = torch.ones(result.model.layer(name).C, device=result.model.device)
            values[indices] = 0
            masks[name] = Mask(values, delta=values.new_ones(()))
        output = step.output(masks)
        return encode.number(float(step.distance(output)) / everything) if everything > 0 else None, output

    costs: list[float | None] = []
    changes: list[list[list[Any]]] = []
    for name, c in list(chosen.pairs())[:MOST_ABLATED]:
        cost, output = without({name: [c]})
        costs.append(cost)
        changes.append(_changes(step, output))
    rest = len(chosen) - len(costs)
    whole = [without(c.in_layers)[0] for c in components[:MOST_ABLATED]]
    return {
        "costs": [*costs, *[None] * rest],
        "changes": [*changes, *[[]] * rest],
        "component_costs": [*whole, *[None] * (len(components) - len(whole))],
    }


def _changes(step: Step, output: Tensor, most: int = 6) -> list[list[Any]]:
    """[entry, mean change, mean absolute change] of the outputs that change most."""
    before = step.clean.output
    if before.dim() < 1 or output.shape != before.shape:
        return []
    width = before.shape[-1] if before.dim() > 1 else 1
    change = (output - before).reshape(-1, width).double()
    absolute = change.abs().mean(0)
    top = absolute.topk(min(most, width))
    return [
        [i, encode.number(float(change[:, i].mean()), 3), encode.number(size, 3)]
        for size, i in zip(top.values.tolist(), top.indices.tolist(), strict=True)
        if size > 0
    ]


def history(records: list[Record]) -> dict[str, Any]:
    """The curves of training: steps, and a list of numbers for each term and each layer's L0."""
    if not records:
        return {}
    names = list(dict.fromkeys(key for record in records for key in record["loss"]))
    layers = list(dict.fromkeys(key for record in records for key in record["l0"]))
    return {
        "steps": [record["step"] for record in records],
        "losses": {n: [encode.number(r["loss"].get(n)) for r in records] for n in names},
        "l0": {n: [encode.number(r["l0"].get(n)) for r in records] for n in layers},
    }
