"""Editing by name: subcomponents and components that are multiplied, everywhere or under a condition."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rankone.clusters import Component
from rankone.editing import AblatedModel
from rankone.errors import BatchError, LayerError, shown
from rankone.masks import Mask
from rankone.model import DecomposedModel
from rankone.views import index_of

Part = tuple[str, int] | Component
"""A subcomponent by its layer and index, or a component of `clusters()`."""


def members_of(model: DecomposedModel, part: Any) -> list[tuple[str, int]]:
    """The subcomponents that are meant, checked."""
    given = part.members if isinstance(part, Component) else [part]
    found = []
    for member in given:
        if not (isinstance(member, tuple) and len(member) == 2 and isinstance(member[0], str)):
            raise LayerError(
                f"{shown(member)} names no subcomponent; expected (layer, index), such as "
                f"({next(iter(model.layers))!r}, 3), or a component of clusters()."
            )
        layer, index = member
        found.append((layer, index_of(index, model.layer(layer).C, layer)))
    return found


def by_layer(model: DecomposedModel, factors: Mapping[Part, float]) -> dict[str, dict[int, float]]:
    """Layer -> index -> factor."""
    if not isinstance(factors, Mapping):
        raise LayerError(
            f"The edit is {shown(factors)}; expected factors by subcomponent, such as "
            f"{{({next(iter(model.layers))!r}, 3): 0.0}}."
        )
    found: dict[str, dict[int, float]] = {}
    for part, factor in factors.items():
        for layer, index in members_of(model, part):
            if index in found.setdefault(layer, {}):
                raise LayerError(f"Subcomponent {index} of {layer!r} is named twice; give it one factor.")
            found[layer][index] = factor
    return found


class Edited(AblatedModel):
    """The network with subcomponents multiplied; call it exactly like the network."""

    def __init__(
        self, model: DecomposedModel, masks: Mapping[str, Mask], where: Callable[..., Tensor] | None
    ) -> None:
        super().__init__(model, masks)
        self._where = where

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        edited = super().forward(*args, **kwargs)
        if self._where is None:
            return edited
        original = self._model.target(*args, **kwargs)
        chosen = torch.as_tensor(self._where(*args, **kwargs))
        if not isinstance(edited, Tensor) or chosen.dtype != torch.bool or chosen.shape != edited.shape[:1]:
            rows = tuple(edited.shape[:1]) if isinstance(edited, Tensor) else type(edited).__name__
            raise BatchError(
                f"where= gave {chosen.dtype} of shape {tuple(chosen.shape)} for an output with rows {rows}; "
                "expected one boolean for each row of a tensor, such as lambda x: x[:, 0] > 0."
            )
        return torch.where(chosen.reshape(-1, *[1] * (edited.dim() - 1)).to(edited.device), edited, original)

    def __repr__(self) -> str:
        condition = "" if self._where is None else ", on rows that fulfil a condition"
        changed = [
            f"{name} {c} x {float(mask.values[c]):g}"
            for name, mask in self._masks.items()
            for c in (mask.values != 1).nonzero().flatten().tolist()
        ]
        return (
            f"<{type(self._model.target).__name__} with {', '.join(changed) or 'nothing changed'}{condition}>"
        )
