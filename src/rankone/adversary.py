"""Adversarial masks: the r in m = g + (1 - g) r that does the most harm.

Random masks test the average; an adversary looks for the worst. It may do what it likes with
everything that importances call unimportant, and nothing to the rest. `Attack` starts anew every
time and takes steps along the sign of the gradient: a measure of quality, and a loss. A
`PersistentAttack` goes on where the last training step left it: one ascent per step, made of the
very gradient that trains, does the work of many. Both are mask sources.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from rankone.errors import ConfigError, TrainingError
from rankone.masks import SOURCES, Draw, Mask, Masks, uniform

Scope = Literal["batch", "datapoint"]
"""One r for all datapoints of a batch, or one for each."""
Sources = dict[str, Float[Tensor, "*lead C"]]
"""Layer -> r of its subcomponents, and where there is a delta component, that one's r at the end."""

BETAS = (0.5, 0.99)
"""Of the Adam that moves a persistent adversary: it forgets quickly, as the network it attacks moves."""
LEAST = 1e-20
"""Its epsilon: gradients of a divergence may be very small numbers."""


@dataclass(frozen=True)
class Attack:
    """A fresh adversary: a random start, then `steps` sign steps, r clipped to [0, 1]."""

    steps: int = 20
    step_size: float = 0.1
    scope: Scope = "batch"

    def __post_init__(self) -> None:
        _refuse_standing_still("steps", self.steps, "step_size", self.step_size)

    def __call__(self, draw: Draw) -> Masks:
        *_, last = self.ladder(draw, [self.steps])
        return last

    def ladder(self, draw: Draw, rungs: list[int]) -> Iterator[Masks]:
        """The masks after each of these numbers of steps."""
        r, g = start(draw, self.scope), importances(draw)
        for step in range(1, max(rungs) + 1):
            gradients = _gradients(draw, r, g, self.scope)
            r = {n: (t + self.step_size * gradients[n].sign()).clamp(0, 1) for n, t in r.items()}
            if step in rungs:
                yield masks_of(draw, r, g)


@dataclass(frozen=True)
class PersistentAttack:
    """An adversary that lives across training steps: Adam on r, `ascents` times per step.

    The last ascent of a step costs nothing: it uses the gradient of the training loss.
    """

    name: str
    """Under which its state is kept."""
    ascents: int = 1
    lr: float = 0.01
    scope: Scope = "batch"

    def __post_init__(self) -> None:
        _refuse_standing_still("ascents", self.ascents, "lr", self.lr)

    def __call__(self, draw: Draw) -> Masks:
        if self.scope == "datapoint" and draw.share.place is not None:
            raise ConfigError(
                "A persistent adversary with an r for each datapoint remembers the rows of a whole batch, "
                "which several processes share. Set losses.adversarial_recon.scope=batch or persistent=false, "
                "or use one process."
            )
        r, g = self._recalled(draw), importances(draw)
        for _ in range(self.ascents - 1):
            r = self._ascended(draw, r, _gradients(draw, r, g, self.scope))
        leaves = {name: t.clone().requires_grad_() for name, t in r.items()}

        def ascend(gradients: list[Tensor | None]) -> None:
            self._ascended(draw, r, _of_all(draw, r, gradients, self.scope))

        draw.follow(list(leaves.values()), ascend)
        return masks_of(draw, leaves, g)

    def _key(self, what: str, layer: str) -> str:
        return f"{self.name}/{what}/{layer}"

    def _recalled(self, draw: Draw) -> Sources:
        """Where the last step left r. Rows that it did not have begin at random, as all do at first."""
        r = start(draw, self.scope)
        for name, fresh in r.items():
            known = draw.memory.get(self._key("r", name))
            if known is not None:
                rows = fresh.reshape(-1, fresh.shape[-1]).clone()
                both = min(len(rows), len(known))
                rows[:both] = known[:both]
                r[name] = rows.reshape(fresh.shape)
        return r

    def _ascended(self, draw: Draw, r: Sources, gradients: Sources) -> Sources:
        """One step of Adam upwards; the state is kept."""
        count = draw.memory.get(f"{self.name}/steps", torch.zeros(())) + 1
        draw.memory[f"{self.name}/steps"] = count
        moved: Sources = {}
        for name, t in r.items():
            rows, gradient = (x.detach().reshape(-1, x.shape[-1]) for x in (t, gradients[name]))
            mean, square = (self._moment(draw, what, name, rows) for what in ("mean", "square"))
            n = len(rows)
            mean[:n] = torch.lerp(gradient, mean[:n], BETAS[0])
            square[:n] = torch.lerp(gradient.square(), square[:n], BETAS[1])
            first, second = (1 - beta ** float(count) for beta in BETAS)
            step = (mean[:n] / first) / ((square[:n] / second).sqrt() + LEAST)
            kept = self._moment(draw, "r", name, rows)
            kept[:n] = (rows + self.lr * step).clamp(0, 1)
            moved[name] = kept[:n].reshape(t.shape).clone()
        return moved

    def _moment(self, draw: Draw, what: str, layer: str, like: Float[Tensor, "rows C"]) -> Tensor:
        """A piece of the state, with at least as many rows as `like`."""
        key = self._key(what, layer)
        known = draw.memory.get(key, like.new_zeros(0, like.shape[1]))
        if len(known) < len(like):
            known = torch.cat([known, like.new_zeros(len(like) - len(known), like.shape[1])])
            draw.memory[key] = known
        return known


