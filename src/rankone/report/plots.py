"""The figures of the paper, from a decomposition. Needs the extra `report` (matplotlib).

Every function returns a matplotlib Figure, or `Picture`s: figures with what a page says about them.
Nothing is shown, and pyplot is not used, so that the backend of a notebook does not matter. Which
figures suit a decomposition is decided here, for the report and for the paper alike. Subcomponents
are shown in the order in which the recovery check sorted them where there is one, otherwise by size.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from rankone.metrics import Check
from rankone.metrics_log import Record
from rankone.progress import LOSS_NAMES
from rankone.report.canvas import ALARM, FAINT, INK, Picture, load_matplotlib, name_columns, new_figure
from rankone.views import LayerView

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FEW_ERRORS = 30
"""So many errors are ringed in a heat map; more are plain to see."""
MOST_SINGLE = 7
"""Subcomponents of one matrix that are drawn singly."""
MOST_SQUARES = 1024
"""Larger matrices are not drawn as coloured squares."""
MOST_LINES = 2048
"""Networks with more weights are not drawn as lines."""
FEATURE_COLOURS = "tab10"
DIVERGING = "RdBu_r"  # red is positive, as in the network diagrams


def weight_pictures(
    views: Mapping[str, LayerView], tied: Mapping[str, str], worth: Mapping[str, int]
) -> list[Picture]:
    """The weights of layers in the order of the network, in every way in which they can be seen.

    `worth` says how many subcomponents of each layer are worth showing; layers in `tied` share those
    of another.
    """
    own = {name: view for name, view in views.items() if name not in tied}
    pictures = []
    for name, view in own.items():
        shown = min(MOST_SINGLE, worth[name] + 1, view.C)
        if is_plane(view):
            caption = (
                "Each coloured line is one column of the matrix: where one input feature is written in "
                f"the two hidden dimensions. Of the {view.C} subcomponents the {shown} largest are "
                "shown. A recovered subcomponent holds one column and nothing else; what is left over "
                "has no size."
            )
            figure = weight_columns(view, shown)
            pictures.append(Picture(f"columns-{name}", f"Columns of {name}", caption, figure))
        elif view.target.numel() <= MOST_SQUARES:
            caption = (
                f"The matrix, the sum of its {view.C} subcomponents, and the {shown} largest ones by "
                "themselves."
            )
            figure = matrices(view, shown)
            pictures.append(Picture(f"matrices-{name}", f"Weights of {name}", caption, figure))
    chain = list(views.values())
    connected = all(a.target.shape[0] == b.target.shape[1] for a, b in pairwise(chain))
    if own and connected and sum(view.target.numel() for view in chain) <= MOST_LINES:
        caption = (
            "Inputs at the bottom, outputs at the top; red lines are positive weights, blue negative, "
            "wider means larger. First the target, then the network made of all subcomponents, then "
            f"networks made of one subcomponent each{' (tied layers share theirs)' if tied else ''}."
        )
        figure = network_diagrams(views, parts_to_show(own, worth), tied)
        pictures.append(Picture("networks", "The network and its parts", caption, figure))
    return pictures


def importance_picture(
    importances: Mapping[str, Tensor], checks: Mapping[str, Check], probe_in_words: str
) -> Picture:
    """Causal importances on the probe."""
    labels = {name: f"{name}: {check.errors} errors" for name, check in checks.items()}
    caption = (
        f"{probe_in_words} (rows); the colour says how important each subcomponent is for the output "
        "(columns, in another order than their indices, which stand below). A diagonal means one "
        "subcomponent per row; filled columns mean "
        "subcomponents that serve many rows."
    )
    figure = importance_heatmap(importances, checks, labels)
    return Picture("importances", "Causal importances on the probe", caption, figure)


def by_size(view: LayerView) -> list[int]:
    """Subcomponents of a layer, largest first."""
    return torch.argsort(view.norms(), descending=True, stable=True).tolist()


def weight_columns(view: LayerView, shown: int) -> "Figure":
    """The columns of a matrix with two rows, as arrows: target, sum of subcomponents, the largest ones
    singly."""
    panels = [("target W", view.target), ("sum of all\nsubcomponents", view.sum())]
    panels += [(f"subcomponent {c}", view.matrix(c)) for c in by_size(view)[:shown]]
    reach = 1.15 * float(view.target.norm(dim=0).max())
    figure = new_figure(1.55 * len(panels), 2.1)
    colours = load_matplotlib().colormaps[FEATURE_COLOURS]
    for i, (title, matrix) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), i + 1)
        for j in range(matrix.shape[1]):
            x, y = matrix[0, j].item(), matrix[1, j].item()
            axes.plot([0, x], [0, y], color=colours(j % 10), linewidth=2, solid_capstyle="round")
            axes.plot([x], [y], "o", color=colours(j % 10), markersize=4)
        axes.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal", xticks=[], yticks=[])
        axes.axhline(0, color=FAINT, linewidth=0.6, zorder=0)
        axes.axvline(0, color=FAINT, linewidth=0.6, zorder=0)
        axes.set_title(title, fontsize=9, color=INK)
        _quiet(axes)
    return figure


def is_plane(view: LayerView) -> bool:
    """Whether a matrix is best drawn as columns in a plane."""
    return view.target.shape[0] == 2 and view.target.shape[1] > 2


def parts_to_show(views: Mapping[str, LayerView], worth: Mapping[str, int]) -> list[tuple[str, int]]:
    """The largest subcomponents: of each matrix at most as many as are `worth` showing, and in all as
    many as a row of networks has room for."""
    room = 8 if max(max(view.target.shape) for view in views.values()) <= 10 else 6
    fair = room if sum(worth[name] for name in views) <= room else max(1, room // len(views))
    chosen = [(name, c) for name, view in views.items() for c in by_size(view)[: min(fair, worth[name])]]
    return chosen[:room]


def network_diagrams(
    views: Mapping[str, LayerView], singles: Sequence[tuple[str, int]], tied: Mapping[str, str]
) -> "Figure":
    """The network drawn once for the target, once for the sum, and once for each single subcomponent.

    Layers stand from bottom to top; a line is a weight, red positive and blue negative, as wide as it
    is large; in wide networks weights below a third of the largest are left out. A subcomponent that
    tied layers share is drawn in all of them.
    """
    zero = {name: torch.zeros_like(view.target) for name, view in views.items()}
    networks: list[tuple[str, dict[str, Tensor]]] = [
        ("target", {name: view.target for name, view in views.items()}),
        ("sum of all\nsubcomponents", {name: view.sum() for name, view in views.items()}),
    ]
    for name, c in singles:
        sharing = [name, *(other for other, source in tied.items() if source == name)]
        networks.append((f"{name}\nsubcomponent {c}", zero | {n: views[n].matrix(c) for n in sharing}))
    largest = max(float(view.target.abs().max()) for view in views.values())
    wide = max(max(view.target.shape) for view in views.values())
    rows = -(-len(networks) // (8 if wide <= 10 else 4))
    columns = -(-len(networks) // rows)
    figure = new_figure((1.6 if wide <= 10 else 3.2) * columns, 2.3 * rows)
    for i, (title, matrices) in enumerate(networks):
        axes = figure.add_subplot(rows, columns, i + 1)
        _network(axes, list(matrices.values()), largest)
        axes.set_title(title, fontsize=9, color=INK)
    if wide > 10:
        figure.supxlabel(
            "Red: positive, blue: negative. Weights below a third of the largest are not drawn.", fontsize=8
        )
    return figure


def _network(axes: "Axes", matrices: Sequence[Tensor], largest: float) -> None:
    from matplotlib.collections import LineCollection

    sizes = [matrices[0].shape[1], *(m.shape[0] for m in matrices)]
    places = [[(i + 0.5) / size for i in range(size)] for size in sizes]
    lines, colours, widths = [], [], []
    least = (
        0.02 if max(sizes) <= 10 else 1 / 3
    )  # thousands of faint lines are a grey surface and a large file
    for level, matrix in enumerate(matrices):
        for o, row in enumerate(matrix.tolist()):
            for i, weight in enumerate(row):
                strength = min(1.0, abs(weight) / largest)
                if strength < least:
                    continue
                lines.append([(places[level][i], level), (places[level + 1][o], level + 1)])
                colours.append((0.75, 0.15, 0.15, strength) if weight > 0 else (0.15, 0.3, 0.7, strength))
                widths.append(0.3 + 2.2 * strength)
    axes.add_collection(LineCollection(lines, colors=colours, linewidths=widths))
    for level, xs in enumerate(places):
        size = 4 if len(xs) <= 10 else 1.5
        axes.plot(
            xs,
            [level] * len(xs),
            "o",
            color=INK,
            markersize=size,
            markerfacecolor="white",
            markeredgewidth=0.7,
        )
    axes.set(xlim=(0, 1), ylim=(-0.2, len(matrices) + 0.2), xticks=[], yticks=[])
    _quiet(axes)


def matrices(view: LayerView, shown: int) -> "Figure":
    """A matrix as coloured squares: target, sum of subcomponents, the largest ones singly."""
    panels = [("target", view.target), ("sum of all\nsubcomponents", view.sum())]
    panels += [(f"subcomponent {c}", view.matrix(c)) for c in by_size(view)[:shown]]
    wide = view.target.shape[1] / view.target.shape[0] > 2
    columns = min(len(panels), 3 if wide else 7)
    rows = -(-len(panels) // columns)
    largest = float(view.target.abs().max())
    small = view.target.numel() <= 25
    figure = new_figure((3.4 if wide else 1.55) * columns + 0.6, (1.4 if wide else 1.9) * rows)
    image: Any = None
    for i, (title, matrix) in enumerate(panels):
        axes = figure.add_subplot(rows, columns, i + 1)
        image = axes.imshow(matrix.numpy(), cmap=DIVERGING, vmin=-largest, vmax=largest)
        if small:
            for o, row in enumerate(matrix.tolist()):
                for j, value in enumerate(row):
                    shade = "white" if abs(value) > 0.6 * largest else INK
                    axes.text(
                        j,
                        o,
                        f"{value:.2f}".replace("-0.00", "0.00"),
                        ha="center",
                        va="center",
                        fontsize=8,
                        color=shade,
                    )
        axes.set(xticks=[], yticks=[])
        axes.set_title(title, fontsize=9, color=INK)
    figure.colorbar(image, ax=figure.axes, shrink=0.8, pad=0.02).ax.tick_params(labelsize=7)
    return figure


def importance_heatmap(
    importances: Mapping[str, Tensor], checks: Mapping[str, Check], labels: Mapping[str, str]
) -> "Figure":
    """Causal importances on one-hot inputs, a row per feature, columns permuted as the recovery check
    sorted them."""
    count = len(importances)
    across = count if count <= 3 else 2
    down = -(-count // across)
    C = max(g.shape[1] for g in importances.values())
    figure = new_figure(min(12.0, 1.2 + across * (3.4 if C <= 40 else 4.4)), (2.6 if C <= 40 else 3.2) * down)
    image: Any = None
    for i, (name, g) in enumerate(importances.items()):
        axes = figure.add_subplot(down, across, i + 1)
        image = _heatmap(axes, g, checks.get(name))
        axes.set_title(labels.get(name, name), fontsize=9, color=INK)
        if i % across == 0:
            axes.set_ylabel("input feature that is on", fontsize=8)
    figure.colorbar(image, ax=figure.axes, label="causal importance", pad=0.01, aspect=40).ax.tick_params(
        labelsize=7
    )
    return figure


def importances_by_setting(
    settings: Sequence[tuple[str, Mapping[str, Tensor], Mapping[str, Check]]],
) -> "Figure":
    """Causal importances of the same layers under several settings: a column for each setting (its
    title, its importances, its checks), a row for each layer."""
    layers = list(settings[0][1])
    figure = new_figure(2.5 * len(settings) + 0.8, 2.5 * len(layers))
    image: Any = None
    for j, (title, importances, checks) in enumerate(settings):
        for i, name in enumerate(layers):
            axes = figure.add_subplot(len(layers), len(settings), i * len(settings) + j + 1)
            image = _heatmap(axes, importances[name], checks.get(name))
            axes.set_title(f"{title}\n{name}" if i == 0 else name, fontsize=8, color=INK)
            if j == 0:
                axes.set_ylabel("input feature that is on", fontsize=8)
    figure.colorbar(image, ax=figure.axes, label="causal importance", pad=0.01, aspect=40).ax.tick_params(
        labelsize=7
    )
    return figure


def _heatmap(axes: "Axes", g: Tensor, check: Check | None) -> Any:
    """Importances with the columns in the order of the check; a long tail of columns without any
    importance is cut off."""
    order = check.order if check else torch.argsort(g.sum(0), descending=True, stable=True).tolist()
    g = g[:, order]
    used = torch.nonzero(g.amax(0) > 0.02).flatten()
    shown = min(g.shape[1], max(g.shape[0], int(used[-1]) + 6 if len(used) else 1))
    image = axes.imshow(
        g[:, :shown].numpy(), cmap="Blues", vmin=0, vmax=1, aspect="auto", interpolation="nearest"
    )
    rest = f", {shown} of {g.shape[1]}" if shown < g.shape[1] else ""
    errors = check.wrong(g) if check else []
    if 0 < len(errors) <= FEW_ERRORS:
        rows, columns = zip(*errors, strict=True)
        axes.plot(columns, rows, "o", color=ALARM, markerfacecolor="none", markersize=5, markeredgewidth=0.9)
        rest += "; rings: errors"
    axes.set_xlabel(f"subcomponents by their index{rest}", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.locator_params(integer=True)
    name_columns(axes, order[:shown])
    return image


def contribution_bars(
    model: Float[Tensor, "features neurons"], subcomponents: Float[Tensor, "features neurons"], blocks: int
) -> "Figure":
    """How much each neuron contributes to the first ten features: in the target above, in single
    subcomponents below."""
    neurons, shown = model.shape[1], min(10, len(model))
    divided = f", the {blocks} blocks divided by grey lines" if blocks > 1 else ""
    reach = 1.1 * float(torch.maximum(model[:shown].abs(), subcomponents[:shown].abs()).max())
    figure = new_figure(12.0, 4.4)
    for row, (title, values) in enumerate((("target", model), ("single subcomponents", subcomponents))):
        axes = figure.add_subplot(2, 1, row + 1)
        for feature in range(shown):
            places = feature + (torch.arange(neurons) / neurons - 0.5) * 0.86
            axes.vlines(
                places.numpy(),
                0,
                values[feature].numpy(),
                color=f"C{feature % 10}",
                linewidth=1.2,
                rasterized=True,
            )
            before = (-math.inf, 0.0)
            for neuron in sorted(values[feature].abs().topk(min(3, neurons)).indices.tolist()):
                place, height = float(places[neuron]), max(0.0, float(values[feature, neuron]))
                if place - before[0] < 0.1 and abs(height - before[1]) < 0.07 * reach:
                    height = before[1] + 0.07 * reach  # above its neighbour's name, not over it
                axes.text(place, height, str(neuron), fontsize=6, ha="center", va="bottom", color=INK)
                before = (place, height)
            for block in range(1, blocks):
                between = feature + (block / blocks - 0.5 / neurons - 0.5) * 0.86
                axes.axvline(between, color=FAINT, linewidth=0.5, zorder=0)
        axes.axhline(0, color=FAINT, linewidth=0.6, zorder=0)
        axes.set(xticks=range(shown), xlim=(-0.6, shown - 0.4), ylim=(min(-0.25 * reach, 0), reach))
        axes.set_title(
            f"{title}: a bar for each of the {neurons} neurons{divided}; the three largest named",
            fontsize=9,
            color=INK,
        )
        _labels(axes, "input feature" if row else "", "neuron contribution")
    return figure


def contribution_scatter(
    model: Float[Tensor, "features neurons"],
    subcomponents: Float[Tensor, "features neurons"],
    blocks: Sequence[str],
    note: str,
) -> "Figure":
    """All neuron contributions: those of the target across, those of single subcomponents up.

    A perfect match is the diagonal. `blocks` says what the legend calls each block's neurons.
    """
    figure = new_figure(4.6, 4.4)
    axes = figure.add_subplot()
    reach = 1.08 * float(torch.maximum(model.abs().max(), subcomponents.abs().max()))
    axes.plot([-reach, reach], [-reach, reach], color=FAINT, linewidth=1, zorder=0)
    for label, x, y in zip(
        blocks, model.chunk(len(blocks), 1), subcomponents.chunk(len(blocks), 1), strict=True
    ):
        points = x.flatten().numpy(), y.flatten().numpy()
        axes.plot(*points, "o", markersize=2, alpha=0.5, markeredgewidth=0, label=label, rasterized=True)
    axes.text(0.03, 0.97, note, transform=axes.transAxes, fontsize=8, va="top", color=INK)
    if len(blocks) > 1:
        axes.legend(fontsize=7, frameon=False, loc="lower right", markerscale=2)
    low = min(float(model.min()), float(subcomponents.min())) - 0.05 * reach
    axes.set(xlim=(low, reach), ylim=(low, reach), aspect="equal")
    _labels(axes, "neuron contribution in the target", "neuron contribution in a single subcomponent")
    return figure


def alive_by_capacity(
    experiments: Mapping[str, Mapping[str, Sequence[tuple[int, int, int]]]],
) -> "Figure":
    """How many subcomponents are alive when more are offered: experiment -> matrix -> (C, alive,
    expected) in order of C."""
    figure = new_figure(4.2 * len(experiments), 3.2)
    for i, (experiment, layers) in enumerate(experiments.items()):
        axes = figure.add_subplot(1, len(experiments), i + 1)
        for j, (name, points) in enumerate(layers.items()):
            xs, ys = [C for C, _, _ in points], [alive for _, alive, _ in points]
            axes.plot(xs, ys, "o-", color=f"C{j}", markersize=5, linewidth=1.2, label=name, zorder=3 - j)
            axes.axhline(points[0][2], color=f"C{j}", linewidth=0.8, linestyle=":", zorder=0)
            for C, alive, _ in points:
                axes.annotate(
                    str(alive),
                    (C, alive),
                    (0, 6),
                    textcoords="offset points",
                    ha="center",
                    fontsize=7,
                    color=f"C{j}",
                )
        sizes = [C for C, _, _ in next(iter(layers.values()))]
        axes.plot(sizes, sizes, color=FAINT, linewidth=1, linestyle="--", label="as many as are offered")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set(xticks=sizes, xticklabels=[str(C) for C in sizes])
        axes.minorticks_off()
        axes.set_yticks(ticks := sorted({y for points in layers.values() for *_, y in points} | {sizes[-1]}))
        axes.set_yticklabels([str(y) for y in ticks])
        axes.set_title(experiment, fontsize=9, color=INK)
        _labels(axes, "C, subcomponents offered per matrix", "alive (dotted: expected)")
        axes.legend(fontsize=7, frameon=False)
    return figure


def loss_curves(history: Sequence[Record]) -> "Figure":
    """The losses and the sparsity over training."""
    figure = new_figure(9.5, 3.5)
    steps = [record["step"] for record in history]
    losses = figure.add_subplot(1, 2, 1)
    for name in history[0]["loss"]:
        values = [record["loss"][name] for record in history]
        style: dict[str, Any] = {"color": INK, "linewidth": 1.6} if name == "total" else {"linewidth": 1.0}
        losses.plot(steps, values, label=LOSS_NAMES.get(name, (name,))[0], **style)
    losses.set_yscale("log")
    losses.set_title("losses (without their coefficients; total with)", fontsize=9, color=INK)
    sparsity = figure.add_subplot(1, 2, 2)
    for name in history[0]["l0"]:
        sparsity.plot(steps, [record["l0"][name] for record in history], label=name, linewidth=1.0)
    sparsity.set_ylim(bottom=0)
    sparsity.set_title("L0: important subcomponents per datapoint", fontsize=9, color=INK)
    for axes in (losses, sparsity):
        _labels(axes, "step", "")
        axes.legend(fontsize=7, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)
    return figure


def _labels(axes: "Axes", x: str, y: str) -> None:
    """What is counted on either side, in small letters, and no frame."""
    axes.set_xlabel(x, fontsize=8)
    axes.set_ylabel(y, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def _quiet(axes: "Axes") -> None:
    for spine in axes.spines.values():
        spine.set_visible(False)
