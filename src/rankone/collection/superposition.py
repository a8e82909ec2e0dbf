"""Toy models of superposition in several shapes: more features than hidden dimensions.

x̂ = ReLU(B A x + b), where B is the transpose of A (tied) or a matrix of its own. The truth is one
part for each feature: its column of A and its row of B. A network is good if it answers each
feature by itself, with more than half of it, and all others with less than half of that.
"""

from dataclasses import asdict, dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankone.collection.base import (
    KnownNetwork,
    Mechanisms,
    columns,
    descend,
    initialise,
    linear,
    orthonormal,
    register,
    rows,
    trained,
)
from rankone.data import WeightedBatch, generator_for
from rankone.targets.tms import TMS


class Untied(nn.Module):
    """Features squeezed through a bottleneck and read out again with a matrix of its own."""

    def __init__(self, n_features: int, n_hidden: int) -> None:
        super().__init__()
        self.embed = nn.Linear(n_features, n_hidden, bias=False)
        self.unembed = nn.Linear(n_hidden, n_features)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.unembed(self.embed(x)))


@dataclass(frozen=True)
class Shape:
    """What a network of this family is trained on and decomposed on."""

    n: int
    d: int
    tied: bool = False
    p_first: float = 0.05
    """How often the first feature is on."""
    p_last: float = 0.05
    """How often the last one is; the others lie between them, at equal ratios."""
    importance: float = 1.0
    """How much less each feature matters to training than the one before."""
    at_once: int = 0
    """Exactly so many features are on at a time; 0: each on its own."""
    steps: int = 6000

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Features, each uniform between 0 and 1 when it is on."""
        values = torch.rand(count, self.n, generator=generator)
        order = torch.rand(count, self.n, generator=generator)
        if self.at_once:
            on = order.argsort(1).argsort(1) < self.at_once
        else:
            on = order < torch.logspace(0, 1, self.n, self.p_last / self.p_first) * self.p_first
        return on * values


@dataclass(frozen=True)
class Variant:
    """How a trained network is decomposed."""

    times: float = 2.5
    """C as a multiple of the number of features."""
    unit_in: float = 1.0
    """The data is multiplied by this, the first matrix divided by it."""
    unit_out: float = 1.0
    """The output is multiplied by this."""
    unseen: int = 0
    """So many features, the last ones, never occur in the data of the decomposition."""
    rows: int = 2048


def _fit(shape: Shape, seed: int) -> nn.Module:
    model = TMS(shape.n, shape.d) if shape.tied else Untied(shape.n, shape.d)
    initialise(model, seed)
    if isinstance(model, Untied):  # begun with matrices of their own, half of the features stay dead
        with torch.no_grad():
            model.unembed.weight.copy_(model.embed.weight.T)
    weights = shape.importance ** torch.arange(shape.n)

    def loss(model: nn.Module, generator: torch.Generator) -> Tensor:
        x = shape.draw(1024, generator)
        return ((model(x) - x).square() * weights).mean()

    descend(model, loss, seed=seed, steps=shape.steps, lr=1e-2)
    if isinstance(model, Untied):
        _turn(model, seed)
    return model


@torch.no_grad()
def _turn(model: Untied, seed: int) -> None:
    """Another basis for the hidden dimensions, stretched: the same function, no longer transposes."""
    d = model.embed.weight.shape[0]
    generator = generator_for(max(seed, 0), "collection/turn")
    turn = orthonormal(d, d, generator) * (0.5 + torch.rand(d, 1, generator=generator))
    model.embed.weight.copy_(turn @ model.embed.weight)
    model.unembed.weight.copy_(model.unembed.weight @ torch.linalg.inv(turn))


@torch.no_grad()
def _check(model: nn.Module) -> tuple[bool, dict[str, float]]:
    assert isinstance(model, TMS | Untied)
    answers = model(torch.eye(model.embed.weight.shape[1]))
    own = answers.diagonal()
    other = float((answers - torch.diag(own)).max())
    numbers = {"smallest_own_response": float(own.min()), "largest_other_response": other}
    return float(own.min()) > 0.5 and other < float(own.min()) / 2, numbers


def _build(name: str, shape: Shape, variant: Variant, base: str) -> KnownNetwork:
    model, good, quality = trained(base, asdict(shape), lambda seed: _fit(shape, seed), _check)
    assert isinstance(model, TMS | Untied)
    seen = shape.n - variant.unseen
    if (variant.unit_in, variant.unit_out) != (1, 1):
        scaled = Untied(shape.n, shape.d)
        scaled.embed = linear(model.embed.weight / variant.unit_in)
        scaled.unembed = linear(
            model.unembed.weight * variant.unit_out, model.unembed.bias * variant.unit_out
        )
        model = scaled.eval().requires_grad_(False)

    def data(generator: torch.Generator) -> WeightedBatch:
        x = shape.draw(variant.rows, generator) * variant.unit_in
        x[:, seen:] = 0
        return WeightedBatch.merging_zero_rows(x)

    def needed(x: Tensor) -> dict[str, Tensor]:
        return {"embed": x != 0, "unembed": x != 0}

    C = round(variant.times * shape.n)
    support = torch.eye(shape.n)[:, :seen] if variant.unseen else None
    return KnownNetwork(
        name,
        model,
        data,
        {"embed": C, "unembed": C},
        {
            "embed": Mechanisms(columns(model.embed.weight), support=support),
            "unembed": Mechanisms(rows(model.unembed.weight)),
        },
        0.75 * variant.unit_in * torch.eye(shape.n)[:seen],
        needed,
        tied={"unembed": "embed"} if isinstance(model, TMS) else {},
        good=good,
        quality=quality,
    )


def _register(
    name: str, about: str, shape: Shape, variant: Variant | None = None, base: str | None = None
) -> None:
    def build(name: str) -> KnownNetwork:
        return _build(name, shape, variant or Variant(), base or name)

    register(name, "units" if "units" in name else "superposition", about, build, trains=True)


_SMALL = Shape(8, 3)
_register("tms_8-3", "8 features in 3 dimensions, one matrix used twice", replace(_SMALL, tied=True))
_register("tms_8-3_untied", "8 features in 3 dimensions, two matrices", _SMALL)
_register("tms_12-4_untied", "12 features in 4 dimensions, two matrices", Shape(12, 4))
_register("tms_20-5", "20 features in 5 dimensions", Shape(20, 5, tied=True))
_register("tms_30-8_untied", "30 features in 8 dimensions", Shape(30, 8))
_register(
    "tms_10-5_frequencies",
    "features from 10 % down to 1 % of the time",
    Shape(10, 5, tied=True, p_first=0.10, p_last=0.01),
)
_register("tms_10-5_importances", "features that matter less and less, 0.8^i", Shape(10, 5, importance=0.8))
_register("tms_20-12_three", "exactly three features at a time", Shape(20, 12, at_once=3))
_register(
    "tms_12-4_unseen",
    "three of the features never occur in the data",
    Shape(12, 4),
    Variant(unseen=3),
    "tms_12-4_untied",
)
_register(
    "tms_8-3_enough",
    "as many subcomponents as there are features",
    _SMALL,
    Variant(times=1.0),
    "tms_8-3_untied",
)
_register(
    "tms_8-3_ten_times",
    "ten times more subcomponents than features",
    _SMALL,
    Variant(times=10.0),
    "tms_8-3_untied",
)
for _word, _unit in (("hundredth", 0.01), ("hundredfold", 100.0)):
    _register(
        f"units_tms_out_{_word}",
        f"TMS 8-3 with its output times {_unit:g}",
        _SMALL,
        Variant(unit_out=_unit),
        "tms_8-3_untied",
    )
    _register(
        f"units_tms_in_{_word}",
        f"TMS 8-3 with its input times {_unit:g}",
        _SMALL,
        Variant(unit_in=_unit),
        "tms_8-3_untied",
    )