def _refuse_standing_still(what: str, number: int, size: str, length: float) -> None:
    if number < 1:
        raise ConfigError(f"An adversary with {what}={number} never moves; give 1 or more.")
    if not 0 < length < math.inf:
        raise ConfigError(
            f"An adversary with {size}={length:g} goes nowhere, or down; give a positive number."
        )


def start(draw: Draw, scope: Scope) -> Sources:
    """r where an adversary begins: uniform random numbers."""
    r: Sources = {}
    for name, raw in draw.raw.items():
        lead = raw.shape[:-1] if scope == "datapoint" else ()
        like = raw.detach().new_empty(*lead, raw.shape[-1] + draw.settings.delta)
        r[name] = uniform(draw.key(f"{name}/adversary"), like)
    return r


def importances(draw: Draw) -> dict[str, Tensor]:
    """g of every layer: made once, as all ascents see the same."""
    return {name: draw.settings.importance(raw) for name, raw in draw.raw.items()}


def masks_of(draw: Draw, r: Sources, importances: Mapping[str, Tensor]) -> Masks:
    """The masks that sources make of importances."""
    masks = {}
    for name, g in importances.items():
        of_parts = r[name][..., : g.shape[-1]]
        delta = r[name][..., -1].expand(g.shape[:-1]) if draw.settings.delta else None
        masks[name] = Mask(torch.lerp(of_parts, g.new_ones(()), g), delta=delta)
    return masks


def _gradients(draw: Draw, r: Sources, importances: Mapping[str, Tensor], scope: Scope) -> Sources:
    """How the divergence rises with every r; importances and subcomponents are held fixed."""
    with torch.enable_grad():
        leaves = {name: t.detach().clone().requires_grad_() for name, t in r.items()}
        harm = draw.harm(masks_of(draw, leaves, {name: g.detach() for name, g in importances.items()}))
        if not harm.requires_grad:
            raise TrainingError(
                "No mask changes the output, so there is nothing to attack: is it computed under "
                "torch.no_grad, or detached from the decomposed layers?"
            )
        found = torch.autograd.grad(harm, list(leaves.values()), allow_unused=True)
    return _of_all(draw, r, found, scope)


def _of_all(draw: Draw, r: Sources, gradients: Sequence[Tensor | None], scope: Scope) -> Sources:
    """Gradients by layer: zero where there is none, and for an r that all datapoints have, those of all."""
    known = {n: torch.zeros_like(r[n]) if g is None else g for n, g in zip(r, gradients, strict=True)}
    return {n: draw.share.mean(g) for n, g in known.items()} if scope == "batch" else known


SOURCES.register("adversarial")(Attack())
