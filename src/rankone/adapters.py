"""How a module type is seen as a matrix: what rankone must know to decompose it.

An adapter answers three questions about one module type: what is its matrix (`[d_out, d_in]`, acting on
column vectors as in the paper), how do read vectors act on its input, and how do write vectors make its
output. Everything else in rankone is written against these three and never looks at a module's type.

A module type of your own takes a dozen lines:

    @register_adapter(MyLayer)
    class MyAdapter(Adapter):
        def matrix(self, module): ...
        def read(self, module, x, V): ...
        def write(self, module, z, U): ...
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from rankone.errors import LayerError
from rankone.fast.factored import Activation, Factored, FactoredLinear, dense, rows_times


class Adapter(ABC):
    """The matrix view of one module type."""

    @abstractmethod
    def matrix(self, module: nn.Module) -> Float[Tensor, "d_out d_in"]:
        """The module's weight as a matrix that maps inputs to outputs."""

    @abstractmethod
    def read(self, module: nn.Module, x: Activation, V: Float[Tensor, "C d_in"]) -> Float[Tensor, "*lead C"]:
        """The inner activations V a, for the module's input x. Best stored with C first (`rows_times`), but any layout is right."""

    @abstractmethod
    def write(self, module: nn.Module, z: Float[Tensor, "*lead C"], U: Float[Tensor, "d_out C"]) -> Activation:
        """The module's output when its subcomponents carry z: U z, plus the original bias."""

    def vectors(self, module: nn.Module, x: Activation) -> Float[Tensor, "*lead d_in"]:
        """The module's input x as the vectors a that its matrix multiplies."""
        return dense(x)

    def check(self, module: nn.Module) -> str | None:
        """Why this particular module cannot be decomposed, or None when it can."""
        return None


_BY_TYPE: dict[type[nn.Module], Adapter] = {}
_BY_NAME: dict[str, Adapter] = {}


def register_adapter(module_type: type[nn.Module] | str) -> Callable[[type[Adapter]], type[Adapter]]:
    """Class decorator: use this adapter for `module_type` and its subclasses.

    A string is a class's full name (`"package.module.Class"`), for types of packages that need not be installed.
    """

    def register(adapter: type[Adapter]) -> type[Adapter]:
        if isinstance(module_type, str):
            _BY_NAME[module_type] = adapter()
        else:
            _BY_TYPE[module_type] = adapter()
        return adapter

    return register


def adapter_for(module: nn.Module, name: str) -> Adapter:
    """The adapter for a module, by the nearest registered class among its ancestors."""
    for cls in type(module).__mro__:
        adapter = _BY_TYPE.get(cls) or _BY_NAME.get(f"{cls.__module__}.{cls.__qualname__}")
        if adapter is None:
            continue
        reason = adapter.check(module)
        if reason is not None:
            raise LayerError(f"Layer {name!r} ({type(module).__name__}) cannot be decomposed: {reason}")
        return adapter
    known = ", ".join(sorted([t.__name__ for t in _BY_TYPE] + [n.rsplit(".", 1)[-1] for n in _BY_NAME]))
    raise LayerError(
        f"Layer {name!r} is a {type(module).__name__}, which rankone does not know how to decompose. "
        f"It knows: {known}. For another type, write an Adapter and register it with rankone.register_adapter."
    )


@register_adapter(nn.Linear)
class LinearAdapter(Adapter):
    """`nn.Linear`: y = W x + b."""

    def matrix(self, module: nn.Module) -> Tensor:
        return _weight(module)

    def read(self, module: nn.Module, x: Activation, V: Tensor) -> Tensor:
        return x.read(V) if isinstance(x, Factored) else rows_times(x, V)

    def write(self, module: nn.Module, z: Tensor, U: Tensor) -> Activation:
        out = rows_times(z, U, rows_first=True)
        bias = _bias(module)
        return out if bias is None else out + bias.to(out.dtype)


@register_adapter(FactoredLinear)
class FactoredLinearAdapter(LinearAdapter):
    """`FactoredLinear`: what the subcomponents carry are the coefficients, their write vectors the directions."""

    def write(self, module: nn.Module, z: Tensor, U: Tensor) -> Activation:
        return Factored((z, U))


@register_adapter("transformers.pytorch_utils.Conv1D")
class Conv1DAdapter(LinearAdapter):
    """GPT-2's `Conv1D`: a linear layer that stores its weight transposed."""

    def matrix(self, module: nn.Module) -> Tensor:
        return _weight(module).T


@register_adapter(nn.Embedding)
class EmbeddingAdapter(Adapter):
    """`nn.Embedding`: a matrix that acts on one-hot vectors; column i of W is the vector of token i."""

    def check(self, module: nn.Module) -> str | None:
        assert isinstance(module, nn.Embedding)
        if module.max_norm is not None:
            return "max_norm makes its forward pass rewrite the weight. Set max_norm=None on the module."
        return None

    def matrix(self, module: nn.Module) -> Tensor:
        return _weight(module).T

    def read(self, module: nn.Module, x: Activation, V: Tensor) -> Tensor:
        assert isinstance(x, Tensor)
        return F.embedding(x, V.T)

    def vectors(self, module: nn.Module, x: Activation) -> Tensor:
        assert isinstance(x, Tensor)
        weight = _weight(module)
        return F.one_hot(x, len(weight)).to(weight.dtype)

    def write(self, module: nn.Module, z: Tensor, U: Tensor) -> Tensor:
        return F.linear(z, U)


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight


def _bias(module: nn.Module) -> Tensor | None:
    bias = module.bias
    assert bias is None or isinstance(bias, Tensor)
    return bias
