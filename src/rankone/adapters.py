"""How a module is seen as a matrix: what rankone must know of a layer type to decompose it.

An adapter is bound to one module and answers three questions about it: what is its matrix (`[d_out,
d_in]`, acting on column vectors as in the paper), how do read vectors act on its input, and how do
write vectors make its output. Everything else in rankone is written against these three and never
looks at a module's type. docs/extending.md shows an adapter for a layer type of your own.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from rankone.errors import LayerError


class Structured(ABC):
    """An activation that is kept in another form than a tensor, and can be made into one."""

    @abstractmethod
    def dense(self) -> Tensor: ...

    @abstractmethod
    def clone(self) -> "Structured": ...

    @property
    @abstractmethod
    def _version(self) -> int:
        """A number that grows when the activation is changed in place, as a tensor's does."""


Activation = Tensor | Structured
"""What flows between layers."""


def dense(x: Any) -> Any:
    """A plain tensor for a structured activation; anything else as it is."""
    return x.dense() if isinstance(x, Structured) else x


class Adapter(ABC):
    """One module, seen as a matrix."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def input(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Activation:
        """What the module is called with, as one activation: `read` is given it."""
        return only_input(name, args, kwargs)

    @abstractmethod
    def matrix(self) -> Float[Tensor, "d_out d_in"]:
        """The module's weight as a matrix that maps inputs to outputs."""

    @abstractmethod
    def read(self, x: Activation, V: Float[Tensor, "C d_in"]) -> Float[Tensor, "*lead C"]:
        """The inner activations V a, for the module's input x."""

    @abstractmethod
    def write(self, z: Float[Tensor, "*lead C"], U: Float[Tensor, "d_out C"]) -> Activation:
        """The module's output for masked inner activations z: U z, plus the original bias."""

    def write_sum(
        self,
        z: Float[Tensor, "*lead C"],
        U: Float[Tensor, "d_out C"],
        rest: Float[Tensor, "*lead k"],
        W: Float[Tensor, "d_out k"] | None,
    ) -> Activation:
        """The module's output for U z + W rest; without a W, `rest` is what is added."""
        if W is None:
            W = torch.eye(U.shape[0], dtype=U.dtype, device=U.device)
        return self.write(torch.cat([z, rest], -1), torch.cat([U, W], 1))

    def vectors(self, x: Activation) -> Float[Tensor, "*lead d_in"]:
        """The module's input x as the vectors a that its matrix multiplies."""
        W = self.matrix()
        return self.read(x, torch.eye(W.shape[1], dtype=W.dtype, device=W.device))

    def refusal(self) -> str | None:
        """Why this particular module cannot be decomposed, or None when it can."""
        return None


