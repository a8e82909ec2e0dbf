"""Which subcomponents are alive: each by its true index, how large it is, how often it is on, and what
importances look like on a sample of the data. For any decomposition."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rankone.decomposition import Decomposition
from rankone.looking import Usage
from rankone.report.canvas import INK, Picture, name_columns, new_figure

MOST_ROWS = 60
"""Subcomponents of a layer that a table lists."""
MOST_LAYERS = 6
"""Layers whose importances are drawn."""
MOST_COLUMNS = 80
"""Subcomponents of a layer that are drawn."""


@dataclass(frozen=True)
class AliveLayer:
    """A layer in the table of alive subcomponents."""

    name: str
    alive: int
    C: int
    rows: list[tuple[int, float, float, float, int | None]]
    """(index, norm, share of datapoints, mean importance there, probe row it serves most), the most
    used first."""
    share_of_norm: float
    """How much of the squared norms of all subcomponents the alive ones have."""


def alive_layers(
    result: Decomposition, usages: Mapping[str, Usage], probed: Mapping[str, Tensor]
) -> list[AliveLayer]:
    """A table for each layer that has subcomponents of its own."""
    layers = []
    for name, used in usages.items():
        norms = result.components(name).norms().cpu()
        alive = used.alive
        rows = []
        for c in sorted(alive, key=lambda c: (-float(used.rate[c]), c))[:MOST_ROWS]:
            serves = int(probed[name][:, c].argmax()) if name in probed else None
            rows.append((c, float(norms[c]), float(used.rate[c]), float(used.mean[c]), serves))
        squares = norms.double().square()
        share = float(squares[alive].sum() / squares.sum().clamp(min=1e-30))
        layers.append(AliveLayer(name, len(alive), len(norms), rows, share))
    return layers


def sample_picture(usages: Mapping[str, Usage]) -> Picture | None:
    """Importances on a sample of the data; None where nothing is ever important."""
    shown = {name: used for name, used in usages.items() if used.alive and len(used.sample)}
    shown = dict(list(shown.items())[:MOST_LAYERS])
    if not shown:
        return None
    widths = [max(6, min(MOST_COLUMNS, len(used.alive))) for used in shown.values()]
    across = 1 if max(widths) > 30 or len(shown) == 1 else 2
    down = -(-len(shown) // across)
    figure = new_figure(9.0 if across == 2 or max(widths) > 30 else 6.0, 2.7 * down + 0.3)
    image: Any = None
    for i, (name, used) in enumerate(shown.items()):
        columns = sorted(sorted(used.alive, key=lambda c: -float(used.rate[c]))[:MOST_COLUMNS])
        g = used.sample[:, columns]
        order = torch.argsort((g - g.mean(0)).argmax(1), stable=True)
        axes = figure.add_subplot(down, across, i + 1)
        image = axes.imshow(
            g[order].numpy(), cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest"
        )
        axes.set_title(name if len(name) <= 50 else f"...{name[-47:]}", fontsize=9, color=INK)
        axes.tick_params(labelsize=7)
        name_columns(axes, columns, most=30 if across == 1 else 15)
        axes.set_yticks([])
        if i % across == 0:
            axes.set_ylabel("datapoints", fontsize=8)
        if i >= len(shown) - across:
            axes.set_xlabel("subcomponents by their index", fontsize=8)
    figure.colorbar(image, ax=figure.axes, label="causal importance", pad=0.01, aspect=40).ax.tick_params(
        labelsize=7
    )
    rest = f" The first {len(shown)} of {len(usages)} layers." if len(shown) < len(usages) else ""
    caption = (
        "Each row is a datapoint that training never drew, each column an alive subcomponent; the darker, "
        "the more it matters there. Rows are sorted by the subcomponent that matters more there than "
        "elsewhere." + rest
    )
    return Picture("sample", "Importances on a sample of the data", caption, figure)
