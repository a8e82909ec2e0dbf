"""The curve as a picture: attack on a logarithmic axis against L0, the recommended point marked.

Needs the extra `report` (matplotlib). Drawn like every figure of rankone, without pyplot.
"""

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rankone.report.canvas import ALARM, FAINT, INK, new_figure
from rankone.tune.curve import MOST_ATTACK, MOST_ROUNDED, Curve, Point, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEAST = 1e-7
"""An attack that costs less is drawn as this."""
HOLDS = f"holds (attack < {MOST_ATTACK:.0%}, rounded < {MOST_ROUNDED:.0%})"
OFFSETS = ((8, 5), (8, -13), (-8, 5), (-8, -13), (0, 11), (0, -19), (18, 14), (18, -24), (-18, 14))
"""Where a label may stand beside its point, in points of print, in order of preference."""


def curve_figure(curve: Curve) -> "Figure":
    """The trade-off: every trial, the front, the recommended point and why it is recommended."""
    figure = new_figure(7.2, 4.6)
    axes = figure.add_subplot()
    choice, front = curve.choice, curve.front
    height = {id(p): max(p.attack, LEAST) for p in curve.points}
    axes.plot(
        [p.l0 for p in front], [height[id(p)] for p in front], color=FAINT, linewidth=1.5, zorder=1,
        label="no other point is better in both",
    )  # fmt: skip
    for good, face, label in ((True, INK, HOLDS), (False, "white", "does not hold")):
        some = [p for p in curve.points if p.good == good]
        if some:
            axes.scatter(
                [p.l0 for p in some], [height[id(p)] for p in some], s=36, facecolor=face, edgecolor=INK,
                zorder=3, label=label,
            )  # fmt: skip
    best = choice.point
    axes.scatter(
        [best.l0], [height[id(best)]], s=190, facecolor="none", edgecolor=ALARM, linewidth=2, zorder=4,
        label=f"recommended: pressure x{best.factor:g}",
    )  # fmt: skip
    axes.axhline(MOST_ATTACK, color=ALARM, linewidth=0.8, linestyle=":", zorder=0)
    _scales(axes, curve.points)
    axes.set_xlabel("important subcomponents per datapoint (L0, all layers together)")
    axes.set_ylabel("error under attack, share of removing everything")
    axes.spines[["top", "right"]].set_visible(False)
    reason = f"x{best.factor:g} recommended: {choice.reason}"
    axes.set_title(
        f"{curve.name}\n" + textwrap.fill(reason, 92), loc="left", fontsize=9, color=INK, linespacing=1.4
    )
    axes.legend(frameon=False, fontsize=8, loc="best")
    figure.draw_without_rendering()  # the layout is made now, and labels are placed in it
    _labels(axes, curve.points)
    return figure


def _scales(axes: "Axes", points: Sequence[Point]) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    needed = [p.l0 for p in points]
    harm = [max(p.attack, LEAST) for p in points]
    axes.set_yscale("log")
    axes.set_ylim(min(*harm, MOST_ATTACK) / 2, max(*harm, MOST_ATTACK) * 2.5)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: percent(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    if min(needed) > 0 and max(needed) > 20 * min(needed):
        axes.set_xscale("log")
        axes.set_xlim(min(needed) / 1.5, max(needed) * 1.5)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        room = 0.12 * (max(needed) - min(needed)) or 0.1 * max(*needed, 1.0)
        axes.set_xlim(min(needed) - room, max(needed) + room)


def _labels(axes: "Axes", points: Sequence[Point]) -> None:
    """The factor beside each point, where it covers neither a point nor another label."""
    figure = axes.figure
    scale = figure.dpi / 72
    at = [axes.transData.transform((p.l0, max(p.attack, LEAST))) for p in points]
    taken = [(x - 5 * scale, y - 5 * scale, x + 5 * scale, y + 5 * scale) for x, y in at]
    for (x, y), point in zip(at, points, strict=True):
        text = f"x{point.factor:g}"
        width, tall = 5.8 * scale * len(text), 9 * scale
        boxes = []
        for right, up in OFFSETS:
            left = x + right * scale - (width if right < 0 else width / 2 if right == 0 else 0)
            boxes.append((left, y + up * scale, left + width, y + up * scale + tall))
        clashes = [sum(_overlap(box, other) for other in taken) for box in boxes]
        chosen = min(range(len(boxes)), key=clashes.__getitem__)
        taken.append(boxes[chosen])
        right, up = OFFSETS[chosen]
        axes.annotate(
            text, (point.l0, max(point.attack, LEAST)), xytext=(right, up), textcoords="offset points",
            ha="right" if right < 0 else "center" if right == 0 else "left", va="bottom", fontsize=9, color=INK,
        )  # fmt: skip


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return bool(a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3])
