"""Plain `nn.Parameter` matrices that a module multiplies with by itself, without an `nn.Linear`.

Such a parameter is decomposed under its own name once it is declared, together with the way in which
it is used: `x @ W` (also `torch.matmul(x, W)`), or `x @ W.T` (also `F.linear(x, W)` and `W @ x` for a
single vector). While rankone runs the target, a stand-in takes the parameter's place on its module:
multiplying with it calls a `Part`, everything else is an error that says what was done.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankone.composites import Composite, Part
from rankone.errors import LayerError

Use = Literal["x @ W", "x @ W.T"]
"""How a module uses its parameter W."""

_MATMUL = {torch.matmul, torch.mm, Tensor.matmul, Tensor.mm}
_SHAPES = {"shape", "dtype", "device", "ndim", "requires_grad", "is_cuda"}


class StandIn:
    """A parameter that can be multiplied with, turned round, and asked for its shape."""

    def __init__(self, name: str, weight: Tensor, multiply: Callable[[Tensor], Tensor], turned: bool) -> None:
        self._name, self._weight, self._multiply = name, weight, multiply
        self._turned = turned
        """Whether this is W.T where `x @ W` was declared, or W where `x @ W.T` was."""

    @property
    def T(self) -> "StandIn":
        return StandIn(self._name, self._weight.T, self._multiply, not self._turned)

    mT = T  # noqa: N815 (torch's name)

    def t(self) -> "StandIn":
        return self.T

    def transpose(self, a: int, b: int) -> "StandIn":
        return self.T if {a % 2, b % 2} == {0, 1} else self

    def size(self, *args: Any) -> Any:
        return self._weight.size(*args)

    def dim(self) -> int:
        return self._weight.dim()

    def __len__(self) -> int:
        return len(self._weight)

    def to(self, *args: Any, **kwargs: Any) -> "StandIn":
        if self._weight.to(*args, **kwargs) is self._weight:
            return self
        raise self._misused("converted to another type or device")

    def __rmatmul__(self, x: Any) -> Tensor:
        return self._product(x)

    def __matmul__(self, x: Any) -> Tensor:
        if x.dim() != 1:
            raise self._misused("multiplied from the left with a matrix (W @ X)")
        return self.T._product(x)

    def _product(self, x: Any) -> Tensor:
        """x @ self."""
        if self._turned:
            raise self._misused("multiplied with the other way round")
        return self._multiply(x)

    def _misused(self, how: str) -> LayerError:
        return LayerError(
            f"The parameter {self._name!r} is {how}, which is not how it was declared. rankone knows "
            "'x @ W' and 'x @ W.T' (F.linear) in matrices.parameters: declare the other one, or leave the "
            "parameter out."
        )

    def __getattr__(self, name: str) -> Any:
        if name in _SHAPES:
            return getattr(self._weight, name)
        raise self._misused(f"used for .{name}")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.linear:
            x, W, bias = (*args, *(kwargs.get(n) for n in ("input", "weight", "bias")[len(args) :]))
            if isinstance(W, StandIn) and not isinstance(x, StandIn) and not isinstance(bias, StandIn):
                output = W.T._product(x)
                return output if bias is None else output + bias
        elif func in _MATMUL and len(args) == 2:
            a, b = args
            if isinstance(b, StandIn) and not isinstance(a, StandIn):
                return b._product(a)
            if isinstance(a, StandIn) and not isinstance(b, StandIn):
                return a @ b
        elif func is torch.addmm and len(args) == 3 and not kwargs and isinstance(args[2], StandIn):
            return args[0] + args[1] @ args[2]
        elif func in (torch.t, torch.transpose):
            return args[0].transpose(*(args[1:] or (0, 1)))
        stand_in = next(x for x in (*args, *kwargs.values(), *_flat(args)) if isinstance(x, StandIn))
        raise stand_in._misused(f"used in {getattr(func, '__name__', func)}")


_OPERATORS = "add radd sub rsub mul rmul truediv rtruediv pow neg getitem iter eq ne lt le gt ge"

for _name in _OPERATORS.split():

    def _refused(self: StandIn, *args: Any, _name: str = _name) -> Any:
        raise self._misused(f"used in {_name}")

    setattr(StandIn, f"__{_name}__", _refused)

StandIn.__hash__ = object.__hash__


def _flat(args: tuple[Any, ...]) -> list[Any]:
    return [x for a in args if isinstance(a, tuple | list) for x in a]


class ParameterMatrix(Composite):
    """One declared parameter of a module."""

    def __init__(self, module: nn.Module, attribute: str, name: str, use: Use) -> None:
        super().__init__(module)
        self.attribute, self.name, self.use = attribute, name, use
        own = self.own
        part = Part(lambda: own().T if use == "x @ W" else own())
        self.parts = {"": part}

    def own(self) -> Tensor:
        return self.module._parameters.get(self.attribute, None)

    def refusal(self) -> str | None:
        if self.own().dim() != 2:
            return f"it has {self.own().dim()} dimensions; only matrices can be decomposed."
        return None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def installed(self) -> dict[tuple[nn.Module, str], Any]:
        part = self.parts[""]
        turned = self.use == "x @ W.T"
        return {(self.module, self.attribute): StandIn(self.name, self.own(), part, turned)}
