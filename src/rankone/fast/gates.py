"""The bridge between torch and the compiled kernels: autograd functions, and when they apply.

`gated` is the fast way to what importance.py, masks.py and losses.py define in plain torch. It leaves out the layers to which it does not
apply (another importance function, another device or precision, very few rows, no numba), and the caller then takes the
plain way. The random numbers of masks are the same on both.
"""

import os
import warnings
from collections.abc import Mapping
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
        from rankone.fast import kernels as found
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


class Penalty(NamedTuple):
    """The shape of the minimality loss: (1 + saturation) q / (1 + saturation q) of each importance g, where q = (g + eps)^p."""

    p: float
    eps: float = 0.0
    saturation: float = 0.0


class Gate(NamedTuple):
    """One layer's importance function, what it is asked about, and the key of its mask's random numbers."""

    importance: ImportanceFunction
    h: Float[Tensor, "*lead C"]
    key: int


def gated(
    gates: Mapping[str, Gate], penalty: Penalty | None = None, shares: Float[Tensor, " rows"] | None = None
) -> tuple[dict[str, Gated], Float[Tensor, ""] | None]:
    """What interpolated gates say, for those layers to which that applies; and the penalty of those layers together.

    The penalty is the mean over datapoints of the sum over subcomponents of what `Penalty` says of upper_leaky(raw); None if none is asked for, or of no layer.
    `shares` says how much each row counts in it; they sum to 1.
    """
    chosen = {name: gate for name, gate in gates.items() if _applies(gate, shares)}
    if not chosen:
        return {}, None
    given: list[Tensor] = []
    for importance, h, _ in chosen.values():
        assert isinstance(importance, MLPImportance)
        flat = h if h.dim() == 2 else h.reshape(-1, h.shape[-1])
        given += [flat, importance.w_in, importance.b_in, importance.w_out, importance.b_out]
    keys = [gate.key for gate in chosen.values()]
    # One function for all layers: in a small network, calling it costs as much as what it computes.
    total, *made = _GatesAndMasks.apply(keys, penalty or Penalty(0.0), shares, *given)
    said: dict[str, Gated] = {}
    for i, (name, (_, h, _)) in enumerate(chosen.items()):
        wide = made[3 * i : 3 * i + 3]
        said[name] = Gated(*wide) if h.dim() == 2 else Gated(*(t.reshape(h.shape) for t in wide))
    return said, None if penalty is None else total


def _applies(gate: Gate, shares: Tensor | None) -> bool:
    importance, h, _ = gate
    rows = h.numel() // h.shape[-1]
    return (
        type(importance) is MLPImportance
        and h.device.type == "cpu"
        and h.dtype == torch.float32
        and rows >= FEWEST_ROWS
        and (shares is None or shares.shape[0] == rows)
        and not (importance._forward_hooks or importance._forward_pre_hooks)
        and kernels() is not None
    )


def _kernels_for(elements: int) -> Any:
    compiled = kernels()
    compiled.use_threads(torch.get_num_threads(), elements)
    return compiled


def _columns(t: Tensor) -> Any:
    """`[rows, C]` as a contiguous numpy array `[C, rows]`; no copy is made where C already comes first in memory."""
    return t.detach().T.contiguous().numpy()


class _GatesAndMasks(torch.autograd.Function):
    """Inner activations `[rows, C]` and gates of some layers -> the penalty; then raw importances, masks, masked inner activations of each.

    numpy views are kept for the way back, not tensors: nothing here may be changed in place before then, and nothing is.
    """

    @staticmethod
    def forward(ctx: Any, keys: list[int], penalty: Penalty, shares: Tensor | None, *given: Tensor) -> Any:
        share = None if shares is None else shares.float().contiguous().numpy()
        shape = tuple(np.float32(number) for number in penalty)
        ctx.known = []
        made: list[Tensor] = []
        total = 0.0
        for i, key in enumerate(keys):
            h, *parameters = given[5 * i : 5 * i + 5]
            rows, C = h.shape
            compiled = _kernels_for(rows * C)
            wide = [h.new_empty(C, rows) for _ in range(3)]
            raw, mask, carried = (t.numpy() for t in wide)
            gate = [w.detach().numpy() for w in parameters]
            kept = np.empty((C, rows), np.float32), *np.empty((2, C), np.float32), np.empty(C, np.int32)
            counts = np.full(rows, 1 / rows, np.float32) if share is None else share
            chosen = np.uint32(key & 0xFFFFFFFF), np.uint32(key >> 32), counts, *shape
            columns = _columns(h)
            penalties = np.empty(C, np.float32)
            compiled.gate_forward(columns, *gate, *chosen, raw, mask, carried, penalties, *kept)
            ctx.known.append((columns, *gate[:3], *chosen, raw, mask, *kept))
            made += [t.T for t in wide]
            total += float(penalties.sum(dtype=np.float64))
        ctx.set_materialize_grads(False)
        return torch.tensor(total, dtype=torch.float32), *made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise TrainingError(
                "The compiled kernels have no second derivatives (create_graph=True asks for them). Set engine='exact' in the config."
            )
        to_penalty, *to_made = grads
        scale = np.float32(0 if to_penalty is None else to_penalty.item())
        back: list[Tensor | None] = [None, None, None]
        for i, known in enumerate(ctx.known):
            if to_penalty is None and all(g is None for g in to_made[3 * i : 3 * i + 3]):
                back += [None] * 5  # a layer that the loss does not use has no gradient, rather than one of zeros
                continue
            h, w_in, *_ = known
            C, rows = h.shape
            compiled = _kernels_for(rows * C)
            to_h = torch.empty(C, rows)
            to_gate = [torch.empty(w_in.shape) for _ in range(3)] + [torch.empty(C)]
            wide = [x for g in to_made[3 * i : 3 * i + 3] for x in ((False, h) if g is None else (True, _columns(g)))]
            compiled.gate_backward(*known, *wide, scale, to_h.numpy(), *(t.numpy() for t in to_gate))
            back += (to_h.T, *to_gate)
        return tuple(back)
