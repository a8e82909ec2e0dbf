"""What every figure is drawn on and written with. Needs the extra `report` (matplotlib).

pyplot is not used, so that the backend of a notebook does not matter, and nothing is shown.
"""

import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#1f2933"
FAINT = "#c5ccd3"
ALARM = "#c0392b"


@dataclass(frozen=True)
class Picture:
    """A figure, and what a page says about it."""

    name: str
    """Names its file; no two pictures of a run share it."""
    title: str
    caption: str
    figure: Any
    """A matplotlib Figure."""

    def _repr_html_(self) -> str:
        """For a notebook, which would show a Figure as text."""
        svg = to_svg(self.figure, self.name)
        return svg[svg.index("<svg") :]


def load_matplotlib() -> Any:
    """matplotlib, also where MPLBACKEND names a backend that is not installed here: a command that is
    started in a notebook inherits the notebook's."""
    named = os.environ.pop("MPLBACKEND", None) if "matplotlib" not in sys.modules else None
    import matplotlib

    if named is not None:
        os.environ["MPLBACKEND"] = named
        with suppress(ValueError):
            matplotlib.rcParams["backend"] = named
    return matplotlib


def new_figure(width: float, height: float) -> "Figure":
    load_matplotlib()
    from matplotlib.figure import Figure

    class Shown(Figure):
        """A figure that a notebook shows, whatever its backend."""

        def _repr_html_(self) -> str:
            svg = to_svg(self, "figure")
            return svg[svg.index("<svg") :]

    return Shown(figsize=(width, height), layout="constrained")


def to_svg(figure: "Figure", name: str) -> str:
    """A figure as SVG text; the same figure is the same text (it holds no date)."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    buffer = io.StringIO()
    # Letters as text, not as outlines: half the size, and they can be searched for.
    with load_matplotlib().rc_context({"svg.hashsalt": f"rankone-{name}", "svg.fonttype": "none"}):
        FigureCanvasSVG(figure).print_figure(
            buffer, format="svg", dpi=150, metadata={"Date": None, "Creator": None}
        )
    return buffer.getvalue()


def name_columns(axes: "Axes", order: Sequence[int], most: int = 12) -> None:
    """True indices under permuted columns; of many columns, every so many."""
    every = max(1, -(-len(order) // most))
    places = range(0, len(order), every)
    axes.set_xticks(list(places), [str(order[i]) for i in places], fontsize=6)
