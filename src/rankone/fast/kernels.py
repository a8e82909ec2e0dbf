"""The inner loops of a training step on the CPU, written for numba.

A gate is a function of one number. Instead of running its `d_gate` neurons on every datapoint, a
kernel runs them at a few nodes that span this batch's inner activations, with value and slope, and
joins the nodes by cubics (Hermite interpolation). There are as many nodes as the steepest neuron
needs: the error is bounded, not the work. Gradients are those of the interpolant, so they flow
through the nodes into the gate's parameters; every datapoint then costs a table look-up, whatever
d_gate is. Gate, leaky hard sigmoid, random number, mask and masked inner activation are made in one
walk over memory, one subcomponent at a time, so that a subcomponent's table and its column stay in
the first-level cache.

A kernel handles subcomponents `begin` to `end`, each from start to end: results do not depend on
how `spread` shares them between threads. Nothing here knows torch. compiled.py compiles and loads
this module, gates.py is the bridge to torch.
"""

import math
from functools import partial
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core.compiler import Compiler
from numba.extending import intrinsic

# Sums may be reordered and products contracted, which vector instructions need; NaN and infinity
# keep their meaning.
_FAST = {"reassoc", "contract", "arcp", "nsz"}

njit: Any = numba.njit  # its type stubs know only some of its options
f4 = np.float32
u4 = np.uint32
LEAK = f4(0.01)

WIDEST_STEP = f4(0.2)
"""How far a gate's steepest neuron may move between two nodes. The error of the gradients falls with
its third power."""
FEWEST_INTERVALS = 8
MOST_INTERVALS = 256
"""A subcomponent that would need more is evaluated exactly: inner activations with outliers, or very
steep gates."""
NARROW_STEP = f4(0.01)
"""Below this, neighbouring nodes differ by little more than rounding, and cubics are made from slopes
alone."""


class _Unaliased(Compiler):
    """No two arrays overlap: only then can the look-up loop of the forward kernel be vectorised."""

    def define_pipelines(self) -> Any:
        self.state.flags.noalias = True
        return super().define_pipelines()


