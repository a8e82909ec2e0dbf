"""Activations that carry their factors: a wide vector known as few coefficients times directions.

A residual stream of width 1000 that only 117 numbers were ever written to is `coefficients @ directions.T`. A layer that reads it
with a matrix W needs `coefficients @ (W @ directions).T`: multiply the small matrices first and the wide activation is never
formed. That is plain algebra, the same numbers up to rounding, and pays wherever a network's stream is wider than what is written to it.

A model opts in by writing to its stream with `FactoredLinear` instead of `nn.Linear`; nothing else changes. Adding streams and
reading them with any linear layer keeps the factors; every other operation simply sees the dense tensor.
"""

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

Term = tuple[Tensor, Tensor]
"""Coefficients `[*lead, k]` and directions `[d, k]`."""


class Factored:
    """The activation `sum of coefficients @ directions.T` over its terms. Never changed in place."""

    def __init__(self, *terms: Term) -> None:
        self.terms = terms
        self._dense: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        coefficients, directions = self.terms[0]
        return torch.Size((*coefficients.shape[:-1], directions.shape[0]))

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
        return Factored(*((coefficients.detach(), directions.detach()) for coefficients, directions in self.terms))

    def dense(self) -> Float[Tensor, "*lead d"]:
        """The activation itself."""
        if self._dense is None:
            self._dense = sum((F.linear(c, D) for c, D in self.terms[1:]), F.linear(*self.terms[0]))
        return self._dense

    def read(self, W: Float[Tensor, "n d"]) -> Float[Tensor, "*lead n"]:
        """`self @ W.T`, in the cheaper order."""
        if not self._factors_pay(W.shape[0]):
            return rows_times(self.dense(), W)
        key: tuple[Any, ...] = (_key(W),)
        out: Tensor | None = None
        for c, D in self.terms:
            key = (*key, _key(c), _key(D))
            out = _once(key, (W, c, D), lambda c=c, D=D, out=out: _add_term(out, c, W, D))
        assert out is not None
        return out

    def _factors_pay(self, n: int) -> bool:
        """Whether multiplying the small matrices first takes fewer multiplications than forming the activation."""
        *lead, d = self.shape
        rows = math.prod(lead)
        factored = sum(D.shape[1] * n * (d + rows) for _, D in self.terms)
        dense = rows * d * n + (0 if self._dense is not None else sum(rows * d * D.shape[1] for _, D in self.terms))
        return factored < dense

    def __add__(self, other: Any) -> Any:
        return Factored(*self.terms, *other.terms) if isinstance(other, Factored) else self.dense() + other

    def __radd__(self, other: Any) -> Any:
        return other + self.dense()

    def __matmul__(self, other: Tensor) -> Tensor:
        return self.read(other.T) if other.dim() == 2 else self.dense() @ other

    def __getitem__(self, index: Any) -> Tensor:
        return self.dense()[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dense(), name)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and isinstance(stream := (*args, None)[0], Factored):
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            out = stream.read(weight)
            return out if bias is None else out + bias
        return func(*(dense(a) for a in args), **{k: dense(v) for k, v in kwargs.items()})


for _name in ("mul", "rmul", "sub", "rsub", "truediv", "pow", "neg"):

    def _by_dense(self: Factored, *args: Any, _method: str = f"__{_name}__") -> Tensor:
        return getattr(self.dense(), _method)(*(dense(a) for a in args))

    setattr(Factored, f"__{_name}__", _by_dense)


class FactoredLinear(nn.Linear):
    """A linear layer without bias whose output carries its factors: the input as coefficients, the weight as directions.

    Do not change its input in place afterwards: the output still refers to it.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, input: Float[Tensor, "*lead in"]) -> Factored:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Factored((input, self.weight))


Activation = Tensor | Factored
"""What flows between layers."""


def dense(x: Any) -> Any:
    """The plain tensor for a factored activation; anything else as it is."""
    return x.dense() if isinstance(x, Factored) else x


SMALL = 1_000_000
"""Multiplications below which it costs more to call a function of our own than a gradient in the wrong orientation does."""


class _RowsTimes(torch.autograd.Function):
    """x @ W.T for datapoints in the rows of x, stored the other way round, as W @ x.T.

    Matrix libraries are several times slower when the narrow side of a product is the one that is contiguous in memory, so the
    gradient of W is made in the orientation that avoids this, which torch's own formula does not.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, W: Tensor) -> Tensor:
        ctx.save_for_backward(x, W)
        return (W @ x.T).T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, W = ctx.saved_tensors
        (grad,) = grads
        to_x = to_W = None
        if ctx.needs_input_grad[0]:
            to_x = (W.T @ grad.T).T
        if ctx.needs_input_grad[1]:
            to_W = grad.T @ x if W.shape[0] < W.shape[1] else (x.T @ grad).T
        return to_x, to_W


def rows_times(
    x: Float[Tensor, "*lead d"], W: Float[Tensor, "n d"], bias: Float[Tensor, " n"] | None = None
) -> Float[Tensor, "*lead n"]:
    """`x @ W.T + bias`, stored with the n outputs first: whoever then walks along one output reads memory in order."""
    if x.dim() != 2:
        return rows_times(x.reshape(-1, x.shape[-1]), W, bias).reshape(*x.shape[:-1], W.shape[0])
    out = (W @ x.T).T if x.numel() * W.shape[0] < SMALL else _RowsTimes.apply(x, W)
    return out if bias is None else out + bias


def _add_term(out: Tensor | None, c: Tensor, W: Tensor, D: Tensor) -> Float[Tensor, "*lead n"]:
    product = _once((_key(W), _key(D)), (W, D), lambda: W @ D)
    made = rows_times(c, product)
    return made if out is None else out + made


class _Memo(threading.local):
    """Products of factors that are known: for one step, and, between weights that nobody trains, from step to step."""

    step: dict[tuple[Any, ...], tuple[Any, Tensor]] | None = None
    constant: dict[tuple[Any, ...], tuple[Any, Tensor]]

    def __init__(self) -> None:
        self.constant = {}


_memo = _Memo()


@contextmanager
def sharing() -> Iterator[None]:
    """While this lasts, equal products of factors are computed once. The tensors involved must not change meanwhile."""
    before, _memo.step = _memo.step, {}
    try:
        yield
    finally:
        _memo.step = before
        if len(_memo.constant) > _MOST_CONSTANTS:
            _memo.constant.clear()


_MOST_CONSTANTS = 1000


def _once(key: tuple[Any, ...], operands: tuple[Tensor, ...], compute: Callable[[], Tensor]) -> Tensor:
    if _memo.step is None:
        return compute()
    memo = _memo.constant if all(_is_constant(t) for t in operands) else _memo.step
    if key not in memo:
        memo[key] = (operands, compute())  # operands are kept alive, so that their addresses stay theirs
    return memo[key][1]


def _is_constant(t: Tensor) -> bool:
    """Whether a tensor is a frozen weight, or a view of one. (Its version is part of the key, should it be changed after all.)"""
    return not t.requires_grad and isinstance(t if t._base is None else t._base, nn.Parameter)


def _key(t: Tensor) -> tuple[Any, ...]:
    """What makes two tensors the same one here: same memory, same version, same place in the autograd graph."""
    return (
        t.data_ptr(),
        t.shape,
        t.stride(),
        t.dtype,
        t._version,
        t.requires_grad,
        torch.is_grad_enabled() and t.requires_grad,
    )
