"""The passages in which a subcomponent matters most, with the tokens marked where it does."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import torch
from torch import Tensor

from rankone.corpus import Text
from rankone.errors import LayerError, printable
from rankone.looking import fresh_batches
from rankone.metrics import IMPORTANT
from rankone.model import DecomposedModel
from rankone.tables import Table, short_number
from rankone.views import index_of

BEFORE, AFTER = 16, 8
"""How many tokens of a passage are shown around the one that counts."""
OPEN, CLOSE = "«", "»"


@dataclass(frozen=True)
class Passage:
    """A piece of text, token by token, with an importance for each."""

    pieces: tuple[str, ...]
    importances: tuple[float, ...]
    peak: int
    """The token on which the subcomponent matters most."""

    def __str__(self) -> str:
        """One line, with the tokens between marks on which it is important."""
        line, inside = "", False
        for piece, g in zip(self.pieces, self.importances, strict=True):
            if inside != (g > IMPORTANT):
                line, inside = line + (CLOSE if inside else OPEN), not inside
            line += as_line(piece)
        return (line + (CLOSE if inside else "")).strip()

    def html(self) -> str:
        return "".join(
            f'<mark style="background: rgba(250, 180, 40, {g:.2f})" title="{g:.2f}">{escape(as_line(piece))}</mark>'
            if g > IMPORTANT
            else escape(as_line(piece))
            for piece, g in zip(self.pieces, self.importances, strict=True)
        ).strip()


def as_line(piece: str) -> str:
    """The text of a token on one line, safe to print."""
    return printable(piece.replace("\n", "⏎").replace("\t", " ")).replace("\n", "⏎")


@dataclass(frozen=True, repr=False)
class Passages(Table):
    """Passages, most important first; `passages[0]["passage"]` is a `Passage`."""

    tokens: Sequence[tuple[str, int]] = field(default=())
    """The tokens on which it is important, with how often, most frequent first."""

    def __repr__(self) -> str:
        lines = [self.note]
        for row in self:
            lines.append(f"  {short_number(row['importance']):>5}  {row['passage']}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{short_number(row['importance'])}</td><td>{row['passage'].html()}</td></tr>"
            for row in self
        )
        return f"<p>{escape(self.note)}</p><table>{rows}</table>"


@torch.no_grad()
def passages(model: DecomposedModel, layer: str, c: int, data: Text, count: int, n_batches: int) -> Passages:
    """The passages in which one subcomponent is most important, each passage once."""
    index = index_of(c, model.layer(layer).C, layer)
    best: list[tuple[float, int, bytes, Tensor, Tensor]] = []
    seen: set[bytes] = set()
    on = total = 0.0
    often: dict[int, int] = {}
    for batch in fresh_batches(model, data, n_batches):
        g, weights = model.weighted_importances(batch)[layer]
        if g.dim() != 3:  # called several times, or without positions
            raise _no_positions(layer, g)
        g, ids = g[..., index].masked_fill(weights == 0, -1.0).cpu(), data.ids_of(batch).cpu()
        for row, its in zip(g, ids, strict=True):
            key = its.numpy().tobytes()
            if key in seen:
                continue
            seen.add(key)
            there = row >= 0
            on, total = on + float((row > IMPORTANT).sum()), total + float(there.sum())
            for token in its[row > IMPORTANT].tolist():
                often[token] = often.get(token, 0) + 1
            if not bool(there.any()):
                continue
            peak, end = int(row.argmax()), int(there.nonzero()[-1]) + 1  # behind it is padding
            best.append((float(row[peak]), peak, key, its[:end], row[:end].clamp(min=0)))
        best = sorted(best, key=lambda found: (-found[0], found[2]))[:count]
    return _table(data, layer, index, [b for b in best if b[0] > 0], on / max(total, 1), often)


def _table(
    data: Text, layer: str, index: int, best: Sequence[Any], rate: float, often: dict[int, int]
) -> Passages:
    rows = []
    for value, peak, _, ids, g in best:
        first, last = max(0, peak - BEFORE), peak + AFTER + 1
        pieces = data.pieces(ids[first:last].tolist())
        shown = Passage(tuple(pieces), tuple(g[first:last].tolist()), peak - first)
        rows.append((value, shown.pieces[shown.peak], shown))
    common = sorted(often.items(), key=lambda item: (-item[1], item[0]))[:10]
    tokens = [(data.pieces([token])[0], n) for token, n in common]
    note = f"subcomponent {index} of {layer}: on at {rate:.2%} of positions"
    if tokens:
        note += ", most often on " + ", ".join(
            f"{as_line(piece).strip() or piece!r} {n}x" for piece, n in tokens[:6]
        )
    elif not rows:
        note += ": never important in these passages"
    return Passages(("importance", "token", "passage"), rows, note, tokens)


def _no_positions(layer: str, g: Tensor) -> Exception:
    return LayerError(
        f"Importances of {layer!r} have the shape {tuple(g.shape)}; passages need one for each token, "
        "[passages, positions, C]."
    )
