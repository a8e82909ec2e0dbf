"""Induction: [BEGIN] T* S M T* S -> M, and an attention-only transformer of two layers that does it.

T and M are any of 128 tokens, S is one of its own. To answer, the network must remember in the first layer
which token follows the first S, and find that one again in the second. There is no MLP and no norm, and
the answer is asked for at the last position alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Int
from pydantic import Field
from torch import Tensor, nn

from rankone.data import generator_for
from rankone.decomposition import Decomposition
from rankone.metrics import Check
from rankone.targets.base import register_target
from rankone.targets.language import LanguageTarget, Rule
from rankone.targets.sparse import Recipe

TOKENS = 128
BEGIN, SIGN = TOKENS, TOKENS + 1


@register_target("induction")
class InductionTarget(LanguageTarget):
    """A transformer that repeats what followed a sign."""

    kind: str = "induction"
    vocabulary: ClassVar[int] = TOKENS + 2
    norm: ClassVar[bool] = False
    last: ClassVar[bool] = True

    width: int = Field(default=16, ge=1, le=10_000)
    """Width of the residual stream."""
    head: int = Field(default=16, ge=2, le=10_000, multiple_of=2)
    """Width of the one attention head of each layer."""
    neurons: int = Field(default=0, ge=0, le=100_000)
    """Neurons of each layer's MLP; 0 for none."""
    training: Recipe = Recipe(steps=4000, batch_size=256, lr=1e-2, weight_decay=0.0)
    """How it is trained; `batch_size` counts sequences."""

    def sample(
        self, rows: int, generator: torch.Generator, length: int | None = None
    ) -> tuple[Tensor, Tensor]:
        length = length or self.length
        ids = torch.randint(TOKENS, (rows, length), generator=generator)
        sign = torch.randint(1, length - 2, (rows,), generator=generator)
        ids[:, 0], ids[:, -1] = BEGIN, SIGN
        ids[torch.arange(rows), sign] = SIGN
        return ids, ids[torch.arange(rows), sign + 1]

    def rules(self, ids: Int[Tensor, "rows positions"]) -> Sequence[Rule]:
        ids = ids.cpu()
        sign = ids == SIGN
        after = sign.roll(1, 1) & (torch.arange(ids.shape[1]) > 0)
        last = torch.zeros_like(sign)
        last[:, -1] = True
        return [
            Rule("the token after the sign", "remembering what came before", after),
            Rule("the last position", "finding it again", last),
        ]

    @torch.no_grad()
    def check(self, model: nn.Module) -> tuple[bool, dict[str, float]]:
        """How often the answer is right."""
        ids, answers = self.sample(1024, generator_for(0, "target/check"))
        right = float((model(ids).argmax(-1) == answers).double().mean())
        return right > 0.95, {"accuracy": right}

    @torch.no_grad()
    def details(self, result: Decomposition, checks: Mapping[str, Check]) -> dict[str, Any]:
        """Which parts serve which step, and what the network answers without the parts of a layer."""
        ids, answers = self.sample(1024, generator_for(1, "target/check"))

        def accuracy(model: Any) -> float:
            return float((model(ids).argmax(-1) == answers).double().mean())

        alive = result.alive
        kept = {"target": accuracy(result.model.target), "alive alone": accuracy(result.ablated(keep=alive))}
        for i in range(self.n_layers):
            parts = {name: found for name, found in alive.items() if name.startswith(f"blocks.{i}.")}
            kept[f"without the parts of layer {i}"] = accuracy(result.ablated(drop=parts))
        words = "; ".join(f"{name} {value:.1%}" for name, value in kept.items())
        known = super().details(result, checks)
        return known | {"accuracy": kept, "in_words": [*known["in_words"], f"Right answers: {words}"]}