# Division by zero gives infinity: a check for it would keep loops from being vectorised.
_inline = njit(inline="always", fastmath=_FAST, error_model="numpy")
_loops = partial(njit, fastmath=_FAST, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


@_inline
def _normal(a: Any) -> Any:
    """The normal distribution function and density at `a`, to 2e-7: one exponential serves both.

    The exponential is Cephes' polynomial after a reduction by powers of 2, the tail is 7.1.26 of
    Abramowitz and Stegun. Both are written out because a call into a mathematics library would keep
    the loop from being vectorised.
    """
    y = max(f4(-0.5) * a * a, f4(-87.0))
    n = np.floor(y * f4(1.44269504) + f4(0.5))
    r = y - n * f4(0.693359375) + n * f4(2.12194440e-4)
    e = f4(1.9875691500e-4)
    e = e * r + f4(1.3981999507e-3)
    e = e * r + f4(8.3334519073e-3)
    e = e * r + f4(4.1665795894e-2)
    e = e * r + f4(1.6666665459e-1)
    e = e * r + f4(5.0000001201e-1)
    e = e * r * r + r + f4(1.0)
    power = (np.int32(n) + np.int32(127)) << np.int32(23)
    e = e * np.int32(power).view(np.float32)
    t = f4(1.0) / (f4(1.0) + f4(0.3275911 / math.sqrt(2)) * abs(a))
    q = f4(1.061405429)
    q = q * t + f4(-1.453152027)
    q = q * t + f4(1.421413741)
    q = q * t + f4(-0.284496736)
    q = q * t + f4(0.254829592)
    tail = f4(0.5) * q * t * e
    return (tail if a < f4(0.0) else f4(1.0) - tail), e * f4(1 / math.sqrt(2 * math.pi))


@_inline
def _mix(x: Any) -> Any:
    """A well-mixed 32-bit number from another (the finaliser known as lowbias32).

    numba computes with 64 bits, so every result is cut to 32; the compiler turns that into 32-bit
    arithmetic.
    """
    x = u4(x ^ (x >> u4(16)))
    x = u4(x * u4(0x7FEB352D))
    x = u4(x ^ (x >> u4(15)))
    x = u4(x * u4(0x846CA68B))
    return u4(x ^ (x >> u4(16)))


@_inline
def _uniform(counter: Any, key0: Any, key1: Any) -> Any:
    """Number `counter` of the stream (key0, key1), in [0, 1): the same as `masks.uniform` gives."""
    return f4(np.int32(_mix(u4(_mix(u4(counter ^ key0)) + key1)) >> u4(8))) * f4(2.0**-24)


@_inline
def _source(counter: Any, key0: Any, key1: Any, r_scale: Any, r_offset: Any) -> Any:
    """The r of a mask, as `masks.MaskSettings.random` gives it."""
    return min(max(_uniform(counter, key0, key1) * r_scale - r_offset, f4(0.0)), f4(1.0))


@_inline
def _interval(t: Any, last: Any) -> Any:
    """The interval that position `t` (in units of intervals) falls into; safe for NaN, too."""
    return np.uint64(min(max(np.int32(t), np.int32(0)), last))


@_inline
def _squashed(x: Any) -> Any:
    """The upper-leaky hard sigmoid."""
    x = max(x, f4(0.0))
    return x if x <= f4(1.0) else f4(1.0) + LEAK * (x - f4(1.0))


@_inline
def _squashed_slope(x: Any) -> Any:
    return f4(0.0) if x <= f4(0.0) else (f4(1.0) if x <= f4(1.0) else LEAK)


@_inline
def _power(x: Any, p: Any) -> Any:
    """x^p; without a call for the exponents at which training begins and ends."""
    if p == f4(1.0):
        return x
    if p == f4(0.0):
        return f4(1.0)
    return x * x if p == f4(2.0) else x**p


@_loops(pipeline_class=_Unaliased)
def _forward(
    begin: int, end: int, h: Any, w_in: Any, b_in: Any, w_out: Any, b_out: Any, key0: Any, key1: Any,
    before: Any, all_rows: Any, r_scale: Any, r_offset: Any, leak: Any,
    row_weights: Any, p: Any, eps: Any, saturation: Any, gamma: Any,
    raw: Any, mask: Any, masked: Any, penalty: Any,
    slopes: Any, low: Any, width: Any, nodes: Any,
) -> None:  # fmt: skip
    """Raw importances, stochastic masks and masked inner activations from inner activations h.

    All are `[C, rows]`, which may be those of a larger batch that begin at `before` of its `all_rows`:
    random numbers are numbered in the whole of it. Where `nodes` is below 0, `low` and `width` say from
    where to where h reaches in the whole. `r_scale`, `r_offset` and `leak` are the settings of masks: a
    leak of 0 stands for the straight-through sigmoid. `penalty[c]` becomes the sum over rows of
    row_weights times the penalty of upper_leaky(raw) (see step.Penalty). Also fills in what the way
    back needs: the slope of the gate at every datapoint (`slopes`), where each subcomponent's nodes
    begin (`low`), how far apart they are (`width`) and how many there are (`nodes`; 0 where none are
    used, and then there are no slopes either).
    """
    rows = h.shape[1]
    d_gate = w_in.shape[1]
    for c in range(np.uint64(begin), np.uint64(end)):
        smallest = low[c] if nodes[c] < 0 else h[c, 0]
        largest = width[c] if nodes[c] < 0 else h[c, 0]
        for r in range(rows):
            smallest = min(smallest, h[c, r])
            largest = max(largest, h[c, r])
        steepest = f4(0.0)
        for d in range(d_gate):
            steepest = max(steepest, abs(w_in[c, d]))
        needed = (largest - smallest) * steepest / WIDEST_STEP
        if not needed < f4(MOST_INTERVALS):
            nodes[c] = 0
            for r in range(rows):
                raw[c, r] = b_out[c]
            for d in range(d_gate):
                for r in range(rows):
                    a = w_in[c, d] * h[c, r] + b_in[c, d]
                    raw[c, r] += w_out[c, d] * a * _normal(a)[0]
        else:
            intervals = np.int32(max(needed, f4(FEWEST_INTERVALS - 1))) + np.int32(1)
            last = np.int32(intervals - 1)
            dx = max(largest - smallest, f4(1e-12)) / f4(intervals)
            low[c] = smallest
            width[c] = dx
            nodes[c] = intervals + 1
            value = np.full(intervals + 1, b_out[c], np.float32)
            slope = np.zeros(intervals + 1, np.float32)
            for d in range(d_gate):
                step = w_in[c, d] * dx
                start = w_in[c, d] * smallest + b_in[c, d]
                out = w_out[c, d]
                for k in range(intervals + 1):
                    a = step * f4(k) + start
                    P, density = _normal(a)
                    value[k] += out * a * P
                    slope[k] += out * step * (P + a * density)
            table = np.empty((intervals, 4), np.float32)  # the cubic on each interval, constant term first
            narrow = steepest * dx < NARROW_STEP
            for k in range(intervals):
                rise = f4(0.5) * (slope[k] + slope[k + 1]) if narrow else value[k + 1] - value[k]
                table[k, 0] = value[k]
                table[k, 1] = slope[k]
                table[k, 2] = f4(3.0) * rise - f4(2.0) * slope[k] - slope[k + 1]
                table[k, 3] = slope[k] + slope[k + 1] - f4(2.0) * rise
            per_unit = f4(1.0) / dx
            for r in range(rows):
                t = (h[c, r] - smallest) * per_unit
                i = _interval(t, last)
                t -= f4(np.int32(i))
                raw[c, r] = ((table[i, 3] * t + table[i, 2]) * t + table[i, 1]) * t + table[i, 0]
                slopes[c, r] = per_unit * (
                    (f4(3.0) * table[i, 3] * t + f4(2.0) * table[i, 2]) * t + table[i, 1]
                )
        first = u4(c * all_rows + before)
        for r in range(rows):
            u = _source(u4(first + r), key0, key1, r_scale, r_offset)
            x = raw[c, r]
            g = min(max(x, leak * x), f4(1.0))
            m = g + (f4(1.0) - g) * u
            mask[c, r] = m
            masked[c, r] = m * h[c, r]
        total = f4(0.0)
        if gamma > f4(0.0):
            for r in range(rows):
                x = _squashed(raw[c, r])
                total += row_weights[r] * x * x / (x * x + gamma * gamma)
        elif saturation > f4(0.0):
            for r in range(rows):
                q = _power(_squashed(raw[c, r]) + eps, p)
                total += row_weights[r] * (f4(1.0) + saturation) * q / (f4(1.0) + saturation * q)
        elif p == f4(1.0):
            for r in range(rows):
                total += row_weights[r] * _squashed(raw[c, r])
        elif p == f4(2.0):
            for r in range(rows):
                x = _squashed(raw[c, r])
                total += row_weights[r] * x * x
        elif p > f4(0.0):
            for r in range(rows):
                total += row_weights[r] * (_squashed(raw[c, r]) + eps) ** p
        penalty[c] = total


@_loops()
def _backward(
    begin: int, end: int, h: Any, w_in: Any, b_in: Any, w_out: Any, key0: Any, key1: Any,
    before: Any, all_rows: Any, r_scale: Any, r_offset: Any, leak: Any,
    row_weights: Any, p: Any, eps: Any, saturation: Any, gamma: Any,
    raw: Any, mask: Any, slopes: Any, low: Any, width: Any, nodes: Any,
    has_raw: bool, to_raw: Any, has_mask: bool, to_mask: Any, has_masked: bool, to_masked: Any,
    to_penalty: Any,
    to_h: Any, to_w_in: Any, to_b_in: Any, to_w_out: Any, to_b_out: Any,
) -> None:  # fmt: skip
    """Gradients to h and the gate's parameters, from those to raw, mask, masked and penalty."""
    rows = h.shape[1]
    d_gate = w_in.shape[1]
    for c in range(np.uint64(begin), np.uint64(end)):
        to_gate = np.empty(rows, np.float32)
        first = u4(c * all_rows + before)
        for r in range(rows):
            x = raw[c, r]
            leaky = LEAK if x <= f4(0.0) else (f4(1.0) if x <= f4(1.0) else f4(0.0))
            by_mask = (to_mask[c, r] if has_mask else f4(0.0)) + (
                to_masked[c, r] * h[c, r] if has_masked else f4(0.0)
            )
            if leak == f4(0.0) and x <= f4(0.0):
                by_mask = min(by_mask, f4(0.0))
            to_gate[r] = by_mask * leaky * (f4(1.0) - _source(u4(first + r), key0, key1, r_scale, r_offset))
        if has_raw:
            for r in range(rows):
                to_gate[r] += to_raw[c, r]
        if to_penalty != f4(0.0):
            if gamma > f4(0.0):
                for r in range(rows):
                    x = _squashed(raw[c, r])
                    below = x * x + gamma * gamma
                    rise = f4(2.0) * x * gamma * gamma / (below * below)
                    to_gate[r] += to_penalty * row_weights[r] * _squashed_slope(raw[c, r]) * rise
            elif saturation > f4(0.0):
                for r in range(rows):
                    x = _squashed(raw[c, r]) + eps
                    flattened = f4(1.0) + saturation * _power(x, p)
                    rise = p * _power(x, p - f4(1.0)) * (f4(1.0) + saturation) / (flattened * flattened)
                    to_gate[r] += to_penalty * row_weights[r] * _squashed_slope(raw[c, r]) * rise
            elif p == f4(1.0):
                for r in range(rows):
                    to_gate[r] += to_penalty * row_weights[r] * _squashed_slope(raw[c, r])
            elif p == f4(2.0):
                for r in range(rows):
                    x = raw[c, r]
                    to_gate[r] += f4(2.0) * to_penalty * row_weights[r] * _squashed_slope(x) * _squashed(x)
            else:
                for r in range(rows):
                    x = raw[c, r]
                    power = (_squashed(x) + eps) ** (p - f4(1.0))
                    to_gate[r] += p * to_penalty * row_weights[r] * _squashed_slope(x) * power
        if nodes[c] == 0:
            total = f4(0.0)
            for r in range(rows):
                to_h[c, r] = f4(0.0)
                total += to_gate[r]
            to_b_out[c] = total
            for d in range(d_gate):
                shift = f4(0.0)
                stretch = f4(0.0)
                by_value = f4(0.0)
                for r in range(rows):
                    a = w_in[c, d] * h[c, r] + b_in[c, d]
                    P, density = _normal(a)
                    by_value += to_gate[r] * a * P
                    to_a = to_gate[r] * w_out[c, d] * (P + a * density)
                    shift += to_a
                    stretch += to_a * h[c, r]
                    to_h[c, r] += to_a * w_in[c, d]
                to_b_in[c, d] = shift
                to_w_in[c, d] = stretch
                to_w_out[c, d] = by_value
        else:
            intervals = nodes[c] - np.int32(1)
            last = np.int32(intervals - 1)
            dx = width[c]
            per_unit = f4(1.0) / dx
            steepest = f4(0.0)
            for d in range(d_gate):
                steepest = max(steepest, abs(w_in[c, d]))
            narrow = steepest * dx < NARROW_STEP
            smallest = low[c]
            place = np.empty(rows, np.float32)
            which = np.empty(rows, np.int32)
            for r in range(rows):
                to_h[c, r] = to_gate[r] * slopes[c, r]
                t = (h[c, r] - smallest) * per_unit
                i = np.int32(_interval(t, last))
                which[r] = i
                place[r] = t - f4(i)
            # Neighbouring rows often fall into one interval, and an addition has to wait for the one
            # before: four tables in turn. Nothing else is written in this loop, or the compiler could
            # not add to the four sums of an interval at once.
            partial = np.zeros((4, intervals, 4), np.float32)
            for r in range(rows):
                i = np.uint64(which[r])
                t = place[r]
                g = to_gate[r]
                turn = np.uint64(r & 3)
                partial[turn, i, 0] += g
                partial[turn, i, 1] += g * t
                partial[turn, i, 2] += g * t * t
                partial[turn, i, 3] += g * t * t * t
            to_table = partial[0] + partial[1] + partial[2] + partial[3]
            to_value = np.zeros(intervals + 1, np.float32)
            to_slope = np.zeros(intervals + 1, np.float32)
            for k in range(intervals):
                to_rise = f4(3.0) * to_table[k, 2] - f4(2.0) * to_table[k, 3]
                to_value[k] += to_table[k, 0]
                to_slope[k] += to_table[k, 1] - f4(2.0) * to_table[k, 2] + to_table[k, 3]
                to_slope[k + 1] += to_table[k, 3] - to_table[k, 2]
                if narrow:
                    to_slope[k] += f4(0.5) * to_rise
                    to_slope[k + 1] += f4(0.5) * to_rise
                else:
                    to_value[k] -= to_rise
                    to_value[k + 1] += to_rise
            total = f4(0.0)
            for k in range(intervals + 1):
                total += to_value[k]
            to_b_out[c] = total
            for d in range(d_gate):
                step = w_in[c, d] * dx
                start = w_in[c, d] * low[c] + b_in[c, d]
                by_value = f4(0.0)
                by_slope = f4(0.0)
                shift = f4(0.0)
                stretch = f4(0.0)
                for k in range(intervals + 1):
                    a = step * f4(k) + start
                    P, density = _normal(a)
                    derivative = P + a * density
                    to_a = to_value[k] * derivative + to_slope[k] * step * density * (f4(2.0) - a * a)
                    shift += to_a
                    stretch += to_a * f4(k)
                    by_slope += to_slope[k] * derivative
                    by_value += to_value[k] * a * P
                out = w_out[c, d]
                to_b_in[c, d] = out * shift
                to_w_in[c, d] = out * (shift * low[c] + (stretch + by_slope) * dx)
                to_w_out[c, d] = by_value + by_slope * step
        if has_masked:
            for r in range(rows):
                to_h[c, r] += to_masked[c, r] * mask[c, r]


@njit(nogil=True)
def gate_forward(arguments: Any) -> None:
    """`_forward` for a tuple of its arguments. LLVM optimises the loops a second time here."""
    _forward(*arguments)


@njit(nogil=True)
def gate_backward(arguments: Any) -> None:
    """`_backward` for a tuple of its arguments."""
    _backward(*arguments)


@intrinsic
def _call(typing: Any, address: Any, arguments: Any) -> Any:
    """Call the kernel at an address. LLVM cannot look into it, so its bits are the serial kernel's."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        function = ir.FunctionType(ir.VoidType(), [context.get_value_type(arguments)])
        builder.call(builder.inttoptr(values[0], function.as_pointer()), [values[1]])
        return context.get_dummy_value()

    return types.void(types.int64, arguments), generate


call: Any = _call  # numba gives it the first argument


@njit(nogil=True, parallel=True, no_cfunc_wrapper=True)
def spread(kernel: int, edges: Any, arguments: Any) -> None:
    """Run the kernel at an address on every range between two edges, on OpenMP's threads."""
    for i in numba.prange(len(edges) - 1):
        call(kernel, (edges[i], edges[i + 1], *arguments))


_wide, _flat, _counts = types.float32[:, ::1], types.float32[::1], types.int32[::1]
_numbers = *[types.uint32] * 4, *[types.float32] * 3, _flat, *[types.float32] * 4
_kept = _wide, _flat, _flat, _counts
_gradient = types.boolean, _wide

KERNELS: dict[Any, tuple[Any, ...]] = {
    gate_forward: (*[_wide] * 4, _flat, *_numbers, *[_wide] * 3, _flat, *_kept),
    gate_backward: (
        *[_wide] * 4, *_numbers, *[_wide] * 2, *_kept, *_gradient * 3, types.float32, *[_wide] * 4, _flat,
    ),
}  # fmt: skip
"""Each kernel with the types of its arguments after the range, the only ones that it is compiled for."""
