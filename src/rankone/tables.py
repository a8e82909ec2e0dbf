"""Small tables for people: what a helper of a result returns, in a terminal, a notebook or a file.

A cell may be a number, a text or a tensor; it is kept as it is and made short only when it is shown.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from torch import Tensor

SHOWN_ROWS = 30
"""Rows that are shown; all are there."""
SHOWN_ENTRIES = 8
"""Entries of a tensor that are shown."""


@dataclass(frozen=True, repr=False)
class Table:
    """Rows under a head, with a note. `table[0]["importance"]` is a cell, `len(table)` counts rows."""

    head: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (dict(zip(self.head, row, strict=True)) for row in self.rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return dict(zip(self.head, self.rows[i], strict=True))

    def column(self, name: str) -> list[Any]:
        """All cells of a column."""
        return [row[list(self.head).index(name)] for row in self.rows]

    def _shown(self) -> tuple[list[list[str]], str]:
        cells = [[cell_text(cell) for cell in row] for row in self.rows[:SHOWN_ROWS]]
        left = len(self.rows) - len(cells)
        return cells, f"... and {left} more rows" if left > 0 else ""

    def __repr__(self) -> str:
        cells, more = self._shown()
        numbers = [all(_is_number(row[i]) for row in self.rows) for i in range(len(self.head))]
        widths = [max(len(row[i]) for row in [list(self.head), *cells]) for i in range(len(self.head))]
        lines = [
            "  ".join(
                cell.rjust(width) if right else cell.ljust(width)
                for cell, width, right in zip(row, widths, numbers, strict=True)
            ).rstrip()
            for row in [list(self.head), *cells]
        ]
        return "\n".join([*lines, *filter(None, [more, self.note])])

    def _repr_html_(self) -> str:
        cells, more = self._shown()
        head = "".join(f"<th>{escape(name)}</th>" for name in self.head)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in cells
        )
        below = " ".join(filter(None, [more, self.note]))
        return f"<table><tr>{head}</tr>{body}</table>" + (f"<p>{escape(below)}</p>" if below else "")


def cell_text(cell: Any) -> str:
    """A cell as it is shown: at most four significant digits, and the beginning of a tensor."""
    if cell is None:
        return "-"
    if isinstance(cell, bool | str):
        return str(cell)
    if isinstance(cell, float):
        return short_number(cell)
    if isinstance(cell, Tensor):
        flat = cell.detach().cpu().flatten()
        beginning = [short_number(float(x)) if flat.is_floating_point() else str(x) for x in
                     flat[:SHOWN_ENTRIES].tolist()]  # fmt: skip
        more = ", ..." if len(flat) > SHOWN_ENTRIES else ""
        shape = f" {tuple(cell.shape)}" if cell.dim() > 1 else ""
        return f"[{', '.join(beginning)}{more}]{shape}"
    return str(cell)


def short_number(value: float) -> str:
    """A number in few characters."""
    if value == 0:
        return "0"
    return f"{value:.3g}" if 1e-3 <= abs(value) < 1e5 else f"{value:.1e}"


def _is_number(cell: Any) -> bool:
    return cell is None or (isinstance(cell, int | float) and not isinstance(cell, bool))
