"""Activations that carry their factors: a wide vector known as few coefficients times directions.

A residual stream of width 1000 that only 117 numbers were ever written to is `coefficients @
directions.T`. A layer that reads it with a matrix W needs `coefficients @ (W @ directions).T`:
multiply the small matrices first and the wide activation is never formed. That is plain algebra,
the same numbers up to rounding, and pays wherever a network's stream is wider than what is written
to it.

A model opts in by writing to its stream with `FactoredLinear` instead of `nn.Linear`; nothing else
changes. Adding streams and reading them with any linear layer keeps the factors; every other
operation simply sees the dense tensor.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from rankone.adapters import Activation, LinearAdapter, Structured, dense, register_adapter
from rankone.fast.products import key_of, once, rows_times

Term = tuple[Tensor, Tensor]
"""Coefficients `[*lead, k]` and directions `[d, k]`."""


class Factored(Structured):
    """The activation `sum of coefficients @ directions.T` over its terms, as one may add and read it.

    Operations that would change it in place work on a copy.
    """

    def __init__(self, *terms: Term, left: "Factored | None" = None) -> None:
        self.terms = (*left.terms, *terms) if left is not None else terms
        self._left = left
        self._dense: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        lead = torch.broadcast_shapes(*(coefficients.shape[:-1] for coefficients, _ in self.terms))
        return torch.Size((*lead, self.terms[0][1].shape[0]))

    @property
    def dtype(self) -> torch.dtype:
        return self.terms[0][0].dtype

    @property
    def device(self) -> torch.device:
        return self.terms[0][0].device

    @property
    def requires_grad(self) -> bool:
        return any(t.requires_grad for term in self.terms for t in term)

    @property
    def _version(self) -> int:
        return sum(coefficients._version for coefficients, _ in self.terms)

    def dim(self) -> int:
        return len(self.shape)

    def clone(self) -> "Factored":
        return Factored(*((coefficients.clone(), directions) for coefficients, directions in self.terms))

    def detach(self) -> "Factored":
        return Factored(
            *((coefficients.detach(), directions.detach()) for coefficients, directions in self.terms)
        )

    def dense(self) -> Float[Tensor, "*lead d"]:
        """The activation itself, as a tensor that may be changed."""
        return self._formed().clone()

    def _formed(self) -> Float[Tensor, "*lead d"]:
        """The activation, formed once: from that of the stream it was added to, where there is one."""
        if self._dense is not None:
            return self._dense
        new = self.terms if self._left is None else self.terms[len(self._left.terms) :]
        made = sum((F.linear(c, D) for c, D in new[1:]), F.linear(*new[0]))
        if self._left is not None:
            made = self._left._formed() + made
        if torch.is_grad_enabled() or not self.requires_grad:
            self._dense = made
        return made

    def read(self, W: Float[Tensor, "n d"]) -> Float[Tensor, "*lead n"]:
        """`self @ W.T`, in the cheaper order. Not to be changed in place: others may be given the
        same tensor."""
        if not self._factors_pay(W.shape[0]):
            return rows_times(self._formed(), W)
        key: tuple[Any, ...] = (key_of(W),)
        operands: tuple[Tensor, ...] = (W,)
        out: Tensor | None = None
        for c, D in self.terms:
            key, operands = (*key, key_of(c), key_of(D)), (*operands, c, D)
            out = once(key, operands, lambda c=c, D=D, out=out: _add_term(out, c, W, D))
        assert out is not None
        return out

    def applied(self, W: Float[Tensor, "n d"]) -> Float[Tensor, "*lead n"]:
        """`self @ W.T` as a linear layer returns it: a tensor of its own, in the usual order in memory."""
        if not self._factors_pay(W.shape[0]):
            return rows_times(self._formed(), W, rows_first=True)
        *before, (c, D) = self.terms
        last = rows_times(c, _product(W, D), rows_first=True)
        if not before:
            return last
        key = (key_of(W), *(key_of(t) for term in before for t in term))
        operands = (W, *(t for term in before for t in term))
        return last + once(("applied", key), operands, lambda: Factored(*before).applied(W))

    def _factors_pay(self, n: int) -> bool:
        """Whether multiplying the small matrices first takes fewer multiplications than forming the
        activation."""
        *lead, d = self.shape
        rows = math.prod(lead)
        factored = sum(D.shape[1] * n * (d + rows) for _, D in self.terms)
        unformed = (
            self.terms
            if self._left is None or self._left._dense is None
            else self.terms[len(self._left.terms) :]
        )
        dense = rows * d * n + (
            0 if self._dense is not None else sum(rows * d * D.shape[1] for _, D in unformed)
        )
        return factored < dense

    def __add__(self, other: Any) -> Any:
        return Factored(*other.terms, left=self) if isinstance(other, Factored) else self._formed() + other

    def __radd__(self, other: Any) -> Any:
        return other + self._formed()

    def __matmul__(self, other: Tensor) -> Tensor:
        if other.dim() != 2:
            return self.dense() @ other
        return F.linear(self, other.T)  # pyright: ignore[reportArgumentType] (see __torch_function__)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dense(), name)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and isinstance(stream := (*args, None)[0], Factored):
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            out = stream.applied(weight)
            return out if bias is None else out + bias
        return func(*tree_map(dense, args), **tree_map(dense, dict(kwargs)))


_OPERATORS = (
    "mul rmul sub rsub truediv rtruediv floordiv mod pow rpow neg abs eq ne lt le gt ge getitem len "
    "bool iter rmatmul"
)

for _name in _OPERATORS.split():

    def _by_dense(self: Factored, *args: Any, _method: str = f"__{_name}__") -> Any:
        return getattr(self.dense(), _method)(*(dense(a) for a in args))

    setattr(Factored, f"__{_name}__", _by_dense)

Factored.__hash__ = object.__hash__


class FactoredLinear(nn.Linear):
    """A linear layer without bias whose output carries its factors: the input as coefficients, the
    weight as directions.

    Do not change its input in place afterwards: the output still refers to it.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input: Float[Tensor, "*lead in"]
    ) -> Factored:
        return Factored((input, self.weight))


def _add_term(out: Tensor | None, c: Tensor, W: Tensor, D: Tensor) -> Float[Tensor, "*lead n"]:
    term = rows_times(c, _product(W, D))
    return term if out is None else out + term


def _product(W: Tensor, D: Tensor) -> Tensor:
    return once((key_of(W), key_of(D)), (W, D), lambda: W @ D)


@register_adapter(FactoredLinear)
class FactoredLinearAdapter(LinearAdapter):
    """Masked inner activations are the coefficients of the output, write vectors its directions."""

    def write(self, z: Tensor, U: Tensor) -> Activation:
        return Factored((z, U))

    def write_sum(self, z: Tensor, U: Tensor, rest: Tensor, W: Tensor | None) -> Activation:
        return super().write_sum(z, U, rest, None) if W is None else Factored((z, U), (rest, W))
