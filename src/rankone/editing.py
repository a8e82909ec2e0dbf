"""Editing a network by its subcomponents: keep some, drop some, make some larger or smaller.

Two meanings, so that both questions can be asked. `keep` asks whether some parts are enough: the
layer consists of them and of nothing else. `drop` and `scale` ask what a part does: the layer is
the original matrix with these parts changed, so that what the decomposition does not explain stays.

`AblatedModel` runs the target under masks; `edited_copy` is a deep copy of the target with other
weights, an ordinary module in every respect.
"""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from rankone.errors import LayerError, shown
from rankone.masks import Mask
from rankone.model import DecomposedModel
from rankone.naming import Matrices, adapters_of, candidates
from rankone.views import index_of

Choice = Mapping[str, Iterable[int] | Tensor]
"""Layer -> indices of subcomponents, or a boolean for each."""
Factors = Mapping[str, Mapping[int, float] | Tensor]
"""Layer -> by how much each subcomponent is multiplied: {index: factor}, or a tensor with C entries in
its last dimension (more dimensions: per datapoint)."""


def edits(
    model: DecomposedModel, keep: Choice | None, drop: Choice | None, scale: Factors | None
) -> dict[str, Mask]:
    """What these choices do to each layer, as masks; without a delta where only the kept remain."""
    for what, given in (("keep", keep), ("drop", drop), ("scale", scale)):
        if given is not None and not isinstance(given, Mapping):
            raise LayerError(
                f"{what} is {shown(given)}; expected a mapping from layers to subcomponents, such as "
                f"{what}={{{next(iter(model.layers))!r}: {'{3: 0.5}' if what == 'scale' else '[3]'}}}."
            )
    keep, drop, scale = keep or {}, drop or {}, scale or {}
    masks: dict[str, Mask] = {}
    for name, chosen in keep.items():
        if name in drop or name in scale:
            raise LayerError(
                f"keep names {name!r}, and so does drop or scale: with keep a layer consists of the kept "
                "subcomponents alone. Choose one of the two for each layer."
            )
        masks[name] = Mask(_chosen(model, "keep", name, chosen))
    for name in dict.fromkeys([*drop, *scale]):
        values = _factors(model, name, scale.get(name, {}))
        if name in drop:
            values = values * (1 - _chosen(model, "drop", name, drop[name]))
        masks[name] = Mask(values, delta=values.new_ones(()))
    return masks


def _chosen(
    model: DecomposedModel, what: str, name: str, chosen: Iterable[int] | Tensor
) -> Float[Tensor, " C"]:
    """1 for every chosen subcomponent of a layer, 0 for the others."""
    C = model.layer(name).C
    if not isinstance(chosen, Iterable) or isinstance(chosen, str):
        raise LayerError(
            f"{what}[{name!r}] is {chosen!r}; expected the indices of subcomponents, such as [{chosen!r}]."
        )
    listed = chosen if isinstance(chosen, Tensor) else [*chosen]
    try:
        index = torch.as_tensor(listed) if len(listed) else torch.zeros(0, dtype=torch.long)
    except (TypeError, ValueError, RuntimeError):
        raise LayerError(
            f"{what}[{name!r}] is {shown(listed)}; expected the indices of subcomponents, such as [0, 3]."
        ) from None
    if index.is_floating_point():
        raise LayerError(
            f"{what}[{name!r}] holds numbers of type {index.dtype}; expected indices or a boolean "
            "choice, such as importances > 0.5."
        )
    if index.dtype == torch.bool:
        if index.shape != (C,):
            raise LayerError(
                f"{what}[{name!r}] has shape {tuple(index.shape)}; a boolean choice needs C = {C} entries."
            )
        kept = index
    else:
        wrong = [int(i) for i in index.flatten() if not 0 <= int(i) < C]
        if wrong:
            raise LayerError(
                f"{what}[{name!r}] names subcomponent {wrong[0]}, but the layer has "
                f"subcomponents 0 to {C - 1}."
            )
        kept = torch.zeros(C, dtype=torch.bool)
        kept[index.long()] = True
    return kept.to(model.device, model.layer(name).subcomponents.U.dtype)


