"""Blocks: mechanisms of rank one, two or three in random bases, each with neurons of its own.

Inputs are sums of mechanisms' own directions, which are random and at right angles; the first
matrix reads them into disjoint groups of neurons, the second writes what the neurons say into
random directions. Nothing lines up with the axes that a matrix is written in, except the neurons.
The truth is exact by construction.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankone.collection.base import KnownNetwork, Mechanisms, linear, orthonormal, register
from rankone.data import WeightedBatch, generator_for

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}


class TwoLayers(nn.Module):
    """write(activation(read x))."""

    def __init__(self, W_read: Tensor, W_write: Tensor, activation: str = "relu") -> None:
        super().__init__()
        self.read, self.write = linear(W_read), linear(W_write)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.write(self.activation(self.read(x)))


class Branches(nn.Module):
    """The mean of two equal networks."""

    def __init__(self, W_read: Tensor, W_write: Tensor) -> None:
        super().__init__()
        self.first, self.second = TwoLayers(W_read, W_write), TwoLayers(W_read, W_write)

    def forward(self, x: Tensor) -> Tensor:
        return (self.first(x) + self.second(x)) / 2


class Bilinear(nn.Module):
    """write((left x) * (right x)), with left and right as two matrices or as the halves of one."""

    def __init__(self, W_left: Tensor, W_right: Tensor, W_write: Tensor, joined: bool) -> None:
        super().__init__()
        if joined:
            self.both = linear(torch.cat([W_left, W_right]))
        else:
            self.left, self.right = linear(W_left), linear(W_right)
        self.write = linear(W_write)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.both(x).chunk(2, -1) if hasattr(self, "both") else (self.left(x), self.right(x))
        return self.write(left * right)


@dataclass(frozen=True)
class Blocks:
    """The settings of one network of this family."""

    ranks: tuple[int, ...] = (1,) * 12
    neurons: int = 3
    """Of each mechanism."""
    d_in: int = 20
    d_out: int = 16
    kind: Literal["relu", "gelu", "branches", "bilinear", "joined"] = "relu"
    on: Literal["sparse", "one_always", "pairs", "exclusive", "three"] = "sparse"
    """Which mechanisms are on together: each on its own; the first always; in correlated pairs; of
    two neighbours never both; exactly three."""
    probability: float = 0.08
    shared_write: bool = False
    """Two neighbours share their neurons, and so their write direction."""
    twins: bool = False
    """Every mechanism is driven by two inputs that always have the same value, and reads them with
    different weights: only the sum of the two weights is real."""
    times: float = 3.0
    """C as a multiple of the parts that the truth has."""
    unit_in: float = 1.0
    unit_out: float = 1.0
    rows: int = 1024
    seed: int = 0

    @property
    def k(self) -> int:
        return len(self.ranks)

    def switched(self, count: int, generator: torch.Generator) -> Tensor:
        """Which mechanisms are on in each row."""
        p = self.probability
        u = torch.rand(count, self.k, generator=generator)
        if self.on == "three":
            return u.argsort(1).argsort(1) < 3
        on = u < p
        if self.on == "one_always":
            on[:, 0] = True
        if self.on == "pairs":  # the second of a pair comes with the first six times in ten
            again = torch.rand(count, self.k // 2, generator=generator)
            first = on[:, 0::2]
            on[:, 1::2] = torch.where(first, again < 0.6, again < 0.4 * p / (1 - p))
        if self.on == "exclusive":
            on[:, 1::2] &= ~on[:, 0::2]
        return on


def build(name: str, settings: Blocks) -> KnownNetwork:
    """The network of these settings."""
    generator = generator_for(settings.seed, "collection/blocks")
    ranks, k, m = settings.ranks, settings.k, settings.neurons
    spans = [(sum(ranks[:i]), sum(ranks[: i + 1])) for i in range(k)]
    total = sum(ranks)
    directions = orthonormal(total, settings.d_in, generator)
    groups = [i // 2 for i in range(k)] if settings.shared_write else list(range(k))
    n_groups = max(groups) + 1
    write_spans = spans[:n_groups]
    outputs = orthonormal(write_spans[-1][1], settings.d_out, generator)
    if settings.twins:
        eye = torch.eye(settings.d_in)
        directions = (eye[0 : 2 * k : 2] + eye[1 : 2 * k : 2]) / 2**0.5

    def gains(rows: int, columns: int, signed: bool) -> Tensor:
        g = 0.5 + torch.rand(rows, columns, generator=generator)
        return torch.randn(rows, columns, generator=generator) if signed else g

    reads: dict[str, list[Tensor]] = {"read": [], "left": [], "right": []}
    for kind in ("left", "right") if settings.kind in ("bilinear", "joined") else ("read",):
        shared = [gains(m, ranks[i], ranks[i] > 1) for i in range(n_groups)]
        for i, (a, b) in enumerate(spans):
            matrix = torch.zeros(n_groups * m, settings.d_in)
            matrix[groups[i] * m : (groups[i] + 1) * m] = (
                shared[groups[i]] @ directions[a:b] / settings.unit_in
            )
            reads[kind].append(matrix)
    writes = []
    for g in range(n_groups):
        matrix = torch.zeros(settings.d_out, n_groups * m)
        a, b = write_spans[g]
        gain = gains(b - a, m, b - a > 1) * settings.unit_out / m**0.5
        matrix[:, g * m : (g + 1) * m] = outputs[a:b].T @ gain
        writes.append(matrix)
    W = {kind: torch.stack(matrices).sum(0) for kind, matrices in reads.items() if matrices}
    W_write = torch.stack(writes).sum(0)
    support = None
    if settings.twins:
        support = directions.T.contiguous()
        lean = torch.zeros(k, settings.d_in)
        lean[range(k), range(0, 2 * k, 2)], lean[range(k), range(1, 2 * k, 2)] = 0.5, -0.5
        W["read"] = W["read"] + torch.stack(reads["read"]).sum(-1).T @ lean

    def mechanisms(matrices: list[Tensor]) -> Mechanisms:
        return Mechanisms(torch.stack(matrices), ranks[: len(matrices)], support)

    written = Mechanisms(torch.stack(writes), ranks[:n_groups])
    if settings.kind in ("relu", "gelu"):
        model: nn.Module = TwoLayers(W["read"], W_write, settings.kind)
        truth = {"read": mechanisms(reads["read"]), "write": written}
    elif settings.kind == "branches":
        model = Branches(W["read"], W_write)
        truth = {
            f"{b}.{n}": t
            for b in ("first", "second")
            for n, t in (("read", mechanisms(reads["read"])), ("write", written))
        }
    else:
        model = Bilinear(W["left"], W["right"], W_write, settings.kind == "joined")
        halves = [torch.cat(pair) for pair in zip(reads["left"], reads["right"], strict=True)]
        two = {"left": mechanisms(reads["left"]), "right": mechanisms(reads["right"])}
        truth = ({"both": mechanisms(halves)} if settings.kind == "joined" else two) | {"write": written}
    one_sided = torch.tensor([r == 1 for r in ranks for _ in range(r)])
    owner = torch.tensor([i for i, r in enumerate(ranks) for _ in range(r)])

    def data(generator: torch.Generator) -> WeightedBatch:
        on = settings.switched(settings.rows, generator)[:, owner]
        values = torch.rand(settings.rows, total, generator=generator)
        values = torch.where(one_sided, values, 2 * values - 1)
        return WeightedBatch.merging_zero_rows(settings.unit_in * (on * values) @ directions)

    def needed(x: Tensor) -> dict[str, Tensor]:
        active = (x @ directions.T).abs() > 1e-5 * settings.unit_in
        by_mechanism = torch.stack([active[..., a:b].any(-1) for a, b in spans], -1)
        members = [[i for i in range(k) if groups[i] == g] for g in range(n_groups)]
        by_group = torch.stack([by_mechanism[..., of].any(-1) for of in members], -1)
        return {n: by_group if n.endswith("write") else by_mechanism for n in truth}

    # A mechanism of higher rank shows all of its parts only on several inputs.
    per_row = [1 if r == 1 else 4 * r for r in ranks]
    rows = []
    for i, (a, b) in enumerate(spans):
        at = torch.randn(per_row[i], b - a, generator=generator)
        at = 0.75 * F.normalize(at, dim=1) if ranks[i] > 1 else torch.full((1, 1), 0.75)
        rows.append(settings.unit_in * at @ directions[a:b])
    probe = torch.cat(rows)
    if settings.on == "one_always":
        probe = torch.cat([probe[:1], probe[1:] + probe[0]])
    C = {n: round(settings.times * sum(of.ranks)) for n, of in truth.items()}
    model = model.eval().requires_grad_(False)
    return KnownNetwork(name, model, data, C, dict(truth), probe, needed)


def _register(name: str, about: str, settings: Blocks, family: str = "blocks") -> None:
    register(name, family, about, lambda name: build(name, settings))


_ONE = Blocks()
_register("blocks_rank1", "12 rank-one mechanisms in random bases", _ONE)
_register("blocks_rank2", "6 mechanisms of rank two", Blocks((2,) * 6, neurons=8))
_register("blocks_rank3", "4 mechanisms of rank three", Blocks((3,) * 4, neurons=12))
_register("blocks_mixed", "mechanisms of rank one and two in one matrix", Blocks((1, 1, 1, 1, 2, 2), 8))
_register("blocks_gelu", "rank-one mechanisms, GELU", replace(_ONE, kind="gelu", seed=1))
_register("blocks_three", "exactly three mechanisms at a time", replace(_ONE, on="three", seed=2))
_register("blocks_always", "one mechanism is always on", replace(_ONE, on="one_always", seed=3))
_register("blocks_correlated", "mechanisms that mostly come in pairs", replace(_ONE, on="pairs", seed=4))
_register(
    "blocks_twins", "inputs that always have the same value", replace(_ONE, twins=True, d_in=24, seed=5)
)
_register("blocks_enough", "as many subcomponents as mechanisms", replace(_ONE, times=1.0, seed=6))
_register("blocks_ten_times", "ten times more subcomponents", replace(_ONE, times=10.0, seed=7))
_register("blocks_copies", "two copies that do the same", replace(_ONE, ranks=(1,) * 8, kind="branches"))
_register(
    "blocks_two_jobs",
    "pairs of mechanisms that write the same and never come together",
    replace(_ONE, shared_write=True, on="exclusive", seed=8),
)
_register("bilinear_cut", "a bilinear layer as two matrices", replace(_ONE, kind="bilinear"), "bilinear")
_register(
    "bilinear_joined", "the same bilinear layer as one matrix", replace(_ONE, kind="joined"), "bilinear"
)
for _word, _unit in (("hundredth", 0.01), ("hundredfold", 100.0)):
    _register(f"units_blocks_in_{_word}", f"inputs times {_unit:g}", replace(_ONE, unit_in=_unit), "units")
    _register(f"units_blocks_out_{_word}", f"output times {_unit:g}", replace(_ONE, unit_out=_unit), "units")
