"""The bridge between torch and the compiled kernels: interpolated gates as one autograd function.

`gated` is the fast way to what importance.py, masks.py and step.py define in plain torch. It leaves
out the layers to which it does not apply (another importance function, another device or precision,
very few rows, no numba), and the caller then takes the plain way. The random numbers of masks are
the same on both.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from rankone.errors import TrainingError
from rankone.fast.compiled import kernels
from rankone.importance import LEAK, ImportanceFunction, MLPImportance
from rankone.masks import MaskSettings
from rankone.share import WHOLE, Share, place_of
from rankone.step import Penalty

FEWEST_ROWS = 64
"""With fewer datapoints than this, exact gates cost as little as interpolated ones."""


class Gated(NamedTuple):
    """What one layer's gates say about a batch, `[*lead, C]` each."""

    raw: Tensor
    mask: Tensor
    """The stochastic mask of the first sample."""
    masked: Tensor
    """The masked inner activations: mask * h."""


class Gate(NamedTuple):
    """One layer's importance function, what it is asked about, the key of its mask's random numbers, and
    how much of a mean each datapoint is (None: all alike)."""

    importance: ImportanceFunction
    h: Float[Tensor, "*lead C"]
    key: int
    weights: Float[Tensor, " datapoints"] | None = None


def gated(
    gates: Mapping[str, Gate],
    penalty: Penalty | None = None,
    masks: MaskSettings | None = None,
    prices: Mapping[str, float] | None = None,
    share: Share = WHOLE,
) -> tuple[dict[str, Gated], Float[Tensor, ""] | None]:
    """What interpolated gates say, for the layers to which that applies; and the penalty of those
    layers.

    The penalty is the weighted mean over datapoints of `Penalty.of`, times the factor of each layer in
    `prices`; None if none is asked for, or of no layer.
    """
    served = {name: gate for name, gate in gates.items() if _applies(gate)}
    if not served:
        return {}, None
    inputs: list[Tensor] = []
    for importance, h, *_ in served.values():
        assert isinstance(importance, MLPImportance)
        flat = h if h.dim() == 2 else h.reshape(-1, h.shape[-1])
        inputs += [flat, importance.w_in, importance.b_in, importance.w_out, importance.b_out]
    keys = [gate.key for gate in served.values()]
    weights = [gate.weights for gate in served.values()]
    factors = [(prices or {}).get(name, 1.0) for name in served]
    # One function for all layers: in a small network, calling it costs as much as what it computes.
    total, *outputs = _GatesAndMasks.apply(
        keys, masks or MaskSettings(), penalty or Penalty(0.0), weights, factors, _ranges(inputs[::5], share),
        *inputs,
    )  # fmt: skip
    layers: dict[str, Gated] = {}
    for i, (name, (_, h, *_)) in enumerate(served.items()):
        wide = outputs[3 * i : 3 * i + 3]
        layers[name] = Gated(*wide) if h.dim() == 2 else Gated(*(t.reshape(h.shape) for t in wide))
    return layers, None if penalty is None else total


