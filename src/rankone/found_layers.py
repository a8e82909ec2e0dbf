"""Every layer of a network that can be decomposed, found by running it once on its data."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from rankone.adapters import Adapter
from rankone.data import Batch, call_with
from rankone.errors import LayerError
from rankone.layer import is_its_matrix
from rankone.naming import Matrices, adapters_of, candidates, find_ties, undeclared_parameters
from rankone.patching import cannot_run, one_pass_at_a_time, overridden, refuse_unusable


class FoundLayers(NamedTuple):
    """What there is to decompose in a network."""

    shapes: dict[str, tuple[int, int]]
    """The layers that can be decomposed, in the order of their first call -> (d_out, d_in)."""
    left_out: dict[str, str]
    """Layers with a matrix that cannot -> why not."""
    tied: dict[str, str]
    """Layers that share their weight -> the layer that they share it with."""


@torch.no_grad()
def find_layers(target: nn.Module, batch: Batch, matrices: Matrices | None = None) -> FoundLayers:
    """All layers of a network that can be decomposed: they have a matrix and an adapter, the network
    calls them on this batch, and they do what their adapter says."""
    refuse_unusable(target)
    known = candidates(target, matrices)
    left_out: dict[str, str] = {}
    adapters: dict[str, Adapter] = {}
    for name in known.matrices():
        try:
            adapter = adapters_of(known, [name], _without_biases(matrices))[name]
        except LayerError as error:
            left_out[name] = str(error)
            continue
        if adapter.matrix().is_floating_point():
            adapters[name] = adapter
        else:
            left_out[name] = f"its weight is of type {adapter.matrix().dtype}, not floating point"
    always: dict[tuple[nn.Module, str], Any] = {}
    for name in adapters:
        if name in known.composites:
            always |= known.composites[name].installed()
    called: dict[str, None] = {}

    def watched(name: str, adapter: Adapter) -> Callable[..., Any]:
        original = always.get((adapter.module, "forward")) or adapter.module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            called[name] = None
            try:
                if not is_its_matrix(adapter, adapter.input(name, args, kwargs), output):
                    left_out[name] = "it does more than multiply by its matrix and add its bias"
            except LayerError as error:
                left_out[name] = str(error)
            return output

        return forward

    with one_pass_at_a_time:
        watching = {(a.module, "forward"): watched(name, a) for name, a in adapters.items()}
        with overridden({**always, **watching}):
            try:
                call_with(target, batch)
            except (RuntimeError, ValueError, IndexError) as error:
                raise cannot_run(target, batch, error) from error
    for name in adapters:
        if name not in called:
            left_out[name] = "the network does not call it on this batch"
    for name in undeclared_parameters(target, known):
        if name.rpartition(".")[0] not in left_out:
            left_out[name] = "a plain parameter: say in matrices.parameters how it is used"
    found = {name: adapters[name] for name in called if name not in left_out}
    shapes = {name: (a.matrix().shape[0], a.matrix().shape[1]) for name, a in found.items()}
    return FoundLayers(shapes, left_out, find_ties(found))


def _without_biases(matrices: Matrices | None) -> Matrices | None:
    return None if matrices is None else matrices.model_copy(update={"biases": []})