def _factors(
    model: DecomposedModel, name: str, given: Mapping[int, float] | Tensor
) -> Float[Tensor, "*lead C"]:
    """By how much each subcomponent of a layer is multiplied."""
    layer = model.layer(name)
    U = layer.subcomponents.U
    if isinstance(given, Tensor):
        if not given.dim() or given.shape[-1] != layer.C:
            raise LayerError(
                f"scale[{name!r}] has shape {tuple(given.shape)}; its last dimension needs C = {layer.C} "
                "entries."
            )
        return given.detach().to(U.device, U.dtype)
    if not isinstance(given, Mapping):
        raise LayerError(
            f"scale[{name!r}] is {shown(given)}; expected factors by index, such as {{3: 0.5}}, or a "
            "tensor with one factor for each subcomponent."
        )
    values = torch.ones(layer.C, dtype=U.dtype)
    for c, factor in given.items():
        index = index_of(c, layer.C, name)
        try:
            values[index] = float(factor)
        except (TypeError, ValueError):
            raise LayerError(f"scale[{name!r}][{c!r}] is {shown(factor)}; expected a number.") from None
    return values.to(U.device)


class AblatedModel(nn.Module):
    """The target with chosen subcomponents kept, dropped or scaled; call it exactly like the target.

    It computes no gradients: it is for looking, not for training. `edited_model` gives a module that can
    be trained.
    """

    _model: DecomposedModel

    def __init__(self, model: DecomposedModel, masks: Mapping[str, Mask]) -> None:
        super().__init__()
        object.__setattr__(self, "_model", model)
        self._masks = dict(masks)

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._model.under(self._masks, lambda: self._model.target(*args, **kwargs))

    def __repr__(self) -> str:
        changed = ", ".join(f"{name!r}" for name in self._masks) or "nothing"
        return f"<{type(self._model.target).__name__} with edited {changed}>"


@torch.no_grad()
def edited_copy(
    model: DecomposedModel, masks: Mapping[str, Mask], matrices: Matrices | None = None
) -> nn.Module:
    """A deep copy of the target whose weights are edited: parameters, gradients and methods as ever.

    A weight that other layers share is given to the edited layer as its own first. `matrices` is what
    the decomposition declared.
    """
    edited = copy.deepcopy(model.target)
    known = candidates(edited, matrices)
    for name, mask in masks.items():
        if mask.values.dim() > 1:
            raise LayerError(
                f"scale[{name!r}] differs from datapoint to datapoint, and weights do not. Use ablated()."
            )
        composite = known.composites.get(name)
        _untie(edited, known.modules[name] if composite is None else composite.module)
    adapters = adapters_of(known, model.layers, matrices)  # of the copy: nothing here can reach the target
    for name, mask in masks.items():
        layer, adapter = model.layer(name), adapters[name]
        W = layer.adapter.matrix().detach()
        U, V = layer.subcomponents.U.detach(), layer.subcomponents.V.detach()
        change = mask.values if mask.delta is None else mask.values - 1
        used = change.nonzero().flatten()
        parts = (U[:, used] * change[used]) @ V[used]
        new = (parts if mask.delta is None else W.to(U.dtype) + parts).to(W.dtype)
        try:
            adapter.matrix().copy_(new)
        except RuntimeError:
            written = False
        else:
            written = torch.equal(adapter.matrix(), new)
        if not written:
            raise LayerError(
                f"The weight of {name!r} ({type(adapter.module).__name__}) is computed from others, so it "
                "cannot be replaced in a copy. Use ablated(), which needs no weight."
            )
    return edited


def _untie(root: nn.Module, module: nn.Module) -> None:
    """Give a module parameters of its own where others have the same ones."""
    for key, parameter in list(module.named_parameters(recurse=False)):
        owners = sum(p is parameter for m in root.modules() for p in m._parameters.values() if p is not None)
        if owners > 1:
            setattr(module, key, nn.Parameter(parameter.detach().clone(), parameter.requires_grad))
