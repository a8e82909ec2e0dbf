"""The bridge between torch and the compiled kernels: autograd functions, and when they apply.

`gated` is the fast way to what importance.py, masks.py and losses.py define in plain torch. It returns None where it does not
apply (another importance function, another device or precision, very few rows, no numba), and the caller then takes the
plain way. The random numbers of masks are the same on both.
"""

import os
import warnings
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rankone.errors import TrainingError
from rankone.importance import ImportanceFunction, MLPImportance

FEWEST_ROWS = 64
"""With fewer datapoints than this, exact gates cost as little as interpolated ones."""


WITHOUT_NUMBA = (
    "numba is missing, so steps run in plain torch with exact gates: as good, several times slower. pip install numba"
)


class MissingKernels(UserWarning):
    """The compiled kernels cannot be used; everything works, more slowly."""


@cache
def kernels() -> Any:
    """The module of compiled kernels, or None (with one notice) where numba is missing."""
    if _forked:
        warnings.warn(
            "A forked process cannot use the compiled kernels; steps run in plain torch.", MissingKernels, stacklevel=2
        )
        return None
    threads = torch.get_num_threads()
    try:
        from rankone import kernels as found
    except ImportError:
        warnings.warn(
            WITHOUT_NUMBA,
            MissingKernels,
            stacklevel=2,
        )
        return None
    torch.set_num_threads(threads)  # numba, when it starts its threads, sets the number for everybody
    return found


_forked = False


def _after_fork() -> None:
    """OpenMP's threads do not survive a fork: a child that used them would be killed by the library."""
    global _forked
    _forked = _forked or (kernels.cache_info().currsize > 0 and kernels() is not None)
    kernels.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Gated(NamedTuple):
    """What one layer's gates say about a batch, `[*lead, C]` each."""

    raw: Tensor
    mask: Tensor
    """The stochastic mask of the first sample."""
    carried: Tensor
    """The masked inner activations: mask * h."""
    penalty: Tensor
    """A scalar: the mean over datapoints of the sum over subcomponents of (upper_leaky(raw) + eps)^p."""


class Penalty(NamedTuple):
    """The exponent of the minimality loss, and what is added to importances under it."""

    p: float
    eps: float


def gated(
    importance: ImportanceFunction,
    h: Float[Tensor, "*lead C"],
    key: int,
    penalty: Penalty | None = None,
    shares: Float[Tensor, " rows"] | None = None,
) -> Gated | None:
    """What interpolated gates say, with the stochastic mask drawn with `key`; None where that does not apply.

    `shares` says how much each row counts in the penalty; they sum to 1.
    """
    rows = h.numel() // h.shape[-1]
    applies = h.device.type == "cpu" and h.dtype == torch.float32 and rows >= FEWEST_ROWS
    hooked = bool(importance._forward_hooks or importance._forward_pre_hooks)
    if type(importance) is not MLPImportance or hooked or not applies or kernels() is None:
        return None
    if shares is not None and shares.shape[0] != rows:
        return None
    settings = penalty or Penalty(0.0, 0.0)
    flat = h if h.dim() == 2 else h.reshape(rows, h.shape[-1])
    gate = importance.w_in, importance.b_in, importance.w_out, importance.b_out
    raw, mask, carried, total = _GateAndMask.apply(flat, *gate, key, settings, shares)
    if h.dim() == 2:
        return Gated(raw, mask, carried, total)
    return Gated(raw.reshape(h.shape), mask.reshape(h.shape), carried.reshape(h.shape), total)


def _kernels_for(elements: int) -> Any:
    compiled = kernels()
    compiled.use_threads(torch.get_num_threads(), elements)
    return compiled


def _columns(t: Tensor) -> Any:
    """`[rows, C]` as a contiguous numpy array `[C, rows]`; no copy is made where C already comes first in memory."""
    return t.detach().T.contiguous().numpy()


class _GateAndMask(torch.autograd.Function):
    """Inner activations `[rows, C]` -> raw importances, masks, masked inner activations, and the penalty.

    numpy views are kept for the way back, not tensors: nothing here may be changed in place before then, and nothing is.
    """

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        w_in: Tensor,
        b_in: Tensor,
        w_out: Tensor,
        b_out: Tensor,
        key: int,
        penalty: Penalty,
        shares: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rows, C = h.shape
        compiled = _kernels_for(rows * C)
        raw, mask, carried = (h.new_empty(C, rows) for _ in range(3))
        gate = tuple(w.detach().numpy() for w in (w_in, b_in, w_out, b_out))
        table = (
            *(np.empty(C, kind) for kind in (np.float32, np.float32, np.int32)),
            np.empty((C, compiled.MOST_INTERVALS, 4), np.float32),
        )
        share = np.full(rows, 1 / rows, np.float32) if shares is None else shares.float().contiguous().numpy()
        chosen = (
            np.uint32(key & 0xFFFFFFFF),
            np.uint32(key >> 32),
            share,
            np.float32(penalty.p),
            np.float32(penalty.eps),
        )
        given = _columns(h)
        made = raw.numpy(), mask.numpy()
        totals = np.empty(C, np.float32)
        compiled.gate_forward(given, *gate, *chosen, *made, carried.numpy(), totals, *table)
        ctx.known = (given, *gate[:3], *chosen, *made, *table)
        ctx.set_materialize_grads(False)
        return raw.T, mask.T, carried.T, torch.tensor(totals.sum(dtype=np.float64), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise TrainingError(
                "The compiled kernels have no second derivatives (create_graph=True asks for them). Set engine='exact' in the config."
            )
        h, w_in, *_ = ctx.known
        C, rows = h.shape
        compiled = _kernels_for(rows * C)
        to_h = torch.empty(C, rows)
        to_gate = [torch.empty(w_in.shape) for _ in range(3)] + [torch.empty(C)]
        *wide, to_penalty = grads
        given = [x for g in wide for x in ((False, h) if g is None else (True, _columns(g)))]
        scale = np.float32(0 if to_penalty is None else to_penalty.item())
        compiled.gate_backward(*ctx.known, *given, scale, to_h.numpy(), *(t.numpy() for t in to_gate))
        return to_h.T, *to_gate, None, None, None
