"""The subcomponents of one layer, for looking at: as factors, one by one, or summed.

Nothing here is trained or alters anything: tensors are detached copies.
"""

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rankone.errors import LayerError, shown


def index_of(c: Any, C: int, layer: str) -> int:
    """One subcomponent by its index, or an error in words; negative ones count from the end."""
    try:
        index = operator.index(c)
    except TypeError:
        raise LayerError(
            f"{shown(c)} does not name a subcomponent of {layer!r}; expected one whole number from 0 to "
            f"{C - 1}. Several together: .sum([1, 2])."
        ) from None
    if not -C <= index < C:
        raise LayerError(f"Layer {layer!r} has subcomponents 0 to {C - 1}, but {index} was asked for.")
    return index % C


@dataclass(frozen=True, repr=False)
class Subcomponent:
    """One rank-one part of a matrix: it reads `v` and writes `u`."""

    layer: str
    index: int
    """Its true index, the one that every figure and table uses."""
    u: Float[Tensor, " d_out"]
    v: Float[Tensor, " d_in"]

    def matrix(self) -> Float[Tensor, "d_out d_in"]:
        return torch.outer(self.u, self.v)

    @property
    def norm(self) -> float:
        """Its size (Frobenius norm)."""
        return float(self.u.norm() * self.v.norm())

    def __repr__(self) -> str:
        return f"<subcomponent {self.index} of {self.layer!r}: {len(self.u)} x {len(self.v)}, norm {self.norm:.3g}>"


@dataclass(frozen=True, repr=False)
class LayerView:
    """The subcomponents of one layer, detached, for looking at. `view[3]` is one, `for part in view`
    gives all, `len(view)` is C."""

    name: str
    target: Float[Tensor, "d_out d_in"]
    """The original matrix."""
    U: Float[Tensor, "d_out C"]
    """Write vectors, one column per subcomponent."""
    V: Float[Tensor, "C d_in"]
    """Read vectors, one row per subcomponent."""

    @property
    def C(self) -> int:
        return self.U.shape[1]

    def __len__(self) -> int:
        return self.C

    def __getitem__(self, c: int) -> Subcomponent:
        index = index_of(c, self.C, self.name)
        return Subcomponent(self.name, index, self.U[:, index], self.V[index])

    def __iter__(self) -> Iterator[Subcomponent]:
        return (self[c] for c in range(self.C))

    def matrix(self, c: int) -> Float[Tensor, "d_out d_in"]:
        """Subcomponent c as a rank-one matrix."""
        return self[c].matrix()

    def sum(self, of: Iterable[int] | None = None) -> Float[Tensor, "d_out d_in"]:
        """All subcomponents together, close to the original matrix; or some of them.

        Added up in double precision, so that the number of threads does not show.
        """
        U, V = self.U, self.V
        if of is not None:
            chosen = [index_of(c, self.C, self.name) for c in of]
            U, V = U[:, chosen], V[chosen]
        return (U.double() @ V.double()).to(self.U.dtype)

    def norms(self) -> Float[Tensor, " C"]:
        """The size (Frobenius norm) of every subcomponent."""
        return self.U.norm(dim=0) * self.V.norm(dim=1)

    def __repr__(self) -> str:
        d_out, d_in = self.target.shape
        norms = self.norms()
        sizes = f"norms {float(norms.min()):.3g} to {float(norms.max()):.3g}" if self.C else "empty"
        return f"<{self.C} subcomponents of {self.name!r}, {d_out} x {d_in}: {sizes}>"
