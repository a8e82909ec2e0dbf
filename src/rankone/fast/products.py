"""Matrix products in the order that suits memory, each computed once in a step.

`x @ W.T` costs several times as much when the narrow side of a product is the one that is
contiguous; `rows_times` chooses the order, for the gradients too. `sharing` remembers products of
factors for one step, `keeping_constants` those of frozen weights from step to step. The numbers are
those of plain torch up to rounding.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

WIDE = 24
"""Columns from which on it is cheaper to make a product with rows first than to turn it round later."""
SMALL = 1_000_000
"""Multiplications below which calling our own function costs more than a badly ordered gradient."""


def rows_times(
    x: Float[Tensor, "*lead d"], W: Float[Tensor, "n d"], *, rows_first: bool = False
) -> Float[Tensor, "*lead n"]:
    """`x @ W.T`, stored with the n outputs first: whoever walks along one output reads memory in order.

    With `rows_first` it is in torch's usual order, as users expect of a layer's output.
    """
    if torch.is_autocast_enabled(x.device.type):
        return F.linear(x, W)
    if x.dim() != 2:
        flat = rows_times(x.reshape(-1, x.shape[-1]), W, rows_first=rows_first)
        return flat.reshape(*x.shape[:-1], W.shape[0])
    if x.numel() * W.shape[0] < SMALL:
        out = (W @ x.T).T
    elif rows_first and W.shape[0] >= WIDE:
        return _RowsTimes.apply(x, W, True)
    else:
        out = _RowsTimes.apply(x, W, False)
    return out.clone(memory_format=torch.contiguous_format) if rows_first else out


class _RowsTimes(torch.autograd.Function):
    """x @ W.T, with every product in the orientation that suits the order of what it is made of.

    torch's own formulas mind neither the narrow side nor that combining two arrays of different
    orders is slow.
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


def _by_bands(A: Float[Tensor, "n k"], B: Float[Tensor, "k rows"]) -> Float[Tensor, "n rows"]:
    """`A @ B`, each thread making a band of its own out of the n.

    Left to itself, MKL lets all threads write to every one of few long rows, and is two to four
    times slower.
    """
    threads = torch.get_num_threads()
    bands = next((g for g in range(min(threads, A.shape[0]), 1, -1) if A.shape[0] % g == 0), 1)
    if bands == 1 or A.device.type != "cpu":
        return A @ B
    return torch.bmm(A.unflatten(0, (bands, -1)), B.expand(bands, *B.shape)).flatten(0, 1)


Memo = dict[tuple[Any, ...], tuple[Any, Tensor, int]]
"""Key -> (the operands, their product, its version)."""


class _Memos(threading.local):
    step: Memo | None = None
    constant: Memo | None = None


_memos = _Memos()


@contextmanager
def sharing(memo: Memo) -> Iterator[None]:
    """While this lasts, equal products of factors are computed once and remembered in `memo`."""
    before, _memos.step = _memos.step, memo
    try:
        yield
    finally:
        _memos.step = before


@contextmanager
def keeping_constants() -> Iterator[None]:
    """While this lasts, `sharing` keeps products of frozen weights from one time to the next."""
    before, _memos.constant = _memos.constant, {}
    try:
        yield
    finally:
        _memos.constant = before


def once(key: tuple[Any, ...], operands: tuple[Tensor, ...], compute: Callable[[], Tensor]) -> Tensor:
    """`compute()`, or what it gave before under the same key while `sharing` lasts."""
    if _memos.step is None:
        return compute()
    constant = _memos.constant is not None and all(_is_constant(t) for t in operands)
    memo = _memos.constant if constant and _memos.constant is not None else _memos.step
    if key not in memo or memo[key][1]._version != memo[key][2]:  # unknown, or changed in place since
        product = compute()
        memo[key] = (
            operands,
            product,
            product._version,
        )  # operands stay alive, so their addresses stay theirs
    return memo[key][1]


def key_of(t: Tensor) -> tuple[Any, ...]:
    """What makes two tensors the same one here: memory, version, and place in the autograd graph."""
    graph = t.requires_grad and torch.is_grad_enabled()
    return (t.device, t.data_ptr(), t.shape, t.stride(), t.dtype, t._version, t.requires_grad, graph)


def _is_constant(t: Tensor) -> bool:
    """Whether a tensor is a frozen weight, or a view of one. (Should it change, its key changes too.)"""
    return not t.requires_grad and isinstance(t if t._base is None else t._base, nn.Parameter)
