"""Which layers to decompose and how many subcomponents C each gets, where nobody says.

C must be more than there are mechanisms, or some have to share one; far more than that only takes
time. A matrix has at least as many mechanisms as its rank, if it is always on, and in superposition
as many as there are directions that come back again and again in its inputs: one feature alone is
always the same direction, a mixture of several never is.
"""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from rankone.data import Batch, Data, batch_digest, batches, to_device
from rankone.errors import ConfigError, LayerError
from rankone.found_layers import find_layers
from rankone.model import DecomposedModel
from rankone.patching import OutputGetter

ROOM = 3
"""C is so many times what a layer is thought to have."""
MOST = 2048
"""C is never chosen larger than this; ask for more by name."""
LOOKED_AT = 1000
"""Inputs of a layer among which directions that come back are looked for."""
BATCHES = 8
SAME = 1 - 1e-6
"""Cosine from which on two inputs have one direction; closer than by chance even in two dimensions."""
OFTEN = 4
"""How many inputs of one direction are not there by chance."""

LayerChoice = Mapping[str, int | None] | Mapping[str, int] | Iterable[str] | None
"""Layers -> C, with None where it is to be found; layers alone; or None for every layer that can be."""


def chosen_layers(
    target: nn.Module,
    data: Data,
    layers: LayerChoice,
    *,
    output: OutputGetter = None,
    seed: int = 0,
    **options: Any,
) -> dict[str, int]:
    """Layers (or patterns of their names) -> C, with everything filled in that was not said.

    `options` go to DecomposedModel: how matrices are declared that cannot be seen.
    """
    if layers is not None and isinstance(layers, Mapping) and all(C is not None for C in layers.values()):
        return {name: C for name, C in layers.items() if C is not None}
    if isinstance(layers, str) or (layers is not None and not isinstance(layers, Iterable)):
        raise ConfigError(
            f"layers is {layers!r}; expected a mapping from layer name patterns to C, such as {{'mlp.*': 100}}, "
            "a list of patterns, or nothing for every layer that can be decomposed."
        )
    device = next((p.device for p in target.parameters()), torch.device("cpu"))
    stream = islice(batches(data, seed, stream="init"), BATCHES)
    drawn = [to_device(batch, device) for batch in _different(stream)]
    if layers is None:
        found = find_layers(target, drawn[0], options.get("matrices"))
        if not found.shapes:
            why = "; ".join(f"{name}: {reason}" for name, reason in found.left_out.items())
            raise LayerError(
                "There is no layer to decompose in this network. "
                + (why or "It has no layer with a weight matrix that rankone knows; see docs/layers.md.")
            )
        layers = dict.fromkeys(found.shapes)
    given = dict(layers) if isinstance(layers, Mapping) else dict.fromkeys(layers)
    model = DecomposedModel(target, dict.fromkeys(given, 1), importance="linear", output=output, **options)
    found = _found(model, drawn)
    said = {
        name: C
        for name in found
        for pattern, C in given.items()
        if C is not None and (name == pattern or fnmatchcase(name, pattern))
    }
    for name, source in model.tied.items():  # layers that share their subcomponents have as many
        C = said.get(source, said.get(name, max(found[name], found[source])))
        said[name] = said[source] = C
    return found | said


def _found(model: DecomposedModel, drawn: list[Batch]) -> dict[str, int]:
    """C of every layer of a model."""
    rows: dict[str, list[Tensor]] = {name: [] for name in model.layers}
    for batch in drawn:
        clean = model.clean(batch)
        for name, layer in model.layers.items():
            a = layer.vectors(clean.inputs[name])
            rows[name].append(_some(a[model.weights(name, clean, a.shape[:-1]) > 0]))
    return {name: room_for(model.layer(name).matrix(), torch.cat(parts)) for name, parts in rows.items()}


def _different(stream: Iterable[Batch]) -> list[Batch]:
    """Batches without those that come again: a short list is gone through many times."""
    return list({batch_digest(batch): batch for batch in stream}.values())


def _some(a: Float[Tensor, "rows d_in"]) -> Float[Tensor, "some d_in"]:
    return a[torch.linspace(0, len(a) - 1, min(len(a), LOOKED_AT)).long()].float().cpu()


def room_for(W: Float[Tensor, "d_out d_in"], inputs: Float[Tensor, "rows d_in"]) -> int:
    """C for a matrix with these inputs."""
    rank = int(torch.linalg.matrix_rank(W.float()))
    return min(ROOM * max(rank, coming_back(inputs), 1), max(MOST, rank))


def coming_back(inputs: Float[Tensor, "rows d_in"]) -> int:
    """How many directions occur again and again."""
    directions = F.normalize(inputs[inputs.norm(dim=1) > 0].double(), dim=1)[:LOOKED_AT]
    same = (directions @ directions.T).abs() >= SAME
    left = same.sum(1) >= OFTEN
    count = 0
    while bool(left.any()):
        left &= ~same[int(left.nonzero()[0])]
        count += 1
    return count
