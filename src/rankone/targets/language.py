"""Small transformers that rankone trains itself, on languages whose every rule is known.

One head per layer, rotary positions, RMS norm and an MLP where there is one. Each family (toy_language.py,
induction.py) says what its language is, and which rules a right decomposition must show; what is
common to them is here: the network, its training, and how rules are counted.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor, nn

from rankone.config import OptimizerSettings
from rankone.data import batches, generator_for, inputs_of
from rankone.decomposition import Decomposition
from rankone.metrics import Check
from rankone.optim import learning_rate
from rankone.targets.base import TrainableTarget
from rankone.targets.sparse import Recipe

ON = 0.5
"""The importance above which a part counts as used when rules are counted."""
FOUND = 0.8
"""How well a part must tell the positions of a rule from all others (F1) for the rule to be found."""
LOOKED_AT = 8
"""Held-out batches on which rules are counted."""


def rotated(x: Float[Tensor, "rows positions d"]) -> Float[Tensor, "rows positions d"]:
    """Rotary positions: pairs of numbers turned by an angle that grows with the position."""
    positions, half = x.shape[-2], x.shape[-1] // 2
    speeds = 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(positions, device=x.device).unsqueeze(1) * speeds
    a, b = x[..., :half], x[..., half:]
    sin, cos = angles.sin(), angles.cos()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def normed(x: Float[Tensor, "*lead d"]) -> Float[Tensor, "*lead d"]:
    """RMS norm without weights of its own."""
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


class Attention(nn.Module):
    """One head that sees what came before, with rotary positions."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, head, bias=False) for _ in range(3))
        self.o = nn.Linear(head, width, bias=False)

    def forward(self, x: Float[Tensor, "rows positions d"]) -> Float[Tensor, "rows positions d"]:
        q, k, v = rotated(self.q(x)), rotated(self.k(x)), self.v(x)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        return self.o(scores.masked_fill(later, -torch.inf).softmax(-1) @ v)


class MLP(nn.Module):
    """Neurons that read the stream and write to it."""

    def __init__(self, width: int, neurons: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, neurons, bias=False), nn.Linear(neurons, width, bias=False)

    def forward(self, x: Float[Tensor, "*lead d"]) -> Float[Tensor, "*lead d"]:
        return self.down(F.relu(self.up(x)))


class Block(nn.Module):
    """Attention and then neurons, both added to the stream."""

    def __init__(self, width: int, head: int, neurons: int, norm: bool) -> None:
        super().__init__()
        self.attn = Attention(width, head)
        self.mlp = MLP(width, neurons) if neurons else None
        self.norm = norm

    def forward(self, x: Float[Tensor, "rows positions d"]) -> Float[Tensor, "rows positions d"]:
        x = x + self.attn(normed(x) if self.norm else x)
        return x if self.mlp is None else x + self.mlp(normed(x) if self.norm else x)


class TinyTransformer(nn.Module):
    """Token ids -> logits of the next token, at every position or at the last one alone."""

    def __init__(
        self, vocabulary: int, width: int, head: int, neurons: int, layers: int, *, norm: bool, last: bool
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, head, neurons, norm) for _ in range(layers))
        self.unembed = nn.Linear(width, vocabulary, bias=False)
        self.norm, self.last = norm, last

    def forward(self, ids: Int[Tensor, "rows positions"]) -> Float[Tensor, "rows *positions vocabulary"]:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        x = x[:, -1] if self.last else x
        return self.unembed(normed(x) if self.norm else x)


@dataclass(frozen=True)
class Rule:
    """A rule of a language, and the positions of a batch at which it decides what comes next."""

    name: str
    kind: str
    where: Bool[Tensor, "rows positions"]


