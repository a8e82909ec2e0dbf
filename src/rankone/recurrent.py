"""Recurrent layers and cells, as calls of their input and recurrent matrices.

`ih` is the matrix that reads the input and `hh` the one that reads the hidden state; in a cell with
gates the rows of all gates stand one after the other, as torch stores them. A layer has them for
each of its levels and directions (`lstm.ih_l0`, `lstm.hh_l0_reverse`), and `hr_l0` where a projection
is asked for. `ih` sees a whole sequence in one call, `[batch, time]`; `hh` is called once for each
moment, and the calls of a pass are datapoints of their own.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rankone.composites import Composite, Part, register_composite
from rankone.errors import LayerError

State = tuple[Tensor, ...]
Advance = Callable[[Tensor, Tensor, State], State]


def _simple(nonlinearity: Callable[[Tensor], Tensor]) -> Advance:
    return lambda i, h, state: (nonlinearity(i + h),)


def _gru(i: Tensor, h: Tensor, state: State) -> State:
    reset_i, update_i, new_i = i.chunk(3, -1)
    reset_h, update_h, new_h = h.chunk(3, -1)
    new = torch.tanh(new_i + torch.sigmoid(reset_i + reset_h) * new_h)
    update = torch.sigmoid(update_i + update_h)
    return (new + update * (state[0] - new),)


def _lstm(i: Tensor, h: Tensor, state: State) -> State:
    enter, forget, new, leave = (i + h).chunk(4, -1)
    cell = torch.sigmoid(forget) * state[1] + torch.sigmoid(enter) * torch.tanh(new)
    return torch.sigmoid(leave) * torch.tanh(cell), cell


def _advance(module: Any) -> Advance:
    if isinstance(module, nn.LSTM | nn.LSTMCell):
        return _lstm
    if isinstance(module, nn.GRU | nn.GRUCell):
        return _gru
    return _simple(torch.tanh if module.nonlinearity == "tanh" else torch.relu)


def _part(module: nn.Module, name: str) -> Part:
    """The matrix and bias that torch keeps as `weight_<name>` and `bias_<name>`."""
    return Part(
        lambda: getattr(module, f"weight_{name}"),
        lambda: getattr(module, f"bias_{name}", None),
        backwards=name.endswith("_reverse"),
    )


@register_composite(nn.RNNCell)
@register_composite(nn.GRUCell)
@register_composite(nn.LSTMCell)
class Cell(Composite):
    """`nn.RNNCell`, `nn.GRUCell`, `nn.LSTMCell`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.parts = {name: _part(module, name) for name in ("ih", "hh")}

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        with_cell = isinstance(self.module, nn.LSTMCell)
        if hx is None:
            zero = input.new_zeros(*input.shape[:-1], self.module.hidden_size)
            hx = (zero, zero) if with_cell else zero
        state = tuple(hx) if with_cell else (hx,)
        state = _advance(self.module)(self.parts["ih"](input), self.parts["hh"](state[0]), state)
        return state if with_cell else state[0]


@register_composite(nn.RNN)
@register_composite(nn.GRU)
@register_composite(nn.LSTM)
class Recurrent(Composite):
    """`nn.RNN`, `nn.GRU`, `nn.LSTM`, with any number of levels, in one direction or both."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.suffixes = [
            f"l{level}{way}"
            for level in range(self.module.num_layers)
            for way in (("", "_reverse") if self.module.bidirectional else ("",))
        ]
        kinds = ("ih", "hh", "hr") if self.module.proj_size else ("ih", "hh")
        self.parts = {f"{kind}_{s}": _part(module, f"{kind}_{s}") for s in self.suffixes for kind in kinds}

    def forward(self, input: Any, hx: Any = None) -> Any:
        m = self.module
        if not isinstance(input, Tensor):
            raise LayerError(
                f"A {type(m).__name__} is called with a {type(input).__name__}; rankone decomposes recurrent "
                "layers that are called with a tensor. Pad the sequences instead of packing them."
            )
        batched, with_cell = input.dim() == 3, isinstance(m, nn.LSTM)
        x = input if batched else input.unsqueeze(0 if m.batch_first else 1)
        x = x if m.batch_first else x.transpose(0, 1)
        given = self._given(hx, x, batched=batched, with_cell=with_cell)
        last: list[State] = []
        directions = 2 if m.bidirectional else 1
        for level in range(m.num_layers):
            sides = []
            for way in range(directions):
                number = level * directions + way
                side, state = self._sequence(
                    x, self.suffixes[number], tuple(s[number] for s in given), backwards=bool(way)
                )
                sides.append(side)
                last.append(state)
            x = torch.cat(sides, -1) if directions > 1 else sides[0]
        output = x if m.batch_first else x.transpose(0, 1)
        states = [torch.stack(s) for s in zip(*last, strict=True)]
        if not batched:
            output, states = output.squeeze(0 if m.batch_first else 1), [s.squeeze(1) for s in states]
        return output, tuple(states) if with_cell else states[0]

    def _sequence(self, x: Tensor, suffix: str, state: State, *, backwards: bool) -> tuple[Tensor, State]:
        """One level in one direction: `x` is `[batch, time, width]`."""
        entering, advance = self.parts[f"ih_{suffix}"](x), _advance(self.module)
        moments = range(x.shape[1])
        shown: list[Tensor] = []
        for t in reversed(moments) if backwards else moments:
            state = advance(entering[:, t], self.parts[f"hh_{suffix}"](state[0]), state)
            if self.module.proj_size:
                state = (self.parts[f"hr_{suffix}"](state[0]), *state[1:])
            shown.append(state[0])
        return torch.stack(shown[::-1] if backwards else shown, 1), state

    def _given(self, hx: Any, x: Tensor, *, batched: bool, with_cell: bool) -> tuple[Tensor, ...]:
        """The hidden state at the beginning, `[levels and directions, batch, width]` (and the cell's)."""
        m = self.module
        if hx is None:
            sizes = [m.proj_size or m.hidden_size, *([m.hidden_size] if with_cell else [])]
            return tuple(x.new_zeros(len(self.suffixes), x.shape[0], size) for size in sizes)
        states = tuple(hx) if with_cell else (hx,)
        return states if batched else tuple(s.unsqueeze(1) for s in states)