def _ranges(inner: Sequence[Tensor], share: Share) -> list[Any] | None:
    """From where to where inner activations of each layer reach in the whole batch, where this is a share."""
    if share.place is None:
        return None
    with torch.no_grad():
        ends = torch.cat([torch.cat([-h.amin(0), h.amax(0)]) for h in inner])
        ends = share.largest(ends).split([2 * h.shape[1] for h in inner])
    return [(-both[: len(both) // 2].numpy(), both[len(both) // 2 :].numpy()) for both in ends]


def _applies(gate: Gate) -> bool:
    importance, h, *_ = gate
    place = place_of(gate.key)
    rows = h.numel() // h.shape[-1]
    if place is not None:  # which gates are interpolated depends on the whole batch, too
        rows = rows // place.here * place.total
    return (
        type(importance) is MLPImportance
        and h.device.type == "cpu"
        and h.dtype == torch.float32
        and rows >= FEWEST_ROWS
        and not (importance._forward_hooks or importance._forward_pre_hooks)
        and kernels() is not None
    )


def _columns(t: Tensor) -> Any:
    """`[rows, C]` as a contiguous numpy array `[C, rows]`; no copy where C already comes first in
    memory."""
    return t.detach().T.contiguous().numpy()


class _GatesAndMasks(torch.autograd.Function):
    """Inner activations `[rows, C]` and gates of some layers -> the penalty; then raw importances,
    masks and masked inner activations of each.

    numpy views are kept for the way back, not tensors: nothing may change them in place before
    then, and nothing does.
    """

    @staticmethod
    def forward(
        ctx: Any,
        keys: list[int],
        masks: MaskSettings,
        penalty: Penalty,
        weights: list[Tensor | None],
        prices: list[float],
        ranges: list[Any] | None,
        *inputs: Tensor,
    ) -> Any:
        compiled, threads = kernels(), torch.get_num_threads()
        assert compiled is not None
        shape = tuple(np.float32(number) for number in penalty)
        rule = *masks.stretch, LEAK if masks.sigmoid == "leaky" else 0.0
        rule = tuple(np.float32(number) for number in rule)
        ctx.layers = []
        outputs: list[Tensor] = []
        total = 0.0
        for i, key in enumerate(keys):
            h, *parameters = inputs[5 * i : 5 * i + 5]
            rows, C = h.shape
            columns = _columns(h)
            gate = [w.detach().contiguous().numpy() for w in parameters]
            own = weights[i]
            per_row = np.full(rows, 1 / rows, np.float32) if own is None else own.float().contiguous().numpy()
            if prices[i] != 1:  # in the kernel the weights of rows serve the penalty alone
                per_row = per_row * np.float32(prices[i])
            place = place_of(key)
            each = 0 if place is None else rows // place.here
            here = (0, rows) if place is None else (place.before * each, place.total * each)
            counted = (np.uint32(number) for number in (key & 0xFFFFFFFF, key >> 32, *here))
            settings = *counted, *rule, per_row, *shape
            wide = [h.new_empty(C, rows) for _ in range(3)]
            raw, mask, masked = (t.numpy() for t in wide)
            penalties = np.empty(C, np.float32)
            low, high = np.empty((2, C), np.float32) if ranges is None else ranges[i]
            given = np.full(C, 0 if ranges is None else -1, np.int32)
            nodes = np.empty((C, rows), np.float32), low, high, given
            compiled.gate_forward(threads, columns, *gate, *settings, raw, mask, masked, penalties, *nodes)
            ctx.layers.append((columns, *gate[:3], *settings, raw, mask, *nodes))
            outputs += [t.T for t in wide]
            total += float(penalties.sum(dtype=np.float64))
        ctx.set_materialize_grads(False)
        return torch.tensor(total, dtype=torch.float32), *outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise TrainingError(
                "The compiled kernels have no second derivatives (create_graph=True asks for them). "
                "Set engine='exact' in the config."
            )
        compiled, threads = kernels(), torch.get_num_threads()
        assert compiled is not None
        to_penalty, *to_outputs = grads
        scale = np.float32(0 if to_penalty is None else to_penalty.item())
        to_inputs: list[Tensor | None] = [None] * 6
        for i, layer in enumerate(ctx.layers):
            to_wide = to_outputs[3 * i : 3 * i + 3]
            if to_penalty is None and all(g is None for g in to_wide):
                to_inputs += [None] * 5  # a layer that the loss does not use has no gradient, not zeros
                continue
            h, w_in, *_ = layer
            to_h = torch.empty(h.shape)
            to_gate = [torch.empty(w_in.shape) for _ in range(3)] + [torch.empty(len(h))]
            wide = [x for g in to_wide for x in ((False, h) if g is None else (True, _columns(g)))]
            compiled.gate_backward(threads, *layer, *wide, scale, to_h.numpy(), *(t.numpy() for t in to_gate))
            to_inputs += (to_h.T, *to_gate)
        return tuple(to_inputs)
