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
from torch.utils._pytree import tree_map

Term = tuple[Tensor, Tensor]
"""Coefficients `[*lead, k]` and directions `[d, k]`."""


class Factored:
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
        return Factored(*((coefficients.detach(), directions.detach()) for coefficients, directions in self.terms))

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
        """`self @ W.T`, in the cheaper order. Not to be changed in place: others may be given the same tensor."""
        if not self._factors_pay(W.shape[0]):
            return rows_times(self._formed(), W)
        key: tuple[Any, ...] = (_key(W),)
        operands: tuple[Tensor, ...] = (W,)
        out: Tensor | None = None
        for c, D in self.terms:
            key, operands = (*key, _key(c), _key(D)), (*operands, c, D)
            out = _once(key, operands, lambda c=c, D=D, out=out: _add_term(out, c, W, D))
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
        key = (_key(W), *(_key(t) for term in before for t in term))
        operands = (W, *(t for term in before for t in term))
        return last + _once(("applied", key), operands, lambda: Factored(*before).applied(W))

    def _factors_pay(self, n: int) -> bool:
        """Whether multiplying the small matrices first takes fewer multiplications than forming the activation."""
        *lead, d = self.shape
        rows = math.prod(lead)
        factored = sum(D.shape[1] * n * (d + rows) for _, D in self.terms)
        unformed = (
            self.terms if self._left is None or self._left._dense is None else self.terms[len(self._left.terms) :]
        )
        dense = rows * d * n + (0 if self._dense is not None else sum(rows * d * D.shape[1] for _, D in unformed))
        return factored < dense

    def __add__(self, other: Any) -> Any:
        return Factored(*other.terms, left=self) if isinstance(other, Factored) else self._formed() + other

    def __radd__(self, other: Any) -> Any:
        return other + self._formed()

    def __matmul__(self, other: Tensor) -> Tensor:
        return F.linear(self, other.T) if other.dim() == 2 else self.dense() @ other  # pyright: ignore[reportArgumentType]

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
            out = stream.applied(weight)
            return out if bias is None else out + bias
        return func(*tree_map(dense, args), **tree_map(dense, dict(kwargs)))


_OPERATORS = (
    "mul rmul sub rsub truediv rtruediv floordiv mod pow rpow neg abs eq ne lt le gt ge getitem len bool iter rmatmul"
)

for _name in _OPERATORS.split():

    def _by_dense(self: Factored, *args: Any, _method: str = f"__{_name}__") -> Any:
        return getattr(self.dense(), _method)(*(dense(a) for a in args))

    setattr(Factored, f"__{_name}__", _by_dense)

Factored.__hash__ = object.__hash__


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
    """A plain tensor, of its own, for a factored activation; anything else as it is."""
    return x.dense() if isinstance(x, Factored) else x


WIDE = 24
"""Columns from which on it is cheaper to make a product with rows first than to turn it round afterwards."""
SMALL = 1_000_000
"""Multiplications below which it costs more to call a function of our own than a gradient in the wrong orientation does."""


def _by_bands(A: Float[Tensor, "n k"], B: Float[Tensor, "k rows"]) -> Float[Tensor, "n rows"]:
    """`A @ B`, each thread making a band of its own out of the n.

    Left to itself, MKL lets all threads write to every one of few long rows, and is two to four times slower.
    """
    threads = torch.get_num_threads()
    bands = next((g for g in range(min(threads, A.shape[0]), 1, -1) if A.shape[0] % g == 0), 1)
    if bands == 1 or A.device.type != "cpu":
        return A @ B
    return torch.bmm(A.unflatten(0, (bands, -1)), B.expand(bands, *B.shape)).flatten(0, 1)


