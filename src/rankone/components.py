"""Rank-one subcomponents: a matrix W written as a sum of C outer products, W ≈ U V.

Column `U[:, c]` is what subcomponent c writes, row `V[c, :]` is what it reads. Nothing here knows
about modules, masks or importances: see adapters.py for how a layer reads and writes.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from rankone.settings import Registry

Factors = tuple[Float[Tensor, "d_out C"], Float[Tensor, "C d_in"]]

INITS: Registry[Callable[[Tensor, int, torch.Generator], Factors]] = Registry("initialisation")
"""How U and V start, from (W, C, generator)."""
DATA_INITS: Registry[Callable[[Tensor, Tensor, int, torch.Generator], Factors]] = Registry(
    "initialisation from data"
)
"""How U and V start, from (W, inputs of the layer, C, generator), once training has seen data."""


class Subcomponents(nn.Module):
    """The C rank-one subcomponents of one matrix, as trainable factors."""

    def __init__(self, U: Float[Tensor, "d_out C"], V: Float[Tensor, "C d_in"]) -> None:
        super().__init__()
        self.U = nn.Parameter(U.contiguous())
        self.V = nn.Parameter(V.contiguous())

    @property
    def C(self) -> int:
        return self.U.shape[1]

    def weight(self) -> Float[Tensor, "d_out d_in"]:
        """The sum of all subcomponents."""
        return self.U @ self.V


class TiedSubcomponents(Subcomponents):
    """A view of another layer's subcomponents: the same parameters, transposed or as they are.

    It owns no parameter, so that an optimiser sees the shared factors exactly once.
    """

    _source: Subcomponents

    def __init__(self, source: Subcomponents, *, transposed: bool) -> None:
        nn.Module.__init__(self)
        # Not a registered submodule: the parameters belong to the source alone.
        object.__setattr__(self, "_source", source)
        self.transposed = transposed

    @property
    def U(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._source.V.T if self.transposed else self._source.U

    @property
    def V(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._source.U.T if self.transposed else self._source.V


@INITS.register("overlap")
def overlap_init(W: Float[Tensor, "d_out d_in"], C: int, generator: torch.Generator) -> Factors:
    """Random unit read and write vectors; each write vector is scaled by its product's overlap with W.

    The overlap of `u v` with W is `u · W v`, so a subcomponent starts large where it already explains
    something of the matrix.
    """
    V = F.normalize(torch.randn(C, W.shape[1], generator=generator, dtype=W.dtype), dim=1)
    U = F.normalize(torch.randn(W.shape[0], C, generator=generator, dtype=W.dtype), dim=0)
    overlap = torch.einsum("oc,oi,ci->c", U, W, V)
    return U * overlap, V


@INITS.register("kaiming")
def kaiming_init(W: Float[Tensor, "d_out d_in"], C: int, generator: torch.Generator) -> Factors:
    """Gaussian factors that keep the scale of activations: V has fan d_in, U has fan C, linear gain."""
    V = torch.randn(C, W.shape[1], generator=generator, dtype=W.dtype) / W.shape[1] ** 0.5
    U = torch.randn(W.shape[0], C, generator=generator, dtype=W.dtype) / C**0.5
    return U, V


SAME_DIRECTION = 0.999
"""Absolute cosine from which on two inputs are the same to `datapoints_init`."""
LEAST_SINGULAR = 1e-2
"""Combinations of read vectors that are this small beside the largest are not inverted: write vectors
would be huge, and cancel."""
LEAST_UNCANCELLED = 0.3
"""The same for `mixed_init`, which rather leaves something of W out."""


@DATA_INITS.register("datapoints")
def datapoints_init(
    W: Float[Tensor, "d_out d_in"], inputs: Float[Tensor, "rows d_in"], C: int, generator: torch.Generator
) -> Factors:
    """Subcomponents that start as what W does to single datapoints.

    Read vectors are the directions of C inputs of the layer, the first at random and then always the
    one that is farthest from those before (by absolute cosine): what is rare in the data gets its
    subcomponent like what is frequent. If there are fewer directions than C, the rest is random. Write
    vectors are the least-squares solution, so that the sum of all subcomponents is W wherever these
    inputs reach.
    """
    V = _far_directions(inputs, C, generator, W.dtype)
    return W @ torch.linalg.pinv(V, rtol=LEAST_SINGULAR), V


@DATA_INITS.register("mixed")
def mixed_init(
    W: Float[Tensor, "d_out d_in"], inputs: Float[Tensor, "rows d_in"], C: int, generator: torch.Generator
) -> Factors:
    """The same with write vectors that are never large enough to cancel each other.

    Where inputs are much alike (the activations of a few neurons, a feature with either sign), the
    least-squares solution is a sum of huge parts that cancel, and training does not get away from it.
    Here the sum of all subcomponents is W only in the directions in which read vectors are many.
    neurons.py may add single neurons.
    """
    V = _far_directions(inputs, C, generator, W.dtype)
    return bounded_solution(W, V), V


def bounded_solution(W: Float[Tensor, "d_out d_in"], V: Float[Tensor, "C d_in"]) -> Float[Tensor, "d_out C"]:
    """Write vectors for these read vectors, as near to W as they get without cancelling each other."""
    return W @ torch.linalg.pinv(V, rtol=LEAST_UNCANCELLED)


def _far_directions(
    inputs: Float[Tensor, "rows d_in"], C: int, generator: torch.Generator, dtype: torch.dtype
) -> Float[Tensor, "C d_in"]:
    """Directions of C inputs, each as far as can be from those before."""
    directions = F.normalize(inputs[inputs.norm(dim=1) > 0], dim=1)
    chosen: list[int] = []
    if len(directions):
        chosen.append(int(torch.randint(len(directions), (), generator=generator)))
        closeness = (directions @ directions[chosen[0]]).abs()
        while len(chosen) < C and closeness.min() < SAME_DIRECTION:
            chosen.append(int(closeness.argmin()))
            closeness = torch.maximum(closeness, (directions @ directions[chosen[-1]]).abs())
    others = F.normalize(
        torch.randn(C - len(chosen), inputs.shape[1], generator=generator, dtype=dtype), dim=1
    )
    return torch.cat([directions[chosen], others])


def make_subcomponents(
    W: Float[Tensor, "d_out d_in"], C: int, init: str, generator: torch.Generator
) -> Subcomponents:
    """Fresh subcomponents for W. Numbers are drawn on the CPU, so a seed means the same on every
    device.

    With an initialisation from data they are zero until `DecomposedModel.start_from_data`.
    """
    if init in DATA_INITS:
        return Subcomponents(W.new_zeros(W.shape[0], C), W.new_zeros(C, W.shape[1]))
    U, V = INITS.get(init)(W.detach().cpu(), C, generator)
    return Subcomponents(U.to(W.device), V.to(W.device))