class LanguageTarget(TrainableTarget):
    """A small transformer trained on a language with known rules."""

    length: int = Field(default=64, ge=4, le=100_000)
    """Tokens in a sequence."""
    width: int = Field(default=64, ge=1, le=10_000)
    """Width of the residual stream."""
    head: int = Field(default=32, ge=2, le=10_000, multiple_of=2)
    """Width of the one attention head of each layer."""
    neurons: int = Field(default=128, ge=0, le=100_000)
    """Neurons of each layer's MLP; 0 for none."""
    n_layers: int = Field(default=2, ge=1, le=100)
    """Layers."""
    training: Recipe = Recipe(steps=3000, batch_size=64, lr=4e-3)
    """How it is trained; `batch_size` counts sequences."""

    vocabulary: ClassVar[int]
    norm: ClassVar[bool] = True
    last: ClassVar[bool] = False
    """Whether the network answers at the last position alone."""
    growing: ClassVar[Sequence[tuple[float, float]]] = ((0.4, 0.25), (0.7, 0.5), (math.inf, 1.0))
    """Until which share of training sequences have which share of their length."""

    @property
    def first_seed(self) -> int:
        return self.training.seed

    @abstractmethod
    def sample(
        self, rows: int, generator: torch.Generator, length: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Sequences, and the tokens that follow: at every position, or after the last one."""

    @abstractmethod
    def rules(self, ids: Int[Tensor, "rows positions"]) -> Sequence[Rule]:
        """The rules of the language, and where each holds in these sequences."""

    def data(self, batch_size: int) -> Any:
        """A sampler; `batch_size` counts positions, as everywhere."""
        rows = max(1, batch_size // self.length)
        return lambda generator: self.sample(rows, generator)[0]

    def build(self, seed: int = 0) -> TinyTransformer:
        sizes = self.vocabulary, self.width, self.head, self.neurons, self.n_layers
        model = TinyTransformer(*sizes, norm=self.norm, last=self.last)
        generator = generator_for(seed, "target/init")
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) / math.sqrt(p.shape[1]))
        return model

    def train(self, seed: int) -> tuple[nn.Module, float]:
        recipe, model = self.training, self.build(seed)
        warm = min(200, recipe.steps - 1)
        rate = OptimizerSettings(lr=recipe.lr, schedule="half_cosine", warmup_steps=warm)
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(
            parameters, lr=recipe.lr, weight_decay=recipe.weight_decay, betas=(0.9, 0.98), fused=True
        )
        tail, losses = max(1, recipe.steps // 100), []
        for step in range(recipe.steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(rate, step, recipe.steps)
            length = self._length_at(step / recipe.steps)
            generator = generator_for(seed, "target/data", step)
            ids, answers = self.sample(recipe.batch_size, generator, length)
            loss = F.cross_entropy(model(ids).flatten(0, -2), answers.flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            losses = [*losses[-tail + 1 :], float(loss.detach())]
        for p in parameters:
            p.grad = None
        return model.eval(), math.fsum(losses) / len(losses)

    def _length_at(self, progress: float) -> int:
        """Sequences are short at first: what has fewer distractors is learned sooner."""
        share = next(share for until, share in self.growing if progress < until)
        return max(4, int(share * self.length))

    def details(self, result: Decomposition, checks: Mapping[str, Check]) -> dict[str, Any]:
        """Which rules of the language have a part of their own."""
        found = count_rules(self, result)
        return {"rules": found, "in_words": in_words(found)}


@torch.no_grad()
def count_rules(target: LanguageTarget, result: Decomposition) -> dict[str, list[dict[str, Any]]]:
    """By kind of rule, for each rule the part that tells its positions best from all others."""
    both: dict[str, Tensor] = {}
    holds: dict[str, float] = {}
    kinds: dict[str, str] = {}
    on = {name: torch.zeros(layer.C, dtype=torch.float64) for name, layer in result.model.layers.items()}
    for batch in islice(batches(result.data_or(None), 0, stream="evaluation"), LOOKED_AT):
        used = {name: (g > ON).double() for name, g in result.importances(batch).items()}
        for name, u in used.items():
            on[name] += u.flatten(0, -2).sum(0)
        for rule in target.rules(inputs_of(batch)):
            kinds[rule.name] = rule.kind
            holds[rule.name] = holds.get(rule.name, 0.0) + float(rule.where.sum())
            for name, u in used.items():
                key = f"{rule.name}/{name}"
                both[key] = both.get(key, torch.zeros_like(on[name])) + u[rule.where].sum(0)
    found: dict[str, list[dict[str, Any]]] = {}
    for rule, kind in kinds.items():
        f1 = {name: 2 * both[f"{rule}/{name}"] / (on[name] + holds[rule]).clamp(min=1) for name in on}
        best = max(f1, key=lambda name: float(f1[name].max()))
        part = int(f1[best].argmax())
        row = {"rule": rule, "layer": best, "part": part, "f1": round(float(f1[best][part]), 4)}
        found.setdefault(kind, []).append(row | {"positions": int(holds[rule])})
    return found


def in_words(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """How many rules of each kind were found."""
    lines = []
    for kind, rows in found.items():
        right = sum(row["f1"] >= FOUND for row in rows)
        mean = math.fsum(row["f1"] for row in rows) / len(rows)
        where = sorted({row["layer"] for row in rows if row["f1"] >= FOUND})
        lines.append(
            f"{kind}: {right} of {len(rows)} have a part of their own (F1 of at least {FOUND:g}; mean "
            f"{mean:.2f})" + (f", in {', '.join(where)}" if where else "")
        )
    return lines