class _RowsTimes(torch.autograd.Function):
    """x @ W.T for datapoints in the rows of x, with every product in the orientation that suits the order of what it is made of.

    Matrix libraries are several times slower when the narrow side of a product is the one that is contiguous in memory, and
    whatever combines two arrays of different orders is slow as well; torch's own formulas mind neither.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, W: Tensor, rows_first: bool) -> Tensor:
        ctx.save_for_backward(x, W)
        return x @ W.T if rows_first else _by_bands(W, x.T).T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, W = ctx.saved_tensors
        (grad,) = grads
        to_x = to_W = None
        if ctx.needs_input_grad[0]:
            to_x = grad @ W if x.is_contiguous() and x.shape[1] >= WIDE else _by_bands(W.T, grad.T).T
        if ctx.needs_input_grad[1]:
            to_W = grad.T @ x if W.shape[0] < W.shape[1] else (x.T @ grad).T
        return to_x, to_W, None


def rows_times(
    x: Float[Tensor, "*lead d"], W: Float[Tensor, "n d"], *, rows_first: bool = False
) -> Float[Tensor, "*lead n"]:
    """`x @ W.T`, stored with the n outputs first: whoever then walks along one output reads memory in order.

    With `rows_first` it is in torch's usual order, as users expect of a layer's output.
    """
    if torch.is_autocast_enabled(x.device.type):
        return F.linear(x, W)
    if x.dim() != 2:
        return rows_times(x.reshape(-1, x.shape[-1]), W, rows_first=rows_first).reshape(*x.shape[:-1], W.shape[0])
    if x.numel() * W.shape[0] < SMALL:
        out = (W @ x.T).T
    elif rows_first and W.shape[0] >= WIDE:
        return _RowsTimes.apply(x, W, True)
    else:
        out = _RowsTimes.apply(x, W, False)
    return out.clone(memory_format=torch.contiguous_format) if rows_first else out


def _add_term(out: Tensor | None, c: Tensor, W: Tensor, D: Tensor) -> Float[Tensor, "*lead n"]:
    made = rows_times(c, _product(W, D))
    return made if out is None else out + made


def _product(W: Tensor, D: Tensor) -> Tensor:
    return _once((_key(W), _key(D)), (W, D), lambda: W @ D)


Known = dict[tuple[Any, ...], tuple[Any, Tensor, int]]
"""Key -> (the operands, their product, its version)."""


class _Memo(threading.local):
    """Products of factors that are known: for one step, and, between weights that nobody trains, from step to step."""

    step: Known | None = None
    constant: Known | None = None


_memo = _Memo()


@contextmanager
def sharing() -> Iterator[None]:
    """While this lasts, equal products of factors are computed once."""
    before, _memo.step = _memo.step, {}
    try:
        yield
    finally:
        _memo.step = before


@contextmanager
def keeping_constants() -> Iterator[None]:
    """While this lasts, `sharing` keeps products of frozen weights from one time to the next."""
    before, _memo.constant = _memo.constant, {}
    try:
        yield
    finally:
        _memo.constant = before


def _once(key: tuple[Any, ...], operands: tuple[Tensor, ...], compute: Callable[[], Tensor]) -> Tensor:
    if _memo.step is None:
        return compute()
    keep = _memo.constant is not None and all(_is_constant(t) for t in operands)
    memo = _memo.constant if keep and _memo.constant is not None else _memo.step
    if key not in memo or memo[key][1]._version != memo[key][2]:  # unknown, or changed in place by whoever was given it
        made = compute()
        memo[key] = (operands, made, made._version)  # operands are kept alive, so that their addresses stay theirs
    return memo[key][1]


def _is_constant(t: Tensor) -> bool:
    """Whether a tensor is a frozen weight, or a view of one. (Its version is part of the key, should it be changed after all.)"""
    return not t.requires_grad and isinstance(t if t._base is None else t._base, nn.Parameter)


def _key(t: Tensor) -> tuple[Any, ...]:
    """What makes two tensors the same one here: same memory, same version, same place in the autograd graph."""
    graph = t.requires_grad and torch.is_grad_enabled()
    return (t.device, t.data_ptr(), t.shape, t.stride(), t.dtype, t._version, t.requires_grad, graph)