def only_input(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Activation:
    """The one tensor that a layer is called with."""
    given = [*args, *kwargs.values()]
    if len(given) != 1 or not isinstance(given[0], Tensor | Structured):
        kinds = ", ".join(type(g).__name__ for g in given) or "nothing"
        raise LayerError(
            f"Layer {name!r} is called with ({kinds}); rankone decomposes layers that take one tensor."
        )
    return given[0]


class BiasedAdapter(Adapter):
    """An adapter that knows its bias apart from its matrix, so that the bias can be decomposed too."""

    @abstractmethod
    def combine(self, z: Float[Tensor, "*lead C"], U: Float[Tensor, "d_out C"]) -> Tensor:
        """U z, in the form of the module's output."""

    @abstractmethod
    def bias(self) -> Float[Tensor, " d_out"] | None:
        """What the module adds to its matrix's product."""

    def with_bias(self, output: Tensor) -> Tensor:
        """The output of `combine`, and the bias."""
        bias = self.bias()
        return output if bias is None else output + bias.to(output.dtype)

    def write(self, z: Float[Tensor, "*lead C"], U: Float[Tensor, "d_out C"]) -> Activation:
        return self.with_bias(self.combine(z, U))


_BY_TYPE: dict[type[nn.Module], type[Adapter]] = {}
_BY_NAME: dict[str, type[Adapter]] = {}


A = TypeVar("A", bound=type[Adapter])


def register_adapter(module_type: type[nn.Module] | str) -> Callable[[A], A]:
    """Class decorator: use this adapter for `module_type` and its subclasses.

    A string is a class's full name (`"package.module.Class"`), for types of packages that need not
    be installed.
    """

    def register(adapter: A) -> A:
        if isinstance(module_type, str):
            _BY_NAME[module_type] = adapter
        else:
            _BY_TYPE[module_type] = adapter
        return adapter

    return register


def _adapter_type(module: nn.Module) -> type[Adapter] | None:
    for cls in type(module).__mro__:
        found = _BY_TYPE.get(cls) or _BY_NAME.get(f"{cls.__module__}.{cls.__qualname__}")
        if found is not None:
            return found
    return None


def is_known(module: nn.Module) -> bool:
    """Whether there is an adapter for a module's type."""
    return _adapter_type(module) is not None


def adapter_for(module: nn.Module, name: str) -> Adapter:
    """The adapter of a module, by the nearest registered class among its ancestors."""
    adapter_type = _adapter_type(module)
    if adapter_type is not None:
        adapter = adapter_type(module)
        reason = adapter.refusal()
        if reason is not None:
            raise LayerError(f"Layer {name!r} ({type(module).__name__}) cannot be decomposed: {reason}")
        return adapter
    plain = [f"{name}.{n}" for n, p in module.named_parameters(recurse=False) if p.dim() == 2]
    hint = (
        f" If its parameter {plain[0]!r} is used as a matrix, declare it in matrices.parameters."
        if plain
        else ""
    )
    types = [t.__name__ for t in _BY_TYPE if not t.__module__.startswith("rankone.")]
    known = ", ".join(sorted([*types, *(n.rsplit(".", 1)[-1] for n in _BY_NAME)]))
    raise LayerError(
        f"Layer {name!r} is a {type(module).__name__}, which rankone does not know how to "
        "decompose. It knows: "
        f"{known}, attention and recurrent layers (docs/layers.md). For another type, write an Adapter and "
        f"register it with rankone.register_adapter.{hint}"
    )


@register_adapter(nn.Linear)
class LinearAdapter(BiasedAdapter):
    """`nn.Linear`: y = W x + b."""

    module: nn.Linear

    def matrix(self) -> Tensor:
        return self.module.weight

    def read(self, x: Activation, V: Tensor) -> Tensor:
        return F.linear(x, V)  # pyright: ignore[reportArgumentType] (a structured activation knows F.linear)

    def vectors(self, x: Activation) -> Tensor:
        return dense(x)

    def combine(self, z: Tensor, U: Tensor) -> Tensor:
        return F.linear(z, U)

    def bias(self) -> Tensor | None:
        return self.module.bias


@register_adapter("transformers.pytorch_utils.Conv1D")
class Conv1DAdapter(LinearAdapter):
    """GPT-2's `Conv1D`: a linear layer that stores its weight transposed."""

    def matrix(self) -> Tensor:
        return super().matrix().T


@register_adapter(nn.Embedding)
class EmbeddingAdapter(Adapter):
    """`nn.Embedding`: a matrix that acts on one-hot vectors; column i of W is the vector of token i."""

    module: nn.Embedding

    def refusal(self) -> str | None:
        if self.module.max_norm is not None:
            return "max_norm makes its forward pass rewrite the weight. Set max_norm=None on the module."
        return None

    def matrix(self) -> Tensor:
        return self.module.weight.T

    def read(self, x: Activation, V: Tensor) -> Tensor:
        return F.embedding(dense(x), V.T)

    def write(self, z: Tensor, U: Tensor) -> Tensor:
        return F.linear(z, U)

    def vectors(self, x: Activation) -> Tensor:
        return F.one_hot(dense(x), self.module.num_embeddings).to(self.module.weight.dtype)
