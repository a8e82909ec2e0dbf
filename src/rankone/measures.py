"""How well a decomposition holds, beyond what random masks can tell.

- **attack**: an adversary chooses what becomes of everything unimportant;
- **union**: a datapoint keeps what is important to it or to others; more must not be worse;
- **deletion**: what is never important is removed for good; nothing should change;
- **well-tempered**: is the more important of two subcomponents the one that is missed more?

The first three are divergences from the target. They mean something beside the divergence of
removing everything, so `Shares` adds up both, batch by batch.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rankone.adversary import Attack
from rankone.data import generator_for
from rankone.importance import clipped
from rankone.masks import Mask, Masks
from rankone.metrics import IMPORTANT
from rankone.step import Step

ATTACK_STEPS = 20
"""Sign steps of 0.1 in every evaluation; the field's number."""
UNIONS = (1, 4, 16, 64)
"""With how many other datapoints' importances a datapoint's are joined."""
TRIALS = 8
"""How many subcomponents of each layer are removed from each datapoint, one at a time, to see which
are missed."""


@dataclass
class Shares:
    """Divergences added up over batches, beside those of removing everything on the same batches."""

    values: dict[str, float] = field(default_factory=dict)
    everything: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, value: Tensor | float, everything: float) -> None:
        self.values[name] = self.values.get(name, 0.0) + float(value)
        self.everything[name] = self.everything.get(name, 0.0) + everything

    def relative(self) -> dict[str, float | None]:
        """Each divergence divided by that of removing everything; None where that costs nothing."""
        return {
            name: value / self.everything[name] if self.everything[name] > 0 else None
            for name, value in self.values.items()
        }


def attacked(step: Step, rungs: list[int], *, delta: bool | None = None) -> Iterator[tuple[int, float]]:
    """(steps, divergence) of one attack at each of these numbers of steps.

    `delta` says whether the adversary also has the delta component to play with; None: if training had.
    """
    draw = step.draw(0)
    if delta is not None:
        draw = replace(draw, settings=draw.settings.model_copy(update={"delta": delta}))
    masks = Attack(max(rungs)).ladder(draw, rungs)
    for rung, found in zip(sorted(set(rungs)), masks, strict=True):
        yield rung, float(step.distance(step.output(found)).detach())


def union_masks(step: Step, sizes: tuple[int, ...] = UNIONS) -> Iterator[tuple[int, Masks]]:
    """(n, masks): importances joined with those of n other datapoints, drawn as often as the data has
    them."""
    joined = {name: clipped(raw) for name, raw in step.raw.items()}
    data = {name: step.each_weight(name).reshape(g.shape[:-1]) for name, g in joined.items()}
    if len({g.shape[:-1] for g in joined.values()}) == 1:
        flat = {name: g.reshape(-1, g.shape[-1]) for name, g in joined.items()}
        weights = next(iter(data.values())).flatten()
    else:
        flat = joined
        weights = max(data.values(), key=len)
        weights = weights.reshape(len(weights), -1).sum(1)
    of_data = {n: g * (data[n] > 0).unsqueeze(-1).reshape(*g.shape[:-1], 1) for n, g in flat.items()}
    union = dict(flat)
    among = (weights > 0).nonzero().flatten().cpu()  # what is no data is nobody's neighbour
    others = torch.zeros(len(weights), dtype=torch.long)
    generator = generator_for(step.seed, "union", step.index)
    done = 0
    for size in sizes:
        while done < size:
            drawn = torch.multinomial(
                weights.cpu().float()[among], len(among), replacement=True, generator=generator
            )
            others[among] = among[drawn]
            union = {
                n: torch.maximum(u, of_data[n][others[: len(u)].to(u.device) % len(u)])
                for n, u in union.items()
            }
            done += 1
        yield size, {n: Mask(u.reshape(joined[n].shape)) for n, u in union.items()}


def deleted(step: Step, alive: Mapping[str, Bool[Tensor, " C"]]) -> Float[Tensor, ""]:
    """The divergence when only subcomponents that are ever important are left, all of them whole."""
    masks = {n: Mask(alive[n].to(raw.device, raw.dtype).expand(raw.shape)) for n, raw in step.raw.items()}
    return step.distance(step.output(masks))


def well_tempered(step: Step, trials: int = TRIALS) -> tuple[float, float] | None:
    """(pairs in which the more important subcomponent is missed more, all pairs), weighted by how often
    a datapoint occurs; None where the divergence is not known per datapoint.

    On every datapoint `trials` subcomponents of a layer are removed from the target, one at a time: half
    of them any, half of them among the important ones. Pairs of (nearly) equal importance do not count.
    """
    right = total = 0.0
    generator = generator_for(step.seed, "well-tempered", step.index)
    for name, raw in step.raw.items():
        g = clipped(raw)
        if g.shape[-1] < 2:
            continue
        weights = step.each_weight(name).double()
        among = weights > 0
        flat = g.reshape(-1, g.shape[-1])
        likely = (flat if bool(among.all()) else flat[among]).cpu()
        importances, damages = [], []
        for trial in range(trials):
            chances = torch.where(likely > IMPORTANT, 1.0, 1e-9) if trial % 2 else torch.ones_like(likely)
            chosen = torch.multinomial(chances, 1, generator=generator).to(g.device)
            values = torch.ones_like(flat)
            values[among] = values[among].scatter(-1, chosen, 0.0)
            delta = torch.ones(g.shape[:-1], dtype=g.dtype, device=g.device)
            mask = Mask(values.reshape(g.shape), delta=delta)
            damage = step.divergences(step.output({name: mask}))
            if damage.shape != g.shape[:-1]:
                return None
            importances.append(flat[among].gather(-1, chosen).squeeze(-1))
            damages.append(damage.flatten()[among])
        first, second = torch.combinations(torch.arange(trials), 2).T
        more = torch.stack(importances)[first] - torch.stack(importances)[second]
        worse = torch.stack(damages)[first] - torch.stack(damages)[second]
        counts = more.abs() > IMPORTANT
        fits = torch.where(worse == 0, 0.5, ((more > 0) == (worse > 0)).double())
        right += float(weights[among] @ (fits * counts).double().sum(0))
        total += float(weights[among] @ counts.double().sum(0))
    return right, total
