"""A decomposition in the terms of a language model: cross-entropy and KL, and what single parts do to text.

`measure` compares the target with its parts under every kind of mask, on held-out passages: how well the
next token is foretold, and which share of what removing everything costs is recovered. `card` is about
one subcomponent: how often it is on, in which passages, which tokens it makes likelier and unlikelier
where it is on, and what is lost without it there and elsewhere. `EditedText` is a copy of the network that
writes text, beside what the edit changes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from rankone import heads
from rankone.adversary import Attack
from rankone.config import DecompositionConfig
from rankone.corpus import Text, continued, encoded, framed
from rankone.data import call_with, given_weights, to_device
from rankone.errors import BatchError, ConfigError, shown
from rankone.importance import clipped
from rankone.looking import fresh_batches
from rankone.losses import kl
from rankone.masks import Mask, Masks
from rankone.metrics import IMPORTANT, l0
from rankone.model import DecomposedModel
from rankone.passages import Passages, as_line, passages
from rankone.patching import pick_output
from rankone.step import Step
from rankone.tables import Table
from rankone.views import index_of

CONDITIONS = {
    "unmasked": "ones",
    "stochastic": "stochastic",
    "importances": "importance",
    "rounded": "rounded",
}
"""What a row of the table is called -> the mask source that it is of."""
ATTACK = Attack(20)
MOST_TOKENS = 8


def refuse_other_data(data: Any) -> Text:
    """The text, if it is some."""
    if not isinstance(data, Text):
        raise BatchError(
            f"This looks at text, and the data is a {type(data).__name__}. Pass data=rankone.text(...)."
        )
    return data


def by_slices(step: Step, output: Tensor, use: Callable[[slice, Tensor], None]) -> None:
    """Log-probabilities of all positions, one slice of them after the other: `use(which, log_q)`."""
    flat = output.reshape(-1, output.shape[-1])
    head = step.clean.head
    rows = max(1, heads.SLICE // (flat.shape[-1] if head is None else head.out_features))
    for start in range(0, len(flat), rows):
        part = slice(start, start + rows)
        logits = flat[part] if head is None else F.linear(flat[part], head.weight, head.bias)
        use(part, logits.float().log_softmax(-1))


def cross_entropy(step: Step, output: Tensor, ids: Tensor) -> float:
    """How unlikely the next tokens are, on average over positions that count and have one."""
    following = torch.full_like(ids, -1)
    following[:, :-1] = ids[:, 1:]
    if step.clean.weights is not None and step.clean.weights.shape == ids.shape:
        following[:, :-1][step.clean.weights[:, 1:] == 0] = -1
        following[step.clean.weights == 0] = -1
    wanted, losses = following.flatten(), []

    def use(part: slice, log_q: Tensor) -> None:
        there = wanted[part] >= 0
        losses.append(-log_q[there].gather(-1, wanted[part][there].unsqueeze(-1)).flatten())

    by_slices(step, output, use)
    return float(torch.cat(losses).double().mean())


@dataclass(frozen=True, repr=False)
class TextMeasures:
    """What `measure` found."""

    table: Table
    """A row for each condition: cross-entropy, KL from the target, share of cross-entropy recovered."""
    l0: dict[str, float]
    """Matrix -> important subcomponents per position."""
    spectrum: dict[str, list[float]] = field(default_factory=dict)
    """Matrix -> the mean importance of every subcomponent, largest first."""

    def __repr__(self) -> str:
        each = ", ".join(f"{name} {value:.2f}" for name, value in self.l0.items())
        return f"{self.table}\nL0 per position {sum(self.l0.values()):.2f}: {each}"


@torch.no_grad()
def measure(model: DecomposedModel, config: DecompositionConfig, data: Text, n_batches: int) -> TextMeasures:
    """Cross-entropy and KL of the target and of its parts under every kind of mask."""
    names = ["target", *CONDITIONS, "attacked", "all zero"]
    losses, far = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    counts = dict.fromkeys(model.layers, 0.0)
    means = {name: torch.zeros(layer.C) for name, layer in model.layers.items()}
    for i, batch in enumerate(fresh_batches(model, data, n_batches)):
        step = Step(model, batch, {}, kl, index=i, masks=config.masks)
        ids = data.ids_of(batch)
        masks: dict[str, Masks] = {name: step.masks(source, 0) for name, source in CONDITIONS.items()}
        masks |= {"attacked": ATTACK(step.draw(0)), "all zero": step.masks("zero", 0)}
        losses["target"] += cross_entropy(step, step.clean.output, ids) / n_batches
        for name, given in masks.items():
            output = step.output(given)
            losses[name] += cross_entropy(step, output, ids) / n_batches
            far[name] += float(step.distance(output)) / n_batches
        for name, raw in step.raw.items():
            counts[name] += l0(clipped(raw), step.weights_of(name)) / n_batches
            means[name] += step.mean_of_each(clipped(raw), name).cpu() / n_batches
    whole = losses["all zero"] - losses["target"]
    rows = [
        (name, losses[name], far[name], (losses["all zero"] - losses[name]) / whole if whole > 0 else None)
        for name in names
    ]
    head = ("masks", "cross-entropy", "KL from the target", "share recovered")
    spectrum = {name: mean.sort(descending=True).values.tolist() for name, mean in means.items()}
    return TextMeasures(
        Table(head, rows, f"On {n_batches} batches that training never saw."), counts, spectrum
    )


@dataclass(frozen=True, repr=False)
class Card:
    """What one subcomponent does in text."""

    layer: str
    c: int
    rate: float
    """The share of positions on which it is important."""
    cost_on: float | None
    """KL from the target without it, where it is important; None where it never is."""
    cost_off: float
    """The same everywhere else."""
    raises: list[tuple[str, float]]
    """Tokens that it makes likelier where it is on, with the mean change of their log-probability."""
    lowers: list[tuple[str, float]]
    examples: Passages

    def __repr__(self) -> str:
        def named(tokens: list[tuple[str, float]]) -> str:
            return (
                ", ".join(f"{as_line(piece).strip() or piece!r} {change:+.2f}" for piece, change in tokens)
                or "-"
            )

        cost = "-" if self.cost_on is None else f"{self.cost_on:.3g}"
        return (
            f"{self.examples}\nmakes likelier: {named(self.raises)}\nmakes unlikelier: {named(self.lowers)}\n"
            f"without it alone: KL {cost} where it is on, {self.cost_off:.3g} elsewhere"
        )


@torch.no_grad()
def card(
    model: DecomposedModel, config: DecompositionConfig, layer: str, c: int, data: Text, n_batches: int
) -> Card:
    """One subcomponent, looked at on held-out passages."""
    c = index_of(c, model.layer(layer).C, layer)
    change, on, off, cost_on, cost_off = None, 0.0, 0.0, 0.0, 0.0
    for i, batch in enumerate(fresh_batches(model, data, n_batches)):
        step = Step(model, batch, {}, kl, index=i, masks=config.masks)
        g = clipped(step.raw[layer])
        each = step.each_weight(layer).reshape(g.shape[:-1]) > 0
        important = (g[..., c] > IMPORTANT) & each
        without = torch.ones(g.shape[-1], dtype=g.dtype, device=g.device)
        without[c] = 0.0
        output = step.output({layer: Mask(without, delta=without.new_ones(g.shape[:-1]))})
        damage = step.divergences(output)
        if damage.shape != important.shape:
            raise BatchError(
                f"The output has datapoints of shape {tuple(damage.shape)}, not one for each token."
            )
        elsewhere = each & ~important
        on, off = on + float(important.sum()), off + float(elsewhere.sum())
        cost_on += float(damage[important].sum())
        cost_off += float(damage[elsewhere].sum())
        moved = _moved(step, output, important)
        change = moved if change is None else change + moved
    assert change is not None
    order = (change / max(on, 1)).sort(descending=True)

    def tokens(which: slice) -> list[tuple[str, float]]:
        found = zip(order.indices[which].tolist(), order.values[which].tolist(), strict=True)
        return [(data.pieces([token])[0], value) for token, value in found]

    return Card(
        layer,
        c,
        on / max(on + off, 1),
        cost_on / on if on else None,
        cost_off / max(off, 1),
        tokens(slice(0, MOST_TOKENS)) if on else [],
        tokens(slice(-MOST_TOKENS, None))[::-1] if on else [],
        passages(model, layer, c, data, 8, n_batches),
    )


def _moved(step: Step, output: Tensor, important: Tensor) -> Float[Tensor, " vocabulary"]:
    """By how much each token's log-probability is higher with a part than without it, added up over
    positions where the part is on."""
    chosen = important.flatten()
    clean, without = (t.reshape(-1, t.shape[-1])[chosen] for t in (step.clean.output, output))
    total: list[Tensor] = []
    for sign, flat in ((1, clean), (-1, without)):
        by_slices(step, flat, lambda _, log_q, sign=sign: total.append(sign * log_q.double().sum(0).cpu()))
    if not total:
        head = step.clean.head
        return torch.zeros(output.shape[-1] if head is None else head.out_features, dtype=torch.float64)
    return torch.stack(total).sum(0)


class EditedText:
    """A copy of a language model without some of its parts: it writes text, and says what else changed."""

    def __init__(
        self, original: nn.Module, model: nn.Module, data: Text, others: Mapping[str, Text], n_batches: int
    ) -> None:
        self.model, self.tokenizer = model, data.tokenizer
        self.side_effects = side_effects(original, model, {"its own text": data, **others}, n_batches)

    def generate(self, prompt: str, tokens: int = 40, *, temperature: float = 0.0, seed: int = 0) -> str:
        """The prompt and what the edited model makes of it; without a temperature, what is likeliest."""
        if self.tokenizer is None:
            raise ConfigError(
                "The text has no tokenizer, so prompts cannot be read. Use .model with token ids."
            )
        ids = torch.tensor([framed(self.tokenizer, encoded(self.tokenizer, prompt), whole=False)])
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            written = continued(self.model, ids, ids.shape[1] + tokens, temperature, generator)
        return str(self.tokenizer.decode(written[0].tolist()))

    def __repr__(self) -> str:
        return f"{type(self.model).__name__} with edited weights. What changed:\n{self.side_effects}"


@torch.no_grad()
def side_effects(original: nn.Module, edited: nn.Module, texts: Mapping[str, Text], n_batches: int) -> Table:
    """What an edit changes on each text: cross-entropy before and after, KL, and how often the likeliest
    next token is another one."""
    rows = []
    for name, data in texts.items():
        if not isinstance(data, Text):
            raise BatchError(f"other={shown(data)}; expected text, as rankone.text gives it.")
        before = after = far = other = total = pairs = 0.0
        stream = data.stream(0, 0, "evaluation")
        for _, batch in zip(range(n_batches), stream, strict=False):
            batch = to_device(batch, next(original.parameters()).device)
            ids, given = data.ids_of(batch), given_weights(batch)
            there = torch.ones_like(ids, dtype=torch.bool) if given is None else given > 0
            log_p, log_q = (_log_probabilities(m, data, batch) for m in (original, edited))
            both, following = there[:, :-1] & there[:, 1:], ids[:, 1:].unsqueeze(-1)
            before -= float(log_p[:, :-1].gather(-1, following)[both].double().sum())
            after -= float(log_q[:, :-1].gather(-1, following)[both].double().sum())
            pairs += int(both.sum())
            far += float((log_p.exp() * (log_p - log_q)).sum(-1)[there].double().sum())
            other += float((log_p.argmax(-1) != log_q.argmax(-1))[there].sum())
            total += int(there.sum())
        rows.append((name, before / max(pairs, 1), after / max(pairs, 1), far / total, other / total))
    head = ("text", "cross-entropy before", "after", "KL", "another likeliest token")
    return Table(head, rows, f"On {n_batches} held-out batches of each text.")


def _log_probabilities(model: nn.Module, data: Text, batch: Any) -> Tensor:
    return pick_output(call_with(model, batch), data.output_of(model)).float().log_softmax(-1)
